"""Which rows, pages and slots an operation touches. Built by the runner, read by kernels."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from milepost.core.plan import ZERO_STATE


class RowSpan(NamedTuple):
    """Rows [first_row, end_row) of a step hold tokens [position, position + length) of one sequence.

    A tuple, which native kernels take as it is.
    """

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

    @classmethod
    def of(
        cls,
        spans: Sequence[RowSpan],
        page_tables: Sequence[torch.Tensor],
        write_pages: Sequence[int],
        write_offsets: Sequence[int],
    ) -> AttentionIndex:
        """The same of numbers, at least one row."""
        pages, offsets = int64_columns(write_pages, write_offsets)
        return cls(tuple(spans), tuple(page_tables), pages, offsets)


def int64_columns(*columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """int64 tensors of as many numbers each, at least one, in one piece of memory: what a small tensor costs
    is making it."""
    numbers = array("q")
    for column in columns:
        numbers.extend(column)
    return torch.frombuffer(numbers, dtype=torch.int64).chunk(len(columns))


class MixerRecord:
    """What recurrent mixers read at some rows of a step, kept so that some of these can be run again.

    Attributes:
        keeps_all: inputs are kept as they are, with all rows of the step, and must lie in `buffers`. Else the
            rows are copied.
        inputs: of every layer so far.
    """

    def __init__(self, rows: Sequence[int], *, keeps_all: bool) -> None:
        """
        Args:
            rows: those that may be run again, ascending.
        """
        self.keeps_all = keeps_all
        self.inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._rows = rows

    def buffers(self, layer: int, *names: str) -> list[str | None]:
        """Places of products (`reference_layers.linear`) that keep their results until the next step."""
        return [f"recorded.{layer}.{name}" if self.keeps_all else None for name in names]

    def keep(self, layer: int, inputs: Iterable[torch.Tensor]) -> None:
        """Keeps the inputs of a layer."""
        if self.keeps_all:
            self.inputs[layer] = tuple(inputs)
        else:
            self.inputs[layer] = tuple(x.index_select(0, self._row_numbers) for x in inputs)

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        """int64, where rows of the step are in what is kept."""
        return _int64(rows if self.keeps_all else [self._rows.index(row) for row in rows])

    def take(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of the inputs of a layer again."""
        return tuple(x.index_select(0, places) for x in self.inputs[layer])

    @functools.cached_property
    def _row_numbers(self) -> torch.Tensor:
        return _int64(self._rows)


class StateExportIndex(NamedTuple):
    """The state after `offset` rows of sequence `sequence` (1 <= offset <= its length) goes to `slot`."""

    sequence: int
    offset: int
    slot: int


class StagedStates:
    """Where states of a step go whose exports have slots of another layout.

    Mixers then work on scratch records: record i holds the state of sequence i, and record sequences + e
    what export e gets. Running states are copied in and out, exports are rounded into their slots. Only one
    layer's scratch exists at a time.

    Attributes:
        index: over the scratch records.
    """

    def __init__(
        self,
        index: RecurrentIndex,
        export_slots: Sequence[int],
        checkpoints: Mapping[tuple[int, str], torch.Tensor],
    ) -> None:
        """
        Args:
            export_slots: one per export of `index`.
            checkpoints: (layer, field name) -> view over the slots of all checkpoints.
        """
        self.index = index
        self._export_slots = _int64(export_slots)
        self._checkpoints = checkpoints
        self._scratch: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def take(self, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Scratch records for a field of one layer, with what `slots` of `states` hold at the head."""
        key = states.shape[1:], states.dtype
        scratch = self._scratch.get(key)
        if scratch is None:
            num_records = self.index.write_slots.shape[0]
            scratch = self._scratch[key] = states.new_empty(num_records, *states.shape[1:])
        torch.index_select(states, 0, slots, out=scratch[: slots.shape[0]])
        return scratch

    def put(
        self, layer: int, name: str, scratch: torch.Tensor, states: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """What a mixer wrote: running states into `slots` of `states`, exports into their own."""
        num_sequences = slots.shape[0]
        states.index_copy_(0, slots, scratch[:num_sequences])
        checkpoints = self._checkpoints[layer, name]
        checkpoints.index_copy_(0, self._export_slots, scratch[num_sequences:].to(checkpoints.dtype))


@dataclass(frozen=True)
class RecurrentIndex:
    """One recurrent group in one step.

    Writes are numbered: the running state of each sequence in order, then the exports.

    Convolution windows are addressed in an *extended* array that holds, per sequence, the
    `tail_rows` rows of its tail and then its raw rows: [rows + sequences * tail_rows, channels].

    Native kernels read the numbers as they are; the tensors below are made for who asks for them.

    Attributes:
        spans: per sequence.
        initial: per sequence, the slot it starts from, or ZERO_STATE: zeros, and no slot is read.
        running: per sequence, the slot its last state goes to.
        exports: ascending by sequence, then offset. All written slots are different.
        tail_rows: rows of a convolution tail.
        token_by_token: sequences whose rows go through the roundings that single rows would.
        record: keeps the inputs of rows that may have to be run again; None = nothing to keep.
        staged: the exports that are computed on the way and go to slots of another layout; they are not
            among `exports`. None = there are none.
    """

    spans: tuple[RowSpan, ...]
    initial: tuple[int, ...]
    running: tuple[int, ...]
    exports: tuple[StateExportIndex, ...]
    tail_rows: int
    token_by_token: frozenset[int] = frozenset()
    record: MixerRecord | None = None
    staged: StagedStates | None = None

    @property
    def is_native_calls(self) -> bool:
        """Whether a step over it is made of kernels alone, and nothing is copied between them."""
        return self.staged is None and (self.record is None or self.record.keeps_all)

    @property
    def any_zero(self) -> bool:
        """Whether any sequence starts from zeros."""
        return ZERO_STATE in self.initial

    @functools.cached_property
    def starts_at_zero(self) -> torch.Tensor:
        """bool [sequences]."""
        return torch.tensor([slot == ZERO_STATE for slot in self.initial], dtype=torch.bool)

    @functools.cached_property
    def initial_slots(self) -> torch.Tensor:
        """int64 [sequences]; where a sequence starts from zeros, the slot it will write, so that gathering
        maps no other record."""
        pairs = zip(self.initial, self.running, strict=True)
        return _int64([own if slot == ZERO_STATE else slot for slot, own in pairs])

    @functools.cached_property
    def write_slots(self) -> torch.Tensor:
        """int64 [sequences + exports]."""
        return _int64([*self.running, *(export.slot for export in self.exports)])

    @functools.cached_property
    def extended_tail_rows(self) -> torch.Tensor:
        """int64 [sequences * tail_rows], extended positions of the tails."""
        return _int64([base + row for base in self._bases for row in range(self.tail_rows)])

    @functools.cached_property
    def extended_raw_rows(self) -> torch.Tensor:
        """int64 [rows], extended position of each raw row."""
        firsts = zip(self._bases, self.spans, strict=True)
        return _int64([base + self.tail_rows + row for base, span in firsts for row in range(span.length)])

    @functools.cached_property
    def extended_write_rows(self) -> torch.Tensor:
        """int64 [(sequences + exports) * tail_rows], tails to store."""
        ends = [base + span.length for base, span in zip(self._bases, self.spans, strict=True)]
        ends += [self._bases[export.sequence] + export.offset for export in self.exports]
        return _int64([end + row for end in ends for row in range(self.tail_rows)])

    @functools.cached_property
    def single_sequences(self) -> tuple[int, ...]:
        """Sequences of length one."""
        return tuple(number for number, span in enumerate(self.spans) if span.length == 1)

    @functools.cached_property
    def single_indices(self) -> torch.Tensor:
        """int64, `single_sequences`."""
        return _int64(self.single_sequences)

    @functools.cached_property
    def single_rows(self) -> torch.Tensor:
        """int64, the rows of `single_sequences`."""
        return _int64([self.spans[sequence].first_row for sequence in self.single_sequences])

    @functools.cached_property
    def _bases(self) -> tuple[int, ...]:
        """Extended position of the first tail row of each sequence."""
        return tuple(span.first_row + number * self.tail_rows for number, span in enumerate(self.spans))


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
