"""Experts of every family in plain torch: routers, activations, packed weights.

Experts hand out their weights per use, so that a quantised checkpoint stays packed in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from milepost.kernels.reference import ExpertWeights

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class GluActivation:
    """What a gated MLP does between its products.

    Without betas: silu(gate) * up. With `beta` (SiTU): beta * tanh(gate / beta) * sigmoid(gate) *
    linear_beta * tanh(up / linear_beta); the up part stays as it is without `linear_beta`.
    """

    beta: float | None = None
    linear_beta: float | None = None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Both [N, inner]; fp32 inside, result in gate's dtype."""
        wide_gate, wide_up = gate.float(), up.float()
        if self.beta is None:
            return (F.silu(wide_gate) * wide_up).to(gate.dtype)
        bounded = self.beta * torch.tanh(wide_gate / self.beta) * torch.sigmoid(wide_gate)
        if self.linear_beta is not None:
            wide_up = self.linear_beta * torch.tanh(wide_up / self.linear_beta)
        return (bounded * wide_up).to(gate.dtype)


class Expert(Protocol):
    """One routed expert."""

    def weights(self) -> ExpertWeights:
        """gate [inner, in], up [inner, in], down [in, inner] in the model dtype."""


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """Weights as they are."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def weights(self) -> ExpertWeights:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A matrix of 4-bit floats: value = table[nibble] * 2^(scale - 127).

    Attributes:
        packed: uint8 [out, in / 2]; the low nibble is the even column.
        scales: uint8 [out, in / 32], E8M0.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in]; exact in fp32, and in bf16 (a value has two significant bits)."""
        table = torch.tensor(_MXFP4_VALUES + tuple(-value for value in _MXFP4_VALUES))
        nibbles = torch.stack([self.packed & 0xF, self.packed >> 4], dim=-1).flatten(1)
        values = table[nibbles.int()].view(*self.scales.shape, -1)
        exponents = self.scales.int().unsqueeze(-1) - _E8M0_BIAS
        return torch.ldexp(values, exponents).flatten(1).to(dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Expert:
    """Weights kept packed; every use decodes them."""

    gate: Mxfp4Weight
    up: Mxfp4Weight
    down: Mxfp4Weight
    dtype: torch.dtype

    def weights(self) -> ExpertWeights:
        gate, up, down = (weight.decode(self.dtype) for weight in (self.gate, self.up, self.down))
        return gate, up, down


def softmax_route(
    logits: torch.Tensor, experts_per_token: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax router: probabilities over all experts, the largest ones count.

    Args:
        logits: fp32 [N, E].

    Returns:
        expert ids int64 [N, k], ascending per row so that sums have one order, and fp32 weights [N, k].
    """
    probabilities = torch.softmax(logits, dim=-1)
    chosen = torch.topk(probabilities, experts_per_token, dim=-1).indices.sort(dim=-1).values
    weights = probabilities.gather(-1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def expert_sum(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[Expert],
    activation: GluActivation,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs, fp32 [N, D].

    Each expert sees the rows that chose it, in row order; a token's k contributions are added in
    the order of its `expert_ids`, whoever else is in the step.

    Args:
        x: [N, D] in the model dtype.
        expert_ids, weights: from a router, [N, k].
    """
    num_rows, per_token = expert_ids.shape
    outputs = x.new_empty(num_rows * per_token, x.shape[1])
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count == 0:
            continue
        places = order[first : first + count]
        gate, up, down = expert.weights()
        rows = x.index_select(0, places // per_token)
        inner = activation(F.linear(rows, gate), F.linear(rows, up))
        outputs.index_copy_(0, places, F.linear(inner, down))
        first += count
    parts = outputs.float().view(num_rows, per_token, -1)
    total = parts[:, 0] * weights[:, 0:1]
    for choice in range(1, per_token):
        total = total.addcmul_(parts[:, choice], weights[:, choice : choice + 1])
    return total
