"""Segments in a Mooncake Store: a pool of the memory of many replicas (extra `mooncake`).

The pool decides itself what it evicts: an object whose lease ran out longest ago. Reading and asking give
leases, writing does not, so this store renews the leases of whole paths after it used their ends; keep the
master's lease short (1 to 2 s), or what was looked at once pushes out what was just written. Objects of an
owner that died are listed for some seconds and cannot be read: a miss. A restarted master knows nothing.

Mooncake's data ports listen on all interfaces whatever they are told: put them behind a firewall.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.buffers import copy_into, owned_copy
from milepost.stores.mooncake_client import HEADS_AT_ONCE, MAX_LONG_HEAD_BYTES, MooncakeConnection, Region
from milepost.stores.objects import Clock, Deadline, ObjectStore, StoreTimeoutError, keeps_existing
from milepost.stores.port import Loaded, LookedUp, SegmentHeader, StoredSegment, Unanswered
from milepost.stores.segment_format import (
    HEAD_UNIT_BYTES,
    CorruptSegmentError,
    Head,
    Identity,
    SegmentError,
    encode_head,
    head_bytes_needed,
)

# What Mooncake returns; other negative numbers are faults of one object.
_NO_SPACE, _BAD_RANGE, _NOT_FOUND, _RPC_FAILED, _RPC_TIMEOUT = -200, -600, -704, -900, -901
_MAX_KNOWN_PARENTS = 1 << 15

_Found = Head | Unanswered | None


class MooncakeStore(ObjectStore):
    """One object per segment in the pool of `connection`, which it closes."""

    expected_call_seconds = 0.002
    expected_load_bytes_per_second = 3e8

    def __init__(
        self,
        connection: MooncakeConnection,
        identity: Identity,
        *,
        name: str = "mooncake",
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(name, identity, clock)
        self._connection = connection
        rank, num_ranks = identity.shard
        self._prefix = f"milepost/{identity.fingerprint}/{rank}-{num_ranks}/"
        self._lock = threading.Lock()
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()

    def key_of(self, key: bytes) -> str:
        """The name of the object that holds the segment which ends at `key`."""
        return self._prefix + key.hex()

    # ------------------------------------------------------------ the port

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        with self._connection.use() as client:
            heads = self._heads(client, oc.LOOKUP, keys, Deadline(deadline_seconds, self._clock))
        return [head.header if isinstance(head, Head) else head for head in heads]

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        deadline = Deadline(deadline_seconds, self._clock)
        with self._connection.use() as client:
            heads = self._heads(client, oc.LOAD, keys, deadline)
            loaded: list[Loaded] = [None if isinstance(head, Head) else head for head in heads]
            sizes = {index: head.object_bytes for index, head in enumerate(heads) if isinstance(head, Head)}
            for group in self._groups(oc.LOAD, sizes):
                if deadline.passed:
                    for index, late in zip(group, self._late(oc.LOAD, len(group)), strict=True):
                        loaded[index] = late
                    continue
                wanted = [(keys[index], sizes[index]) for index in group]
                for index, segment in zip(group, self._load_group(client, wanted, deadline), strict=True):
                    loaded[index] = segment
            self._renew(client, [key for key, each in zip(keys, loaded, strict=True) if each])
        return loaded

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        deadline = Deadline(deadline_seconds, self._clock)
        saved = [False] * len(segments)
        with self._connection.use() as client:
            existing = self._heads(client, oc.SAVE, [each.header.key for each in segments], deadline)
            if deadline.passed:
                return saved
            new: dict[int, bytes] = {}
            for index, (segment, head) in enumerate(zip(segments, existing, strict=True)):
                if isinstance(head, Head) and keeps_existing(head.header, segment.header, self._has):
                    saved[index] = True
                    continue
                if isinstance(head, Head):
                    self._discard(segment.header.key)
                new[index] = encode_head(segment)
            sizes = {index: len(head) + segments[index].header.payload_bytes for index, head in new.items()}
            for group in self._groups(oc.SAVE, sizes):
                if deadline.passed:
                    self.outcomes.add(oc.SAVE, oc.TIMEOUT, len(group))
                    continue
                objects = [(new[index], segments[index]) for index in group]
                for index, done in zip(group, self._save_group(client, objects, deadline), strict=True):
                    saved[index] = done
            self._learn(segment.header for segment in segments)
            self._renew(
                client, [each.header.parent_key for each, done in zip(segments, saved, strict=True) if done]
            )
        return saved

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        with self._connection.use() as client:
            codes = client.batch_remove([self.key_of(key) for key in keys], True)
        _raise_if_unreachable(codes)
        return sum(code == 0 for code in codes)

    def close(self) -> None:
        self._connection.close()

    # ------------------------------------------------------------ parts

    def _heads(self, client: Any, operation: str, keys: Sequence[bytes], deadline: Deadline) -> list[_Found]:
        heads: list[_Found] = []
        for start in range(0, len(keys), HEADS_AT_ONCE):
            if deadline.passed:
                break
            heads += self._some_heads(client, operation, keys[start : start + HEADS_AT_ONCE], deadline)
        heads += self._late(operation, len(keys) - len(heads))
        self._learn(head.header for head in heads if isinstance(head, Head))
        return heads

    def _some_heads(
        self, client: Any, operation: str, keys: Sequence[bytes], deadline: Deadline
    ) -> list[_Found]:
        """Heads are read without their payloads."""
        region = self._connection.heads
        heads: list[_Found] = []
        with region.held(deadline):
            names = [self.key_of(key) for key in keys]
            offsets = [[index * HEAD_UNIT_BYTES] for index in range(len(keys))]
            codes = _read_ranges(client, region, names, offsets, HEAD_UNIT_BYTES)
            if _RPC_FAILED in codes:
                self._connection.check_master()
                # So it is for objects that are on a disk of the pool only, too.
                _raise_if_unreachable(client.batch_is_exist(names))
            for index, (key, code) in enumerate(zip(keys, codes, strict=True)):
                if code == HEAD_UNIT_BYTES:
                    start = index * HEAD_UNIT_BYTES
                    data = self._whole_head(client, key, bytes(region.view[start : start + code]))
                    heads.append(self._read_head(operation, key, data, None))
                elif code == _RPC_FAILED:
                    heads.append(self._head_on_disk(client, operation, key, deadline))
                else:
                    heads.append(self._noted(operation, key, code))
        return heads

    def _head_on_disk(self, client: Any, operation: str, key: bytes, deadline: Deadline) -> _Found:
        """Mooncake reads such objects whole or not at all."""
        region, name = self._connection.loads, self.key_of(key)
        if deadline.passed:
            return self._late(operation, 1)[0]
        size = client.get_size(name)
        if not 0 < size <= region.view.nbytes:
            return self._noted(operation, key, min(size, _NOT_FOUND))
        with region.held(deadline):
            (code,) = client.batch_get_into([name], [region.address], [size])
            data = bytes(region.view[: min(size, MAX_LONG_HEAD_BYTES)])
        if code != size:
            return self._noted(operation, key, code)
        return self._read_head(operation, key, data, size)

    def _whole_head(self, client: Any, key: bytes, start: bytes) -> bytes:
        """With the region of heads held: a head that is longer than usual is read once more."""
        try:
            needed = head_bytes_needed(start)
        except SegmentError:
            return start
        if not len(start) < needed <= MAX_LONG_HEAD_BYTES:
            return start
        region = self._connection.heads
        offset = HEADS_AT_ONCE * HEAD_UNIT_BYTES
        codes = _read_ranges(client, region, [self.key_of(key)], [[offset]], needed)
        return bytes(region.view[offset : offset + needed]) if codes == [needed] else start

    def _load_group(
        self, client: Any, wanted: Sequence[tuple[bytes, int]], deadline: Deadline
    ) -> list[Loaded]:
        """Objects by key and length."""
        region = self._connection.loads
        keys, sizes = [key for key, _ in wanted], [size for _, size in wanted]
        segments: list[Loaded] = []
        with region.held(deadline):
            starts = list(accumulate(sizes, initial=0))
            addresses = [region.address + start for start in starts[:-1]]
            codes = client.batch_get_into([self.key_of(key) for key in keys], addresses, list(sizes))
            _raise_if_unreachable(codes)
            for key, size, start, code in zip(keys, sizes, starts, codes, strict=False):
                if code != size:
                    segments.append(self._noted(oc.LOAD, key, code))
                else:
                    data = owned_copy([region.view[start : start + size]])
                    segments.append(self._read_segment(key, data))
        return segments

    def _save_group(
        self, client: Any, objects: Sequence[tuple[bytes, StoredSegment]], deadline: Deadline
    ) -> list[bool]:
        """Objects by head and segment."""
        region = self._connection.saves
        names, addresses, sizes = [], [], []
        with region.held(deadline):
            offset = 0
            for head, segment in objects:
                names.append(self.key_of(segment.header.key))
                addresses.append(region.address + offset)
                for piece in (head, *segment.payload):
                    view = memoryview(piece).cast("B")
                    copy_into(region.view[offset : offset + view.nbytes], view)
                    offset += view.nbytes
                sizes.append(region.address + offset - addresses[-1])
            codes = client.batch_put_from(names, addresses, sizes, self._connection.replication)
            _raise_if_unreachable(codes)
        for (_, segment), code in zip(objects, codes, strict=True):
            if code != 0:
                self._noted(oc.SAVE, segment.header.key, code)
        return [code == 0 for code in codes]

    def _groups(self, operation: str, sizes: dict[int, int]) -> Iterator[list[int]]:
        """What fits into the buffer, in runs that fit together."""
        limit = self._connection.options.largest_object_bytes
        group: list[int] = []
        num_bytes = 0
        for index, size in sizes.items():
            if size > limit:
                self._log_once(f"an object of {size} bytes is too large for half of the buffer (buffer=)")
                self.outcomes.add(operation, oc.FULL)
                continue
            if group and num_bytes + size > limit:
                yield group
                group, num_bytes = [], 0
            group.append(index)
            num_bytes += size
        if group:
            yield group

    def _noted(self, operation: str, key: bytes, code: int) -> Unanswered | None:
        """Count what a code says about an object, and what stands for it; a plain miss is nothing."""
        if code == _NO_SPACE:
            self.outcomes.add(operation, oc.FULL)
        elif code == _BAD_RANGE or code >= 0:
            self._refuse(operation, key, CorruptSegmentError("not as long as its head says"))
        elif code != _NOT_FOUND:
            self.outcomes.add(operation, oc.ERROR)
            self._log_once(f"Mooncake error {code}")
            return Unanswered(oc.ERROR)
        return None

    def _refuse(self, operation: str, key: bytes, error: SegmentError) -> None:
        super()._refuse(operation, key, error)
        if operation == oc.SAVE:
            # A put keeps what has the name, also what is of no use to us.
            self._discard(key)

    def _has(self, key: bytes) -> bool:
        with self._connection.use() as client:
            return bool(client.is_exist(self.key_of(key)) == 1)

    def _discard(self, key: bytes) -> None:
        with self._connection.use() as client:
            client.remove(self.key_of(key), True)

    # ------------------------------------------------------------ leases

    def _learn(self, headers: Iterable[SegmentHeader]) -> None:
        with self._lock:
            for header in headers:
                self._parents[header.key] = header.parent_key
                self._parents.move_to_end(header.key)
            while len(self._parents) > _MAX_KNOWN_PARENTS:
                self._parents.popitem(last=False)

    def _renew(self, client: Any, keys: Sequence[bytes]) -> None:
        """What these build on stays as long as they do: asking for an object renews its lease."""
        path: dict[bytes, None] = {}
        with self._lock:
            for key in keys:
                while key and key not in path:
                    path[key] = None
                    key = self._parents.get(key, b"")
        if path:
            client.batch_is_exist([self.key_of(key) for key in path])


def _read_ranges(
    client: Any, region: Region, names: list[str], offsets: list[list[int]], num_bytes: int
) -> list[int]:
    """The first `num_bytes` of each object; how many came, or an error."""
    sources, sizes = [[0]] * len(names), [[num_bytes]] * len(names)
    (codes,) = client.get_into_ranges([region.address], [names], [offsets], [sources], [sizes])
    return [each[0] for each in codes]


def _raise_if_unreachable(codes: Sequence[int]) -> None:
    if _RPC_TIMEOUT in codes:
        raise StoreTimeoutError("the Mooncake master did not answer in time")
    if _RPC_FAILED in codes:
        raise StoreError("the Mooncake master does not answer")
