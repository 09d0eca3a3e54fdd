"""What the cache of this process can give to peers: published checkpoints with the pages behind them.

The engine thread looks at the tree and pins, between two steps; hashing, copying and sending happen
elsewhere. What is pinned cannot be evicted, so that little is pinned at a time, and only while it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from milepost.core.geometry import CacheGeometry
from milepost.core.scheduler import Scheduler
from milepost.core.transfers import SegmentRecords
from milepost.core.tree import Node
from milepost.core.units import floor_div
from milepost.engine.engine import Engine
from milepost.engine.messages import EngineError
from milepost.engine.saving import WorthSaving
from milepost.engine.segments import SegmentCodec
from milepost.engine.tiering_limits import SAVING_SHARE, SETTLE_SECONDS
from milepost.errors import StoreError
from milepost.stores.objects import StoreTimeoutError
from milepost.stores.peer_protocol import MAX_HEAD_BYTES
from milepost.stores.port import Buffer, SegmentHeader
from milepost.stores.segment_format import Identity, encode_head, head_of

T = TypeVar("T")


class CacheSource:
    """Implements `stores.peer_protocol.SegmentSource` over an engine; make it before the engine starts.

    A segment reaches back to the nearest checkpoint that a store would keep, not to every guess: a peer that
    loads a path gets as many states as a store would have given it.

    Args:
        max_segment_bytes: of a payload; longer ones are not offered.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, geometry: CacheGeometry, codec: SegmentCodec,
        max_segment_bytes: int,
    ) -> None:  # fmt: skip
        self.identity = Identity(codec.fingerprint, (geometry.rank, geometry.world_size))
        self._engine = engine
        self._codec = codec
        self._unit = geometry.match_unit
        self._tree = scheduler.cache.tree
        self._transfers = scheduler.transfers
        self._is_worth = WorthSaving(scheduler)
        self._max_segment_bytes = max_segment_bytes
        self._max_pinned_bytes = floor_div(scheduler.cache.memory.budget_bytes, SAVING_SHARE)
        self._condition = threading.Condition()
        self._reading: dict[int, SegmentRecords] = {}
        self._ended: list[SegmentRecords] = []
        engine.before_condemning(self._settle)

    # -- from threads of peers -------------------------------------------------------------------

    def heads(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Buffer | None]:
        def look() -> list[SegmentHeader | None]:
            return [self._header(key) for key in keys]

        headers = self._between_steps(look, deadline_seconds, lambda headers: None)
        heads = [None if header is None else head_of(header) for header in headers]
        return [None if head is None or len(head) > MAX_HEAD_BYTES else head for head in heads]

    @contextmanager
    def reading(
        self, keys: Sequence[bytes], max_bytes: int, *, deadline_seconds: float
    ) -> Iterator[list[Sequence[Buffer] | None]]:
        def begin() -> list[SegmentRecords | None]:
            return self._begin(keys, min(max_bytes, self._max_pinned_bytes))

        records = self._between_steps(begin, deadline_seconds, self._end)
        try:
            segments = [None if each is None else self._codec.encode(each) for each in records]
            yield [None if each is None else (encode_head(each), *each.payload) for each in segments]
        finally:
            self._end(records)

    def _between_steps(self, view: Callable[[], T], seconds: float, undo: Callable[[T], None]) -> T:
        """What `view` returns in the engine thread; `undo` gets what came too late."""
        future: Future[T] = self._engine.act(lambda scheduler, now: view())
        try:
            return future.result(max(0.0, seconds))
        except TimeoutError:
            future.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise StoreTimeoutError("the engine was busy for too long") from None
        except EngineError as error:
            raise StoreError(str(error)) from None

    def _end(self, records: Sequence[SegmentRecords | None]) -> None:
        """From any thread: nobody reads these any more."""
        with self._condition:
            self._ended += [each for each in records if each is not None]
            self._condition.notify_all()
        self._engine.act(lambda scheduler, now: self._unpin())

    # -- in the engine thread --------------------------------------------------------------------

    def _header(self, key: bytes) -> SegmentHeader | None:
        node = self._tree.index.get(key)
        if node is None or node.states is None:
            return None
        base = self._base(node)
        start = 0 if base is None else base.depth * self._unit
        header = self._codec.header(
            key, b"" if base is None else base.key, start, node.depth * self._unit, node.reason
        )
        return header if header.payload_bytes <= self._max_segment_bytes else None

    def _base(self, node: Node) -> Node | None:
        """The checkpoint its segment builds on; None = it reaches back to the first token."""
        for above in self._tree.ancestors(node):
            if not above.is_root and above.states is not None and self._is_worth(above):
                return above
        return None

    def _begin(self, keys: Sequence[bytes], max_bytes: int) -> list[SegmentRecords | None]:
        """Pin the segments of the first keys, as far as they have so many bytes; at least one."""
        begun: list[SegmentRecords | None] = []
        num_bytes = 0
        for key in keys:
            header = self._header(key)
            if header is None:
                begun.append(None)
                continue
            num_bytes += header.payload_bytes
            if num_bytes > max_bytes and any(each is not None for each in begun):
                break
            parent_key = header.parent_key
            records = self._transfers.begin_save(self._tree.index[key], parent_key.__eq__)
            if records is not None:
                with self._condition:
                    self._reading[id(records)] = records
            begun.append(records)
        return begun

    def _unpin(self) -> None:
        with self._condition:
            ended, self._ended = self._ended, []
            for records in ended:
                del self._reading[id(records)]
        for records in ended:
            self._transfers.end_save(records)

    def _settle(self) -> None:
        """Wait until nobody reads, which takes as long as copying: none begins meanwhile.

        Raises:
            EngineError: a reader does not end.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._ended) == len(self._reading), SETTLE_SECONDS):
                raise EngineError("a peer does not end reading, so that checkpoints cannot be dropped")
        self._unpin()
