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
        ids = list(page_ids)
        self._buffer = torch.zeros(max(8, len(ids)), dtype=torch.int64)
        self._length = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, page_ids: Sequence[int]) -> None:
        if not page_ids:
            return
        end = self._length + len(page_ids)
        if end > self._buffer.shape[0]:
            grown = torch.zeros(2 * end, dtype=torch.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = torch.tensor(page_ids, dtype=torch.int64)
        self._length = end

    def replace(self, unit: int, page_id: int) -> int:
        """Reads `page_id` for `unit` from now on; returns the id it had."""
        previous = int(self._buffer[unit])
        self._buffer[unit] = page_id
        return previous

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def pages(self, count: int) -> torch.Tensor:
        """int64 [count], the first `count` ids; a view."""
        return self._buffer[:count]


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
    token_ids = torch.cat([_token_ids(chunk, vocab_size) for chunk in plan.chunks])
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
        _index_of_states(
            tuple(spans),
            [chunk.initial_slots[group] for chunk in chunks],
            [chunk.running_slots[group] for chunk in chunks],
            [],
            _tail_rows(layout, group),
            frozenset(range(len(spans))),
            None,
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


def _token_ids(chunk: ChunkPlan, vocab_size: int) -> torch.Tensor:
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
    return torch.tensor(ids, dtype=torch.int64)


def _attention_index(
    chunks: Sequence[ChunkPlan],
    spans: tuple[RowSpan, ...],
    page_tables: Mapping[int, Sequence[PageTable]],
    group: int,
    match_unit: int,
    num_pages: int,
) -> AttentionIndex:
    tables = []
    write_pages = []
    offsets = []
    for chunk in chunks:
        table = page_tables[chunk.request_id][group]
        needed = -(-chunk.last_row_end // match_unit)
        if len(table) < needed:
            raise WorkerError(
                f"request {chunk.request_id}: {chunk.last_row_end} tokens need {needed} pages, "
                f"not {len(table)}"
            )
        pages = table.pages(needed)
        tables.append(pages)
        positions = torch.arange(chunk.start, chunk.last_row_end)
        write_pages.append(pages.index_select(0, positions // match_unit))
        offsets.append(positions % match_unit)
    written = torch.cat(write_pages)
    if int(written.max()) >= num_pages or int(written.min()) < 0:
        raise WorkerError(f"attention group {group}: a page id is outside of the pool of {num_pages} records")
    return AttentionIndex(spans, tuple(tables), written, torch.cat(offsets))


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
    export_slots: list[int] = []
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
            exports.append(StateExportIndex(sequence, export.offset))
            export_slots.append(export.slots[group])
    initial = [chunk.initial_slots[group] for chunk in chunks]
    running = [chunk.running_slots[group] for chunk in chunks]
    _check_slots(group, initial, running + export_slots, num_slots)
    for chunk in chunks:
        if chunk.num_drafts and chunk.initial_slots[group] == chunk.running_slots[group]:
            raise WorkerError(
                f"request {chunk.request_id}: a chunk with drafts needs the state it starts from once more, "
                f"it cannot run in place in slot {chunk.running_slots[group]}"
            )
    drafted = frozenset(number for number, chunk in enumerate(chunks) if chunk.num_drafts)
    written = list(zip(exports, export_slots, strict=True))
    return _index_of_states(spans, initial, running, written, tail_rows, drafted, record)


def _index_of_states(
    spans: tuple[RowSpan, ...],
    initial: Sequence[int],
    running: Sequence[int],
    written: Sequence[tuple[StateExportIndex, int]],
    tail_rows: int,
    token_by_token: frozenset[int],
    record: MixerRecord | None,
) -> RecurrentIndex:
    """Index over checked slots; `written`: exports and their slots, ascending."""
    exports = [export for export, _ in written]
    write_slots = [*running, *(slot for _, slot in written)]
    raw_rows, tails, bases = [], [], []
    for sequence, span in enumerate(spans):
        base = span.first_row + sequence * tail_rows
        bases.append(base)
        tails.append(torch.arange(base, base + tail_rows))
        raw_rows.append(torch.arange(base + tail_rows, base + tail_rows + span.length))
    ends = [bases[sequence] + span.length for sequence, span in enumerate(spans)]
    ends += [bases[export.sequence] + export.offset for export in exports]
    singles = tuple(sequence for sequence, span in enumerate(spans) if span.length == 1)
    starts_at_zero = [slot == ZERO_STATE for slot in initial]
    return RecurrentIndex(
        spans=spans,
        # The running slot stands in where nothing is read: it gets written, so no other record is mapped.
        initial_slots=torch.tensor(
            [own if slot == ZERO_STATE else slot for own, slot in zip(running, initial, strict=True)],
            dtype=torch.int64,
        ),
        starts_at_zero=torch.tensor(starts_at_zero),
        any_zero=any(starts_at_zero),
        exports=tuple(exports),
        write_slots=torch.tensor(write_slots, dtype=torch.int64),
        extended_raw_rows=torch.cat(raw_rows),
        extended_tail_rows=torch.cat(tails),
        extended_write_rows=(torch.tensor(ends).unsqueeze(1) + torch.arange(tail_rows)).flatten(),
        single_sequences=singles,
        single_rows=torch.tensor([spans[sequence].first_row for sequence in singles], dtype=torch.int64),
        single_indices=torch.tensor(singles, dtype=torch.int64),
        token_by_token=token_by_token,
        record=record,
    )


def _check_slots(group: int, initial: Sequence[int], written: Sequence[int], num_slots: int) -> None:
    for slot in initial:
        if slot != ZERO_STATE and not 0 <= slot < num_slots:
            raise WorkerError(f"recurrent group {group}: initial slot {slot} is outside of {num_slots} slots")
    for slot in written:
        if not 0 <= slot < num_slots:
            raise WorkerError(f"recurrent group {group}: slot {slot} is outside of {num_slots} slots")
    if len(set(written)) != len(written):
        raise WorkerError(f"recurrent group {group}: a slot is written twice in one step: {sorted(written)}")
