"""Attention of a block of guessed rows over paged entries and the block itself, in plain torch.

Rows of a block lie behind the pages' last entry and are not in them. They see entries of the context from
some position on, and of the block either all rows or those up to themselves. The context is read in tiles
at fixed positions, with a running maximum and sum, so that memory does not grow with it and a result
depends on the context alone, not on how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CONTEXT_TILE_TOKENS = 1024
"""Tokens of the context that are widened at the same time."""

SplitEntries = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Stored rows [T, W] -> keys [T, G, K] and values [T, G, V], widened to fp32; G key-value heads."""


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What lies before one block.

    Attributes:
        pages: [records, match_unit, W] of one layer.
        table: int64 page ids that cover positions [0, length).
        first_seen: per row of the block, the first position it sees; ascending.
    """

    pages: torch.Tensor
    table: torch.Tensor
    length: int
    first_seen: Sequence[int]


def attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: BlockContext,
    split: SplitEntries,
    *,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of one block.

    Args:
        query: fp32 [R, H, K]; head h reads key-value head h // (H / G).
        keys, values: fp32 [R, G, K] and [R, G, V] of the block itself.
        is_causal: rows see no later row.

    Returns:
        fp32 [R, H, V].
    """
    num_rows, num_heads, _ = query.shape
    num_groups = keys.shape[1]
    # [G, R * heads per group, K]; row r of the block is rows [r * share, (r + 1) * share).
    share = num_heads // num_groups
    rows = query.view(num_rows, num_groups, share, -1).transpose(0, 1).reshape(num_groups, -1, query.shape[2])
    hidden = None
    if is_causal:
        places = torch.arange(num_rows)
        hidden = places > places.repeat_interleave(share).unsqueeze(1)
    parts = _Softmax(rows, scale)
    parts.add(keys, values, hidden)
    unit = context.pages.shape[1]
    # Tiles begin at multiples of a whole number of units.
    tile = max(1, CONTEXT_TILE_TOKENS // unit) * unit
    begin = max(0, context.first_seen[0]) // tile * tile
    for start in range(begin, context.length, tile):
        end = min(start + tile, context.length)
        table = context.table[start // unit : -(-end // unit)]
        stored = context.pages.index_select(0, table).flatten(0, 1)[: end - start]
        hidden = None
        if start < context.first_seen[-1]:
            first_seen = torch.tensor(context.first_seen).repeat_interleave(share)
            hidden = torch.arange(start, end) < first_seen.unsqueeze(1)
        parts.add(*split(stored), hidden)
    result = parts.result().view(num_groups, num_rows, share, -1).transpose(0, 1)
    return result.reshape(num_rows, num_heads, -1)


class _Softmax:
    """Weighted sums over keys that come in parts; the first part must show every row a key."""

    def __init__(self, rows: torch.Tensor, scale: float) -> None:
        self._rows = rows
        self._scale = scale
        self._sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Highest score, sum of the weights and weighted sum of the values so far."""

    def add(self, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """keys [T, G, K], values [T, G, V]; hidden bool [rows, T]."""
        scores = torch.matmul(self._rows, keys.permute(1, 2, 0).contiguous()).mul_(self._scale)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        if self._sums is not None:
            highest = torch.maximum(self._sums[0], highest)
        weights = torch.exp(scores.sub_(highest))
        mixed = torch.matmul(weights, values.transpose(0, 1).contiguous())
        total = weights.sum(-1, keepdim=True)
        if self._sums is not None:
            known, known_total, known_mixed = self._sums
            kept = torch.exp(known - highest)
            total = known_total * kept + total
            mixed += known_mixed * kept
        self._sums = highest, total, mixed

    def result(self) -> torch.Tensor:
        """fp32 [G, rows, V]."""
        assert self._sums is not None
        _, total, mixed = self._sums
        return mixed / total
