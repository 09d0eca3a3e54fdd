"""Draft modules at work: what they keep of processed tokens, and what they guess behind them.

Entry j of a module depends on tokens [0, j] only, so pages of entries are published, hit and evicted with
those of the decoder. What the next entry reads of the position before, the tap, lies in the same pages; a
request that starts from a hit drafts at once. Guesses are made in copies: nothing that was not accepted is
ever written to a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from milepost.kernels.index import AttentionIndex, RowSpan, int64_columns
from milepost.models.draft_target import ChainedModules
from milepost.models.inputs import CacheFields, StepInputs
from milepost.models.layout import DRAFT_COPY_BYTES, TAP_FIELD, AttentionGroupLayout
from milepost.runner.batch import PageTable
from milepost.runner.draft_sampling import DraftSampler, pick_drafts


@dataclass(frozen=True, slots=True)
class DraftLane:
    """A request that wants drafts.

    Attributes:
        position: of `token`, the newest one; everything before it was processed, it was not.
        max_drafts: at least 1.
        stop_ids: guesses end before one of them.
        table: pages of draft entries.
        sampler: draws the drafts; None = the most likely tokens.
    """

    position: int
    token: int
    max_drafts: int
    stop_ids: frozenset[int]
    table: PageTable
    sampler: DraftSampler | None = None


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """Tokens [start, end) of a request, which the decoder has processed in rows from `first_row` on."""

    start: int
    end: int
    first_row: int
    tokens: array[int]
    table: PageTable


class _Entries:
    """Copied entries of one module, for several sequences, with room for more.

    Positions are those of tokens; the copy begins with the module's first entry.
    """

    def __init__(
        self, pages: torch.Tensor, first_position: int, parts: Sequence[tuple[PageTable, int, int]]
    ) -> None:
        """
        Args:
            pages: [records, match_unit, W] of the module.
            parts: (table, start, end): entries before `start` are copied, there is room up to `end`.
        """
        self._first = first_position
        self._unit = pages.shape[1]
        units = [-(-max(0, end - first_position) // self._unit) for _, _, end in parts]
        self._bases = [sum(units[:number]) for number in range(len(units))]
        self.pages = pages.new_empty(sum(units), *pages.shape[1:])
        self._flat = self.pages.view(-1, pages.shape[2])
        self._numbers = torch.arange(sum(units))
        for number, (table, start, _) in enumerate(parts):
            if start > first_position:
                known = pages.index_select(0, table.pages(-(-start // self._unit))).flatten(0, 1)
                self.rows(number, first_position, start).copy_(known[first_position:start])

    def rows(self, number: int, start: int, end: int) -> torch.Tensor:
        """View of the entries of positions [start, end) of a part, [end - start, W]."""
        base = self._bases[number] * self._unit - self._first
        return self._flat[base + start : base + end]

    def index(self, rows: Sequence[tuple[int, int, int]]) -> AttentionIndex:
        """Of rows (part, start, end), packed in this order."""
        spans, tables = [], []
        pages: list[int] = []
        offsets: list[int] = []
        row = 0
        for number, start, end in rows:
            spans.append(RowSpan(row, row + end - start, start - self._first))
            base = self._bases[number]
            tables.append(self._numbers[base : base - (-(end - self._first) // self._unit)])
            for position in range(start - self._first, end - self._first):
                pages.append(base + position // self._unit)
                offsets.append(position % self._unit)
            row += end - start
        return AttentionIndex.of(spans, tables, pages, offsets)


class ChainRunner:
    """Runs draft modules over the pages of a worker; a `drafters.DraftRunner`."""

    def __init__(
        self, modules: ChainedModules, group: AttentionGroupLayout, fields: CacheFields, match_unit: int
    ) -> None:
        """
        Args:
            group: layout of the modules' entries; the last attention group of the model.
            fields: of the worker's pools.
        """
        self._modules = modules
        self._unit = match_unit
        name = group.token_fields[0].name
        layers = [modules.layer(module) for module in range(modules.num_modules)]
        self._fields: CacheFields = {(layer, name): fields[layer, name] for layer in layers}
        self._name = name
        self._bytes_per_token = group.bytes_per_token
        self._entries = [fields[layer, name] for layer in layers]
        self._taps = [fields[layer, TAP_FIELD] for layer in layers]

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._modules.tap_layers

    def propose(self, lanes: Sequence[DraftLane]) -> list[array[int]]:
        """Guesses for the tokens behind the newest one of every lane; some may be empty.

        Guess k is made by module k, or k modulo their number. Up to as many guesses as there are modules,
        a module reads exactly what it would read if the guesses had been processed; behind that, what the
        guess before was made from stands in for hidden states nobody has computed.
        """
        drafts: list[array[int]] = []
        lengths = [lane.position + lane.max_drafts for lane in lanes]
        for first, end in self._groups(lengths, self._bytes_per_token):
            drafts += self._proposed(lanes[first:end])
        return drafts

    def _proposed(self, lanes: Sequence[DraftLane]) -> list[array[int]]:
        work = _Proposals(self, lanes)
        for step in range(max(lane.max_drafts for lane in lanes)):
            if not work.extend(step):
                break
        return work.drafts

    def record(self, parts: Sequence[ProcessedRows], read: torch.Tensor) -> None:
        """Brings entries and taps of requests up to what was processed.

        Args:
            read: of the step's rows, what `ChainedModules.taps` reads.
        """
        taps = self._modules.taps(read)
        streams = [taps[part.first_row : part.first_row + part.end - part.start] for part in parts]
        last = self._modules.num_modules - 1
        for module in range(last + 1):
            first = self._modules.first_position(module)
            self._clear(module, first, parts)
            rows = [(number, max(part.start, first), part.end) for number, part in enumerate(parts)]
            rows = [row for row in rows if row[1] < row[2]]
            before: list[torch.Tensor] = []
            for number, start, end in rows:
                before += self._before(module, parts[number], streams[number], start, end)
            # A copy, for the pages get their newest taps next.
            hidden = torch.cat(before) if before else None
            self._write_taps(module, parts, streams)
            if hidden is None:
                continue
            token_ids, index = self._in_pages(first, parts, rows)
            if module < last:
                streams = self._run(module, parts, streams, rows, token_ids, hidden)
            else:
                self._modules.store(module, StepInputs(token_ids, index, None), hidden, self._fields)

    def tap(self, module: int, table: PageTable, position: int) -> torch.Tensor:
        """[1, D]: what the module's entry at `position` reads of the position before."""
        page = table[(position - 1) // self._unit]
        return self._taps[module][page : page + 1]

    def copied(self, module: int, parts: Sequence[tuple[PageTable, int, int]]) -> _Entries:
        return _Entries(self._entries[module], self._modules.first_position(module), parts)

    def run(
        self,
        module: int,
        entries: _Entries,
        index: AttentionIndex,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Handed-on states and what the head reads, [N, D] each; new entries are in `entries`."""
        cache = {(self._modules.layer(module), self._name): entries.pages}
        result = self._modules.run(module, StepInputs(token_ids, index, None), hidden, cache)
        return result.handed_on, result.normed

    def logits(self, module: int, normed: torch.Tensor) -> torch.Tensor:
        return self._modules.logits(module, normed)

    @property
    def num_modules(self) -> int:
        return self._modules.num_modules

    def first_position(self, module: int) -> int:
        return self._modules.first_position(module)

    def _before(
        self, module: int, part: ProcessedRows, stream: torch.Tensor, start: int, end: int
    ) -> list[torch.Tensor]:
        """Hidden states at positions [start - 1, end - 1), [end - start, D] in pieces; the first may be what
        a page holds."""
        if start > part.start:
            return [stream[start - 1 - part.start : end - 1 - part.start]]
        tap = self.tap(module, part.table, start)
        return [tap] if end - start == 1 else [tap, stream[: end - 1 - start]]

    def _run(
        self,
        module: int,
        parts: Sequence[ProcessedRows],
        streams: Sequence[torch.Tensor],
        rows: Sequence[tuple[int, int, int]],
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Passes of a module that others read from; its outputs at the positions of `streams`."""
        outputs = [torch.zeros_like(stream) for stream in streams]
        row = 0
        ends = [end for _, _, end in rows]
        for first, last in self._groups(ends, self._bytes_per_token // self._modules.num_modules):
            some = rows[first:last]
            entries = self.copied(module, [(parts[n].table, start, end) for n, start, end in some])
            index = entries.index([(place, start, end) for place, (_, start, end) in enumerate(some)])
            count = index.spans[-1].end_row
            handed_on, _ = self.run(
                module, entries, index, token_ids[row : row + count], hidden[row : row + count]
            )
            row += count
            for place, ((number, start, end), span) in enumerate(zip(some, index.spans, strict=True)):
                part = parts[number]
                outputs[number][start - part.start :] = handed_on[span.first_row : span.end_row]
                at = int64_columns(*self._places(part.table, range(start, end)))
                self._entries[module].index_put_(at, entries.rows(place, start, end))
        return outputs

    def _groups(self, lengths: Sequence[int], bytes_per_token: int) -> list[tuple[int, int]]:
        """Neighbours [first, end) whose copied entries, for so many tokens each, fit `DRAFT_COPY_BYTES`; a
        longer one is alone."""
        groups: list[tuple[int, int]] = []
        room = -1
        for number, length in enumerate(lengths):
            num_bytes = -(-length // self._unit) * self._unit * bytes_per_token
            room -= num_bytes
            if room < 0:
                groups.append((number, number + 1))
                room = DRAFT_COPY_BYTES - num_bytes
            else:
                groups[-1] = (groups[-1][0], number + 1)
        return groups

    def _write_taps(
        self, module: int, parts: Sequence[ProcessedRows], streams: Sequence[torch.Tensor]
    ) -> None:
        """At the end of every page that was filled, and at the newest token."""
        for part, stream in zip(parts, streams, strict=True):
            ends = range(part.start - part.start % self._unit + self._unit, part.end, self._unit)
            for end in (*ends, part.end):
                self._taps[module][part.table[(end - 1) // self._unit]] = stream[end - 1 - part.start]

    def _clear(self, module: int, first: int, parts: Sequence[ProcessedRows]) -> None:
        """Zeros at a module's first positions, where it has no entry, so that pages have defined bytes."""
        for part in parts:
            if part.start < first:
                at = int64_columns(*self._places(part.table, range(part.start, min(first, part.end))))
                self._entries[module].index_put_(at, torch.zeros((), dtype=self._entries[module].dtype))

    def _in_pages(
        self, first: int, parts: Sequence[ProcessedRows], rows: Sequence[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, AttentionIndex]:
        """Tokens of rows (part, start, end), int64, and where their entries are in their pages; positions
        count from the module's first entry."""
        spans, tables = [], []
        token_ids: list[int] = []
        pages: list[int] = []
        offsets: list[int] = []
        row = 0
        for number, start, end in rows:
            part = parts[number]
            spans.append(RowSpan(row, row + end - start, start - first))
            tables.append(part.table.pages(-(-end // self._unit)))
            token_ids += part.tokens[start - part.start : end - part.start]
            at = self._places(part.table, range(start, end))
            pages += at[0]
            offsets += at[1]
            row += end - start
        ids, page, offset = int64_columns(token_ids, pages, offsets)
        return ids, AttentionIndex(tuple(spans), tuple(tables), page, offset)

    def _places(self, table: PageTable, positions: range) -> tuple[list[int], list[int]]:
        """Pages and offsets of positions."""
        pages = [table[position // self._unit] for position in positions]
        return pages, [position % self._unit for position in positions]


class _Proposals:
    """Guesses in the making. Row r of a lane stands at `lane.position + r`: newest token, then guesses."""

    def __init__(self, runner: ChainRunner, lanes: Sequence[DraftLane]) -> None:
        self._runner = runner
        self._lanes = lanes
        self.drafts: list[array[int]] = [array("I") for _ in lanes]
        self._active = list(range(len(lanes)))
        depth = max(lane.max_drafts for lane in lanes)
        num_modules = min(runner.num_modules, depth)
        parts = [(lane.table, lane.position, lane.position + lane.max_drafts) for lane in lanes]
        self._entries = [runner.copied(module, parts) for module in range(num_modules)]
        self._next_rows = [
            [max(0, runner.first_position(module) - lane.position) for lane in lanes]
            for module in range(num_modules)
        ]
        self._outputs: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        """(module, lane, row) -> handed-on states [N, D], and which of them."""
        self._chain: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        """(lane, row) -> handed-on states, and the one that the guess behind the row was made from."""

    def extend(self, step: int) -> bool:
        """Guess number `step` of every lane that wants one; False if none does."""
        module = step % self._runner.num_modules
        self._active = [
            n for n in self._active if len(self.drafts[n]) == step and step < self._lanes[n].max_drafts
        ]
        if not self._active:
            return False
        rows = [(n, self._next_rows[module][n], step + 1) for n in self._active]
        token_ids = [self._token(n, row) for n, first, end in rows for row in range(first, end)]
        before = [self._hidden(module, n, row) for n, first, end in rows for row in range(first, end)]
        entries = self._entries[module]
        index = entries.index(
            [(n, self._lanes[n].position + first, self._lanes[n].position + end) for n, first, end in rows]
        )
        [tokens] = int64_columns(token_ids)
        hidden = before[0] if len(before) == 1 else torch.cat(before)
        handed_on, normed = self._runner.run(module, entries, index, tokens, hidden)
        if len(token_ids) > len(rows):
            normed = normed.index_select(0, torch.tensor([span.end_row - 1 for span in index.spans]))
        logits = self._runner.logits(module, normed)
        guesses = pick_drafts(logits, [self._lanes[n].sampler for n in self._active])
        for (n, first, end), span, guess in zip(rows, index.spans, guesses, strict=True):
            for row in range(first, end):
                self._outputs[module, n, row] = handed_on, span.first_row + row - first
            self._chain[n, step] = handed_on, span.end_row - 1
            self._next_rows[module][n] = end
            if guess not in self._lanes[n].stop_ids:
                self.drafts[n].append(guess)
        return True

    def _token(self, lane: int, row: int) -> int:
        return self._lanes[lane].token if row == 0 else self.drafts[lane][row - 1]

    def _hidden(self, module: int, lane: int, row: int) -> torch.Tensor:
        """What a module reads at a row of the position before, [1, D]."""
        if row == 0:
            return self._runner.tap(module, self._lanes[lane].table, self._lanes[lane].position)
        states, at = self._outputs[module - 1, lane, row - 1] if row <= module else self._chain[lane, row - 1]
        return states[at : at + 1]
