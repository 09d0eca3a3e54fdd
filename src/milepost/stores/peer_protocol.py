"""What replicas that pull from each other say: HTTP/1.1, bodies in msgpack, segments as in `segment_format`.

    POST /kv/hello    -> Hello      how bulk bytes can go
    POST /kv/lookup   Ask -> heads  one per key, or nil; their payload digest is not known yet (zeros)
    POST /kv/load     Ask -> bytes  one frame per key, or, if the peer is to read them itself, Staged
    POST /kv/release  Release       the peer has read what was staged

A frame is a length (8 bytes, little endian; 0 = not here) and so many bytes of an object. An answer may end
early, between two frames; what is missing is a miss. Every request carries `Authorization: Bearer SECRET`,
where there is one, and the identity whose segments are meant; another one is refused with status 409.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from milepost.stores.port import Buffer
from milepost.stores.segment_format import KEY_BYTES, Identity

PROTOCOL_VERSION = 1
HELLO, LOOKUP, LOAD, RELEASE = "/kv/hello", "/kv/lookup", "/kv/load", "/kv/release"
CONTENT_TYPE = "application/x-msgpack"
FRAME = struct.Struct("<Q")
MAX_KEYS = 4096
"""In one request."""
MAX_REQUEST_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 14
"""In the answer to a lookup; what has a longer one is not found."""
MAX_SECONDS = 60.0
WIRE, NIXL = "wire", "nixl"
TRANSPORTS = (WIRE, NIXL)


class Ask(msgspec.Struct, frozen=True):
    """Attributes:
    fingerprint, shard: whose segments are meant; see `segment_format.Identity`.
    seconds: after which the answer is of no use.
    transport: how the payloads are to go, for a load.
    """

    version: int
    fingerprint: str
    shard: tuple[int, int]
    keys: list[bytes]
    seconds: float
    transport: str = WIRE

    @property
    def problem(self) -> str | None:
        """What nobody sends who follows the protocol."""
        if self.version != PROTOCOL_VERSION:
            return f"protocol {self.version}; this side speaks {PROTOCOL_VERSION}"
        if len(self.keys) > MAX_KEYS:
            return f"{len(self.keys)} keys; {MAX_KEYS} are allowed"
        if any(len(key) != KEY_BYTES for key in self.keys):
            return f"a key that has not {KEY_BYTES} bytes"
        if not 0 <= self.seconds <= MAX_SECONDS:
            return f"an answer within {self.seconds} s"
        if self.transport not in TRANSPORTS:
            return f"transport {self.transport[:20]!r}"
        return None


class Hello(msgspec.Struct, frozen=True):
    """How bulk bytes can go.

    Attributes:
        instance: of the process that answers; another one has other memory.
        nixl: how its staging area is read; empty if it cannot be.
        address: where that begins, in its process.
        num_bytes: how large it is.
        proof: HMAC-SHA256 of the other fields under the secret: what is handed to a native library must come
            from somebody who knows it.
    """

    version: int
    instance: str
    nixl: bytes = b""
    address: int = 0
    num_bytes: int = 0
    proof: bytes = b""


class Staged(msgspec.Struct, frozen=True):
    """Objects that lie in the staging area until they are released.

    Attributes:
        lease: for `Release`.
        objects: (offset, bytes), or None = not here; for the first so many keys of the request. Those that
            are missing found no room: they may be asked for again.
    """

    instance: str
    lease: int
    objects: list[tuple[int, int] | None]


class Release(msgspec.Struct, frozen=True):
    lease: int


class SegmentSource(Protocol):
    """What peers can be given. Called from threads that may wait."""

    @property
    def identity(self) -> Identity: ...

    def heads(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Buffer | None]:
        """Heads of the objects that end at `keys`.

        Raises:
            StoreError: not in time, or there will be no more.
        """
        ...

    def reading(
        self, keys: Sequence[bytes], max_bytes: int, *, deadline_seconds: float
    ) -> AbstractContextManager[list[Sequence[Buffer] | None]]:
        """Objects in pieces, None for those that are not here: of the first of `keys`, as many as have
        `max_bytes` together, and at least one. They do not change before the context ends.

        Raises:
            StoreError: as above.
        """
        ...
