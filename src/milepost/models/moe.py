"""Mixture of experts: sigmoid router, routed SwiGLU experts, shared experts."""

from __future__ import annotations

import torch

from milepost.models.layers import DenseMlp, Loader
from milepost.models.specs import MoeSpec


class MoeMlp:
    """Hub names: gate.weight, gate.e_score_correction_bias, experts.E.{w1, w3, w2}, shared_experts."""

    def __init__(self, loader: Loader, hidden_size: int, spec: MoeSpec) -> None:
        self._kernels = loader.kernels
        self._spec = spec
        gate = loader.under("gate")
        self._router = gate.tensor_fp32("weight", spec.num_experts, hidden_size)
        self._bias = gate.tensor_fp32("e_score_correction_bias", spec.num_experts)
        inner = spec.expert_intermediate_size
        self._experts = []
        for number in range(spec.num_experts):
            expert = loader.under(f"experts.{number}")
            up_shapes = (hidden_size, inner)
            weights = (
                expert.linear("w1", *up_shapes),
                expert.linear("w3", *up_shapes),
                expert.linear("w2", inner, hidden_size),
            )
            self._experts.append(weights)
        self._shared: DenseMlp | None = None
        if spec.num_shared_experts:
            self._shared = DenseMlp(
                loader.under("shared_experts"), hidden_size, inner * spec.num_shared_experts
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ops, spec = self._kernels, self._spec
        ids, weights = ops.route(
            ops.linear(x.float(), self._router),
            self._bias,
            spec.experts_per_token,
            renormalize=spec.renormalize,
            scaling_factor=spec.routed_scaling_factor,
        )
        total = ops.routed_experts(x, ids, weights, self._experts)
        if self._shared is not None:
            total = total + self._shared(x).float()
        return total.to(x.dtype)
