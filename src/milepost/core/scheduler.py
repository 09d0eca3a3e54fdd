"""The scheduler: `plan = schedule(now)`, then `updates = commit(result)`. It composes, others decide.

chunking    where a chunk ends and what it exports
prefix_cache what can be reused, which records a chunk gets
siblings    who waits for whose prefix
transfers   what is loaded from a store or read by one
admission   whether a request can run without starving those that do
outcome     what a finished step means for each request
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core import reasons
from milepost.core.admission import SIBLING, fits, largest_request_tokens, what_holds
from milepost.core.assembly import (
    NO_DRAFTS,
    Drafts,
    PlannedChunk,
    build_chunk,
    build_start,
    furnish_lease,
    nothing_reserved,
)
from milepost.core.background import BackgroundShare
from milepost.core.chunking import (
    effective_spacing,
    marked_units,
    plan_chunk,
    prefill_wanted,
    settled_position,
)
from milepost.core.coordinator import Match
from milepost.core.drafts import DraftPlanner
from milepost.core.explain import explain_start
from milepost.core.geometry import CacheGeometry
from milepost.core.hashing import KeyChain
from milepost.core.lease import Reservation
from milepost.core.metrics import CoreStats
from milepost.core.outcome import settle_chunk
from milepost.core.plan import StepPlan, StepResult
from milepost.core.prefix_cache import PrefixCache
from milepost.core.queues import RequestQueue, is_background, last_behind, order_key
from milepost.core.request import Request, RequestStatus, RequestUpdate
from milepost.core.siblings import Siblings
from milepost.core.stats import audit_requests, core_stats
from milepost.core.transfers import Transfers
from milepost.core.units import is_multiple
from milepost.errors import ConfigError, RequestError


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache. At most one plan in flight.

    Raises:
        ConfigError: the budget cannot hold a single short request.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        cache: CacheConfig,
        config: SchedulerConfig,
        drafts: DraftPlanner | None = None,
    ) -> None:
        if geometry.match_unit != cache.match_unit:
            raise ConfigError(
                "prefix_match_unit",
                f"geometry has {geometry.match_unit} tokens, the cache {cache.match_unit}",
            )
        self.geometry = geometry
        self.config = config
        self.cache = PrefixCache(geometry, cache)
        self.max_model_len = largest_request_tokens(geometry, cache, config)
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self.drafts = drafts
        self.siblings = Siblings(cache.match_unit)
        self.transfers = Transfers(self.cache)
        self._alignment = geometry.checkpoint_alignment
        self._grid = math.lcm(cache.match_unit, self._alignment or 1)
        self._spacing = effective_spacing(cache.checkpoint_interval, geometry)
        self._is_caching = cache.enable_prefix_caching
        self._background = BackgroundShare(config.background_share, self._grid, config.max_num_batched_tokens)
        self._num_steps = 0
        self._plan: StepPlan | None = None
        self._planned: list[PlannedChunk] = []
        self._planned_ids: set[int] = set()
        self._gone_on_worker: list[int] = []
        self._updates: list[RequestUpdate] = []
        self._blocked_head: int | None = None
        self._now = 0.0

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use, it is too long for the model, or it can never fit the budget.
        """
        if request.request_id in self.requests:
            raise RequestError("request_id", f"{request.request_id} is already in use")
        room = self.max_model_len - request.num_prompt_tokens
        if room < 1:
            raise RequestError(
                "prompt",
                f"the prompt has {request.num_prompt_tokens} tokens; with at least one generated token it "
                f"must fit {self.max_model_len} tokens. Shorten it, or raise --max-model-len and "
                "--cache-bytes",
                code="context_length_exceeded",
            )
        request.max_tokens = min(request.max_tokens, room)
        self.waiting.arrive(request)
        request.chain = KeyChain(request.tokens, request.domain, self.cache.match_unit, request.media)
        self.requests[request.request_id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.prefill_end = request.num_tokens
        request.wanted = (
            prefill_wanted(
                request.num_tokens, self.cache.match_unit, request.wanted_by_caller, request.media_spans,
                self._grid,
            )
            if self._is_caching and request.uses_cache
            else []
        )  # fmt: skip
        self.waiting.push(request)
        if self._is_caching and request.follows_others:
            following = self.siblings.register(request)
            if following is not None:
                self._want_junction(following.leader, following.boundary)

    def _want_junction(self, request: Request, position: int) -> None:
        """Ask for a checkpoint where another path leaves this one, if nothing else is there yet."""
        position = settled_position(position, self.cache.match_unit, self._grid, request.media_spans)
        if position > request.num_processed and all(position != p for p, _ in request.wanted):
            request.wanted = sorted([*request.wanted, (position, reasons.JUNCTION)])

    def _leave_siblings(self, request: Request) -> None:
        for relation in self.siblings.leave(request):
            self._want_junction(relation.leader, relation.boundary)

    def abort(self, request_id: int) -> None:
        """End a request now, or when its step is over. Unknown and finished ids are ignored."""
        self._end_early(request_id, "abort")

    def finish(self, request_id: int) -> None:
        """End a request because the caller found a stop string."""
        self._end_early(request_id, "stop")

    def _end_early(self, request_id: int, reason: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        if request_id in self._planned_ids:
            request.pending_abort = request.pending_abort or reason
            return
        self._updates.append(RequestUpdate(request_id, finish_reason=reason))
        self._end(request, reason, is_sound=True)

    def preempt(self, request_id: int) -> None:
        """Take a running request's memory; it goes back to its place in the queue.

        Ignored for requests that do not run or are in the plan in flight.
        """
        request = self.requests.get(request_id)
        if request is None or request_id in self._planned_ids or request.status is not RequestStatus.RUNNING:
            return
        self._preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Drop what no running request holds; True if nothing is left."""
        if self._plan is not None:
            return False
        return self.cache.reset()

    def condemn(self, request: Request, position: int) -> int:
        """Drop the checkpoint at `position` of a request's path and all behind it (an audit failed).

        Requests that build on it start again from what is left. Returns the checkpoints dropped.

        Raises:
            RuntimeError: a plan is in flight.
        """
        if self._plan is not None:
            raise RuntimeError("condemn() was called while a plan is in flight")
        node = self.cache.node_at(request.known_chain, position)
        if node is None:
            return 0
        for other in reversed(tuple(self.running)):
            if self.cache.tree.is_behind(other.held_lease.tip, node):
                self._preempt(other, is_sound=False)
        return self.cache.evictor.drop_subtree(node)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    # -- schedule ------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Choose what the next step computes. `now` (seconds, any origin) only serves retention.

        Raises:
            RuntimeError: the previous plan was not committed.
        """
        if self._plan is not None:
            raise RuntimeError("schedule() was called while a plan is in flight; commit() its result first")
        self._now = now
        self._num_steps += 1
        plan = StepPlan(self._num_steps, [])
        self._plan = plan
        self._planned = []
        budget = self.config.max_num_batched_tokens
        decoding = [request for request in self.running if not request.is_prefilling]
        prefill_budget = max(1, budget - len(decoding))
        if self.drafts is not None:
            self.drafts.begin_step(budget, decoding, now)
        self._background.begin_step(is_quiet=all(map(is_background, self.requests.values())))
        running = tuple(self.running)
        for request in running:
            if budget < 1 or is_background(request):
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.num_processed >= request.prefill_end:
                num_rows = self._plan_decode(plan, request)
                budget -= num_rows
                prefill_budget -= max(0, num_rows - 1)
            elif prefill_budget > 0:
                num_tokens = self._plan_prefill(plan, request, min(budget, prefill_budget))
                budget -= num_tokens
                prefill_budget -= num_tokens
        left = self._admit(plan, min(budget, prefill_budget), in_background=False)
        for request in filter(is_background, running if self._background.num_left_tokens else ()):
            limit = min(left, self._background.num_left_tokens)
            if limit > 0 and request.status is RequestStatus.RUNNING:
                left -= self._plan_prefill(plan, request, limit)
        self._admit(plan, min(left, self._background.num_left_tokens), in_background=True)
        if not plan.chunks and self.transfers.is_idle and all(map(is_background, self.requests.values())):
            self._give_one_up()
        plan.finished = self._gone_on_worker
        self._gone_on_worker = []
        plan.discards = self.cache.memory.take_discards()
        return plan

    def _plan_decode(self, plan: StepPlan, request: Request) -> int:
        start, end = request.num_processed, request.num_processed + 1
        lease = request.held_lease
        if self.cache.is_supplied(lease, start):
            reservation: Reservation | None = nothing_reserved(lease, self._now)
        else:
            reservation = self._reserve(request, end, (), reasons.DECODE)
        if reservation is None:
            return 0
        drafts = self.drafts.plan(self.cache, request, reservation) if self.drafts is not None else NO_DRAFTS
        return self._append_chunk(plan, request, end, reservation, None, drafts)

    def _plan_prefill(self, plan: StepPlan, request: Request, num_budget_tokens: int) -> int:
        start = request.num_processed
        decision = plan_chunk(
            start, len(request.tokens), num_budget_tokens, request.wanted, self.cache.match_unit,
            self._alignment, self._spacing if self._is_caching and request.uses_cache else 0,
        )  # fmt: skip
        for reason in decision.dropped:
            self.cache.counters.refusals[reasons.REFUSED_NOT_LEGAL, reason] += 1
        lease = request.held_lease
        unit = self.cache.match_unit
        ends_between = decision.end < len(request.tokens) and not is_multiple(decision.end, unit)
        if ends_between and start and start == lease.tip.depth * unit:
            # The chunk leaves a boundary and ends between two: without this the boundary's state
            # would be lost to an abort or a preemption.
            self.cache.keep_running(lease, reasons.INTERVAL, self._now)
        reservation = self._reserve(request, decision.end, decision.exports, decision.end_reason)
        if reservation is None:
            return 0
        self._append_chunk(plan, request, decision.end, reservation, decision.end_reason)
        return decision.end - start

    def _reserve(
        self, request: Request, end: int, exports: Sequence[tuple[int, str]], end_reason: str | None
    ) -> Reservation | None:
        """Records for the next chunk, at the cost of later requests if need be."""
        lease = request.held_lease
        while True:
            reservation = self.cache.reserve(lease, end, exports, self._now, end_reason)
            if reservation is not None:
                self.cache.confirm(lease, reservation)
                return reservation
            if self.drafts is not None and self.drafts.take_back(self.cache, self._planned):
                continue
            victim = last_behind(request, self.running)
            if victim is None or victim.request_id in self._planned_ids:
                return None
            self._preempt(victim)

    def _append_chunk(
        self, plan: StepPlan, request: Request, end: int, reservation: Reservation, end_reason: str | None,
        drafts: Drafts = NO_DRAFTS,
    ) -> int:  # fmt: skip
        chunk = build_chunk(request, request.held_lease, end, reservation, drafts)
        plan.chunks.append(chunk)
        self._planned.append(PlannedChunk(request, chunk, end_reason))
        self._planned_ids.add(request.request_id)
        num_rows = chunk.last_row_end - chunk.start
        self._background.planned(request, num_rows)
        return num_rows

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, num_budget_tokens: int, *, in_background: bool) -> int:
        """Returns the tokens that are left."""
        known_to_wait: set[int] = set()
        held_by = partial(what_holds, self.transfers, self.siblings, known_to_wait)
        self.waiting.release(held_by)
        for request in self.waiting:
            if num_budget_tokens < 1:
                break
            if is_background(request) is not in_background:
                continue
            if len(self.running) >= self.config.max_num_seqs and not self._make_way(request):
                break
            if holder := held_by(request):
                self.cache.counters.num_sibling_waits += self.waiting.hold(request) and holder == SIBLING
                continue
            if self._blocked_head == request.request_id:
                break
            num_tokens = self._try_admit(plan, request, num_budget_tokens)
            while num_tokens == 0 and self._make_way(request):
                num_tokens = self._try_admit(plan, request, num_budget_tokens)
            if num_tokens == 0:
                # Only what runs can make room later; with nothing running, try again.
                self._blocked_head = request.request_id if self.running else None
                break
            num_budget_tokens -= num_tokens
        return num_budget_tokens

    def _make_way(self, request: Request) -> bool:
        """Preempt a background request for one that is none; whether there was one."""
        last = self.running[-1] if self.running else None
        if last is None or is_background(request) or not is_background(last):
            return False
        self._preempt(last)
        return True

    def _give_one_up(self) -> None:
        """Nobody is there but background requests, and none finds room: live conversations hold the rest."""
        for request in (*self.running, *self.waiting):
            if not what_holds(self.transfers, self.siblings, None, request):
                self.abort(request.request_id)
                return

    def _try_admit(self, plan: StepPlan, request: Request, num_budget_tokens: int) -> int:
        chain = request.known_chain
        match = self.cache.no_match()
        if request.uses_cache:
            match = self.cache.match(chain, request.num_match_tokens)
        if not fits(self.cache, request, match, self.running, self.transfers):
            return 0
        lease = self.cache.open(match, chain, self._now, uses_cache=request.uses_cache)
        marked = marked_units(
            request.wanted_by_caller, self.cache.match_unit, self._grid, request.media_spans
        )
        furnish_lease(lease, request, marked, self.cache, match)
        request.lease = lease
        request.num_processed = match.position
        if match.hit.attention_units > match.units:
            self._want_junction(request, match.hit.attention_units * self.cache.match_unit)
        for relation in self.siblings.overtake(request):
            self._want_junction(relation.leader, relation.boundary)
        num_tokens = self._plan_prefill(plan, request, num_budget_tokens)
        if num_tokens == 0:
            self.cache.release(lease, None, self._now)
            request.lease = None
            request.num_processed = 0
            return 0
        self._start(plan, request, match)
        return num_tokens

    def _start(self, plan: StepPlan, request: Request, match: Match) -> None:
        lease = request.held_lease
        if request.reuse is None:
            explain_start(self.cache, match, request)
            self.cache.record_hit(lease, match, self._now)
        request.move_to(RequestStatus.RUNNING)
        self.waiting.admit(request)
        self.running.append(request)
        self.running.sort(key=order_key)
        plan.started.append(build_start(request, lease, match.units))

    # -- commit --------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Publish what the step wrote; only now is it visible. Returns what changed per request.

        A chunk without a matching result did not happen: its request ends with an error.

        Raises:
            ValueError: `result` does not belong to the plan in flight.
        """
        plan = self._plan
        if plan is None or plan.step_id != result.step_id:
            raise ValueError(f"result of step {result.step_id} does not belong to the plan in flight")
        results = {entry.request_id: entry for entry in result.chunk_results}
        planned = self._planned
        self._plan = None
        self._planned = []
        self._planned_ids = set()
        self.cache.counters.num_steps += 1
        if result.error is not None and not result.chunk_results:
            # The worker may not have seen the plan at all: what it had to give up is told again.
            self._gone_on_worker = [*plan.finished, *self._gone_on_worker]
            self.cache.memory.repeat_discards(plan.discards)
        updates = self._updates
        self._updates = []
        for entry in planned:
            request = entry.request
            was_prefilling = request.num_processed < request.prefill_end
            update, reason, is_sound = settle_chunk(
                self.cache, request, entry.chunk, results.get(request.request_id), entry.end_reason,
                result.error, self._now,
            )  # fmt: skip
            if self.drafts is not None and is_sound:
                self.drafts.settle(self.cache.counters, request, entry.chunk, results[request.request_id])
            if was_prefilling and is_sound and request.num_processed >= request.prefill_end:
                self._leave_siblings(request)
            if reason is not None:
                update.finish_reason = reason
                self._end(request, reason, is_sound=is_sound)
            if update.tokens or update.finish_reason or update.reuse or update.scores:
                updates.append(update)
        return updates

    def _end(self, request: Request, reason: str, *, is_sound: bool) -> None:
        if request.lease is not None:
            self._release(request, is_sound=is_sound)
        else:
            self.waiting.remove(request)
        request.finish_reason = reason
        self.waiting.settle(request)
        request.move_to(RequestStatus.FINISHED)
        self._leave_siblings(request)
        self.transfers.lift(request.request_id)
        if self.drafts is not None:
            self.drafts.forget(request.request_id)
        del self.requests[request.request_id]

    def _preempt(self, request: Request, *, is_sound: bool = True) -> None:
        self._release(request, is_sound=is_sound)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_processed = 0
        request.num_preemptions += 1
        self.cache.counters.num_preemptions += request.is_counted
        self._leave_siblings(request)
        self._enqueue(request)

    def _release(self, request: Request, *, is_sound: bool) -> None:
        lease = request.held_lease
        self.cache.release(lease, request.num_processed if is_sound else None, self._now)
        request.lease = None
        self.running.remove(request)
        self._gone_on_worker.append(request.request_id)
        self._blocked_head = None

    # -- inspection ----------------------------------------------------------------------------

    def stats(self) -> CoreStats:
        """Counters and gauges as of now."""
        return core_stats(self.cache, self.running, sum(request.is_counted for request in self.waiting))

    def audit(self) -> list[str]:
        """Every violated invariant of scheduler and cache; empty = sound."""
        leases = [r.lease for r in self.running if r.lease is not None]
        problems = self.cache.audit(leases, list(self.transfers.leases()), self.transfers.pinned())
        problems += self.siblings.audit()
        problems += self.transfers.audit(set(self.requests))
        problems += audit_requests(self.requests, self.running, len(self.waiting))
        return problems
