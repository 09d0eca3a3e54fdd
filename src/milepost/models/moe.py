"""Mixture of experts: sigmoid router, routed SwiGLU experts, shared experts."""

from __future__ import annotations

import torch

from milepost.kernels.api import MoeParams
from milepost.models.layers import DenseMlp, Loader
from milepost.models.specs import MoeSpec


class MoeMlp:
    """Hub names: gate.weight, gate.e_score_correction_bias, experts.E.{w1, w3, w2}, shared_experts."""

    def __init__(self, loader: Loader, hidden_size: int, spec: MoeSpec) -> None:
        self._kernels = loader.kernels
        gate = loader.under("gate")
        router = gate.tensor_fp32("weight", spec.num_experts, hidden_size)
        self._router = self._kernels.pack_linear(router, name="moe.router")
        inner = spec.expert_intermediate_size
        experts = []
        for number in range(spec.num_experts):
            expert = loader.under(f"experts.{number}")
            gate_weight = expert.linear("w1", hidden_size, inner)
            up_weight = expert.linear("w3", hidden_size, inner)
            experts.append((gate_weight, up_weight, expert.linear("w2", inner, hidden_size)))
        self._params = MoeParams(
            bias=gate.tensor_fp32("e_score_correction_bias", spec.num_experts),
            experts_per_token=spec.experts_per_token,
            renormalize=spec.renormalize,
            scaling_factor=spec.routed_scaling_factor,
            experts=self._kernels.pack_experts(experts),
        )
        self._shared: DenseMlp | None = None
        if spec.num_shared_experts:
            self._shared = DenseMlp(
                loader.under("shared_experts"), hidden_size, inner * spec.num_shared_experts, "moe.shared"
            )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> residual + experts [N, D]; `residual` may be overwritten."""
        ops = self._kernels
        logits = ops.linear(x, self._router)
        shared = None if self._shared is None else self._shared(x)
        return ops.moe(x, logits, self._params, shared=shared, residual=residual)
