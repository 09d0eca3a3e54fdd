"""Block drafters at work: entries of processed tokens in pages, and guesses from one pass over a block.

Entry t depends on the decoder's pass over tokens [0, t] and on nothing else, so pages of entries are
published, hit and evicted with those of the decoder, a request that starts from a hit drafts at once, and
nothing has to be kept once per page. A block reads the pages where they are; its own keys and values live
as long as the pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from milepost.kernels.index import AttentionIndex, RowSpan
from milepost.models.dflash import BlockLane
from milepost.models.dspark import BlockDrafter
from milepost.models.inputs import CacheFields
from milepost.models.layout import DRAFT_COPY_BYTES, AttentionGroupLayout
from milepost.runner.batch import PageTable
from milepost.runner.draft_sampling import pick_drafts
from milepost.runner.drafting import DraftLane, ProcessedRows

_LOGIT_COPIES = 3
"""fp32 logits of a block that exist at the same time: plain, corrected, and over the whole vocabulary."""


class BlockRunner:
    """Runs a block drafter over the pages of a worker; a `drafters.DraftRunner`."""

    def __init__(
        self, drafter: BlockDrafter, group: AttentionGroupLayout, fields: CacheFields, match_unit: int
    ) -> None:
        """
        Args:
            group: layout of the drafter's entries; the last attention group of the model.
            fields: of the worker's pools.
        """
        self._drafter = drafter
        self._unit = match_unit
        self._fields: CacheFields = {
            (field.layer, field.name): fields[field.layer, field.name] for field in group.token_fields
        }

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._drafter.spec.tap_layers

    def propose(self, lanes: Sequence[DraftLane]) -> list[array[int]]:
        """Guesses for the tokens behind the newest one of every lane; some may be empty.

        What is guessed does not depend on how many guesses are wanted: a whole block is computed, and as many
        of its guesses are returned.
        """
        drafts: list[array[int]] = []
        spec = self._drafter.spec
        lane_bytes = _LOGIT_COPIES * 4 * spec.num_guesses * spec.vocab_size
        at_once = max(1, DRAFT_COPY_BYTES // lane_bytes)
        for first in range(0, len(lanes), at_once):
            drafts += self._proposed(lanes[first : first + at_once])
        return drafts

    def record(self, parts: Sequence[ProcessedRows], read: torch.Tensor) -> None:
        """Brings entries of requests up to what was processed.

        Args:
            read: [N, taps * D] of the step's rows, outputs of the tap layers side by side.
        """
        rows = [row for p in parts for row in range(p.first_row, p.first_row + p.end - p.start)]
        if len(rows) < read.shape[0]:
            read = read.index_select(0, torch.tensor(rows))
        self._drafter.store(read, self._index(parts), self._fields)

    def _index(self, parts: Sequence[ProcessedRows]) -> AttentionIndex:
        """Where the entries of the parts go; rows are packed."""
        spans, tables = [], []
        pages: list[int] = []
        offsets: list[int] = []
        row = 0
        for part in parts:
            spans.append(RowSpan(row, row + part.end - part.start, part.start))
            row += part.end - part.start
            tables.append(self._pages(part.table, part.end))
            for position in range(part.start, part.end):
                pages.append(part.table[position // self._unit])
                offsets.append(position % self._unit)
        return AttentionIndex.of(spans, tables, pages, offsets)

    def _pages(self, table: PageTable, end: int) -> torch.Tensor:
        """int64 ids of the pages that cover [0, end)."""
        return table.pages(-(-end // self._unit))

    def _proposed(self, lanes: Sequence[DraftLane]) -> list[array[int]]:
        drafter = self._drafter
        blocks = [
            BlockLane(lane.token, lane.position, self._pages(lane.table, lane.position)) for lane in lanes
        ]
        rows = drafter.run(blocks, self._fields)
        base = drafter.base_logits(rows)
        previous = [lane.token for lane in lanes]
        threshold = drafter.spec.confidence_threshold
        state, survival = drafter.first_state(len(lanes)), torch.ones(len(lanes))
        drafts: list[array[int]] = [array("I") for _ in lanes]
        active = list(range(len(lanes)))
        for place in range(drafter.spec.num_guesses):
            active = [number for number in active if place < lanes[number].max_drafts]
            if not active:
                break
            tokens = torch.tensor([previous[number] for number in active])
            # All lanes, as a rule: views then, no copies.
            at = slice(None) if len(active) == len(lanes) else torch.tensor(active)
            read = drafter.read(
                rows[at, place], base[at, place], tokens, state[at], estimates=threshold > 0.0
            )
            state[at] = read.state
            logits = read.logits
            if read.confidence is not None:
                survival[at] *= read.confidence
                kept = survival[at] >= threshold
                active = [number for number, keep in zip(active, kept.tolist(), strict=True) if keep]
                logits = logits[kept]
            guesses = pick_drafts(logits, [lanes[number].sampler for number in active])
            for number, guess in zip(list(active), guesses, strict=True):
                previous[number] = guess
                if guess in lanes[number].stop_ids:
                    active.remove(number)
                else:
                    drafts[number].append(guess)
        return drafts
