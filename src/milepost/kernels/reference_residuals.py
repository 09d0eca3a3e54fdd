"""Attention residuals over depth (Kimi K3), where a layer reads a mix of what earlier blocks produced; and
output gates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from milepost.kernels.rowwise import on_full_vectors


def mix_sources(sources: Sequence[torch.Tensor], query: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax-weighted sum of the sources, per row.

    A source's logit is rms_norm(source) . query, without a scale; what is summed is the source itself.

    Args:
        sources: each [N, D] in the model dtype, oldest first; one source comes back as it is.
        query: fp32 [D], norm weight times projection.

    Returns:
        [N, D] in the model dtype; fp32 inside.
    """
    if len(sources) == 1:
        return sources[0]
    logits = []
    for source in sources:
        wide = source.float()
        logits.append((wide * query).sum(-1) * torch.rsqrt(wide.square().mean(-1) + eps))
    # Row by row, so that a row's bits do not depend on the rows beside it.
    weights = torch.softmax(torch.stack(logits, dim=-1), dim=-1)
    total = weights[:, :1] * sources[0].float()
    for number, source in enumerate(sources[1:], start=1):
        total = total.addcmul_(weights[:, number : number + 1], source.float())
    return total.to(sources[0].dtype)


def gate_values(values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """values * sigmoid(gate), both [N, W]; fp32 inside, result in the dtype of the values."""
    return (values.float() * on_full_vectors(torch.sigmoid, gate.float())).to(values.dtype)
