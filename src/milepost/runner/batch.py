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
    StateExportIndex,
)
from milepost.models.inputs import StepInputs
from milepost.models.layout import CONV_TAIL_FIELD, CacheLayout


class PageTable:
    """Page ids of one request in one attention group, in order of position. Grows, and can shrink back."""

    def __init__(self, page_ids: Iterable[int]) -> None:
        self._ids = array("q", page_ids)
        self._tensor = torch.empty(0, dtype=torch.int64)
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
        return self._tensor[:count]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors.

    Attributes:
        head_chunks: numbers of the chunks whose last row needs logits, as do those of drafts behind it.
        head_rows: int64, all these rows; chunk by chunk, `1 + num_drafts` of each.
        spans: rows of every chunk.
    """

    inputs: StepInputs
    head_chunks: tuple[int, ...]
    head_rows: torch.Tensor
    spans: tuple[RowSpan, ...]


def build_batch(
    plan: StepPlan,
    page_tables: Mapping[int, Sequence[PageTable]],
    layout: CacheLayout,
    geometry: CacheGeometry,
    *,
    vocab_size: int,
    num_records: Sequence[int],
) -> Batch:
    """Packs the chunks of a plan with at least one chunk.

    Args:
        page_tables: request id -> one table per attention group, new pages already appended.
        num_records: records per pool.

    Raises:
        WorkerError: the plan contradicts itself or the pools; names the request.
    """
    spans = _row_spans(plan.chunks)
    token_ids = _token_ids(plan.chunks, vocab_size)
    record = _record(plan.chunks, spans)
    attention = [
        _attention_index(plan.chunks, spans, page_tables, group, geometry.match_unit, num_records[group])
        for group in range(geometry.num_attention_groups)
    ]
    recurrent = [
        _recurrent_index(
            plan.chunks,
            spans,
            group,
            _tail_rows(layout, group),
            num_records[geometry.num_attention_groups + group],
            record,
        )
        for group in range(geometry.num_recurrent_groups)
    ]
    heads = tuple(
        number for number, chunk in enumerate(plan.chunks) if chunk.num_samples or chunk.captures_logits
    )
    return Batch(
        inputs=StepInputs(
            token_ids,
            attention[0] if attention else None,
            recurrent[0] if recurrent else None,
        ),
        head_chunks=heads,
        head_rows=torch.tensor(
            [
                row
                for number in heads
                for row in range(
                    spans[number].end_row - 1 - plan.chunks[number].num_drafts, spans[number].end_row
                )
            ],
            dtype=torch.int64,
        ),
        spans=spans,
    )


def _record(chunks: Sequence[ChunkPlan], spans: Sequence[RowSpan]) -> MixerRecord | None:
    """Keeps the rows of chunks with drafts."""
    drafted = [span for chunk, span in zip(chunks, spans, strict=True) if chunk.num_drafts]
    if not drafted:
        return None
    return MixerRecord(torch.cat([torch.arange(span.first_row, span.end_row) for span in drafted]))


def replay_index(
    plan: StepPlan,
    layout: CacheLayout,
    geometry: CacheGeometry,
    num_valid: Mapping[int, int],
) -> tuple[torch.Tensor, list[RecurrentIndex]]:
    """How the states of chunks whose drafts were not all accepted come about.

    They start again where the chunk started and run over the rows that count.

    Args:
        num_valid: number of a chunk with drafts -> rows of it that count, at least 1.

    Returns:
        int64 numbers of these rows within the step's `MixerRecord`, and per recurrent group the index.
    """
    kept: list[torch.Tensor] = []
    spans: list[RowSpan] = []
    chunks: list[ChunkPlan] = []
    first = row = 0
    for number, chunk in enumerate(plan.chunks):
        if not chunk.num_drafts:
            continue
        if number in num_valid:
            count = num_valid[number]
            kept.append(torch.arange(first, first + count))
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
    return torch.cat(kept), indices


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


def _token_ids(chunks: Sequence[ChunkPlan], vocab_size: int) -> torch.Tensor:
    all_ids = array("I")
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
        all_ids.extend(ids)
    return torch.tensor(all_ids, dtype=torch.int64)


def _attention_index(
    chunks: Sequence[ChunkPlan],
    spans: tuple[RowSpan, ...],
    page_tables: Mapping[int, Sequence[PageTable]],
    group: int,
    match_unit: int,
    num_pages: int,
) -> AttentionIndex:
    tables: list[torch.Tensor] = []
    write_pages: list[int] = []
    offsets: list[int] = []
    for chunk in chunks:
        table = page_tables[chunk.request_id][group]
        needed = -(-chunk.last_row_end // match_unit)
        if len(table) < needed:
            raise WorkerError(
                f"request {chunk.request_id}: {chunk.last_row_end} tokens need {needed} pages, "
                f"not {len(table)}"
            )
        tables.append(table.pages(needed))
        # Numbers, not tensors: a decode step of many requests has one row of each.
        for position in range(chunk.start, chunk.last_row_end):
            write_pages.append(table[position // match_unit])
            offsets.append(position % match_unit)
    if max(write_pages) >= num_pages or min(write_pages) < 0:
        raise WorkerError(f"attention group {group}: a page id is outside of the pool of {num_pages} records")
    return AttentionIndex(
        spans,
        tuple(tables),
        torch.tensor(write_pages, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
    )


def _tail_rows(layout: CacheLayout, group: int) -> int:
    """Rows of the convolution tail; 0 if the group's layers have none."""
    for field in layout.recurrent[group].fields:
        if field.name == CONV_TAIL_FIELD:
            return field.shape[0]
    return 0


def _recurrent_index(
    chunks: Sequence[ChunkPlan],
    spans: tuple[RowSpan, ...],
    group: int,
    tail_rows: int,
    num_slots: int,
    record: MixerRecord | None,
) -> RecurrentIndex:
    exports: list[StateExportIndex] = []
    for sequence, chunk in enumerate(chunks):
        previous = 0
        for export in chunk.exports:
            if not previous < export.offset <= spans[sequence].length:
                raise WorkerError(
                    f"request {chunk.request_id}: export offsets must ascend within "
                    f"[1, {spans[sequence].length}], got {[e.offset for e in chunk.exports]}"
                )
            if export.position != chunk.start + export.offset:
                raise WorkerError(
                    f"request {chunk.request_id}: export at offset {export.offset} of a chunk that starts at "
                    f"{chunk.start} cannot have position {export.position}"
                )
            previous = export.offset
            exports.append(StateExportIndex(sequence, export.offset, export.slots[group]))
    initial = tuple(chunk.initial_slots[group] for chunk in chunks)
    running = tuple(chunk.running_slots[group] for chunk in chunks)
    _check_slots(group, initial, [*running, *(export.slot for export in exports)], num_slots)
    for chunk in chunks:
        if chunk.num_drafts and chunk.initial_slots[group] == chunk.running_slots[group]:
            raise WorkerError(
                f"request {chunk.request_id}: a chunk with drafts needs the state it starts from once more, "
                f"it cannot run in place in slot {chunk.running_slots[group]}"
            )
    drafted = frozenset(number for number, chunk in enumerate(chunks) if chunk.num_drafts)
    return RecurrentIndex(spans, initial, running, tuple(exports), tail_rows, drafted, record)


def _check_slots(group: int, initial: Sequence[int], written: Sequence[int], num_slots: int) -> None:
    for slot in initial:
        if slot != ZERO_STATE and not 0 <= slot < num_slots:
            raise WorkerError(f"recurrent group {group}: initial slot {slot} is outside of {num_slots} slots")
    for slot in written:
        if not 0 <= slot < num_slots:
            raise WorkerError(f"recurrent group {group}: slot {slot} is outside of {num_slots} slots")
    if len(set(written)) != len(written):
        raise WorkerError(f"recurrent group {group}: a slot is written twice in one step: {sorted(written)}")
