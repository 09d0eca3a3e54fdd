"""Saves that nobody waits for: one queue and one thread per tier, bounded in bytes together."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.guard import GuardedStore
from milepost.stores.objects import Clock
from milepost.stores.port import SegmentHeader, StoredSegment
from milepost.stores.segment_format import with_digest

logger = logging.getLogger(__name__)

_MAX_OWED = 8192
_OWED_LOOKED_AT = 64
_REPAIR_PAUSE_SECONDS = 1.0


def _nothing() -> None:
    """Whoever owns the payload does not wait for it."""


def _ignore_count(count: int | None) -> None:
    """Nobody asked."""


@dataclass(eq=False, slots=True)
class _Save:
    """Attributes:
    num_open: tiers that still need the payload.
    saved: whether some tier has it.
    done: told once, when none needs it any more.
    """

    segment: StoredSegment
    since: float
    num_open: int
    done: Callable[[bool], None]
    saved: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def digested(self) -> StoredSegment:
        """The segment, its payload hashed by the tier that comes first."""
        with self.lock:
            self.segment = with_digest(self.segment)
            return self.segment


@dataclass(eq=False, slots=True)
class _Removal:
    keys: Sequence[bytes]
    done: Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class _Repair:
    key: bytes


@dataclass(eq=False, slots=True)
class _Queue:
    """Of one tier.

    Attributes:
        tier: its index.
        keys: of saves that are not over.
        owed: keys that it did not get although a tier before it may have, and since when.
        in_call: saves of calls that are not over; behind a later call, those of calls that were abandoned.
        late: of these, the ones whose key was removed meanwhile.
    """

    tier: int
    store: GuardedStore
    items: deque[_Save | _Removal] = field(default_factory=deque)
    num_bytes: int = 0
    keys: set[bytes] = field(default_factory=set)
    owed: dict[bytes, float] = field(default_factory=dict)
    in_call: set[_Save] = field(default_factory=set)
    late: dict[bytes, _Save] = field(default_factory=dict)


class _Batch:
    """Saves that went to a tier in one call: over when the result is known and the payload let go."""

    def __init__(
        self, saves: Sequence[_Save], over: Callable[[Sequence[_Save], Sequence[bool]], None]
    ) -> None:
        self._saves = saves
        self._over = over
        self._results: Sequence[bool] = [False] * len(saves)
        self._num_open = 2
        self._lock = threading.Lock()

    def known(self, results: Sequence[bool]) -> None:
        self._results = results
        self.arrived()

    def arrived(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
        self._over(self._saves, self._results)


class WriteBehind:
    """Takes segments from the engine's thread without blocking it and saves them to every tier.

    A tier may hold up to its share of the bytes, so that one that is slow does not take the room of the
    others; one segment it always takes. What a tier missed because it was slow or gone for a while is copied
    once from the tiers before it when it has time: a path with a gap would be of no use after a restart.

    Args:
        on_losses: told (key, parent key) of segments that a tier has now without what they build on; from its
            thread.
        max_pending_bytes: payloads that are held at most; more is refused.
        max_batch_bytes: payloads in one call to a store, unless a single one is larger.
        save_deadline_seconds: of one call.
    """

    def __init__(
        self,
        stores: Sequence[GuardedStore],
        *,
        on_losses: Callable[[Sequence[tuple[bytes, bytes]]], None],
        max_pending_bytes: int,
        max_batch_bytes: int,
        save_deadline_seconds: float,
        clock: Clock,
    ) -> None:
        self._on_losses = on_losses
        self._max_pending_bytes = max_pending_bytes
        self._max_batch_bytes = max_batch_bytes
        self._save_deadline_seconds = save_deadline_seconds
        self._clock = clock
        self._condition = threading.Condition()
        self._queues = [_Queue(tier, store) for tier, store in enumerate(stores)]
        self._share_bytes = max_pending_bytes // max(1, len(stores))
        # In order of arrival; a dictionary, because any may end first.
        self._pending: dict[_Save, None] = {}
        self._pending_bytes = 0
        self._num_removals = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"save-{each.store.name}", daemon=True)
            for each in self._queues
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ from any thread, never blocking

    @property
    def pending_bytes(self) -> int:
        with self._condition:
            return self._pending_bytes

    def pending_bytes_of(self, tier: int) -> int:
        with self._condition:
            return self._queues[tier].num_bytes

    @property
    def oldest_pending_seconds(self) -> float:
        with self._condition:
            since = [save.since for save in itertools.islice(self._pending, 1)]
            for each in self._queues:
                since += itertools.islice(each.owed.values(), 1)
            return self._clock() - min(since) if since else 0.0

    def save(
        self,
        segment: StoredSegment,
        tiers: Sequence[int],
        done: Callable[[bool], None],
        *,
        share: float = 1.0,
    ) -> bool:
        """Whether some tier takes it; `done` is called if so.

        Args:
            share: of `max_pending_bytes`, beyond which it is refused.
        """
        num_bytes, key = segment.header.payload_bytes, segment.header.key
        with self._condition:
            fits = not self._closed and self._pending_bytes + num_bytes <= share * self._max_pending_bytes
            queues = [self._queues[tier] for tier in tiers]
            takers = [each for each in queues if fits and self._takes(each, num_bytes)]
            for each in queues:
                if each not in takers:
                    each.store.outcomes.add(oc.SAVE, oc.BACK_PRESSURE)
            if not takers:
                return False
            for each in queues:
                if each not in takers:
                    self._owe(each, key)
            save = _Save(segment, self._clock(), len(takers), done)
            for each in takers:
                each.items.append(save)
                each.late.pop(key, None)
                each.num_bytes += num_bytes
                each.keys.add(key)
            self._pending[save] = None
            self._pending_bytes += num_bytes
            self._condition.notify_all()
            return True

    def _owe(self, queue: _Queue, key: bytes) -> None:
        if queue.tier and len(queue.owed) < _MAX_OWED and not self._closed:
            queue.owed.setdefault(key, self._clock())

    def _takes(self, queue: _Queue, num_bytes: int) -> bool:
        return not queue.items or queue.num_bytes + num_bytes <= self._share_bytes

    def is_pending(self, tier: int, key: bytes) -> bool:
        with self._condition:
            return key in self._queues[tier].keys

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """After the saves before it. How many segments the tier with most of them had.

        Raises (in the future):
            StoreError: tiers that did not answer; they may still have them.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        counts: list[int] = []
        silent: list[str] = []
        lock = threading.Lock()

        def done(name: str, count: int | None) -> None:
            with lock:
                counts.append(count or 0)
                if count is None:
                    silent.append(name)
                if len(counts) < len(queues):
                    return
            if silent:
                future.set_exception(StoreError(f"not removed from {', '.join(silent)}: no answer"))
            else:
                future.set_result(max(counts))

        queues = self._queues
        with self._condition:
            closed = self._closed
            for each in () if closed else queues:
                for key in keys:
                    each.owed.pop(key, None)
                self._append_removal(each, keys, partial(done, each.store.name))
        if closed:
            future.set_exception(StoreError("the stores are closed"))
        elif not queues:
            future.set_result(0)
        return future

    def _append_removal(
        self, queue: _Queue, keys: Sequence[bytes], done: Callable[[int | None], None]
    ) -> None:
        self._num_removals += 1
        queue.items.append(_Removal(keys, done))
        self._condition.notify_all()

    # ------------------------------------------------------------ waiting, for others than the engine

    def flush(self, timeout_seconds: float) -> bool:
        """Whether everything that was handed in is saved, given up or removed."""
        with self._condition:
            return self._condition.wait_for(self._is_settled, timeout_seconds)

    def _is_settled(self) -> bool:
        # A tier that is left alone is not waited for.
        return not (self._pending or self._num_removals or any(map(self._repairable, self._queues)))

    def _repairable(self, queue: _Queue) -> bytes | None:
        """A key that the tier lacks and a tier before it may have by now; the first few are looked at."""
        if not queue.owed or queue.store.breaker.is_open:
            return None
        faster = self._queues[: queue.tier]
        for key in itertools.islice(queue.owed, _OWED_LOOKED_AT):
            if not any(key in each.keys for each in faster):
                return key
        return None

    def close(self) -> None:
        """Give up what did not begin; calls that run end by their deadlines."""
        with self._condition:
            self._closed = True
            given_up = [(each, tuple(each.items)) for each in self._queues]
            for each in self._queues:
                each.items.clear()
                each.owed.clear()
            self._condition.notify_all()
        for each, items in given_up:
            for item in items:
                if isinstance(item, _Save):
                    self._over(each, (item,), (False,))
                else:
                    self._removed(item, None)

    # ------------------------------------------------------------ threads of the tiers

    def _work(self, queue: _Queue) -> None:
        while (work := self._next(queue)) is not None:
            if isinstance(work, _Repair):
                self._repair(queue, work.key)
            elif isinstance(work, _Removal):
                self._note_late(queue, work.keys)
                self._removed(work, queue.store.try_remove(work.keys, self._save_deadline_seconds))
            else:
                batch = _Batch(work, lambda saves, results: self._over(queue, saves, results))
                results = queue.store.save_in_place(
                    [save.digested() for save in work],
                    deadline_seconds=self._save_deadline_seconds,
                    released=batch.arrived,
                )
                headers = [save.segment.header for save, done in zip(work, results, strict=True) if done]
                batch.known(results)
                del batch
                self._look_for_losses(queue, headers)
            del work

    def _look_for_losses(self, queue: _Queue, saved: Sequence[SegmentHeader]) -> None:
        """A store may have lost what was saved before: removed by hand, evicted, or forgotten by a server
        that was started anew. Nobody who has the path in memory would notice before the next restart."""
        own = {header.key for header in saved}
        children = {h.parent_key: h.key for h in saved if h.start and h.parent_key not in own}
        with self._condition:
            expected = queue.keys | queue.owed.keys()
            parents = [] if self._closed else [key for key in children if key not in expected]
        lost = queue.store.lacking(parents, self._save_deadline_seconds) if parents else []
        if lost:
            self._on_losses([(children[key], key) for key in lost])

    def _next(self, queue: _Queue) -> Sequence[_Save] | _Removal | _Repair | None:
        """A removal, or saves up to it, or a repair when there is neither; None at the end."""
        with self._condition:
            while not queue.items:
                if self._closed:
                    return None
                if (key := self._repairable(queue)) is not None:
                    return _Repair(key)
                # Nobody tells when a breaker closes.
                self._condition.wait(_REPAIR_PAUSE_SECONDS if queue.owed else None)
            first = queue.items.popleft()
            if isinstance(first, _Removal):
                for key in first.keys:  # a save before it may have failed since
                    queue.owed.pop(key, None)
                return first
            batch = [first]
            num_bytes = first.segment.header.payload_bytes
            while queue.items and isinstance(following := queue.items[0], _Save):
                num_bytes += following.segment.header.payload_bytes
                if num_bytes > self._max_batch_bytes:
                    break
                batch.append(following)
                queue.items.popleft()
            queue.in_call.update(batch)
            return batch

    def _note_late(self, queue: _Queue, keys: Sequence[bytes]) -> None:
        with self._condition:
            for save in queue.in_call:
                if save.segment.header.key in keys:
                    queue.late[save.segment.header.key] = save

    def _repair(self, queue: _Queue, key: bytes) -> None:
        seconds = self._save_deadline_seconds
        for faster in self._queues[: queue.tier]:
            (segment,) = faster.store.load([key], deadline_seconds=seconds)
            if segment:
                queue.store.save_in_place([segment], deadline_seconds=seconds, released=_nothing)
                break
        with self._condition:
            # One attempt each, but not while the tier is gone.
            if not queue.store.breaker.is_open:
                queue.owed.pop(key, None)
            self._condition.notify_all()

    def _over(self, queue: _Queue, saves: Sequence[_Save], results: Sequence[bool]) -> None:
        finished = []
        with self._condition:
            for save, saved in zip(saves, results, strict=True):
                key = save.segment.header.key
                queue.num_bytes -= save.segment.header.payload_bytes
                queue.keys.discard(key)
                save.saved |= saved
                queue.in_call.discard(save)
                if queue.late.get(key) is save:
                    # Its call was abandoned, and may have saved what was removed meanwhile.
                    del queue.late[key]
                    if not self._closed:
                        self._append_removal(queue, [key], _ignore_count)
                elif not saved:
                    self._owe(queue, key)
                save.num_open -= 1
                if not save.num_open:
                    finished.append(save)
        for save in finished:
            try:
                save.done(save.saved)
            except Exception:
                logger.exception("the callback of a save failed")
        with self._condition:
            for save in finished:
                del self._pending[save]
                self._pending_bytes -= save.segment.header.payload_bytes
            self._condition.notify_all()

    def _removed(self, removal: _Removal, count: int | None) -> None:
        removal.done(count)
        with self._condition:
            self._num_removals -= 1
            self._condition.notify_all()
