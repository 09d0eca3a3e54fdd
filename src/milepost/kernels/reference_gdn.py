"""Gated DeltaNet in plain torch: the KDA recurrence with one decay per value head.

Formulas: Gated Delta Networks (Yang et al.); orders as in Qwen3-Next and Qwen3.5. Keys and queries
have fewer heads than values: each key head serves a run of consecutive value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from milepost.kernels.index import RecurrentIndex
from milepost.kernels.reference import gather_initial, l2_norm
from milepost.kernels.reference_kda import KdaRows, kda


@dataclass(frozen=True, slots=True)
class GdnParams:
    """What a Gated DeltaNet layer multiplies besides its projections. All tensors fp32 and contiguous.

    Attributes:
        conv_taps: [taps, channels] over q | k | v, the last tap meets the current row.
        decay_log: [value heads], `A_log`.
        dt_bias: [value heads].
        norm_weight: [value dim], not zero-centred.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: torch.Tensor
    decay_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float


class GdnInputs(NamedTuple):
    """Projections of the rows of a step, in the model dtype.

    raw [N, 2 * key heads * key dim + value heads * value dim] as q | k | v; gate [N, value heads *
    value dim] before the silu; beta [N, value heads] before the sigmoid; decay [N, value heads].
    """

    raw: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


def gdn_mixer(
    inputs: GdnInputs,
    params: GdnParams,
    tails: torch.Tensor,
    states: torch.Tensor,
    index: RecurrentIndex,
) -> torch.Tensor:
    """Convolution, SiLU, L2 norm, gates, recurrence and gated norm of all sequences of a step.

    g = -exp(A_log) * softplus(a + dt_bias) per value head, beta = sigmoid(b); output
    rms_norm(o) * weight * silu(z).

    Args:
        tails: [slots, taps - 1, channels] in the model dtype; states: fp32 [slots, value heads, key
            dim, value dim]. Initial records of all sequences are read, then running and exported
            ones are written.

    Returns:
        [N, value heads * value dim] in the model dtype.
    """
    num_rows = inputs.raw.shape[0]
    q, k, v = repeated_parts(F.silu(convolved(inputs.raw, params.conv_taps, tails, index)), params)
    decay = -params.decay_log.exp() * F.softplus(inputs.decay.float() + params.dt_bias)
    g = decay.unsqueeze(-1).expand(-1, -1, params.key_dim)
    beta = torch.sigmoid(inputs.beta.float())
    out = kda(KdaRows(l2_norm(q) * params.key_dim**-0.5, l2_norm(k), v, g, beta), states, index)
    scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + params.norm_eps)
    gate = inputs.gate.reshape(out.shape).float()
    return (out * scale * params.norm_weight * F.silu(gate)).to(inputs.gate.dtype).reshape(num_rows, -1)


def convolved(
    raw: torch.Tensor, taps: torch.Tensor, tails: torch.Tensor, index: RecurrentIndex
) -> torch.Tensor:
    """Causal depthwise convolution without its activation, fp32 [N, C]; see `reference.short_conv`.

    Args:
        taps: fp32 [taps, C].
    """
    num_taps, channels = taps.shape
    initial = gather_initial(tails, index)
    extended = raw.new_empty(raw.shape[0] + initial.shape[0] * (num_taps - 1), channels)
    extended.index_copy_(0, index.extended_tail_rows, initial.reshape(-1, channels))
    extended.index_copy_(0, index.extended_raw_rows, raw)
    stored = extended.index_select(0, index.extended_write_rows).view(-1, num_taps - 1, channels)
    tails.index_copy_(0, index.write_slots, stored)
    wide = extended.float()
    result = torch.zeros(raw.shape, dtype=torch.float32)
    for tap in range(num_taps):
        rows = index.extended_raw_rows - (num_taps - 1 - tap)
        result.addcmul_(wide.index_select(0, rows), taps[tap])
    return result


def repeated_parts(
    channels: torch.Tensor, params: GdnParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [N, value heads, key dim] and v [N, value heads, value dim] of rows [N, q | k | v]."""
    num_rows = channels.shape[0]
    key_width = params.num_key_heads * params.key_dim
    repeats = params.num_value_heads // params.num_key_heads
    q, k, v = channels.split([key_width, key_width, channels.shape[1] - 2 * key_width], dim=-1)
    q, k = (
        x.reshape(num_rows, params.num_key_heads, params.key_dim).repeat_interleave(repeats, dim=1)
        for x in (q, k)
    )
    return q, k, v.reshape(num_rows, params.num_value_heads, params.value_dim)
