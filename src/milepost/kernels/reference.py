"""Every operation in plain torch: the definition of correct, and the fallback that always works.

Shapes: N rows of a packed step, D hidden size, H heads, K key dim, V value dim, C channels.
Model-dtype inputs (fp32 or bf16) are widened to fp32 inside; what is stored (pages, convolution
tails) is first rounded to its stored dtype and then read back, so that a later pass sees the same
numbers as the rows of this one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from milepost.kernels.index import AttentionIndex, RecurrentIndex
from milepost.kernels.reference_coded import ReadMatrix, coded_linear
from milepost.kernels.reference_experts import SWIGLU, GluActivation, expert_sum, largest
from milepost.kernels.rowwise import on_full_vectors

L2_NORM_EPS = 1e-6
RENORMALIZE_EPS = 1e-20
MAX_SCORES = 1 << 22
"""Attention scores held at a time (query rows x heads x keys)."""

ExpertWeights = tuple[ReadMatrix, ReadMatrix, ReadMatrix]
"""gate [inner, D], up [inner, D], down [D, inner] (hub names w1, w3, w2)."""


def linear(x: torch.Tensor, weight: ReadMatrix) -> torch.Tensor:
    """x [N, in] times weight [out, in] -> [N, out] in the weight's dtype, which is x's if it is not coded."""
    if not isinstance(weight, torch.Tensor):
        return coded_linear(x, weight)
    # Contiguous: with a stride, rows at other alignments may be rounded differently.
    return F.linear(x.contiguous(), weight)


def per_head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H, in] times weight [H, in, out] -> fp32 [N, H, out]."""
    return torch.bmm(x.float().transpose(0, 1), weight.float()).transpose(0, 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; fp32 inside, result in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate), in this order, fp32 inside.

    x fp32 [N, H, V], gate [N, H, V] in the model dtype, weight [V]; result in gate's dtype.
    """
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight.float() * torch.sigmoid(gate.float())).to(gate.dtype)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim; x fp32. The eps stands inside of the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half; gate_up [N, 2 * inner]. fp32 inside, result in its dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def short_conv(
    raw: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, index: RecurrentIndex
) -> torch.Tensor:
    """Causal depthwise convolution and SiLU, carrying the last rows from pass to pass.

    y[t, c] = silu(sum_j weight[c, j] * raw[t - taps + 1 + j, c]); the last tap meets row t.

    Args:
        raw: [N, C] projections in the model dtype (the stored precision of the tail).
        weight: fp32 [C, taps].
        tails: [slots, taps - 1, C], view of the pool; initial tails are read, then running and
            exported tails are written.

    Returns:
        fp32 [N, C].
    """
    taps = weight.shape[1]
    num_rows, channels = raw.shape
    initial = gather_initial(tails, index)
    extended = raw.new_empty(num_rows + initial.shape[0] * (taps - 1), channels)
    extended.index_copy_(0, index.extended_tail_rows, initial.reshape(-1, channels))
    extended.index_copy_(0, index.extended_raw_rows, raw)
    stored = extended.index_select(0, index.extended_write_rows).view(-1, taps - 1, channels)
    tails.index_copy_(0, index.write_slots, stored)

    wide = extended.float()
    result = raw.new_zeros((num_rows, channels), dtype=torch.float32)
    for tap in range(taps):
        rows = index.extended_raw_rows - (taps - 1 - tap)
        result.addcmul_(wide.index_select(0, rows), weight[:, tap])
    return F.silu(result)


def gather_initial(pool: torch.Tensor, index: RecurrentIndex) -> torch.Tensor:
    """Initial records of all sequences, [sequences, ...]: a copy; zeros where the plan says so."""
    initial = pool.index_select(0, index.initial_slots)
    if index.any_zero:
        # where, not multiply: an unused slot may hold NaN.
        mask = index.starts_at_zero.view(-1, *([1] * (initial.dim() - 1)))
        initial = torch.where(mask, torch.zeros((), dtype=initial.dtype), initial)
    return initial


def kda_gate(
    raw_gate: torch.Tensor, decay_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay g <= 0 of the KDA recurrence, fp32 [N, H, K].

    Args:
        raw_gate: [N, H, K] low-rank gate projection.
        decay_log: fp32 [H], `A_log`.
        dt_bias: fp32 [H, K].
        lower_bound: None: g = -exp(A_log) * softplus(z); else g = lower_bound * sigmoid(exp(A_log) * z),
            with z = raw_gate + dt_bias.
    """
    z = raw_gate.float() + dt_bias
    rate = decay_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def store_rows(pages: torch.Tensor, rows: torch.Tensor, index: AttentionIndex) -> None:
    """Writes rows [N, W] into pages [num_pages, match_unit, W], rounding to the stored dtype."""
    pages.index_put_((index.write_pages, index.write_offsets), rows.to(pages.dtype))


def latent_attention(
    query: torch.Tensor, pages: torch.Tensor, index: AttentionIndex, *, value_width: int, scale: float
) -> torch.Tensor:
    """Causal attention of absorbed queries over paged latents (MLA without positions).

    One algebra for prefill and decode: every head attends to the same latent rows, scores use the
    whole row, values are its first `value_width` entries. Only entries [0, position] are ever read.

    Args:
        query: fp32 [N, H, W], absorbed through the key expansion, then the shared key part.
        pages: [num_pages, match_unit, W] in the stored dtype; rows of this step are already in.

    Returns:
        fp32 [N, H, value_width]: softmax-weighted latents.
    """
    num_heads, width = query.shape[1:]
    result = query.new_empty(query.shape[0], num_heads, value_width)
    for span, table in zip(index.spans, index.page_tables, strict=True):
        latents = pages.index_select(0, table).view(-1, width)[: span.end_position].float()
        block = max(1, MAX_SCORES // (num_heads * span.end_position))
        for first in range(span.first_row, span.end_row, block):
            end = min(first + block, span.end_row)
            first_position = span.position + first - span.first_row
            visible = latents[: first_position + end - first]
            scores = torch.matmul(query[first:end].reshape(-1, width), visible.t()).mul_(scale)
            if end - first > 1:
                keys = torch.arange(visible.shape[0])
                rows = torch.arange(first_position, first_position + end - first)
                hidden = (keys > rows.unsqueeze(-1)).unsqueeze(1)
                scores.view(end - first, num_heads, -1).masked_fill_(hidden, float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            result[first:end] = torch.matmul(weights, visible[:, :value_width]).view(
                -1, num_heads, value_width
            )
    return result


def expanded_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    index: AttentionIndex,
    expand_key: torch.Tensor,
    expand_value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one sequence over keys and values that every head makes from the latents.

    Args:
        query: [N, H, nope + shared] in the model dtype.
        pages: [num_pages, match_unit, latent + shared] in the stored dtype.
        index: of one span; its rows are in.
        expand_key: fp32 [H, nope, latent]; expand_value: fp32 [H, value, latent].

    Returns:
        fp32 [N, H, value].
    """
    [span], [table] = index.spans, index.page_tables
    latent_width = expand_key.shape[2]
    entries = pages.index_select(0, table).view(-1, pages.shape[2])[: span.end_position].float()
    latents, shared = entries[:, :latent_width], entries[:, latent_width:]
    keys = torch.matmul(latents, expand_key.transpose(1, 2)).to(pages.dtype).float()
    keys = torch.cat([keys, shared.expand(keys.shape[0], -1, -1)], dim=-1)
    values = torch.matmul(latents, expand_value.transpose(1, 2)).to(pages.dtype).float()
    result = query.new_empty(*query.shape[:2], values.shape[2], dtype=torch.float32)
    rows = query.float().transpose(0, 1)
    block = max(1, MAX_SCORES // (query.shape[1] * span.end_position))
    for first in range(0, span.length, block):
        end = min(first + block, span.length)
        scores = torch.matmul(rows[:, first:end], keys.transpose(1, 2)).mul_(scale)
        limits = torch.arange(span.position + first, span.position + end).unsqueeze(1)
        scores.masked_fill_(torch.arange(span.end_position) > limits, float("-inf"))
        result[first:end] = torch.matmul(torch.softmax(scores, dim=-1), values).transpose(0, 1)
    return result


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    experts_per_token: int,
    *,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid router: the bias decides who is chosen, the unbiased scores how much each counts.

    Args:
        logits: fp32 [N, E].
        correction_bias: fp32 [E].

    Returns:
        expert ids int64 [N, k] as of `largest` biased scores, and fp32 weights [N, k].
    """
    scores = on_full_vectors(torch.sigmoid, logits)
    chosen = largest(scores + correction_bias, experts_per_token)
    weights = scores.gather(-1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORMALIZE_EPS)
    return chosen, weights * scaling_factor


def routed_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[ExpertWeights],
    activation: GluActivation = SWIGLU,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs, fp32 [N, D].

    Args:
        x: [N, D] in the model dtype.
        expert_ids, weights: from a router; `expert_sum` has the order of rows and sums.
    """
    callables = [functools.partial(_gated_mlp, expert, activation) for expert in experts]
    return expert_sum(x, expert_ids, weights, callables)


def _gated_mlp(expert: ExpertWeights, activation: GluActivation, rows: torch.Tensor) -> torch.Tensor:
    gate, up, down = expert
    return linear(activation(linear(rows, gate), linear(rows, up)), down)


def add_shared(
    total: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """residual + (total + sigmoid(gate) * shared); the sum in brackets is rounded once, in fp32 until then.

    Args:
        total: [N, D], fp32 or in the model dtype.
        shared: [N, D] in the model dtype, or None.
        gate: fp32 [N, 1]; None = 1.
        residual: [N, D] in the model dtype; None = nothing is added to the rounded sum.
        dtype: of the result, the model dtype.
    """
    total = total.float()
    if shared is not None:
        wide = shared.float()
        total = total + (wide if gate is None else on_full_vectors(torch.sigmoid, gate) * wide)
    return total.to(dtype) if residual is None else residual + total.to(dtype)
