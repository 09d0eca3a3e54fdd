"""Weights and rows of the larger operations, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class KdaParams:
    """What a KDA layer multiplies besides its projections. All tensors fp32 and contiguous.

    Attributes:
        conv_taps: [taps, heads * (2 key + value)], the last tap meets the current row.
        decay_log: [heads], `A_log`.
        dt_bias: [heads * key].
        norm_weight: [value].
        lower_bound: see `reference.kda_gate`.
    """

    num_heads: int
    head_dim: int
    conv_taps: torch.Tensor
    decay_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    lower_bound: float | None


class KdaInputs(NamedTuple):
    """Projections of the rows of a step, in the model dtype.

    raw [N, heads * (2 key + value)] as q | k | v; decay [N, heads * key]; beta [N, heads] before
    the sigmoid; gate [N, heads * value] before the sigmoid.
    """

    raw: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoeParams:
    """Router settings and packed experts.

    Attributes:
        bias: fp32 [experts] of a sigmoid router; decides who is chosen, not how much it counts. None = a
            softmax router.
        experts: from `pack_experts`.
    """

    bias: torch.Tensor | None
    experts_per_token: int
    renormalize: bool
    scaling_factor: float
    experts: Any
