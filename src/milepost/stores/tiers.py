"""Several stores as one, fastest first, for a thread that must never wait.

Every method called by the engine returns at once; answers are futures, resolved by threads of the tiers at
the deadline at the latest. What a tier does not answer in time is a miss there, but not said to be absent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.answers import Answer, Timer
from milepost.stores.guard import GuardedStore, GuardOptions
from milepost.stores.lanes import Lane
from milepost.stores.meter import CallTotals
from milepost.stores.objects import Clock, Deadline
from milepost.stores.port import Loaded, LookedUp, SegmentHeader, SegmentStore, StoredSegment, Unanswered
from milepost.stores.write_behind import WriteBehind

_LATE = Unanswered(oc.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    header: of the segment.
    tier: index of the fastest tier that has it.
    """

    header: SegmentHeader
    tier: int


Find = Found | Unanswered | None
"""None: every tier says that it does not have it."""


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """Attributes:
    max_pending_save_bytes: payloads that wait to be saved; more is refused, and the caller may try later.
    max_batch_bytes: payloads in one call to a store, unless a single segment is larger; what was loaded
        before a deadline passed is kept by whole calls.
    save_deadline_seconds: of one call that saves or removes.
    num_threads: lookups, and loads, that run at the same time; more wait, and may miss their deadlines.
    """

    max_pending_save_bytes: int = 256 << 20
    max_batch_bytes: int = 32 << 20
    save_deadline_seconds: float = 10.0
    num_threads: int = 4


@dataclass(frozen=True, slots=True)
class TierCounters:
    """A snapshot of one tier.

    Attributes:
        outcomes: keys by (operation, outcome); names are in `outcomes`.
        calls: number, seconds and payload bytes of calls that came back or timed out, by operation.
        pending_save_bytes: payloads in its queue or being written.
        breaker_is_open: it is left alone at present.
        usage: (bytes used, bound in bytes) of a store in this process or on its disk, as this process knows
            it; None elsewhere.
        takes_saves: False where somebody else decides what is in it.
    """

    name: str
    outcomes: dict[tuple[str, str], int]
    calls: dict[str, CallTotals]
    pending_save_bytes: int
    breaker_is_open: bool
    usage: tuple[int, int] | None = None
    takes_saves: bool = True

    @property
    def read_bytes(self) -> int:
        return self.calls.get("load", CallTotals()).num_bytes

    @property
    def written_bytes(self) -> int:
        return self.calls.get("save", CallTotals()).num_bytes


@dataclass(eq=False, slots=True)
class _Transfer:
    """A segment on its way in, and who waits for it.

    Attributes:
        deadline: of the load that began it.
        waiters: (answer, index in it).
        may_promote: False once the key was removed meanwhile.
    """

    found: Found
    deadline: Deadline
    waiters: list[tuple[Answer[Loaded], int]] = field(default_factory=list)
    may_promote: bool = True


class Tiers:
    """See the module. Owns the stores and closes them.

    Args:
        stores: fastest first; names must differ.

    Raises:
        StoreError: no store, or two with one name.
    """

    def __init__(
        self,
        stores: Sequence[SegmentStore],
        options: TiersOptions | None = None,
        *,
        guard_options: GuardOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.names = tuple(store.name for store in stores)
        if not stores or len(set(self.names)) < len(self.names):
            raise StoreError(f"tiers need stores with different names, not {list(self.names)}")
        self.options = options or TiersOptions()
        self.forbidden_threads: set[threading.Thread] = set()
        self._clock = clock
        self._stores = [
            GuardedStore(store, guard_options, clock=clock, forbidden_threads=self.forbidden_threads)
            for store in stores
        ]
        self.kept = tuple(tier for tier, store in enumerate(self._stores) if store.takes_saves)
        """Numbers of the tiers that take what is saved."""
        self.on_losses: Callable[[Sequence[tuple[bytes, bytes]]], None] = lambda lost: None
        """Told (key, parent key) of segments that a tier took without having what they build on."""
        self._writes = WriteBehind(
            [self._stores[tier] for tier in self.kept],
            on_losses=lambda lost: self.on_losses(lost),
            max_pending_bytes=self.options.max_pending_save_bytes,
            max_batch_bytes=self.options.max_batch_bytes,
            save_deadline_seconds=self.options.save_deadline_seconds,
            clock=clock,
        )
        self._find_lane = Lane("find", self.options.num_threads)
        self._load_lane = Lane("load", self.options.num_threads)
        self._timer = Timer("store-deadlines", clock)
        self._lock = threading.Lock()
        self._transfers: dict[bytes, _Transfer] = {}
        self._closed = False

    @property
    def takes_saves(self) -> bool:
        """Whether anything can be saved at all."""
        return bool(self.kept)

    def forbid_thread(self, thread: threading.Thread) -> None:
        """From now on a store that is called on this thread raises InvariantError: the thread of an engine
        must never wait for one."""
        self.forbidden_threads.add(thread)

    # ------------------------------------------------------------ in

    def find(self, keys: Sequence[bytes], *, deadline_seconds: float) -> Future[list[Find]]:
        """Where the segments that end at `keys` are; one lookup per tier for all that is still missing."""
        future: Future[list[Find]] = Future()
        answer = Answer[Find](future, len(keys), _LATE)
        deadline = Deadline(deadline_seconds, self._clock)
        self._timer.after(deadline_seconds, answer.finish)
        self._start(self._find_lane, answer, partial(self._find, list(keys), deadline, answer))
        return future

    def find_each(self, keys: Sequence[bytes], *, deadline_seconds: float) -> Future[list[list[LookedUp]]]:
        """By number, what each tier that takes saves has of the segments that end at `keys`; the others are
        not asked, and have nothing."""
        future: Future[list[list[LookedUp]]] = Future()
        late: list[LookedUp] = [_LATE] * len(keys)
        answer = Answer(future, len(self._stores), late)
        deadline = Deadline(deadline_seconds, self._clock)
        self._timer.after(deadline_seconds, answer.finish)
        for tier in range(len(self._stores)):
            if tier not in self.kept:
                answer.put(tier, [None] * len(keys))
                continue
            self._start(self._find_lane, answer, partial(self._find_at, tier, list(keys), deadline, answer))
        return future

    def _find_at(
        self, tier: int, keys: list[bytes], deadline: Deadline, answer: Answer[list[LookedUp]]
    ) -> None:
        answer.put(tier, self._stores[tier].lookup(keys, deadline_seconds=deadline.remaining_seconds))

    def load(self, found: Sequence[Found], *, deadline_seconds: float) -> Future[list[Loaded]]:
        """Whole segments. One that is on its way already is not fetched twice; what came from a slower tier
        is saved to the faster ones in the background."""
        future: Future[list[Loaded]] = Future()
        answer = Answer[Loaded](future, len(found), _LATE)
        deadline = Deadline(deadline_seconds, self._clock)
        new: dict[int, list[_Transfer]] = {}
        with self._lock:
            # Nothing new after closing; the timer ends the answer at once.
            for index, each in enumerate(() if self._closed else found):
                transfer = self._transfers.get(each.header.key)
                if transfer is None or transfer.deadline.passed:
                    transfer = self._transfers[each.header.key] = _Transfer(each, deadline)
                    new.setdefault(each.tier, []).append(transfer)
                transfer.waiters.append((answer, index))
        self._timer.after(deadline_seconds, answer.finish)
        for tier, transfers in new.items():
            self._start(self._load_lane, answer, partial(self._load, tier, transfers, deadline))
        return future

    def _start(
        self,
        lane: Lane,
        answer: Answer[Find] | Answer[Loaded] | Answer[list[LookedUp]] | Answer[list[bytes] | None],
        work: Callable[[], None],
    ) -> None:
        try:
            lane.start(work)
        except RuntimeError:
            # Closed.
            answer.finish()

    def _find(self, keys: list[bytes], deadline: Deadline, answer: Answer[Find]) -> None:
        missing = list(range(len(keys)))
        silent: dict[int, Unanswered] = {}
        for tier, store in enumerate(self._stores):
            if not missing or deadline.passed:
                break
            # A tier that hangs leaves time for those behind it.
            seconds = deadline.remaining_seconds / (len(self._stores) - tier)
            headers = store.lookup([keys[index] for index in missing], deadline_seconds=seconds)
            for index, header in zip(missing, headers, strict=True):
                if isinstance(header, SegmentHeader):
                    answer.put(index, Found(header, tier))
                elif header is not None:
                    silent.setdefault(index, header)
            missing = [index for index, header in zip(missing, headers, strict=True) if not header]
        else:
            # All were asked.
            for index in missing:
                answer.put(index, silent.get(index))
        answer.finish()

    def _load(self, tier: int, transfers: list[_Transfer], deadline: Deadline) -> None:
        """In batches, so that what came before the deadline counts; then what is missing, further down."""
        try:
            for start, end in self._batches(transfers):
                self._load_batch(tier, transfers[start:end], deadline)
        finally:
            # Nobody waits for what an error left over.
            for transfer in transfers:
                self._deliver(transfer, Unanswered(oc.ERROR))

    def _batches(self, transfers: Sequence[_Transfer]) -> list[tuple[int, int]]:
        """Ranges of at most `max_batch_bytes`, or of one segment."""
        bounds, num_bytes = [0], 0
        for index, transfer in enumerate(transfers):
            size = transfer.found.header.payload_bytes
            if num_bytes and num_bytes + size > self.options.max_batch_bytes:
                bounds.append(index)
                num_bytes = 0
            num_bytes += size
        return list(zip(bounds, [*bounds[1:], len(transfers)], strict=True))

    def _load_batch(self, tier: int, transfers: Sequence[_Transfer], deadline: Deadline) -> None:
        silent: dict[_Transfer, Unanswered] = {}
        for index in range(tier, len(self._stores)):
            if not transfers:
                return
            if deadline.passed:
                silent = {**dict.fromkeys(transfers, _LATE), **silent}
                break
            keys = [transfer.found.header.key for transfer in transfers]
            loaded = self._stores[index].load(keys, deadline_seconds=deadline.remaining_seconds)
            missing = []
            for transfer, segment in zip(transfers, loaded, strict=True):
                if isinstance(segment, StoredSegment):
                    self._promote(transfer, segment, index)
                    self._deliver(transfer, segment)
                    continue
                missing.append(transfer)
                if segment is not None:
                    silent.setdefault(transfer, segment)
            # It was evicted or found damaged since; a slower tier may have it as well.
            transfers = missing
        for transfer in transfers:
            self._deliver(transfer, silent.get(transfer))

    def _deliver(self, transfer: _Transfer, segment: Loaded) -> None:
        key = transfer.found.header.key
        with self._lock:
            if self._transfers.get(key) is transfer:
                del self._transfers[key]
            waiters, transfer.waiters = transfer.waiters, []
        for answer, index in waiters:
            answer.put(index, segment)

    def _promote(self, transfer: _Transfer, segment: StoredSegment, tier: int) -> None:
        key = segment.header.key
        faster = [q for q, at in enumerate(self.kept) if at < tier and not self._writes.is_pending(q, key)]
        if faster and transfer.may_promote:
            # What was computed comes before what a slower tier keeps anyway.
            self._writes.save(segment, faster, lambda saved: None, share=0.5)

    # ------------------------------------------------------------ out

    def save(self, segment: StoredSegment, done: Callable[[bool], None]) -> bool:
        """Save to every tier that takes it and does not have it, behind the caller's back.

        Args:
            segment: its payload may be views of live memory; it must not change before `done`.
            done: called once from a thread of a tier, when no tier needs the payload any more, with whether
                at least one has the segment. A store that hangs delays it until the call ends.

        Returns:
            False if there is no room for it now; nothing is kept then, and `done` is not called.
        """
        return self._writes.save(segment, range(len(self.kept)), done)

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget segments in every tier, pending saves included; how many there were.

        Raises (in the future):
            StoreError: names tiers that did not answer; they may still have them.
        """
        with self._lock:
            for key in keys:
                if (transfer := self._transfers.get(key)) is not None:
                    transfer.may_promote = False
        return self._writes.remove(list(keys))

    def followers(
        self, keys: Sequence[bytes], *, deadline_seconds: float
    ) -> Future[list[list[bytes] | None]]:
        """Per tier, the keys of the segments there that build on these, as far as it can list them; None for
        one that did not answer in time. Where nothing can be removed nobody is asked."""
        future: Future[list[list[bytes] | None]] = Future()
        answer = Answer[list[bytes] | None](future, len(self._stores), None)
        deadline = Deadline(deadline_seconds, self._clock)
        self._timer.after(deadline_seconds, answer.finish)

        def ask(tier: int) -> None:
            found = self._stores[tier].try_followers(keys, deadline.remaining_seconds)
            answer.put(tier, found)

        for tier in range(len(self._stores)):
            if tier in self.kept:
                self._start(self._find_lane, answer, partial(ask, tier))
            else:
                answer.put(tier, [])
        return future

    @property
    def pending_save_bytes(self) -> int:
        """Payloads that wait for a tier or are being written."""
        return self._writes.pending_bytes

    @property
    def oldest_pending_seconds(self) -> float:
        """How long the oldest of them has been waiting; 0 if there is none."""
        return self._writes.oldest_pending_seconds

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything handed to `save` and `remove` is settled; whether it was in time."""
        return self._writes.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Save what can be saved in that time, give up the rest, and close the stores."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writes.flush(timeout_seconds)
        self._writes.close()
        self._find_lane.close()
        self._load_lane.close()
        self._timer.close()
        for store in self._stores:
            store.close()

    # ------------------------------------------------------------ numbers

    def load_bytes_per_second(self, tier: int) -> float:
        """Measured bandwidth of loads, beyond the latency of a call."""
        return self._stores[tier].meter.load_bytes_per_second

    def load_latency_seconds(self, tier: int) -> float:
        """Measured time of a call that carries next to nothing."""
        return self._stores[tier].meter.call_seconds

    def counters(self) -> list[TierCounters]:
        """One per tier, in their order."""
        return [
            TierCounters(
                name=store.name,
                outcomes=store.outcomes.snapshot(),
                calls=store.meter.totals(),
                pending_save_bytes=(
                    self._writes.pending_bytes_of(self.kept.index(index)) if store.takes_saves else 0
                ),
                breaker_is_open=store.breaker.is_open,
                usage=getattr(store.store, "known_usage", None),
                takes_saves=store.takes_saves,
            )
            for index, store in enumerate(self._stores)
        ]
