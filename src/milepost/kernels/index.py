"""Which rows, pages and slots an operation touches. Built by the runner, read by kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first_row, end_row) of a step hold tokens [position, position + length) of one sequence."""

    first_row: int
    end_row: int
    position: int

    @property
    def length(self) -> int:
        return self.end_row - self.first_row

    @property
    def end_position(self) -> int:
        return self.position + self.length


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """One attention group in one step.

    Attributes:
        spans: per sequence.
        page_tables: per sequence, int64 page ids that cover positions [0, end_position).
        write_pages, write_offsets: int64 [rows], where each row's entry is stored.
        expanded: numbers of spans whose latents are expanded to keys and values of every head, instead of
            being read as they are by absorbed queries.
    """

    spans: tuple[RowSpan, ...]
    page_tables: tuple[torch.Tensor, ...]
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    expanded: frozenset[int] = frozenset()


class MixerRecord:
    """What recurrent mixers read at some rows of a step, kept so that some of these can be run again.

    Attributes:
        rows: int64, the rows of the step that are kept.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._inputs: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(self, layer: int, inputs: Iterable[torch.Tensor]) -> None:
        """Copies the rows of every input of a layer; buffers of kernels live only until the next call."""
        self._inputs[layer] = tuple(x.index_select(0, self.rows) for x in inputs)

    def take(self, layer: int, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inputs of a layer again; `kept` int64 counts within `rows`."""
        return tuple(x.index_select(0, kept) for x in self._inputs[layer])


@dataclass(frozen=True, slots=True)
class StateExportIndex:
    """The state after `offset` rows of sequence `sequence` (1 <= offset <= its length)."""

    sequence: int
    offset: int


@dataclass(frozen=True, slots=True)
class RecurrentIndex:
    """One recurrent group in one step.

    Writes are numbered: the running state of each sequence in order, then the exports.

    Convolution windows are addressed in an *extended* array that holds, per sequence, the
    `tail_rows` rows of its tail and then its raw rows: [rows + sequences * tail_rows, channels].

    Attributes:
        spans: per sequence.
        initial_slots: int64 [sequences]; any valid slot where `starts_at_zero`.
        starts_at_zero: bool [sequences]; the initial state is zeros and the slot is not read.
        any_zero: whether any entry of `starts_at_zero` is set.
        exports: ascending by sequence, then offset.
        write_slots: int64 [sequences + exports], all different.
        extended_raw_rows: int64 [rows], extended position of each raw row.
        extended_tail_rows: int64 [sequences * tail_rows], extended positions of the tails.
        extended_write_rows: int64 [(sequences + exports) * tail_rows], tails to store.
        single_sequences: sequences of length one; `single_rows` int64 are their rows and
            `single_indices` int64 their numbers.
        token_by_token: sequences whose rows go through the roundings that single rows would.
        record: keeps the inputs of rows that may have to be run again; None = nothing to keep.
    """

    spans: tuple[RowSpan, ...]
    initial_slots: torch.Tensor
    starts_at_zero: torch.Tensor
    any_zero: bool
    exports: tuple[StateExportIndex, ...]
    write_slots: torch.Tensor
    extended_raw_rows: torch.Tensor
    extended_tail_rows: torch.Tensor
    extended_write_rows: torch.Tensor
    single_sequences: tuple[int, ...]
    single_rows: torch.Tensor
    single_indices: torch.Tensor
    token_by_token: frozenset[int] = frozenset()
    record: MixerRecord | None = None
