"""The KDA recurrence in plain torch.

Per head, with S [K, V] in fp32:  S' = diag(exp(g_t)) S_{t-1};
S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = S_t^T q_t  (Kimi Linear, section on KDA).

Two forms. Token by token for short queries. Chunks of 16 tokens for long ones, anchored at
absolute multiples of 16 so that a pass that starts elsewhere computes in the same tiles. The chunk
form never takes exp of a positive number: decays between two rows of a tile are built from sums of
g that lie between these rows (halves of halves: rows of the second half times rows of the first,
each scaled towards the middle), so an unbounded gate cannot overflow and no two large sums are
subtracted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from milepost.kernels.index import RecurrentIndex
from milepost.kernels.reference import gather_initial

TILE = 16
"""Tokens per tile of the chunk form."""
SEGMENT_TILES = 16
"""Tiles whose temporaries are alive at a time."""
MAX_RECURRENT_TOKENS = 4
"""Queries up to this length go token by token."""
_LEVELS = (8, 4, 2, 1, 0)
_MIN_LOG_DECAY = -1e30


class KdaRows(NamedTuple):
    """Inputs of the recurrence, all fp32.

    q [N, H, K] normalised and scaled, k [N, H, K] normalised, v [N, H, V], g [N, H, K] log decay
    (<= 0), beta [N, H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def between(self, first: int, end: int) -> KdaRows:
        return KdaRows(*(x[first:end] for x in self))

    def select(self, rows: torch.Tensor) -> KdaRows:
        return KdaRows(*(x.index_select(0, rows) for x in self))


def kda(rows: KdaRows, states: torch.Tensor, index: RecurrentIndex) -> torch.Tensor:
    """Runs the recurrence of every sequence of a step.

    Initial states of all sequences are read first; then running and exported states are written.

    Args:
        states: fp32 [slots, H, K, V], view of the pool.

    Returns:
        o [N, H, V].
    """
    initial = gather_initial(states, index)
    result = torch.empty_like(rows.v)
    written = states.new_empty(index.write_slots.shape[0], *states.shape[1:])
    if index.single_sequences:
        sequences = index.single_indices
        singles = initial.index_select(0, sequences)
        result.index_copy_(0, index.single_rows, kda_step(rows.select(index.single_rows), singles))
        written.index_copy_(0, sequences, singles)
    num_sequences = len(index.spans)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for number, export in enumerate(index.exports, start=num_sequences):
        wanted.setdefault(export.sequence, []).append((export.offset, number))
    for sequence, span in enumerate(index.spans):
        exports = wanted.get(sequence, [])
        if span.length > 1:
            out, final, exported = kda_sequence(
                rows.between(span.first_row, span.end_row),
                initial[sequence],
                position=span.position,
                export_offsets=[offset for offset, _ in exports],
                token_by_token=sequence in index.token_by_token,
            )
            result[span.first_row : span.end_row] = out
            written[sequence] = final
            for (_, number), state in zip(exports, exported, strict=True):
                written[number] = state
        else:
            for _, number in exports:
                written[number] = written[sequence]
    states.index_copy_(0, index.write_slots, written)
    return result


def kda_step(rows: KdaRows, state: torch.Tensor) -> torch.Tensor:
    """One token for each of B independent sequences (rows of length B).

    `state` [B, H, K, V] is updated in place. Returns o [B, H, V].
    """
    q, k, v, g, beta = rows
    state.mul_(g.exp().unsqueeze(-1))
    delta = (v.unsqueeze(-2) - torch.matmul(k.unsqueeze(-2), state)).mul_(beta[..., None, None])
    state.addcmul_(k.unsqueeze(-1), delta)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2)


def kda_sequence(
    rows: KdaRows,
    initial: torch.Tensor,
    *,
    position: int,
    export_offsets: Sequence[int] = (),
    token_by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One sequence of T rows that starts at absolute `position`; `initial` [H, K, V] is not changed.

    Args:
        export_offsets: numbers of rows, each in [1, T], after which the state is wanted.
        token_by_token: whatever the length.

    Returns:
        o [T, H, V], the state after the last row, and the exported states.
    """
    if token_by_token or rows.q.shape[0] <= MAX_RECURRENT_TOKENS:
        return kda_recurrent(rows, initial, export_offsets=export_offsets)
    return kda_chunk(rows, initial, position=position, export_offsets=export_offsets)


def kda_recurrent(
    rows: KdaRows,
    initial: torch.Tensor,
    *,
    export_offsets: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`kda_sequence`, token by token."""
    state = initial.unsqueeze(0).clone()
    result = torch.empty_like(rows.v)
    at_offset: dict[int, torch.Tensor] = {}
    wanted = set(export_offsets)
    for row in range(rows.q.shape[0]):
        result[row] = kda_step(rows.between(row, row + 1), state)[0]
        if row + 1 in wanted:
            at_offset[row + 1] = state[0].clone()
    return result, state[0], [at_offset[offset] for offset in export_offsets]


def kda_chunk(
    rows: KdaRows,
    initial: torch.Tensor,
    *,
    position: int,
    export_offsets: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`kda_sequence` in tiles of 16 tokens at absolute multiples of 16."""
    q, k, v, g, beta = rows
    num_rows = q.shape[0]
    lead = position % TILE
    num_tiles = -(-(lead + num_rows) // TILE)
    # Rows outside of [position, position + T) are neutral: no decay, no key, no beta.
    tiles = KdaRows(
        *(_tiled(x, lead, num_tiles) for x in (q, k, v, g.clamp_min(_MIN_LOG_DECAY), beta.unsqueeze(-1)))
    )
    wanted: dict[int, list[int]] = {}
    for offset in export_offsets:
        wanted.setdefault((lead + offset - 1) // TILE, []).append((lead + offset - 1) % TILE + 1)
    at_offset: dict[int, torch.Tensor] = {}
    state = initial
    outputs = []
    for first in range(0, num_tiles, SEGMENT_TILES):
        local = {tile - first: ends for tile, ends in wanted.items() if first <= tile < first + SEGMENT_TILES}
        out, state, exported = _segment(tiles.between(first, first + SEGMENT_TILES), state, local)
        outputs.append(out)
        for (tile, end), exported_state in exported.items():
            at_offset[(first + tile) * TILE + end - lead] = exported_state
    result = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    result = result.transpose(1, 2).reshape(num_tiles * TILE, *v.shape[1:])
    return result[lead : lead + num_rows], state, [at_offset[offset] for offset in export_offsets]


def _tiled(x: torch.Tensor, lead: int, num_tiles: int) -> torch.Tensor:
    """[T, H, width] -> contiguous [tiles, H, 16, width], zeros in front and behind."""
    padded = x.new_zeros(num_tiles * TILE, *x.shape[1:])
    padded[lead : lead + x.shape[0]] = x
    return padded.view(num_tiles, TILE, *x.shape[1:]).transpose(1, 2).contiguous()


@functools.cache
def _decay_sums() -> torch.Tensor:
    """0/1 matrix [(levels + 2) * 16, 16]: which g_t each decay of a tile sums up.

    Level h splits the tile into blocks of 2h rows around a middle: a row of the second half sums
    the g from the middle up to itself, a row of the first half those behind it up to the middle.
    The product of both is the decay between the two rows. Level 0 sums nothing (a row with itself).
    Then: from the start of the tile up to and with the row; behind the row up to the end.
    """
    parts = []
    for half in _LEVELS:
        part = torch.zeros(TILE, TILE)
        for row in range(TILE):
            if half:
                middle = row // (2 * half) * 2 * half + half
                part[row, min(row + 1, middle) : max(row + 1, middle)] = 1.0
        parts.append(part)
    parts.append(torch.ones(TILE, TILE).tril())
    parts.append(torch.ones(TILE, TILE).triu(1))
    return torch.cat(parts)


@functools.cache
def _pair_masks() -> torch.Tensor:
    """0/1 [levels, 32, 16]: the pairs (row, column) each level covers, for keys and for queries.

    Rows 0-15 are for key products (strictly lower), rows 16-31 for query products (with diagonal).
    """
    masks = torch.zeros(len(_LEVELS), TILE, TILE)
    for level, half in enumerate(_LEVELS):
        for row in range(TILE):
            if half and row // half % 2 == 1:
                start = row // (2 * half) * 2 * half
                masks[level, row, start : start + half] = 1.0
            if not half:
                masks[level, row, row] = 1.0
    keys = masks.clone()
    keys[_LEVELS.index(0)] = 0.0
    return torch.cat([keys, masks], dim=1)


def _segment(
    tiles: KdaRows, state: torch.Tensor, exports: dict[int, list[int]]
) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[int, int], torch.Tensor]]:
    """n tiles in a row: q, k, g [n, H, 16, K], v [n, H, 16, V], beta [n, H, 16, 1], state [H, K, V].

    Args:
        exports: tile -> rows of the tile after which the state is wanted.

    Returns:
        o [n, H, 16, V], the state behind the last tile, and (tile, rows) -> state.
    """
    q, k, v, g, beta = tiles
    num_tiles, num_heads, _, key_dim = k.shape
    num_levels = len(_LEVELS)
    decay = torch.matmul(_decay_sums(), g).exp_().view(num_tiles, num_heads, num_levels + 2, TILE, key_dim)
    from_start, to_end = decay[:, :, num_levels], decay[:, :, num_levels + 1]
    pair = decay[:, :, :num_levels]
    keys = k.unsqueeze(2) * pair
    rows = torch.cat([keys, q.unsqueeze(2) * pair], dim=3)
    products = torch.matmul(rows, keys.transpose(-1, -2)).mul_(_pair_masks()).sum(2)
    key_products, query_products = products[:, :, :TILE], products[:, :, TILE:]

    # (I + beta * key_products) [U | W] = beta * [v | k * decay from the start]
    value_dim = v.shape[-1]
    system = key_products * beta
    right = torch.cat([v, k * from_start], dim=-1).mul_(beta)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved[..., :value_dim], solved[..., value_dim:]

    reads = torch.cat([from_state, q * from_start], dim=2)
    faded_keys = (k * to_end).transpose(-1, -2)
    tile_decay = from_start[:, :, -1].unsqueeze(-1)
    updates = torch.empty_like(v)
    result = torch.empty_like(v)
    exported: dict[tuple[int, int], torch.Tensor] = {}
    for tile in range(num_tiles):
        read = torch.matmul(reads[tile], state)
        update = torch.sub(own[tile], read[:, :TILE], out=updates[tile])
        result[tile] = read[:, TILE:]
        for end in exports.get(tile, ()):
            exported[tile, end] = _state_after(k[tile], g[tile], update, state, end)
        state = torch.baddbmm(state * tile_decay[tile], faded_keys[tile], update)
    result += torch.matmul(query_products, updates)
    return result, state, exported


def _state_after(
    k: torch.Tensor, g: torch.Tensor, update: torch.Tensor, state: torch.Tensor, end: int
) -> torch.Tensor:
    """State after the first `end` rows of a tile: as if the rows behind were neutral."""
    g = g.clone()
    g[:, end:] = 0.0
    k = k.clone()
    k[:, end:] = 0.0
    sums = _decay_sums()
    from_start = torch.matmul(sums[-2 * TILE : -TILE], g).exp_()
    to_end = torch.matmul(sums[-TILE:], g).exp_()
    return torch.baddbmm(state * from_start[:, -1].unsqueeze(-1), (k * to_end).transpose(-1, -2), update)
