"""Replays requests through the real core, without tensors and without checks of contents.

The fingerprint world proves that reuse is right; a replay measures how much there is, for prompts of
hundreds of thousands of tokens and budgets of terabytes. Only the worker and the clock are made up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from milepost.config import DEFAULT_DECODE_INTERVAL, CacheConfig, SchedulerConfig
from milepost.core.geometry import CacheGeometry
from milepost.core.plan import ChunkPlan, ChunkResult, SampledToken, SamplingParams, StepPlan, StepResult
from milepost.core.request import Request, RequestUpdate
from milepost.core.scheduler import Scheduler
from milepost.core.units import ceil_to
from milepost.sim.cost import CostModel
from milepost.sim.policies.retention import use_lru_retention
from milepost.sim.trace import TRACE_BLOCK_TOKENS, TraceRow

OUTPUT_TOKEN = (1 << 32) - 1
"""What a request generates whose answer is not known: no prompt contains it."""


class AccountingWorker:
    """Acknowledges every plan and samples the recorded answers. Implements `core.ports.Worker`.

    Args:
        outputs: request id -> its answer; beyond its end, or without one, OUTPUT_TOKEN is sampled.
    """

    def __init__(self, outputs: Callable[[int], Sequence[int]]) -> None:
        self._outputs = outputs
        self.num_computed_tokens = 0
        self.num_chunks = 0
        self.num_exports = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Pretend that everything in the plan was computed."""
        results = []
        for chunk in plan.chunks:
            self.num_computed_tokens += chunk.end - chunk.start
            self.num_exports += len(chunk.exports)
            sampled = [self._sample(chunk)] if chunk.num_samples else []
            results.append(
                ChunkResult(chunk.request_id, chunk.end, [e.position for e in chunk.exports], sampled)
            )
        self.num_chunks += len(plan.chunks)
        return StepResult(plan.step_id, results)

    def _sample(self, chunk: ChunkPlan) -> SampledToken:
        outputs = self._outputs(chunk.request_id)
        position = chunk.output_position
        return SampledToken(outputs[position] if position < len(outputs) else OUTPUT_TOKEN)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class ReplayOptions:
    """How requests are replayed.

    Attributes:
        max_output_tokens: answers are cut to this; 1 = prefill only, since no later prompt of a trace
            can be known to contain an answer.
        step_tokens: tokens per step over all requests.
        cost: None = a request is served in no time, before the next one arrives, so that figures do
            not depend on a machine; else steps take time and requests queue and run side by side.
        lru_retention: give up the checkpoint used longest ago instead of the least valuable one.
        max_requests: only the first so many.
    """

    max_output_tokens: int = 1
    step_tokens: int = 1 << 20
    max_num_seqs: int = 256
    checkpoint_interval: int | None = None
    max_states_per_path: int | None = None
    cost: CostModel | None = None
    lru_retention: bool = False
    max_requests: int | None = None


@dataclass(slots=True)
class ReplayResult:
    """One policy at one budget.

    Attributes:
        num_prompt_tokens, num_cached_tokens, seconds_to_first_token: per request, in order of arrival.
        num_refused: requests the budget cannot hold at all; they count as computed.
        evictions: (move, checkpoint reason) -> count.
        losses: per request, "move:reason" of the eviction (or refusal) that cost it tokens; "" = none did.
    """

    policy: str
    cache_bytes: int
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    seconds_to_first_token: list[float] = field(default_factory=list)
    num_passes: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_refused: int = 0
    peak_committed_bytes: int = 0
    num_checkpoints: int = 0
    evictions: dict[tuple[str, str], int] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    states_by_reason: dict[str, int] = field(default_factory=dict)

    def hit_rate(self, first: int = 0) -> float:
        """Reused tokens / prompt tokens from request `first` on; 0.0 for an empty range."""
        total = sum(self.num_prompt_tokens[first:])
        return sum(self.num_cached_tokens[first:]) / total if total else 0.0

    @property
    def second_half_hit_rate(self) -> float:
        """Hit rate over the second half of the requests, when the cache is warm."""
        return self.hit_rate(len(self.num_prompt_tokens) // 2)


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A request to replay; `tokens` makes its prompt when it is needed.

    Attributes:
        outputs: the recorded answer; empty if a trace does not know it.
        block_ids, block_tokens: ids of the prompt's blocks, if a trace states them.
        wanted: (position, reason) as a caller would send them; a trace knows none.
        abort_after_steps: the client leaves after so many steps; None = it stays.
    """

    timestamp: float
    num_prompt_tokens: int
    num_output_tokens: int
    tokens: Callable[[], array[int]]
    outputs: Sequence[int] = ()
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    wanted: tuple[tuple[int, str], ...] = ()
    conversation: str | None = None
    abort_after_steps: int | None = None
    label: str = ""


def from_trace(rows: Iterable[TraceRow]) -> list[ReplayRequest]:
    """Requests of a trace."""
    return [
        ReplayRequest(
            row.timestamp,
            row.num_input_tokens,
            row.num_output_tokens,
            row.tokens,
            block_ids=row.block_ids,
            block_tokens=TRACE_BLOCK_TOKENS,
        )
        for row in rows
    ]


class _Replay:
    """State of one run."""

    def __init__(
        self,
        requests: Sequence[ReplayRequest],
        geometry: CacheGeometry,
        cache_bytes: int,
        options: ReplayOptions,
    ) -> None:
        longest = max((r.num_prompt_tokens + max(1, r.num_output_tokens) for r in requests), default=1)
        cache = CacheConfig(
            cache_bytes,
            match_unit=geometry.match_unit,
            checkpoint_interval=options.checkpoint_interval,
            decode_interval=ceil_to(DEFAULT_DECODE_INTERVAL, geometry.match_unit),
            max_states_per_path=options.max_states_per_path,
        )
        config = SchedulerConfig(options.step_tokens, options.max_num_seqs, longest + 1)
        self.requests = requests
        self.options = options
        self.scheduler = Scheduler(geometry, cache, config)
        if options.lru_retention:
            use_lru_retention(self.scheduler.cache)
        self.worker = AccountingWorker(lambda number: requests[number].outputs)
        self.now = 0.0
        self.result = ReplayResult("milepost-lru" if options.lru_retention else "milepost", cache_bytes)
        self._steps_left: dict[int, int] = {}

    def send(self, number: int) -> None:
        """Request `number` arrives."""
        entry = self.requests[number]
        result = self.result
        result.num_prompt_tokens.append(entry.num_prompt_tokens)
        result.num_cached_tokens.append(0)
        result.losses.append("")
        result.seconds_to_first_token.append(0.0)
        if entry.num_prompt_tokens >= self.scheduler.max_model_len:
            result.num_refused += 1
            result.num_computed_tokens += entry.num_prompt_tokens
            return
        outputs = max(1, min(entry.num_output_tokens, self.options.max_output_tokens))
        self.scheduler.add(
            Request(
                number,
                entry.tokens(),
                SamplingParams(temperature=0.0),
                max_tokens=outputs,
                wanted=entry.wanted,
                conversation=entry.conversation,
            )
        )
        if entry.abort_after_steps is not None:
            self._steps_left[number] = entry.abort_after_steps

    def step(self) -> None:
        """One step of the engine."""
        plan = self.scheduler.schedule(self.now)
        result = self.worker.execute(plan)
        if self.options.cost is not None:
            self.now += self.options.cost.step_seconds(plan)
        for update in self.scheduler.commit(result):
            self._note(update)
        for number in list(self._steps_left):
            self._steps_left[number] -= 1
            if self._steps_left[number] <= 0:
                del self._steps_left[number]
                self.scheduler.abort(number)

    def _note(self, update: RequestUpdate) -> None:
        result, number = self.result, update.request_id
        if update.reuse is not None:
            result.num_cached_tokens[number] = update.reuse.num_cached_tokens
            if update.reuse.eviction is not None:
                result.losses[number] = ":".join(update.reuse.eviction)
        if update.tokens and not result.seconds_to_first_token[number]:
            result.seconds_to_first_token[number] = self.now - self.requests[number].timestamp

    def finish(self) -> ReplayResult:
        """Totals."""
        stats = self.scheduler.stats()
        result = self.result
        result.num_passes = self.worker.num_chunks
        result.num_computed_tokens += self.worker.num_computed_tokens
        result.num_preemptions = stats.counters.num_preemptions
        result.peak_committed_bytes = stats.peak_committed_bytes
        result.num_checkpoints = stats.num_checkpoints
        result.evictions = dict(stats.counters.evictions)
        result.states_by_reason = dict(stats.states_by_reason)
        return result


def replay(
    requests: Sequence[ReplayRequest],
    geometry: CacheGeometry,
    cache_bytes: int,
    options: ReplayOptions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Replay `requests` (in order of arrival) against one budget.

    Args:
        on_progress: called with (requests sent, all requests) now and then.

    Raises:
        ConfigError: the budget cannot hold any request.
    """
    options = options if options is not None else ReplayOptions()
    selected = requests[: options.max_requests]
    run = _Replay(selected, geometry, cache_bytes, options)
    for number, entry in enumerate(selected):
        if on_progress is not None and number % 64 == 0:
            on_progress(number, len(selected))
        while run.scheduler.has_unfinished_requests and (options.cost is None or run.now < entry.timestamp):
            run.step()
        run.now = max(run.now, entry.timestamp)
        run.send(number)
    while run.scheduler.has_unfinished_requests:
        run.step()
    if on_progress is not None:
        on_progress(len(selected), len(selected))
    return run.finish()
