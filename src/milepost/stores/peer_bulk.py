"""How a peer's staging area is read without its help, where that is possible."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Protocol

from milepost.stores.objects import Deadline
from milepost.stores.peer_protocol import Hello


class BulkReader(Protocol):
    """One peer's staging area, seen from here. Thread-safe."""

    @property
    def is_ready(self) -> bool: ...

    def connect(self, ask: Callable[[], Hello]) -> None:
        """Begin to ask the peer how its area is read, unless it was asked lately. Nobody waits for it."""
        ...

    def read(
        self, instance: str, offset: int, num_bytes: int, max_bytes: int, deadline: Deadline
    ) -> memoryview:
        """A copy of what lies there; read-only.

        Raises:
            StoreError: not in time, out of bounds, or the peer is gone.
        """
        ...

    def close(self) -> None: ...


class NoBulk:
    """Everything comes over the connection."""

    is_ready = False

    def connect(self, ask: Callable[[], Hello]) -> None:
        """There is no need to ask."""

    def read(
        self, instance: str, offset: int, num_bytes: int, max_bytes: int, deadline: Deadline
    ) -> memoryview:
        raise AssertionError("nothing is ready to be read")

    def close(self) -> None:
        """Nothing is held."""


def proof_of(hello: Hello, secret: str | None) -> bytes:
    """What `Hello.proof` must be; see there."""
    said = b"\0".join(
        (hello.instance.encode(), str(hello.address).encode(), str(hello.num_bytes).encode(), hello.nixl)
    )
    return hmac.new((secret or "").encode(), said, sha256).digest()
