"""Between the engine and the stores: what to look up, what to load, what to save, and how long to wait.

Everything here runs in the engine thread, except what is handed to the tiers as a callback; those put
an event into a queue (or fill records that belong to them) and return. A store can be slow, full or gone:
requests are then computed as if it were not there.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from milepost.core.admission import fits
from milepost.core.plan import StepPlan
from milepost.core.queues import is_background
from milepost.core.request import Request, RequestStatus
from milepost.core.scheduler import Scheduler
from milepost.core.transfers import ANY_COST, Restore, TransferCost, choose_segments
from milepost.core.units import floor_div
from milepost.engine import load_outcomes as ended
from milepost.engine import tiering_limits as limits
from milepost.engine.lookups import Lookup
from milepost.engine.messages import EngineError, LoadNote
from milepost.engine.saving import Saves
from milepost.engine.segments import SegmentCodec
from milepost.stores.port import Loaded, Unanswered

if TYPE_CHECKING:
    from milepost.stores.tiers import Find, TierCounters, Tiers

log = logging.getLogger("milepost.engine")


class Tiering:
    """Loads for waiting requests; saves of new checkpoints are in `saves`.

    Args:
        clock: seconds, monotonic; the engine's own.
        wake: ends the engine's wait; called from threads of the tiers.
        always_loads: load what there is, even where computing it would be sooner.
        max_load_seconds: longest that a request is held for stores, all waits together; None = as long as
            computing would take, or `tiering_limits.ALWAYS_LOAD_SECONDS` with `always_loads`.

    Attributes:
        seconds_per_token: to compute one prompt token, as measured so far.
    """

    def __init__(
        self,
        tiers: Tiers,
        scheduler: Scheduler,
        codec: SegmentCodec,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        always_loads: bool = False,
        max_load_seconds: float | None = None,
    ) -> None:
        self.tiers = tiers
        self._scheduler = scheduler
        self._transfers = scheduler.transfers
        self.codec = codec
        self._clock = clock
        self._wake = wake
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lookups: dict[int, Lookup] = {}
        self._num_restores = 0
        self._always_loads = always_loads
        if max_load_seconds is None:
            max_load_seconds = limits.ALWAYS_LOAD_SECONDS if always_loads else math.inf
        self.max_load_seconds = max_load_seconds
        self.seconds_per_token = limits.INITIAL_SECONDS_PER_TOKEN
        cache = scheduler.cache
        self._unit = cache.match_unit
        self.outcomes: Counter[str] = Counter()
        """Lookups by how they ended."""
        self.prefetch_outcomes: Counter[str] = Counter()
        self.num_prefetched_tokens = 0
        self.num_queried_tokens = 0
        self.num_loaded_tokens = 0
        self.saves = Saves(tiers, scheduler, codec, clock, self._put)

    # -- for the engine ------------------------------------------------------------------------

    def begin(self) -> None:
        """In the engine thread, before anything else: no store may ever be called on it."""
        self.tiers.forbid_thread(threading.current_thread())

    def close(self) -> None:
        """Close the stores; the engine thread has ended."""
        self.tiers.close()

    @property
    def has_work(self) -> bool:
        """Whether `turn` has something to do without a new step."""
        return not self._events.empty() or self.saves.may_save()

    def consider(self, request: Request) -> None:
        """A request was added: ask the stores for what the cache lacks, and hold it back meanwhile."""
        if is_background(request):
            return
        outlook = self._transfers.outlook(request)
        if outlook is None:
            return
        now = self._clock()
        patience = self._patience_seconds(len(outlook.keys) * self._unit)
        self.num_queried_tokens += len(outlook.keys) * self._unit
        self._transfers.hold(request.request_id)
        self._look_up(Lookup(request, outlook, now, now + patience, patience))

    def prefetch(self, request: Request, timeout_seconds: float, done: Callable[[LoadNote], None]) -> bool:
        """Load what the stores have of a prompt, for whoever sends it next.

        Args:
            request: with a chain; stands for the prompt, is never scheduled, and has an id of its own.
            done: called in the engine thread. At the timeout what is loaded may still be on its way.

        Returns:
            False if the cache has all of it; `done` is not called then.
        """
        outlook = self._transfers.outlook(request)
        if outlook is not None:
            now = self._clock()
            self._look_up(Lookup(request, outlook, now, now + timeout_seconds, done=done))
        return outlook is not None

    def _look_up(self, lookup: Lookup) -> None:
        self._lookups[lookup.request.request_id] = lookup
        keys = lookup.outlook.keys
        end = next((i for i, key in enumerate(keys) if self.saves.is_shunned(key)), len(keys))
        if not end:
            self._end(lookup, ended.NOT_ASKED)
            return
        future = self.tiers.find(keys[:end], deadline_seconds=lookup.deadline - lookup.begun_at)
        future.add_done_callback(lambda done: self._put(lambda: self._take_found(lookup, done)))

    def turn(self) -> None:
        """Between two steps: apply what arrived, start loads there is room for, give up late ones, save."""
        self._apply_events()
        now = self._clock()
        has_room = True
        for request_id, lookup in tuple(self._lookups.items()):
            if lookup.request.status is not RequestStatus.WAITING:
                if lookup.note is None and lookup.restore is None:
                    self._end(lookup, ended.TOO_LATE)
                if lookup.request.status is RequestStatus.FINISHED:
                    del self._lookups[request_id]
            elif lookup.is_ready:
                has_begun = has_room and self._try_begin(lookup, now)
                has_room = has_begun or (has_room and lookup.is_prefetch)
                if lookup.is_prefetch and lookup.is_ready and now >= lookup.deadline:
                    self._end(lookup, ended.NO_ROOM)
            elif lookup.note is None and now >= lookup.deadline:
                self._end(lookup, ended.TOO_LATE)
        self.saves.save_some()

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Learn what computing a prompt token costs; steps that only decode say nothing about it."""
        rows = [chunk.last_row_end - chunk.start for chunk in plan.chunks]
        num_tokens = sum(count for count in rows if count >= limits.MIN_MEASURED_TOKENS)
        if num_tokens:
            measured = seconds / num_tokens
            self.seconds_per_token += limits.SPEED_SMOOTHING * (measured - self.seconds_per_token)

    def take_note(self, request_id: int) -> LoadNote | None:
        """What became of the lookup of a request that was admitted or has ended."""
        lookup = self._lookups.pop(request_id, None)
        return lookup.note if lookup is not None else None

    @property
    def save_lag_seconds(self) -> float:
        """Age of the oldest checkpoint that is not saved yet."""
        since = self.saves.waiting_since
        waiting = 0.0 if since is None else self._clock() - since
        return max(waiting, self.tiers.oldest_pending_seconds)

    def tier_counters(self) -> list[TierCounters]:
        """One per tier, fastest first; from any thread."""
        return self.tiers.counters()

    @property
    def num_pending_saves(self) -> int:
        return self.saves.num_pending

    def drain(self, timeout_seconds: float) -> bool:
        """Save everything that waits, as long as time is left; whether all is saved."""
        deadline = self._clock() + timeout_seconds
        while True:
            self._apply_events()
            self.saves.save_some(limit=limits.MAX_PENDING_SAVES)
            left = deadline - self._clock()
            if self.saves.is_done:
                return True
            if left <= 0:
                return False
            try:
                self._events.get(timeout=min(left, 0.05))()
            except queue.Empty:
                continue

    def _settle(self, timeout_seconds: float) -> bool:
        """Wait until nobody reads or writes records any more."""
        deadline = self._clock() + timeout_seconds
        while self.saves.is_reading or self._num_restores:
            left = deadline - self._clock()
            if left <= 0:
                return False
            try:
                self._events.get(timeout=left)()
            except queue.Empty:
                return False
        return True

    def condemn(self, request: Request, drop: Callable[[], int]) -> int:
        """Run `drop`, which takes checkpoints of the request's path off the cache by force, once nobody reads
        or writes records, and remove what the stores have of the path.

        Segments of paths that branch off it and are in no cache any more stay in the stores; those that
        build on a removed one cannot be used.

        Raises:
            EngineError: a transfer does not end.
        """
        if not self._settle(limits.SETTLE_SECONDS):
            raise EngineError("a transfer does not end, so that wrong checkpoints cannot be dropped")
        self.saves.removed = []
        num_dropped = drop()
        keys = [*self.saves.removed, *(request.chain.keys if request.chain is not None else ())]
        self.saves.removed = None
        self.saves.remove(list(dict.fromkeys(keys)))
        return num_dropped

    # -- in ------------------------------------------------------------------------------------

    def _put(self, event: Callable[[], None]) -> None:
        """From any thread."""
        self._events.put(event)
        self._wake()

    def _apply_events(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            event()

    def _patience_seconds(self, num_tokens: int) -> float:
        """How long a request may be held for stores that could spare it so many tokens: the one bound there
        is, whatever the stores do."""
        computing = math.inf if self._always_loads else num_tokens * self.seconds_per_token
        return min(computing, self.max_load_seconds)

    def _cost(self, tier: int) -> TransferCost:
        return TransferCost(
            seconds_per_token=self.seconds_per_token,
            seconds_per_byte=1 / self.tiers.load_bytes_per_second(tier),
            seconds_per_load=self.tiers.load_latency_seconds(tier),
        )

    def _take_found(self, lookup: Lookup, done: Future[list[Find]]) -> None:
        if lookup.note is not None:
            return
        keys = lookup.request.chain.keys if lookup.request.chain is not None else []
        first = floor_div(lookup.outlook.hit_position, self._unit)
        num_foreign = 0
        silent: list[Unanswered] = []
        for index, found in enumerate(done.result()):
            if isinstance(found, Unanswered):
                silent.append(found)  # it may be there
                continue
            if found is None:
                self.saves.known.discard(keys[first + index])
                continue
            stored = self.codec.checkpoint(found.header, keys, first + index + 1)
            if stored is None:
                num_foreign += 1
                continue
            lookup.found[stored.position] = found
            lookup.offers.append(stored)
        if not lookup.offers:
            nothing = ended.outcome_of_silence(silent) if silent else ended.NOT_FOUND
            self._end(lookup, ended.UNUSABLE if num_foreign else nothing)
            return
        now = self._clock()
        lookup.is_ready, lookup.patience_seconds = True, lookup.deadline - now
        self._try_begin(lookup, now)

    def _try_begin(self, lookup: Lookup, now: float) -> bool:
        """Start the load if the request could run; else leave it in the queue, and return False."""
        request, scheduler = lookup.request, self._scheduler
        chain = request.chain
        has_room = chain is not None and len(scheduler.running) < scheduler.config.max_num_seqs
        if chain is not None and has_room:
            match = scheduler.cache.match(chain, request.num_tokens)
            has_room = fits(scheduler.cache, request, match, scheduler.running, self._transfers)
        if not has_room:
            self._transfers.lift(request.request_id)
            return False
        outlook = self._transfers.outlook(request)
        cost = ANY_COST if lookup.is_prefetch or self._always_loads else self._slowest(lookup)
        offers = [o for o in lookup.offers if not self.saves.is_shunned(lookup.found[o.position].header.key)]
        chosen = [] if outlook is None else choose_segments(offers, outlook, cost)
        if outlook is None or not chosen:
            self._end(lookup, ended.SOONER_COMPUTED if self._is_linked(lookup) else ended.UNUSABLE)
            return True
        restore = self._transfers.begin(request, chosen, now)
        if restore is None:
            self._end(lookup, ended.NO_ROOM)
            return True
        self._num_restores += 1
        lookup.restore, lookup.is_ready, lookup.outlook = restore, False, outlook
        if not lookup.is_prefetch:
            self._transfers.hold(request.request_id)
            gained = chosen[-1].position - outlook.hit_position
            lookup.deadline = now + min(lookup.patience_seconds, self._patience_seconds(gained))
        wanted = [lookup.found[stored.position] for stored in chosen]
        future = self.tiers.load(wanted, deadline_seconds=limits.LOAD_SHARE * (lookup.deadline - now))
        future.add_done_callback(lambda done: self._fill(lookup, restore, done))
        return True

    def _slowest(self, lookup: Lookup) -> TransferCost:
        """Cost of loading from the slowest tier that has a part of it."""
        return self._cost(max(found.tier for found in lookup.found.values()))

    def _is_linked(self, lookup: Lookup) -> bool:
        """Whether some offer could be used if time did not matter; forgets keys whose chain is broken."""
        outlook = self._transfers.outlook(lookup.request) or lookup.outlook
        if choose_segments(lookup.offers, outlook, ANY_COST):
            return True
        for found in lookup.found.values():
            self.saves.known.discard(found.header.key)
            self.saves.known.discard(found.header.parent_key)
        return False

    def _fill(self, lookup: Lookup, restore: Restore, done: Future[list[Loaded]]) -> None:
        """In a thread of the tiers: the records belong to `restore` until it is finished."""
        num_written = 0
        silent: list[Unanswered] = []
        try:
            for target, segment in zip(restore.segments, done.result(), strict=True):
                if isinstance(segment, Unanswered):
                    silent.append(segment)
                    break
                if segment is None or segment.header.start != target.stored.start:
                    break  # gone, or saved anew with other pages
                self.codec.decode_into(segment, target)
                num_written += 1
        except Exception:
            log.exception("a loaded segment could not be used; its request is computed")
        written = num_written
        self._put(lambda: self._finish(lookup, restore, written, silent))

    def _finish(
        self, lookup: Lookup, restore: Restore, num_written: int, silent: Sequence[Unanswered]
    ) -> None:
        """Args:
        silent: of the segment behind those that were written: it may still be there.
        """
        position = self._transfers.finish(restore, num_written, self._clock())
        for segment in restore.segments[:num_written]:
            self.saves.known.add(restore.lease.chain.keys[floor_div(segment.stored.position, self._unit) - 1])
        for segment in restore.segments[num_written : num_written + 1] if not silent else ():
            # It is gone, and what builds on it is of no use: whoever computes it is to save it again.
            lost = [f.header.key for at, f in lookup.found.items() if at >= segment.stored.position]
            self.saves.known.discard(*lost)
        lookup.restore = None
        self._num_restores -= 1
        num_tokens = max(0, position - lookup.outlook.hit_position)
        if lookup.is_prefetch:
            self.num_prefetched_tokens += num_tokens
        else:
            self.num_loaded_tokens += num_tokens
        if lookup.note is None:
            tier = self.tiers.names[max(lookup.found[s.stored.position].tier for s in restore.segments)]
            nothing = ended.outcome_of_silence(silent) if silent else ended.FAILED
            self._end(lookup, ended.LOADED if num_tokens else nothing, num_tokens, tier)

    def _end(self, lookup: Lookup, outcome: str, num_tokens: int = 0, tier: str = "") -> None:
        seconds = self._clock() - lookup.begun_at
        lookup.note = LoadNote(outcome, tier, num_tokens, seconds)
        lookup.is_ready = False
        if lookup.done is None:
            self.outcomes[outcome] += 1
            self._transfers.lift(lookup.request.request_id)
        else:
            self.prefetch_outcomes[outcome] += 1
            del self._lookups[lookup.request.request_id]
            lookup.done(lookup.note)
