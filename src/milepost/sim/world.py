"""The world: the real scheduler, a fingerprint worker, clients and a virtual clock.

After every action the core is audited, and what it lets a lookup find is compared with what the
worker really holds. A violation raises `SimulationError` and names the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import CacheGeometry
from milepost.core.plan import StepPlan, StepResult
from milepost.core.reasons import REQUIRED
from milepost.core.request import Request, RequestUpdate, ReuseReport
from milepost.core.scheduler import Scheduler
from milepost.core.units import floor_to, is_multiple
from milepost.errors import MilepostError, WorkerError
from milepost.sim.contents import ContentsCheck
from milepost.sim.cost import CostModel
from milepost.sim.drafting import DraftingConfig, with_own_drafts
from milepost.sim.fakes import WorkerFaults
from milepost.sim.fingerprint import FingerprintWorker
from milepost.sim.losses import LossBook, is_overflowing
from milepost.sim.model import FingerprintModel, MediaSymbols, TrueSequence
from milepost.sim.promises import PromiseBook
from milepost.sim.spec import Outcome, RequestSpec

MAX_IDLE_STEPS = 3
"""Steps in a row that neither compute nor end anything before the world calls it a livelock."""

MAX_FAREWELL_STEPS = 50
"""Steps in which a failing worker is told again who has ended, before it counts as a leak."""


class SimulationError(MilepostError):
    """A promise was broken in simulation: always a bug."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What is checked after every action.

    Attributes:
        audit: the core's own invariants.
        contents: every published page and state against the worker's records.
        bound: promise P1 for every admitted request: what it recomputes beyond the bound is what it says
            that evictions and refusals cost.
        losses: that it says so rightly, and that the counters of evictions and refusals agree.
    """

    audit: bool = True
    contents: bool = True
    bound: bool = True
    losses: bool = True


class World:
    """One replica under simulation.

    Args:
        scheduler: the core under test; built from the three configurations if not given.
        drafting: speculation with a scripted drafter.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        cache: CacheConfig,
        config: SchedulerConfig,
        *,
        faults: WorkerFaults | None = None,
        cost: CostModel | None = None,
        checks: Checks | None = None,
        model: FingerprintModel | None = None,
        scheduler: Scheduler | None = None,
        drafting: DraftingConfig | None = None,
    ) -> None:
        self.geometry = geometry
        self.scheduler = scheduler if scheduler is not None else Scheduler(geometry, cache, config)
        self.worker = FingerprintWorker(geometry, budget_bytes=cache.cache_bytes, model=model, faults=faults)
        self._drafter = (drafting or DraftingConfig()).drafter(
            self.worker.truth, self.worker.model.vocab_size
        )
        if drafting is not None:
            self.scheduler.drafts = drafting.planner(self._drafter)
        self.cost = cost if cost is not None else CostModel()
        self.checks = checks if checks is not None else Checks()
        self.promises = PromiseBook(geometry.match_unit)
        self.contents = ContentsCheck(self.scheduler.cache, self.worker)
        self.losses = LossBook(self.scheduler.cache) if self.checks.losses else None
        self.now = 0.0
        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_actions = 0
        self.outcomes: dict[int, Outcome] = {}
        self.running: dict[int, Request] = {}
        self.plan: StepPlan | None = None
        self.on_end: Callable[[Outcome], None] | None = None
        self._next_id = 0
        self._steps_left: dict[int, int] = {}
        self._is_caching = cache.enable_prefix_caching

    # --- actions -------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> int:
        """Send a request; returns its id.

        Raises:
            RequestError: refused by the core, which must then be unchanged.
        """
        request_id = self._next_id
        self._next_id += 1
        request = Request(
            request_id,
            spec.prompt,
            spec.sampling,
            max_tokens=spec.max_tokens,
            priority=spec.priority,
            domain=spec.domain,
            wanted=spec.wanted,
            media=spec.media,
            conversation=spec.conversation,
        )
        self.scheduler.add(request)
        self.worker.expect(
            request_id,
            spec.prompt,
            spec.sampling,
            domain=spec.domain,
            weights=spec.domain.adapter.encode(),
            media=[MediaSymbols(span.start, span.end, span.digest) for span in spec.media],
        )
        self.outcomes[request_id] = Outcome(request_id, spec, self.now)
        self.running[request_id] = request
        if spec.abort_after_steps is not None:
            self._steps_left[request_id] = spec.abort_after_steps
        self._after("add")
        return request_id

    def abort(self, request_id: int) -> None:
        """The client leaves."""
        self.scheduler.abort(request_id)
        self._after("abort")

    def finish(self, request_id: int) -> None:
        """The engine found a stop string."""
        if request_id in self.outcomes:
            self.outcomes[request_id].was_cut = True
        self.scheduler.finish(request_id)
        self._after("finish")

    def preempt(self, request_id: int) -> None:
        """Memory pressure from outside."""
        self.scheduler.preempt(request_id)
        self._after("preempt")

    def reset(self) -> bool:
        """Drop everything cached that is not in use."""
        done = self.scheduler.reset_prefix_cache()
        self.promises.forget()
        for request_id in self.running.keys() - self.scheduler.requests.keys():
            self.promises.ended(request_id, None)  # over, and only its last update is still to come
        self._after("reset")
        return done

    def evict(self, count: int) -> int:
        """Memory pressure: let the core give up to `count` records up; returns how many times it did."""
        evictor = self.scheduler.cache.evictor
        num_evicted = 0
        while num_evicted < count and evictor.evict_one(self.now):
            num_evicted += 1
        self._after("evict")
        return num_evicted

    def schedule(self) -> StepPlan:
        """Make a plan; it stays in flight until `execute`."""
        if self.plan is not None:
            raise ValueError("a plan is in flight; call execute() first")
        self.plan = self.scheduler.schedule(self.now)
        self._note_admissions(self.plan)
        self._after("schedule")
        return self.plan

    def execute(self) -> list[RequestUpdate]:
        """Run the plan in flight and commit its result. A fault of the worker fails the step."""
        plan, self.plan = self.plan, None
        if plan is None:
            raise ValueError("no plan is in flight; call schedule() first")
        try:
            sent, drafts = with_own_drafts(plan, self._drafter, self._stop_ids)
            result = self.worker.execute(sent)
            for done in result.chunk_results:
                done.draft_tokens = drafts.get(done.request_id, b"")
        except WorkerError as error:
            result = StepResult(plan.step_id, [], str(error))
            self.num_failed_steps += 1
        self.num_steps += 1
        self.now += self.cost.step_seconds(plan)
        updates = self.scheduler.commit(result)
        for update in updates:
            self._note_update(update)
        self._note_progress()
        self._after("execute")
        return updates

    def _stop_ids(self, request_id: int) -> frozenset[int]:
        return self.running[request_id].stop_ids

    def step(self) -> list[RequestUpdate]:
        """Schedule (unless a plan is in flight) and execute."""
        if self.plan is None:
            self.schedule()
        return self.execute()

    def drain(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left, then check that nothing is held.

        Raises:
            SimulationError: no progress, an ended request without an update, or a leak.
        """
        idle = 0
        for _ in range(max_steps):
            if self.plan is None and not self.scheduler.has_unfinished_requests:
                break
            before = self.progress
            self.step()
            idle = idle + 1 if before == self.progress else 0
            if idle > MAX_IDLE_STEPS:
                raise SimulationError(f"step {self.num_steps}: requests {sorted(self.running)} wait for ever")
        else:
            raise SimulationError(f"not done after {max_steps} steps")
        for _ in range(MAX_FAREWELL_STEPS):
            failures = self.num_failed_steps
            self.step()
            if self.num_failed_steps == failures:
                break
        if self.worker.live and self.num_failed_steps == failures:
            raise SimulationError(f"the worker still holds requests {sorted(self.worker.live)}")
        if self.running:
            raise SimulationError(f"requests {sorted(self.running)} ended without an update")
        if self.losses is not None and (problems := self.losses.totals_problems()):
            raise SimulationError("; ".join(problems))

    @property
    def is_busy(self) -> bool:
        """Whether a plan is in flight or a request is unfinished."""
        return self.plan is not None or self.scheduler.has_unfinished_requests

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever a step computed or ended something."""
        return self.worker.counters.num_computed_tokens, len(self.running)

    # --- bookkeeping ---------------------------------------------------------------------

    def _note_update(self, update: RequestUpdate) -> None:
        outcome = self.outcomes.get(update.request_id)
        if outcome is None or update.request_id not in self.running:
            raise SimulationError(f"update for request {update.request_id}, which is not running")
        if update.tokens and outcome.time_to_first_token is None:
            outcome.time_to_first_token = self.now - outcome.arrival
        outcome.output_tokens.extend(token.token_id for token in update.tokens)
        if update.reuse is not None:
            self._note_reuse(outcome, update.reuse)
        if update.finish_reason is not None:
            self._end(outcome, update)
            return
        limit = outcome.spec.abort_after_tokens
        if limit is not None and len(outcome.output_tokens) >= limit:
            self.scheduler.abort(update.request_id)

    def _note_reuse(self, outcome: Outcome, reuse: ReuseReport) -> None:
        if outcome.num_cached_tokens is not None:
            raise SimulationError(f"request {outcome.request_id}: reuse was reported twice")
        if not 0 <= reuse.num_cached_tokens < outcome.num_prompt_tokens == reuse.num_prompt_tokens:
            raise SimulationError(f"request {outcome.request_id}: impossible report {reuse}")
        outcome.num_cached_tokens = reuse.num_cached_tokens
        if self.losses is not None and self.running[outcome.request_id].is_counted:
            self.losses.report(reuse)
        outcome.reuse_reason = reuse.reason

    def _end(self, outcome: Outcome, update: RequestUpdate) -> None:
        request_id = update.request_id
        request = self.running.pop(request_id)
        outcome.finish_reason = update.finish_reason
        outcome.error = update.error
        outcome.finished_at = self.now
        outcome.num_preemptions = request.num_preemptions
        counters = self.worker.counters
        outcome.num_computed_tokens = counters.computed_by_request.pop(request_id, 0)
        outcome.num_passes = counters.passes_by_request.pop(request_id, 0)
        truth = self.worker.truth(request_id)
        check_answer(outcome, truth, request.max_tokens)
        if self.checks.contents:
            problems = self.contents.learn(request, truth)
            self.contents.forget(request_id)
            if problems:
                raise SimulationError("; ".join(problems))
        is_complete = update.finish_reason in ("stop", "length") and bool(outcome.output_tokens)
        is_complete = is_complete and self._is_promised(request, request.num_processed)
        self.promises.ended(request_id, request.num_processed if is_complete else None)
        self.worker.forget(request_id)
        self._steps_left.pop(request_id, None)
        if self.on_end is not None:
            self.on_end(outcome)

    def _note_admissions(self, plan: StepPlan) -> None:
        """Right after the lookup: is what was found as long as promised?"""
        for started in plan.started:
            request = self.running.get(started.request_id)
            if request is None or request.num_preemptions:
                continue
            truth = self.worker.truth(started.request_id)
            if self.checks.bound and self._is_caching and not is_overflowing(self.scheduler.cache):
                num_lost = request.reuse.num_tokens_lost_to_eviction if request.reuse is not None else 0
                self.promises.check(started.request_id, truth, request.num_processed + num_lost)
            wanted = self._promised_positions(request)
            self.promises.opened(started.request_id, truth, wanted, request.num_processed)

    def _note_progress(self) -> None:
        for request_id, request in self.running.items():
            self.promises.processed(request_id, request.num_processed)
        for request_id in [r for r, steps in self._steps_left.items() if steps <= 1]:
            del self._steps_left[request_id]
            self.scheduler.abort(request_id)
        for request_id in self._steps_left:
            self._steps_left[request_id] -= 1

    def _promised_positions(self, request: Request) -> list[int]:
        """The end of the prompt, and what the caller wanted if the kernel can export it in any chunk."""
        alignment = self.geometry.checkpoint_alignment
        is_any_legal = alignment is None or is_multiple(self.geometry.match_unit, alignment)
        positions = [p for p, reason in request.wanted_by_caller if is_any_legal or reason in REQUIRED]
        return [p for p in (*positions, request.num_prompt_tokens) if self._is_promised(request, p)]

    def _is_promised(self, request: Request, position: int) -> bool:
        """No boundary may split a media item, so nothing is promised where the bound would need one."""
        unit = self.geometry.match_unit
        needed = (floor_to(position, unit), floor_to(max(0, position - 1), unit))
        return not any(span.start < at < span.end for span in request.media for at in needed)

    def after_outside(self, action: str) -> None:
        """Somebody acted on the core between two steps: audit everything."""
        self._after(action)

    def _after(self, action: str) -> None:
        """Audit everything. Runs after every action, so its cost bounds the size of a world."""
        self.num_actions += 1
        problems: list[str] = []
        if self.checks.audit:
            problems += self.scheduler.audit()
        if self.checks.contents:
            for request_id, request in self.running.items():
                problems += self.contents.learn(request, self.worker.truth(request_id))
            problems += self.contents.problems()
        if self.losses is not None:
            problems += self.losses.problems()
        if problems:
            raise SimulationError(f"step {self.num_steps}, after {action}: {'; '.join(problems)}")


def check_answer(outcome: Outcome, truth: TrueSequence, max_tokens: int) -> None:
    """A request that ended by itself must have the answer of a cold run, others a beginning of it.

    Args:
        max_tokens: what the core made of the client's limit (the context may end earlier).

    Raises:
        SimulationError: a token, the length, the reason or the count of computed rows is wrong.
    """
    spec = outcome.spec
    wanted = truth.outputs(max_tokens)
    answer = list(outcome.output_tokens)
    where = f"request {outcome.request_id} ({outcome.finish_reason})"
    if answer != wanted[: len(answer)]:
        raise SimulationError(f"{where}: answered {answer}, a cold run answers {wanted}")
    stops = spec.sampling.stop_token_ids
    is_complete = len(answer) == len(wanted)
    ends_with_stop = bool(answer) and answer[-1] in stops
    if outcome.finish_reason == "length" and not (is_complete and not ends_with_stop):
        raise SimulationError(f"{where}: answered {answer}, a cold run answers {wanted}")
    if outcome.finish_reason == "stop" and not outcome.was_cut and not (is_complete and ends_with_stop):
        raise SimulationError(f"{where}: answered {answer}, a cold run answers {wanted}")
    if outcome.finish_reason not in ("stop", "length") or outcome.was_cut:
        return
    expected_rows = outcome.num_recomputed_tokens + len(answer) - 1
    if not outcome.num_preemptions and outcome.num_computed_tokens != expected_rows:
        raise SimulationError(
            f"{where}: {outcome.num_cached_tokens} of {outcome.num_prompt_tokens} tokens reported as reused, "
            f"{len(answer)} generated, but {outcome.num_computed_tokens} rows computed"
        )
