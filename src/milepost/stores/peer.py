"""What another replica has in its cache, as a store: looked up and loaded, never written to.

The peer decides what it keeps. Segments come in the format of all stores and are read with the same
suspicion, over the connection itself, or, where both sides have NIXL, read by this side from the peer's
staging area.
A peer that is not there at the start is looked for with every call, within the bounds of the guard around.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.buffers import new_buffer
from milepost.stores.objects import Clock, Deadline, ObjectStore, StoreTimeoutError
from milepost.stores.peer_bulk import BulkReader, NoBulk
from milepost.stores.peer_connection import PeerConnections, PeerRefused
from milepost.stores.peer_protocol import (
    FRAME,
    HELLO,
    LOAD,
    LOOKUP,
    MAX_HEAD_BYTES,
    MAX_KEYS,
    MAX_SECONDS,
    NIXL,
    PROTOCOL_VERSION,
    RELEASE,
    WIRE,
    Ask,
    Hello,
    Release,
    Staged,
)
from milepost.stores.port import Buffer, Loaded, LookedUp, StoredSegment, Unanswered
from milepost.stores.segment_format import Identity

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9400
DEFAULT_MAX_OBJECT_BYTES = 1 << 30
DEFAULT_SILENCE_SECONDS = 2.0
_FOREIGN_STATUS = 409
_MAX_HELLO_BYTES = 1 << 16
_HELLO_SECONDS = 10.0
_encode = msgspec.msgpack.Encoder().encode
_heads = msgspec.msgpack.Decoder(list[bytes | None])
_hello = msgspec.msgpack.Decoder(Hello)
_staged = msgspec.msgpack.Decoder(Staged)


class PeerStore(ObjectStore):
    """Owns the connections and `bulk`, and closes them.

    Args:
        bulk: reads the peer's staging area; by default everything comes over the connection.
        max_object_bytes: of one segment; a longer one is not taken.
    """

    takes_saves = False
    expected_call_seconds = 0.002
    expected_load_bytes_per_second = 3e8

    def __init__(
        self,
        connections: PeerConnections,
        identity: Identity,
        *,
        bulk: BulkReader | None = None,
        max_object_bytes: int = DEFAULT_MAX_OBJECT_BYTES,
        name: str = "peer",
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(name, identity, clock)
        self._connections = connections
        self._bulk = bulk or NoBulk()
        self._max_object_bytes = max_object_bytes

    # ------------------------------------------------------------ the port

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        deadline = Deadline(deadline_seconds, self._clock)
        found: list[LookedUp] = []
        for start in range(0, len(keys), MAX_KEYS):
            some = keys[start : start + MAX_KEYS]
            if deadline.passed:
                break
            heads = self._ask_heads(some, deadline)
            for key, head in zip(some, heads, strict=True):
                found.append(self._read_header(oc.LOOKUP, key, head, None))
        return found + self._late(oc.LOOKUP, len(keys) - len(found))

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        deadline = Deadline(deadline_seconds, self._clock)
        objects = self._objects(keys, deadline)
        loaded: list[Loaded] = []
        fault = oc.TIMEOUT
        try:
            if not deadline.passed:
                for data, key in zip(objects, keys, strict=False):
                    loaded.append(self._read_segment(key, data))
        except PeerRefused as error:
            if not self._is_foreign(error):
                raise
            fault = oc.FOREIGN
        except StoreError as error:
            # What came before counts: a later segment is of use only with those before it.
            if not any(loaded):
                raise
            fault = oc.TIMEOUT if isinstance(error, StoreTimeoutError) else oc.ERROR
            logger.debug("%s: %d of %d segments: %s", self.name, len(loaded), len(keys), error)
        num_missing = len(keys) - len(loaded)
        self.outcomes.add(oc.LOAD, fault, num_missing)
        return loaded + [Unanswered(fault) if fault in oc.SILENCES else None] * num_missing

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        """Saves nothing."""
        return [False] * len(segments)

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        """Removes nothing: it is the peer's."""
        return 0

    def close(self) -> None:
        self._bulk.close()
        self._connections.close()

    # ------------------------------------------------------------ parts

    def _ask(self, keys: Sequence[bytes], deadline: Deadline, transport: str = WIRE) -> bytes:
        return _encode(
            Ask(
                PROTOCOL_VERSION,
                self.identity.fingerprint,
                self.identity.shard,
                list(keys),
                min(deadline.remaining_seconds, MAX_SECONDS),
                transport,
            )
        )

    def _ask_heads(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes | None]:
        try:
            with self._connections.post(LOOKUP, self._ask(keys, deadline), deadline) as answer:
                heads = _decoded(_heads, answer.read_all(64 + len(keys) * (MAX_HEAD_BYTES + 8)))
        except PeerRefused as error:
            if not self._is_foreign(error):
                raise
            self.outcomes.add(oc.LOOKUP, oc.FOREIGN, len(keys))
            return [None] * len(keys)
        if len(heads) != len(keys):
            raise StoreError(f"the peer answers {len(heads)} heads to {len(keys)} keys")
        return heads

    def _objects(self, keys: Sequence[bytes], deadline: Deadline) -> Iterator[Buffer | None]:
        """One per key, in their order, as long as they come."""
        for start in range(0, len(keys), MAX_KEYS):
            some = keys[start : start + MAX_KEYS]
            if self._bulk.is_ready:
                yield from self._read_staged(some, deadline)
            else:
                self._bulk.connect(self.ask_hello)
                yield from self._read_frames(some, deadline)

    def _read_frames(self, keys: Sequence[bytes], deadline: Deadline) -> Iterator[Buffer | None]:
        with self._connections.post(LOAD, self._ask(keys, deadline), deadline) as answer:
            length = memoryview(bytearray(FRAME.size))
            for _ in keys:
                try:
                    answer.read_into(length)
                except EOFError:
                    raise StoreTimeoutError("the peer stopped before the last segment") from None
                (num_bytes,) = FRAME.unpack(length)
                if not num_bytes:
                    yield None
                    continue
                if num_bytes > self._max_object_bytes:
                    most = self._max_object_bytes
                    raise StoreError(f"the peer sends {num_bytes} bytes of a segment; {most} are taken")
                data = new_buffer(num_bytes)
                answer.read_into(data)
                yield data.toreadonly()
            if answer.read_all(0):
                raise StoreError("the peer sends more than it was asked for")

    def ask_hello(self) -> Hello:
        """How the peer's bulk bytes can go.

        Raises:
            StoreError: it does not say.
        """
        deadline = Deadline(_HELLO_SECONDS, self._clock)
        with self._connections.post(HELLO, self._ask((), deadline), deadline) as answer:
            return _decoded(_hello, answer.read_all(_MAX_HELLO_BYTES))

    def _read_staged(self, keys: Sequence[bytes], deadline: Deadline) -> Iterator[Buffer | None]:
        """In turns, as many as find room in the peer's area and in ours."""
        done = 0
        while done < len(keys) and not deadline.passed:
            some = keys[done:]
            with self._connections.post(LOAD, self._ask(some, deadline, NIXL), deadline) as answer:
                staged = _decoded(_staged, answer.read_all(64 + len(some) * 24))
            if len(staged.objects) > len(some):
                raise StoreError("the peer stages more than it was asked for")
            try:
                for place in staged.objects:
                    if place is None:
                        yield None
                        continue
                    yield self._bulk.read(staged.instance, *place, self._max_object_bytes, deadline)
            finally:
                self._release(staged.lease, deadline)
            if not staged.objects:
                raise StoreTimeoutError("the peer has no room to stage a segment")
            done += len(staged.objects)

    def _release(self, lease: int, deadline: Deadline) -> None:
        """The peer ends a lease by itself, only later."""
        try:
            with self._connections.post(RELEASE, _encode(Release(lease)), deadline) as answer:
                answer.read_all(64)
        except StoreError as error:
            logger.debug("%s: a lease runs out by itself: %s", self.name, error)

    def _is_foreign(self, error: PeerRefused) -> bool:
        if error.status != _FOREIGN_STATUS:
            return False
        self._log_once(f"it has segments of another model, or of other settings: {error}")
        return True

    def _discard(self, key: bytes) -> None:
        """It is the peer's, and it may have been damaged on its way."""


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """
    Raises:
        StoreError: it is something else.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"the peer's answer cannot be read: {error}"[:200]) from None
