"""What can be set about the server itself; what concerns the model is in `engine.serving`."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.engine.aio import MAX_UNREAD_DELTAS
from milepost.engine.roles import BOTH
from milepost.errors import ConfigError

DEFAULT_MAX_BODY_BYTES = 32 << 20
DEFAULT_DRAIN_SECONDS = 20.0
HEARTBEAT_SECONDS = 15.0
RED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Attributes:
    max_body_bytes: a larger request body is refused (413), before it is read where its size is announced.
    request_timeout: seconds from arrival to the last token; None = no limit.
    drain_seconds: how long open requests may go on after the signal to stop.
    heartbeat_seconds: an event stream that has nothing to say sends a comment so often.
    max_unread_deltas: an answer with so many parts that its client does not take is cancelled.
    red_seconds: how long a server whose engine has died answers `/health` with 503 before it exits.
    api_keys: without any, everybody may use the server.
    admin_api_keys: may also use the routes that concern all callers.
    role: what this replica is for, see `engine.roles`.
    otlp_traces_endpoint: where spans of requests are sent, as OTLP over HTTP; None = nowhere.
    share_prefix_across_keys: False = a cached prefix serves only the API key it was computed for.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    request_timeout: float | None = None
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    max_unread_deltas: int = MAX_UNREAD_DELTAS
    red_seconds: float = RED_SECONDS
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    share_prefix_across_keys: bool = False
    otlp_traces_endpoint: str | None = None
    role: str = BOTH

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1024:
            raise ConfigError("max_body_bytes", f"must be at least 1024, not {self.max_body_bytes}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "otlp_traces_endpoint",
                f"must be an address like http://localhost:4318/v1/traces, not {endpoint}",
            )
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError("request_timeout", "must be above 0 seconds; leave it out for no limit")
        if not self.drain_seconds >= 0:
            raise ConfigError("drain_seconds", f"must not be negative, but is {self.drain_seconds}")
        for field, keys in (("api_key", self.api_keys), ("admin_api_key", self.admin_api_keys)):
            for key in keys:
                if not key or not key.isascii() or not key.isprintable() or " " in key:
                    raise ConfigError(field, "a key must be printable ASCII without spaces, and not empty")
        if self.admin_api_keys and not self.api_keys:
            raise ConfigError(
                "admin_api_key", "needs --api-key or --api-key-file: the server is open without"
            )
        if self.share_prefix_across_keys and not self.api_keys:
            raise ConfigError("share_prefix_across_keys", "needs --api-key or --api-key-file")
