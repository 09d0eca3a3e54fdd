"""Who is calling, and what they may do. Keys are compared as digests, all of them, in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request

from milepost.config import read_private_lines
from milepost.errors import RequestError
from milepost.server.options import ServerOptions

OPEN_PATHS = ("/health", "/version", "/ui")
"""Probes have no key, and learn nothing about callers here; nor does the empty page."""
ADMIN_PATHS = ("/reset_prefix_cache", "/ui/state")
"""They concern the cache of every caller: with several keys only an admin key may use them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        key: the API key it came with, checked or not; None = none.
        owner: names whoever pays for it, without giving the key away; "" where keys are not checked.
        is_separate: its cache is its own.
        is_admin: may do what concerns all callers: it has an admin key, or there is no other caller.
    """

    key: str | None = None
    owner: str = ""
    is_separate: bool = False
    is_admin: bool = True


class Access:
    """The keys of a server.

    Without keys everybody may call; a key that is sent anyway only keeps salts of clients apart.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._admin = [_digest(key) for key in options.admin_api_keys]
        self._keys = [_digest(key) for key in options.api_keys] + self._admin
        self._is_separate = not options.share_prefix_across_keys

    @property
    def needs_key(self) -> bool:
        return bool(self._keys)

    def check(self, path: str, headers: Headers) -> Caller:
        """The caller of a request.

        Raises:
            RequestError: 401 without a known key, 403 for a route this key may not use.
        """
        key = sent_key(headers)
        if not self._keys:
            return Caller(key)
        if path in OPEN_PATHS:
            return Caller(is_admin=False)
        if key is None:
            message = "no API key: send it as `Authorization: Bearer KEY`, or as `x-api-key`"
            raise RequestError(None, message, code="invalid_api_key", status=401)
        digest = _digest(key)
        if not _is_among(digest, self._keys):
            raise RequestError(None, "this API key is not known", code="invalid_api_key", status=401)
        is_admin = _is_among(digest, self._admin) or len(self._keys) == 1
        if not is_admin and _concerns_everybody(path):
            raise RequestError(
                None,
                f"{path} concerns the cache of every API key; it needs one given with --admin-api-key",
                code="admin_key_needed",
                status=403,
            )
        return Caller(key, digest.hex()[:16], self._is_separate, is_admin)


def caller_of(request: Request) -> Caller:
    """Whom `Access.check` found."""
    caller: Caller = request.state.caller
    return caller


def sent_key(headers: Headers) -> str | None:
    """The key in a request's headers, as OpenAI's or as Anthropic's clients send it."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip() or None


def read_key_file(path: Path, field: str = "api_key_file") -> tuple[str, ...]:
    """Keys of a file: one per line; empty lines and those that begin with # do not count.

    Raises:
        ConfigError: not readable, readable by others than its owner, or without a key.
    """
    return read_private_lines(path, field)


def _concerns_everybody(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in ADMIN_PATHS)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def challenge(status: int) -> dict[str, str]:
    """Headers of a refusal."""
    return {"www-authenticate": "Bearer"} if status == 401 else {}
