"""Grouped-query attention over paged keys and values, in plain torch.

Per-head norms, rotary positions on a leading part of each head, an output gate. Positions are the
absolute ones of the rows, so that a page holds the same keys whoever wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from milepost.kernels.index import AttentionIndex
from milepost.kernels.reference import MAX_SCORES, rms_norm, store_rows
from milepost.kernels.rowwise import on_full_vectors


@dataclass(frozen=True, slots=True)
class GqaParams:
    """Sizes and small tensors of a grouped-query attention layer.

    Attributes:
        query_norm, key_norm: fp32 [head_dim], as multiplied.
        inverse_frequencies: fp32 [rotary_dim / 2]; rotary_dim <= head_dim, the rest is not rotated.
        has_gate: whether what attention gives is multiplied by a sigmoid.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    norm_eps: float
    inverse_frequencies: torch.Tensor
    has_gate: bool = True


class GqaInputs(NamedTuple):
    """Projections of the rows of a step, in the model dtype.

    query_gate [N, heads * 2 * head_dim], per head query then gate (before the sigmoid), or, without gates,
    [N, heads * head_dim]; key and value [N, kv heads * head_dim].
    """

    query_gate: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def inverse_frequencies(rotary_dim: int, theta: float) -> torch.Tensor:
    """fp32 [rotary_dim / 2]: theta^(-2i / rotary_dim)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def row_positions(index: AttentionIndex) -> torch.Tensor:
    """int64 [N], absolute position of every row of the step."""
    positions = [torch.arange(span.position, span.end_position) for span in index.spans]
    return torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)


Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary angles of rows, fp32 [N, 1, A] each."""


def turns(angles: torch.Tensor) -> Turns:
    """Of angles fp32 [N, A]."""
    return on_full_vectors(torch.cos, angles).unsqueeze(1), on_full_vectors(torch.sin, angles).unsqueeze(1)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`turned` by angles fp32 [N, A]."""
    return turned(x, turns(angles))


def turned(x: torch.Tensor, by: Turns) -> torch.Tensor:
    """Rotates entry i of the first half of the rotary part with entry i of its second half.

    Args:
        x: fp32 [N, H, head_dim]; the first 2 * A entries of a head are the rotary part.
    """
    cos, sin = by
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def gqa_mixer(
    inputs: GqaInputs, params: GqaParams, pages: torch.Tensor, index: AttentionIndex
) -> torch.Tensor:
    """Norms, rotary positions, storing, attention and output gate of all sequences of a step.

    Args:
        pages: [pages, match_unit, kv heads * 2 * head_dim] in the stored dtype, per kv head value, then
            key; the rows are stored first and then read back like every other.

    Returns:
        attention output * sigmoid(gate), [N, heads * head_dim] in the model dtype.
    """
    query = store_and_rotate(inputs, params, pages, index)
    out = grouped_attention(query, pages, index, params.num_kv_heads)
    return gated_output(out, inputs, params)


def store_and_rotate(
    inputs: GqaInputs, params: GqaParams, pages: torch.Tensor, index: AttentionIndex
) -> torch.Tensor:
    """Stores keys and values of the rows; the rotated queries, fp32 [N, heads, head_dim]."""
    angles = row_angles(params.inverse_frequencies, index)
    _store(inputs.key, inputs.value, params, pages, index, angles)
    query = _per_head(inputs, params)[:, :, 0].float()
    return rotate(rms_norm(query, params.query_norm, params.norm_eps), angles)


def row_angles(inverse_frequencies: torch.Tensor, index: AttentionIndex) -> torch.Tensor:
    """fp32 [N, A], as the models were trained: whole positions times rounded frequencies [A]."""
    return row_positions(index).float().unsqueeze(1) * inverse_frequencies


def store_keys_values(
    key: torch.Tensor, value: torch.Tensor, params: GqaParams, pages: torch.Tensor, index: AttentionIndex
) -> None:
    """Stores what `gqa_mixer` would, and nothing else: keys, normed and rotated, and values.

    Args:
        key, value: [N, kv heads * head_dim] in the model dtype.
    """
    _store(key, value, params, pages, index, row_angles(params.inverse_frequencies, index))


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    params: GqaParams,
    pages: torch.Tensor,
    index: AttentionIndex,
    angles: torch.Tensor,
) -> None:
    num_rows = key.shape[0]
    per_head = key.reshape(num_rows, params.num_kv_heads, params.head_dim).float()
    rotated = rotate(rms_norm(per_head, params.key_norm, params.norm_eps), angles)
    stored = torch.cat([value.reshape(rotated.shape).float(), rotated], dim=-1)
    store_rows(pages, stored.reshape(num_rows, -1), index)


def gated_output(out: torch.Tensor, inputs: GqaInputs, params: GqaParams) -> torch.Tensor:
    """out fp32 [N, heads, head_dim], times sigmoid(gate) if there is one; [N, heads * head_dim] in the model
    dtype."""
    if params.has_gate:
        out = out * on_full_vectors(torch.sigmoid, _per_head(inputs, params)[:, :, 1].float())
    return out.to(inputs.key.dtype).flatten(1)


def _per_head(inputs: GqaInputs, params: GqaParams) -> torch.Tensor:
    """[N, heads, 2 or 1, head_dim]: query, then gate if there is one."""
    parts = 2 if params.has_gate else 1
    return inputs.query_gate.reshape(inputs.key.shape[0], params.num_heads, parts, params.head_dim)


def rotate_heads(
    x: torch.Tensor,
    num_heads: int,
    inverse_frequencies: torch.Tensor,
    index: AttentionIndex,
    *,
    amplitude: float = 1.0,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Rotary positions of the last entries of every head; fp32 inside, a new tensor or a buffer of its own.

    Args:
        x: [N, heads * W].
        inverse_frequencies: fp32 [A]; the last 2 * A entries of a head are rotated.
        amplitude: what these are multiplied by before.
        is_interleaved: whether entry 2i is rotated with entry 2i + 1, instead of entry i with entry A + i.
    """
    per_head = x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)
    width = 2 * inverse_frequencies.shape[0]
    cos, sin = turns(row_angles(inverse_frequencies, index))
    rotary = per_head[..., per_head.shape[-1] - width :].float() * amplitude
    if is_interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(parts, dim=-1).flatten(-2) if is_interleaved else torch.cat(parts, dim=-1)
    return torch.cat([per_head[..., : per_head.shape[-1] - width], joined.to(x.dtype)], dim=-1).flatten(1)


def grouped_attention(
    query: torch.Tensor, pages: torch.Tensor, index: AttentionIndex, num_kv_heads: int
) -> torch.Tensor:
    """Causal attention; only entries [0, position] of a sequence are ever read.

    Args:
        query: fp32 [N, H, head_dim], rotated.
        pages: see `gqa_mixer`; rows of this step are in.

    Returns:
        fp32 [N, H, head_dim].
    """
    num_heads, head_dim = query.shape[1:]
    scale = head_dim**-0.5
    result = torch.empty_like(query)
    for span, table in zip(index.spans, index.page_tables, strict=True):
        entries = pages.index_select(0, table).view(-1, num_kv_heads, 2, head_dim)[: span.end_position]
        values, keys = entries[:, :, 0].float().transpose(0, 1), entries[:, :, 1].float().permute(1, 2, 0)
        block = max(1, MAX_SCORES // (num_heads * span.end_position))
        for first in range(span.first_row, span.end_row, block):
            end = min(first + block, span.end_row)
            seen = span.position + end - span.first_row
            # [kv heads, rows * heads per kv head, head_dim]
            rows = query[first:end].view(end - first, num_kv_heads, -1, head_dim).transpose(0, 1)
            rows = rows.reshape(num_kv_heads, -1, head_dim)
            scores = torch.matmul(rows, keys[:, :, :seen]).mul_(scale)
            if end - first > 1:
                limits = torch.arange(seen - (end - first), seen).view(1, -1, 1, 1)
                hidden = torch.arange(seen) > limits
                scores.view(num_kv_heads, end - first, -1, seen).masked_fill_(hidden, float("-inf"))
            mixed = torch.matmul(torch.softmax(scores, dim=-1), values[:, :seen])
            mixed = mixed.view(num_kv_heads, end - first, -1, head_dim).transpose(0, 1)
            result[first:end] = mixed.reshape(end - first, num_heads, head_dim)
    return result
