"""From plan to index tensors. The only place that builds them; derives no decision."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from milepost.core.geometry import CacheGeometry
from milepost.core.plan import ZERO_STATE, ChunkPlan, StepPlan
from milepost.errors import WorkerError
from milepost.kernels.index import (
    AttentionIndex,
    MixerRecord,
    RecurrentIndex,
    RowSpan,
    StagedStates,
    StateExportIndex,
    int64_columns,
)
from milepost.kernels.tapes import MAX_TAPE_ROWS
from milepost.models.inputs import StepInputs
from milepost.models.layout import CONV_TAIL_FIELD, CacheLayout
from milepost.runner.pools import PoolSet, RecordPool


class PageTable:
    """Page ids of one request in one attention group, in order of position. Grows, and can shrink back."""

    def __init__(self, page_ids: Iterable[int]) -> None:
        self._ids = array("q", page_ids)
        self._tensor = self._view = torch.empty(0, dtype=torch.int64)
        self._fill()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, unit: int) -> int:
        return self._ids[unit]

    def extend(self, page_ids: Sequence[int]) -> None:
        if not page_ids:
            return
        end = len(self._ids) + len(page_ids)
        self._ids.extend(page_ids)
        if end > self._tensor.shape[0]:
            self._fill()
        else:
            self._tensor[end - len(page_ids) : end] = torch.tensor(page_ids, dtype=torch.int64)

    def _fill(self) -> None:
        """Every id again, in a tensor with room for as many more."""
        self._tensor = torch.zeros(max(8, 2 * len(self._ids)), dtype=torch.int64)
        if self._ids:
            self._tensor[: len(self._ids)] = torch.frombuffer(self._ids, dtype=torch.int64)
        self._view = self._tensor[: len(self._ids)]

    def replace(self, unit: int, page_id: int) -> int:
        """Reads `page_id` for `unit` from now on; returns the id it had."""
        previous = self._ids[unit]
        self._ids[unit] = page_id
        self._tensor[unit] = page_id
        return previous

    def truncate(self, length: int) -> None:
        del self._ids[length:]

    def pages(self, count: int) -> torch.Tensor:
        """int64 [count], the first `count` ids; a view."""
        # The last one again: most steps stay within a page.
        if self._view.shape[0] != count:
            self._view = self._tensor[:count]
        return self._view


@dataclass(frozen=True, slots=True)
class StateTraffic:
    """Which slots of one recurrent group the chunks of a step read and write.

    Attributes:
        initial: per chunk, the slot to start from or ZERO_STATE.
        running: per chunk, the slot to write.
        exports: those that the pass writes, into slots of the pool of checkpoints.
        started: (checkpoint, running slot) to be converted before the pass; `initial` is that running slot.
        ended: (running slot, checkpoint) to be converted behind it.
    """

    initial: list[int]
    running: list[int]
    exports: list[StateExportIndex]
    started: list[tuple[int, int]]
    ended: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors.

    Attributes:
        states: per recurrent group.
        head_chunks: numbers of the chunks whose last row needs logits, as do those of drafts behind it.
        head_rows: all these rows, ascending; chunk by chunk, `1 + num_drafts` of each.
        spans: rows of every chunk.
    """

    inputs: StepInputs
    head_chunks: tuple[int, ...]
    head_rows: Sequence[int]
    spans: tuple[RowSpan, ...]
    states: tuple[StateTraffic, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.spans[-1].end_row


def build_batch(
    plan: StepPlan,
    page_tables: Mapping[int, Sequence[PageTable]],
    layout: CacheLayout,
    geometry: CacheGeometry,
    *,
    vocab_size: int,
    pools: PoolSet,
) -> Batch:
    """Packs the chunks of a plan with at least one chunk.

    Args:
        page_tables: request id -> one table per attention group, new pages already appended.

    Raises:
        WorkerError: the plan contradicts itself or the pools; names the request.
    """
    chunks = plan.chunks
    spans = _row_spans(chunks)
    columns = [_token_ids(chunks, vocab_size)]
    for group in range(geometry.num_attention_groups):
        pages = _written_pages(chunks, page_tables, group, geometry.match_unit, pools)
        if group == 0:
            columns += [pages, _offsets(chunks, geometry.match_unit)]
    token_ids, *places = int64_columns(*columns)
    attention = None
    if geometry.num_attention_groups:
        tables = _page_tables(chunks, page_tables, geometry.match_unit)
        attention = AttentionIndex(spans, tables, places[0], places[1])
    traffic = tuple(
        _state_traffic(chunks, spans, group, pools, keeps_apart=geometry.keeps_states_apart)
        for group in range(geometry.num_recurrent_groups)
    )
    recurrent = None
    if traffic:
        record = _record(chunks, spans)
        recurrent = _recurrent_index(chunks, spans, traffic[0], _tail_rows(layout, 0), record, pools)
    heads = tuple(number for number, chunk in enumerate(chunks) if chunk.num_samples or chunk.captures_logits)
    head_rows = [
        row
        for number in heads
        for row in range(spans[number].end_row - 1 - chunks[number].num_drafts, spans[number].end_row)
    ]
    return Batch(StepInputs(token_ids, attention, recurrent), heads, head_rows, spans, traffic)


def _record(chunks: Sequence[ChunkPlan], spans: Sequence[RowSpan]) -> MixerRecord | None:
    """Keeps the rows of chunks with drafts; of a small step those of all, which costs no copy."""
    drafted = [span for chunk, span in zip(chunks, spans, strict=True) if chunk.num_drafts]
    if not drafted:
        return None
    rows = [row for span in drafted for row in range(span.first_row, span.end_row)]
    return MixerRecord(rows, keeps_all=spans[-1].end_row <= MAX_TAPE_ROWS)


def replay_index(
    plan: StepPlan,
    layout: CacheLayout,
    geometry: CacheGeometry,
    num_valid: Mapping[int, int],
) -> tuple[list[int], list[RecurrentIndex]]:
    """How the states of chunks whose drafts were not all accepted come about.

    They start again where the chunk started and run over the rows that count.

    Args:
        num_valid: number of a chunk with drafts -> rows of it that count, at least 1.

    Returns:
        these rows of the step, and per recurrent group the index.
    """
    kept: list[int] = []
    spans: list[RowSpan] = []
    chunks: list[ChunkPlan] = []
    first = row = 0
    for number, chunk in enumerate(plan.chunks):
        if number in num_valid:
            count = num_valid[number]
            kept.extend(range(first, first + count))
            spans.append(RowSpan(row, row + count, chunk.start))
            chunks.append(chunk)
            row += count
        first += chunk.last_row_end - chunk.start
    indices = [
        RecurrentIndex(
            tuple(spans),
            tuple(chunk.initial_slots[group] for chunk in chunks),
            tuple(chunk.running_slots[group] for chunk in chunks),
            (),
            _tail_rows(layout, group),
            frozenset(range(len(spans))),
        )
        for group in range(geometry.num_recurrent_groups)
    ]
    return kept, indices


def _row_spans(chunks: Sequence[ChunkPlan]) -> tuple[RowSpan, ...]:
    spans = []
    row = 0
    for chunk in chunks:
        if not 0 <= chunk.start < chunk.end:
            raise WorkerError(
                f"request {chunk.request_id}: chunk [{chunk.start}, {chunk.end}) is empty or negative"
            )
        spans.append(RowSpan(row, row + chunk.last_row_end - chunk.start, chunk.start))
        row = spans[-1].end_row
    return tuple(spans)


def _token_ids(chunks: Sequence[ChunkPlan], vocab_size: int) -> list[int]:
    """Of all rows."""
    all_ids: list[int] = []
    for chunk in chunks:
        ids = array("I", chunk.tokens)
        if len(ids) != chunk.end - chunk.start:
            raise WorkerError(
                f"request {chunk.request_id}: {len(ids)} token ids for positions [{chunk.start}, {chunk.end})"
            )
        ids.frombytes(chunk.draft_tokens)
        if max(ids) >= vocab_size:
            raise WorkerError(
                f"request {chunk.request_id}: token id {max(ids)} is outside of vocabulary {vocab_size}"
            )
        all_ids += ids
    return all_ids


def _num_pages(chunk: ChunkPlan, match_unit: int) -> int:
    """Pages that hold everything up to the last row of a chunk."""
    return -(-chunk.last_row_end // match_unit)


def _written_pages(
    chunks: Sequence[ChunkPlan],
    page_tables: Mapping[int, Sequence[PageTable]],
    group: int,
    match_unit: int,
    pools: PoolSet,
) -> list[int]:
    """Per row, the page of an attention group that its entry goes to."""
    pages: list[int] = []
    for chunk in chunks:
        table = page_tables[chunk.request_id][group]
        needed = _num_pages(chunk, match_unit)
        if len(table) < needed:
            raise WorkerError(
                f"request {chunk.request_id}: {chunk.last_row_end} tokens need {needed} pages, "
                f"not {len(table)}"
            )
        for position in range(chunk.start, chunk.last_row_end):
            pages.append(table[position // match_unit])
    num_pages = pools.attention_pool(group).num_records
    if max(pages) >= num_pages or min(pages) < 0:
        raise WorkerError(f"attention group {group}: a page id is outside of the pool of {num_pages} records")
    return pages


def _offsets(chunks: Sequence[ChunkPlan], match_unit: int) -> list[int]:
    """Per row, the place of its entry in its page."""
    return [position % match_unit for chunk in chunks for position in range(chunk.start, chunk.last_row_end)]


def _page_tables(
    chunks: Sequence[ChunkPlan], page_tables: Mapping[int, Sequence[PageTable]], match_unit: int
) -> tuple[torch.Tensor, ...]:
    """Of the decoder's attention group, which is the first: per chunk, the pages up to its last row."""
    return tuple(page_tables[chunk.request_id][0].pages(_num_pages(chunk, match_unit)) for chunk in chunks)


def _tail_rows(layout: CacheLayout, group: int) -> int:
    """Rows of the convolution tail; 0 if the group's layers have none."""
    for field in layout.recurrent[group].fields:
        if field.name == CONV_TAIL_FIELD:
            return field.shape[0]
    return 0


def _state_traffic(
    chunks: Sequence[ChunkPlan], spans: tuple[RowSpan, ...], group: int, pools: PoolSet, *, keeps_apart: bool
) -> StateTraffic:
    """Checks the slots of one recurrent group.

    Where checkpoints are kept apart a chunk that starts from one runs in place of its copy, and an export
    at the end of a chunk is a copy of its running state.
    """
    traffic = StateTraffic([], [], [], [], [])
    for sequence, chunk in enumerate(chunks):
        _check_exports(chunk, spans[sequence])
        initial, running = chunk.initial_slots[group], chunk.running_slots[group]
        if keeps_apart and chunk.starts_from_checkpoint:
            traffic.started.append((initial, running))
            initial = running
        if chunk.num_drafts and initial == running:
            raise WorkerError(
                f"request {chunk.request_id}: a chunk with drafts needs the state it starts from once more, "
                f"it cannot run in place in slot {running}"
            )
        traffic.initial.append(initial)
        traffic.running.append(running)
        for export in chunk.exports:
            slot = export.slots[group]
            if keeps_apart and export.offset == spans[sequence].length:
                traffic.ended.append((running, slot))
            else:
                traffic.exports.append(StateExportIndex(sequence, export.offset, slot))
    exported = [export.slot for export in traffic.exports] + [slot for _, slot in traffic.ended]
    checkpoints, running_pool = pools.checkpoint_pool(group), pools.running_pool(group)
    _check_initial(group, traffic.initial, running_pool)
    _check_initial(group, [slot for slot, _ in traffic.started], checkpoints)
    if keeps_apart:
        _check_written(group, traffic.running, running_pool)
        _check_written(group, exported, checkpoints)
    else:
        _check_written(group, traffic.running + exported, running_pool)
    return traffic


def _check_exports(chunk: ChunkPlan, span: RowSpan) -> None:
    previous = 0
    for export in chunk.exports:
        if not previous < export.offset <= span.length:
            raise WorkerError(
                f"request {chunk.request_id}: export offsets must ascend within "
                f"[1, {span.length}], got {[e.offset for e in chunk.exports]}"
            )
        if export.position != chunk.start + export.offset:
            raise WorkerError(
                f"request {chunk.request_id}: export at offset {export.offset} of a chunk that starts at "
                f"{chunk.start} cannot have position {export.position}"
            )
        previous = export.offset


def _recurrent_index(
    chunks: Sequence[ChunkPlan],
    spans: tuple[RowSpan, ...],
    states: StateTraffic,
    tail_rows: int,
    record: MixerRecord | None,
    pools: PoolSet,
) -> RecurrentIndex:
    drafted = frozenset(number for number, chunk in enumerate(chunks) if chunk.num_drafts)
    initial, running, exports = tuple(states.initial), tuple(states.running), tuple(states.exports)
    if not pools.checkpoints or not exports:
        return RecurrentIndex(spans, initial, running, exports, tail_rows, drafted, record)
    numbers = tuple(range(len(spans)))
    scratch = RecurrentIndex(
        spans,
        tuple(
            ZERO_STATE if slot == ZERO_STATE else number
            for number, slot in zip(numbers, initial, strict=True)
        ),
        numbers,
        tuple(export._replace(slot=len(spans) + at) for at, export in enumerate(exports)),
        tail_rows,
        drafted,
    )
    staged = StagedStates(scratch, [export.slot for export in exports], pools.checkpoints)
    return RecurrentIndex(spans, initial, running, (), tail_rows, drafted, record, staged)


def _check_initial(group: int, slots: Sequence[int], pool: RecordPool) -> None:
    for slot in slots:
        if slot != ZERO_STATE and not 0 <= slot < pool.num_records:
            raise WorkerError(
                f"recurrent group {group}: initial slot {slot} is outside of {pool.num_records} slots"
            )


def _check_written(group: int, slots: Sequence[int], pool: RecordPool) -> None:
    for slot in slots:
        if not 0 <= slot < pool.num_records:
            raise WorkerError(f"recurrent group {group}: slot {slot} is outside of {pool.num_records} slots")
    if len(set(slots)) != len(slots):
        raise WorkerError(f"recurrent group {group}: a slot is written twice in one step: {sorted(slots)}")
