"""Executes step plans with torch, in this process."""

from __future__ import annotations

import dataclasses
import functools
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from milepost.core.geometry import CacheGeometry
from milepost.core.plan import (
    PROBABILISTIC,
    ChunkDrafts,
    ChunkPlan,
    ChunkResult,
    SampledToken,
    SamplingParams,
    StepDrafts,
    StepPlan,
    StepResult,
    WorkerRequest,
)
from milepost.errors import WorkerError
from milepost.models.inputs import StepRows
from milepost.models.loading import LoadedModel
from milepost.runner.batch import Batch, PageTable, build_batch, replay_index
from milepost.runner.draft_sampling import DraftSampler, verify_drawn
from milepost.runner.drafters import DraftLane, DraftRunner, ProcessedRows, draft_runner
from milepost.runner.expansion import with_expansion
from milepost.runner.pools import PoolSet
from milepost.runner.sampler import SamplingRow, TokenHistory, sample_checked, score
from milepost.runner.verify import num_accepted, sampling_rows

SCORED_LOGIT_BYTES = 32 << 20
"""Logits of prompt tokens that are held at the same time."""


@dataclass(slots=True)
class _RequestState:
    """What the worker remembers of a request between steps.

    Attributes:
        drafted_position: up to where its draft entries and taps reach; None before its first chunk, which
            starts where reused pages end.
        sampler: of the drafts that are to be verified; None = they were not drawn.
    """

    sampling: SamplingParams
    page_tables: list[PageTable]
    history: TokenHistory | None
    num_prompt_tokens: int
    drafted_position: int | None = None
    sampler: DraftSampler | None = None


class TorchWorker:
    """Worker for one model. Owns the pools and per-request page tables, decides nothing.

    Attributes:
        pools: memory of pages and states.
    """

    def __init__(
        self,
        model: LoadedModel,
        geometry: CacheGeometry,
        cache_bytes: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            geometry: from `model.geometry(match_unit)`.
            cache_bytes: budget; pools hold `cache_bytes // record_bytes` records each.
            clock: seconds, monotonic; times how long making drafts takes.

        Raises:
            ConfigError: the budget is smaller than one record, or the geometry is another model's.
        """
        self._model = model
        self._geometry = geometry
        self._clock = clock
        self.pools = PoolSet(model.layout, geometry, cache_bytes)
        self._forward = model.decoder.steps(self.pools.fields)
        self._inference = torch.inference_mode()
        self._requests: dict[int, _RequestState] = {}
        self._drafter = draft_runner(model, self.pools.fields, geometry.match_unit)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def num_requests(self) -> int:
        """Requests the worker holds page tables for."""
        return len(self._requests)

    def mapped_bytes(self) -> int:
        """Bytes of cache memory that the operating system really backs."""
        return self.pools.mapped_bytes()

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step.

        A request whose logits are not finite gets no result (the others do) and is named in `error`.

        Raises:
            WorkerError: the plan cannot be executed; page tables are as before.
        """
        undo: list[Callable[[], object]] = []
        with self._inference:
            try:
                for discard in plan.discards:
                    self.pools.pools[discard.pool].discard(discard.record_ids)
                for request_id in plan.finished:
                    self._requests.pop(request_id, None)
                for request in plan.started:
                    self._start(request)
                    undo.append(functools.partial(self._requests.pop, request.request_id))
                for chunk in plan.chunks:
                    self._update_pages(chunk, undo)
                return self._run(plan)
            except Exception as error:
                for step in reversed(undo):
                    step()
                if isinstance(error, WorkerError):
                    raise
                raise WorkerError(f"step {plan.step_id} failed: {error}") from error

    def hidden_states(self, plan: StepPlan, tap_layers: tuple[int, ...] = ()) -> tuple[Batch, StepRows]:
        """Runs the decoder over the rows of a plan; pages and copies must be applied.

        Args:
            tap_layers: layers whose outputs are wanted.

        Returns:
            the batch and what was computed of its rows, logits only if every row needs them.
        """
        batch = build_batch(
            plan,
            {chunk.request_id: self._request(chunk.request_id).page_tables for chunk in plan.chunks},
            self._model.layout,
            self._geometry,
            vocab_size=self._model.vocab_size,
            pools=self.pools,
        )
        if self._model.expands_latents:
            prompt_ends = [self._request(chunk.request_id).num_prompt_tokens for chunk in plan.chunks]
            batch = with_expansion(batch, prompt_ends, self._model.kernels.exactness)
        for group, states in enumerate(batch.states):
            if states.started:
                checkpoints, running = torch.tensor(states.started, dtype=torch.int64).unbind(1)
                self.pools.start_from(group, checkpoints, running)
        rows = self._forward(batch.inputs, tap_layers, len(batch.head_rows) == batch.num_rows)
        for group, states in enumerate(batch.states):
            if states.ended:
                running, checkpoints = torch.tensor(states.ended, dtype=torch.int64).unbind(1)
                self.pools.keep(group, running, checkpoints)
        return batch, rows

    def close(self) -> None:
        """Gives the cache memory back; no call may follow."""
        self._requests.clear()
        self.pools.close()

    def _request(self, request_id: int) -> _RequestState:
        state = self._requests.get(request_id)
        if state is None:
            raise WorkerError(f"request {request_id} was never started on this worker, or is finished")
        return state

    def _start(self, request: WorkerRequest) -> None:
        if request.request_id in self._requests:
            raise WorkerError(f"request {request.request_id} is started a second time")
        if len(request.page_tables) != self._geometry.num_attention_groups:
            raise WorkerError(
                f"request {request.request_id} has {len(request.page_tables)} page tables, "
                f"the model has {self._geometry.num_attention_groups} attention groups"
            )
        history = None
        if request.sampling.needs_history:
            tokens = array("I", request.tokens)
            prompt, output = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
            history = TokenHistory(set(prompt), Counter(output))
        tables = [PageTable(pages) for pages in request.page_tables]
        self._requests[request.request_id] = _RequestState(
            request.sampling, tables, history, request.num_prompt_tokens
        )

    def _update_pages(self, chunk: ChunkPlan, undo: list[Callable[[], object]]) -> None:
        """Applies replaced pages, then appends new ones; `undo` gets the way back."""
        self._replace_pages(chunk, undo)
        tables = self._request(chunk.request_id).page_tables
        for table, pages in zip(tables, chunk.new_pages, strict=True):
            undo.append(functools.partial(table.truncate, len(table)))
            table.extend(pages)

    def _replace_pages(self, chunk: ChunkPlan, undo: list[Callable[[], object]]) -> None:
        tables = self._request(chunk.request_id).page_tables
        for group, unit, page_id in chunk.replaced_pages:
            table = tables[group]
            if (unit + 1) * self._geometry.match_unit > chunk.start or unit >= len(table):
                raise WorkerError(
                    f"request {chunk.request_id}: page of unit {unit} is not complete, or unknown"
                )
            undo.append(functools.partial(table.replace, unit, table.replace(unit, page_id)))

    def _copy_states(self, plan: StepPlan) -> None:
        for group in sorted({copy.group for copy in plan.copies}):
            copies = [copy for copy in plan.copies if copy.group == group]
            destinations = [copy.destination_slot for copy in copies]
            if len(set(destinations)) != len(destinations):
                raise WorkerError(f"recurrent group {group}: two copies into one slot: {destinations}")
            self.pools.running_pool(group).copy([copy.source_slot for copy in copies], destinations)

    def _run(self, plan: StepPlan) -> StepResult:
        self._copy_states(plan)
        if not plan.chunks:
            return StepResult(plan.step_id, [])
        begun = self._clock()
        asked, plan = plan, self._with_own_drafts(plan)
        draft_seconds = self._clock() - begun if plan is not asked else 0.0
        batch, rows = self.hidden_states(plan, () if self._drafter is None else self._drafter.tap_layers)
        results: dict[int, ChunkResult] = {
            number: ChunkResult(chunk.request_id, chunk.end, [], [])
            for number, chunk in enumerate(plan.chunks)
        }
        for number, chunk in enumerate(asked.chunks):
            if chunk.num_own_drafts:
                results[number].draft_tokens = plan.chunks[number].draft_tokens
        failed = self._add_heads(plan, batch, rows, results)
        failed += self._add_scores(plan, rows.hidden, results)
        self._settle_drafts(plan, batch, results)
        if self._drafter is not None:
            read = rows.joined_taps if rows.taps else rows.hidden
            self._record(self._drafter, plan, batch, read, results)
        error = None
        if failed:
            names = ", ".join(str(plan.chunks[number].request_id) for number in failed)
            error = f"logits of request {names} are not finite"
        return StepResult(plan.step_id, list(results.values()), error, draft_seconds)

    def _add_scores(self, plan: StepPlan, hidden: torch.Tensor, results: dict[int, ChunkResult]) -> list[int]:
        """Scores prompt tokens, a block of rows at a time; drops and returns the chunks that are not
        finite."""
        failed = []
        first_row = 0
        block = max(1, SCORED_LOGIT_BYTES // (4 * self.vocab_size))
        for number, chunk in enumerate(plan.chunks):
            row = first_row + chunk.scored_offset
            first_row += chunk.last_row_end - chunk.start
            token_ids = array("I", chunk.scored_tokens)
            for begin in range(0, len(token_ids), block):
                if number not in results:
                    break
                wanted = token_ids[begin : begin + block].tolist()
                logits = self._model.decoder.logits(hidden[row + begin : row + begin + len(wanted)])
                if not bool(torch.isfinite(logits).all()):
                    failed.append(number)
                    del results[number]
                    break
                results[number].scores += score(logits, wanted, chunk.num_score_logprobs)
        return failed

    def _add_heads(
        self, plan: StepPlan, batch: Batch, computed: StepRows, results: dict[int, ChunkResult]
    ) -> list[int]:
        """Samples, and captures logits where asked for; drops and returns the chunks that are not finite."""
        if not batch.head_chunks:
            return []
        logits = computed.logits
        if logits is None:
            heads = computed.hidden.index_select(0, torch.tensor(batch.head_rows))
            logits = self._model.decoder.logits(heads)
        native = self._model.kernels.sampling
        rows: list[SamplingRow | None] = []
        drawn: dict[int, list[SampledToken]] = {}
        sampling: list[tuple[int, int]] = []
        lane = 0
        for number in batch.head_chunks:
            chunk = plan.chunks[number]
            if chunk.captures_logits:
                results[number].logits = logits[lane].numpy().astype("<f4").tobytes()
            num_rows = 1 + chunk.num_drafts
            if chunk.num_samples:
                state = self._request(chunk.request_id)
                chunk_rows = sampling_rows(chunk, state.sampling, state.history, self.vocab_size)
                probabilities = _drawn_from(chunk, state)
                if probabilities:
                    drafts = array("I", chunk.draft_tokens)
                    chunk_logits = logits[lane : lane + num_rows]
                    drawn[number] = verify_drawn(chunk_logits, chunk_rows, drafts, probabilities, native)
                else:
                    rows += chunk_rows
            rows += [None] * (lane + num_rows - len(rows))
            sampling.append((number, lane))
            lane += num_rows
        sampled_tokens, finite = sample_checked(logits, rows, native)
        tokens = iter(sampled_tokens)
        failed = []
        for number, lane in sampling:
            chunk, result = plan.chunks[number], results[number]
            if number in drawn:
                sampled = drawn[number]
                count = len(sampled) - 1
            else:
                sampled = [next(tokens) for _ in range(1 + chunk.num_drafts)] if chunk.num_samples else []
                count = num_accepted(chunk, sampled)
            if not all(finite[lane : lane + 1 + count]):
                failed.append(number)
                del results[number]
                continue
            result.end += count
            result.sampled = sampled[: 1 + count] if chunk.num_samples else []
            history = self._request(chunk.request_id).history
            if history is not None:
                history.output.update(token.token_id for token in result.sampled)
        return failed

    def _settle_drafts(self, plan: StepPlan, batch: Batch, results: dict[int, ChunkResult]) -> None:
        """Acknowledges exports, and makes running states summarise what was accepted and nothing else."""
        num_valid = {}
        for number, result in results.items():
            chunk = plan.chunks[number]
            result.exported_positions = [
                export.position for export in chunk.exports if export.position <= result.end
            ]
            if result.end < chunk.last_row_end:
                num_valid[number] = result.end - chunk.start
        inputs = batch.inputs.recurrent
        if not num_valid or inputs is None or inputs.record is None:
            return
        kept, indices = replay_index(plan, self._model.layout, self._geometry, num_valid)
        places = inputs.record.places(kept)
        self._model.decoder.replay(inputs.record, places, indices[0], self.pools.fields)

    def draft(self, plan: StepPlan) -> StepDrafts:
        """Makes the drafts that a plan asks for. The plan is executed next, with them.

        Raises:
            WorkerError: it cannot be done, see `_own_drafts`.
        """
        begun = self._clock()
        with self._inference:
            for chunk in plan.chunks:
                if chunk.num_own_drafts:
                    self._replace_pages(chunk, [])
            try:
                made = self._own_drafts(plan)
            except Exception as error:
                if isinstance(error, WorkerError):
                    raise
                raise WorkerError(f"drafts of step {plan.step_id} failed: {error}") from error
        drafts = [ChunkDrafts(plan.chunks[number].request_id, made[number].tobytes()) for number in made]
        return StepDrafts(plan.step_id, drafts, self._clock() - begun)

    def _with_own_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan as if somebody had sent the drafts that the worker is asked to make."""
        made = self._own_drafts(plan)
        if not made:
            return plan
        chunks = list(plan.chunks)
        for number, drafts in made.items():
            chunks[number] = dataclasses.replace(chunks[number])
            chunks[number].set_drafts(drafts.tobytes())
        return dataclasses.replace(plan, chunks=chunks)

    def _own_drafts(self, plan: StepPlan) -> dict[int, array[int]]:
        """Number of a chunk -> drafts, for all that ask for some.

        Raises:
            WorkerError: the model has no drafter, or a chunk does not start at its newest token.
        """
        numbers = [number for number, chunk in enumerate(plan.chunks) if chunk.num_own_drafts]
        if not numbers:
            return {}
        if self._drafter is None:
            raise WorkerError("the plan asks for drafts, but the model was loaded without a drafter")
        lanes = []
        for number in numbers:
            chunk = plan.chunks[number]
            state = self._request(chunk.request_id)
            if chunk.end != chunk.start + 1 or chunk.start < 1 or chunk.draft_tokens:
                raise WorkerError(
                    f"request {chunk.request_id}: drafts follow one token behind others, not [{chunk.start}, "
                    f"{chunk.end}), and are not sent as well"
                )
            self._check_drafted(chunk, state)
            state.sampler = DraftSampler.of(
                state.sampling,
                chunk.output_position,
                state.history,
                chunk.draft_sampling,
                self._model.kernels.sampling,
            )
            lanes.append(
                DraftLane(
                    chunk.start,
                    array("I", chunk.tokens)[0],
                    chunk.num_own_drafts,
                    frozenset(state.sampling.stop_token_ids),
                    state.page_tables[-1],
                    state.sampler,
                )
            )
        return dict(zip(numbers, self._drafter.propose(lanes), strict=True))

    def _record(
        self,
        drafter: DraftRunner,
        plan: StepPlan,
        batch: Batch,
        read: torch.Tensor,
        results: dict[int, ChunkResult],
    ) -> None:
        """Brings what the drafter keeps to the position of the states and pages of every request."""
        parts = []
        for number, result in results.items():
            chunk, state = plan.chunks[number], self._request(result.request_id)
            self._check_drafted(chunk, state)
            tokens = array("I", chunk.tokens + chunk.draft_tokens)[: result.end - chunk.start]
            first_row = batch.spans[number].first_row
            parts.append(ProcessedRows(chunk.start, result.end, first_row, tokens, state.page_tables[-1]))
            state.drafted_position = result.end
        if parts:
            drafter.record(parts, read)

    def _check_drafted(self, chunk: ChunkPlan, state: _RequestState) -> None:
        """Draft entries stand where the chunk starts, as the decoder's do."""
        at = state.drafted_position
        if at is not None and at != chunk.start:
            raise WorkerError(
                f"request {chunk.request_id}: draft entries reach up to {at}, not {chunk.start}, where the "
                "chunk starts"
            )


def _drawn_from(chunk: ChunkPlan, state: _RequestState) -> list[torch.Tensor]:
    """What the drafts of a chunk were drawn from, if they are to be verified by it; else nothing."""
    sampler, state.sampler = state.sampler, None
    if sampler is None or chunk.draft_sampling != PROBABILISTIC or not chunk.draft_tokens:
        return []
    if sampler.output_position != chunk.output_position:
        raise WorkerError(
            f"request {chunk.request_id}: drafts were drawn for output {sampler.output_position}, "
            f"not {chunk.output_position}"
        )
    return sampler.probabilities
