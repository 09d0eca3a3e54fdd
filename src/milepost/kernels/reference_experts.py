"""Experts of every family in plain torch: routers and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.kernels.rowwise import on_full_vectors


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
            return (on_full_vectors(F.silu, wide_gate) * wide_up).to(gate.dtype)
        bounded = self.beta * on_full_vectors(torch.tanh, wide_gate / self.beta)
        bounded = bounded * on_full_vectors(torch.sigmoid, wide_gate)
        if self.linear_beta is not None:
            wide_up = self.linear_beta * on_full_vectors(torch.tanh, wide_up / self.linear_beta)
        return (bounded * wide_up).to(gate.dtype)


SWIGLU = GluActivation()

Expert = Callable[[torch.Tensor], torch.Tensor]
"""One routed expert: rows [n, D] in the model dtype -> [n, D]."""


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, count]: numbers of each row's largest keys [N, E], ascending, so that sums have one order.
    Equal keys: the lowest numbers. NaN is larger than everything."""
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values


def softmax_route(
    logits: torch.Tensor, experts_per_token: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax router: probabilities over all experts, the largest ones count.

    Args:
        logits: fp32 [N, E].

    Returns:
        expert ids int64 [N, k] as of `largest` logits, and fp32 weights [N, k].
    """
    probabilities = torch.softmax(logits, dim=-1)
    chosen = largest(logits, experts_per_token)
    weights = probabilities.gather(-1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def expert_sum(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[Expert],
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
        outputs.index_copy_(0, places, expert(x.index_select(0, places // per_token)))
        first += count
    parts = outputs.float().view(num_rows, per_token, -1)
    total = parts[:, 0] * weights[:, 0:1]
    for choice in range(1, per_token):
        total = total.addcmul_(parts[:, choice], weights[:, choice : choice + 1])
    return total
