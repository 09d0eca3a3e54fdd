"""How a replica gives to its peers, and how it takes from them, as options say it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from milepost.config import install_command, parse_size
from milepost.errors import ConfigError, StoreError
from milepost.stores.peer import DEFAULT_MAX_OBJECT_BYTES, DEFAULT_PORT, DEFAULT_SILENCE_SECONDS
from milepost.stores.peer_nixl import is_loopback
from milepost.stores.peer_protocol import NIXL, WIRE
from milepost.stores.sockets import bound_socket

AUTO = "auto"
CHOICES = (AUTO, WIRE, NIXL)
DEFAULT_AREA_BYTES = 256 << 20
MIN_AREA_BYTES = 1 << 20
SERVE_OPTION = "serve_kv"


@dataclass(frozen=True, slots=True)
class PeerServing:
    """Where and how this process gives its cache to peers.

    Attributes:
        area_bytes: of the staging area: the most that is on its way to peers; a longer segment is not given.
        transport: auto = NIXL for peers that have it, if it is installed here; wire; nixl = it must be.
        secret: what peers must know; None = everybody who reaches the port.
    """

    host: str
    port: int
    area_bytes: int = DEFAULT_AREA_BYTES
    transport: str = AUTO
    secret: str | None = field(default=None, repr=False)

    def check(self) -> None:
        """
        Raises:
            ConfigError: others could reach it, and nobody is asked for a secret.
        """
        if self.secret is None and not is_loopback(self.host):
            raise ConfigError(
                SERVE_OPTION,
                f"{self.host} can be reached from other machines: whoever asks could read what is cached. "
                "Give --peer-token-file a file with a secret, or serve on 127.0.0.1",
            )


def parse_serving(text: str, secret: str | None) -> PeerServing:
    """`HOST:PORT`, with options behind a `?`: `bytes` and `transport`.

    Raises:
        ConfigError: not that.
    """
    wrong = ConfigError(SERVE_OPTION, f"{text[:100]!r} is not HOST:PORT, like 127.0.0.1:{DEFAULT_PORT}")
    try:
        parts = urlsplit(f"peer://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if host is None or port is None or parts.path or parts.fragment or "@" in parts.netloc:
        raise wrong
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    size = options.pop("bytes", None)
    area_bytes = DEFAULT_AREA_BYTES if size is None else parse_size(size, SERVE_OPTION)
    transport = options.pop("transport", AUTO)
    if options:
        raise ConfigError(
            SERVE_OPTION, f"there is no option {next(iter(options))!r}; bytes and transport are"
        )
    if area_bytes < MIN_AREA_BYTES:
        raise ConfigError(SERVE_OPTION, f"bytes must be at least {MIN_AREA_BYTES}, not {area_bytes}")
    serving = PeerServing(host, port, area_bytes, checked_transport(transport, SERVE_OPTION), secret)
    serving.check()
    return serving


def bound(serving: PeerServing) -> socket.socket:
    """A socket at its address.

    Raises:
        ConfigError: that is taken, or not this machine's.
    """
    try:
        return bound_socket(serving.host, serving.port)
    except OSError as error:
        raise ConfigError(
            SERVE_OPTION, f"cannot listen on {serving.host}:{serving.port}: {error.strerror or error}"
        ) from None


def checked_transport(transport: str, option: str) -> str:
    """
    Raises:
        ConfigError: there is no such way.
    """
    if transport not in CHOICES:
        raise ConfigError(option, f"transport must be one of {', '.join(CHOICES)}, not {transport!r}")
    return transport


@dataclass(frozen=True, slots=True)
class PeerTaking:
    """Options of a `peer://` address.

    Attributes:
        silence_seconds: of the peer, after which a call is given up.
    """

    transport: str
    max_object_bytes: int
    silence_seconds: float


def parse_taking(options: Mapping[str, str], option: str) -> PeerTaking:
    """
    Raises:
        ConfigError: a value that cannot work.
    """
    said = options.get("timeout")
    try:
        silence_seconds = DEFAULT_SILENCE_SECONDS if said is None else float(said)
    except ValueError:
        silence_seconds = 0.0
    if not 0 < silence_seconds <= 60:
        raise ConfigError(option, f"timeout is a number of seconds, above 0 and at most 60, not {said!r}")
    size = options.get("max_segment")
    return PeerTaking(
        checked_transport(options.get("transport", AUTO), option),
        DEFAULT_MAX_OBJECT_BYTES if size is None else parse_size(size, option),
        silence_seconds,
    )


def nixl_hint(error: Exception) -> StoreError:
    """What to do where `transport=nixl` cannot be."""
    return StoreError(
        f"transport=nixl needs NIXL; install it with: {install_command('nixl')}, or take transport=wire "
        f"({error})"
    )
