"""Segments in this process's memory, bounded in bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.buffers import owned_copy
from milepost.stores.lru import Entry, LruIndex
from milepost.stores.objects import Clock, Deadline, ObjectStore, keeps_existing
from milepost.stores.port import Loaded, LookedUp, SegmentHeader, StoredSegment
from milepost.stores.segment_format import Identity, encode_head


class MemoryStore(ObjectStore):
    """Keeps whole objects, checksums included, as the other stores do: what memory lost is a miss too.

    A segment that was loaded stays valid after its eviction, as long as the caller keeps it; its bytes
    are then the caller's.

    Args:
        budget_bytes: heads and payloads together; never exceeded.
    """

    def __init__(
        self, identity: Identity, *, budget_bytes: int, name: str = "memory", clock: Clock = time.monotonic
    ) -> None:
        super().__init__(name, identity, clock)
        if budget_bytes < 1:
            raise StoreError(f"{name}: bytes must be positive, not {budget_bytes}")
        self.budget_bytes = budget_bytes
        self._objects: dict[str, memoryview] = {}
        self._index = LruIndex()
        self._lock = threading.Lock()
        self._save_lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._index.total_bytes

    @property
    def known_usage(self) -> tuple[int, int]:
        return self.used_bytes, self.budget_bytes

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        found: list[LookedUp] = []
        for key in keys:
            with self._lock:
                data = self._objects.get(key.hex())
            found.append(self._read_header(oc.LOOKUP, key, data, None if data is None else data.nbytes))
        return found

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        deadline = Deadline(deadline_seconds, self._clock)
        loaded: list[Loaded] = []
        for key in keys:
            if deadline.passed:
                break
            with self._lock:
                data = self._objects.get(key.hex())
                if data is not None:
                    self._index.touch_path(key.hex())
            loaded.append(self._read_segment(key, data))
        return loaded + self._late(oc.LOAD, len(keys) - len(loaded))

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        deadline = Deadline(deadline_seconds, self._clock)
        saved: list[bool] = []
        if self._save_lock.acquire(timeout=deadline_seconds):
            try:
                for segment in segments:
                    if deadline.passed:
                        break
                    saved.append(self._save_one(segment))
            finally:
                self._save_lock.release()
        self.outcomes.add(oc.SAVE, oc.TIMEOUT, len(segments) - len(saved))
        return saved + [False] * (len(segments) - len(saved))

    def _save_one(self, segment: StoredSegment) -> bool:
        name = segment.header.key.hex()
        if self._has_as_good(segment.header):
            with self._lock:
                self._index.touch_path(name)
            return True
        head = encode_head(segment)
        num_bytes = len(head) + segment.header.payload_bytes
        if not self._make_room(name, num_bytes, segment.header.parent_key.hex()):
            self.outcomes.add(oc.SAVE, oc.FULL)
            return False
        data = owned_copy((head, *segment.payload))
        with self._lock:
            self._objects[name] = data
            self._index.add(name, Entry(num_bytes, segment.header.parent_key.hex() or None))
            self._index.touch_path(name)
        return True

    def _has_as_good(self, new: SegmentHeader) -> bool:
        with self._lock:
            data = self._objects.get(new.key.hex())
        existing = self._read_header(oc.SAVE, new.key, data, None if data is None else data.nbytes)
        return existing is not None and keeps_existing(existing, new, lambda key: key.hex() in self._objects)

    def _make_room(self, name: str, num_bytes: int, parent: str) -> bool:
        with self._lock:
            self._forget(name)
            needed = self._index.total_bytes + num_bytes - self.budget_bytes
            # What the new segment builds on is worth more than the segment.
            victims = self._index.victims(needed, set(self._index.path(parent)))
            for victim in victims or ():
                self._forget(victim)
            return victims is not None

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        with self._lock:
            return sum(self._forget(key.hex()) for key in keys)

    def _links(self, deadline: Deadline) -> Iterable[tuple[bytes, bytes]]:
        with self._lock:
            entries = [(name, self._index.entry(name)) for name in self._objects]
        return [
            (bytes.fromhex(name), bytes.fromhex((entry and entry.parent) or "")) for name, entry in entries
        ]

    def close(self) -> None:
        with self._lock:
            self._objects.clear()
            self._index = LruIndex()

    def _forget(self, name: str) -> bool:
        self._index.remove(name)
        return self._objects.pop(name, None) is not None

    def _discard(self, key: bytes) -> None:
        with self._lock:
            self._forget(key.hex())
