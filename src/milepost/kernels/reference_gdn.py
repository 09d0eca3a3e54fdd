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
from milepost.kernels.reference import l2_norm, short_conv
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
    key_width = params.num_key_heads * params.key_dim
    repeats = params.num_value_heads // params.num_key_heads
    mixed = short_conv(inputs.raw, params.conv_taps.t(), tails, index)
    q, k, v = mixed.split([key_width, key_width, mixed.shape[1] - 2 * key_width], dim=-1)
    q, k = (
        l2_norm(x.reshape(num_rows, params.num_key_heads, params.key_dim)).repeat_interleave(repeats, dim=1)
        for x in (q, k)
    )
    v = v.reshape(num_rows, params.num_value_heads, params.value_dim)
    decay = -params.decay_log.exp() * F.softplus(inputs.decay.float() + params.dt_bias)
    g = decay.unsqueeze(-1).expand(-1, -1, params.key_dim)
    beta = torch.sigmoid(inputs.beta.float())
    out = kda(KdaRows(q * params.key_dim**-0.5, k, v, g, beta), states, index)
    return _silu_gated_norm(out, inputs.gate.reshape(out.shape), params).reshape(num_rows, -1)


def _silu_gated_norm(x: torch.Tensor, gate: torch.Tensor, params: GdnParams) -> torch.Tensor:
    """rms_norm(x) * weight * silu(gate), in this order, fp32 inside; result in gate's dtype."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + params.norm_eps)
    return (x * scale * params.norm_weight * F.silu(gate.float())).to(gate.dtype)
