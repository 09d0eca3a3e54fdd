"""Mixture of experts: routed gated MLPs, and a shared MLP that always runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from milepost.kernels.api import MoeParams
from milepost.kernels.reference_coded import Matrix, Mxfp4Weight
from milepost.kernels.reference_experts import SWIGLU, GluActivation
from milepost.kernels.stored import StoredMatrix
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.specs import MXFP4_GROUP, MoeSpec, SituSpec

_E8M0_NAN = 255


class MoeMlp:
    """Either router and any gated experts as one operation of the kernels.

    Experts may be stored as 4-bit floats, and may work in a latent space: down projection, experts, weighted
    sum, norm of the sum, up projection. The router and the shared MLP read the full width.
    """

    def __init__(self, loader: Loader, hidden_size: int, spec: MoeSpec, situ: SituSpec | None) -> None:
        self._kernels = loader.kernels
        pack = loader.pack_linear
        gate = loader.under("gate")
        router = gate.tensor_fp32("weight", spec.num_experts, hidden_size)
        self._router = pack(router, name="moe.router", role="router")
        bias = None
        if spec.router == "sigmoid":
            bias = gate.tensor_fp32("e_score_correction_bias", spec.num_experts)
        self._down = self._up = self._latent_norm = None
        width = hidden_size
        if spec.latent is not None:
            width = spec.latent.width
            down = loader.matrix("routed_expert_down_proj", hidden_size, width)
            self._down = pack(down, name="moe.latent")
            self._up = pack(loader.matrix("routed_expert_up_proj", width, hidden_size), name="moe.up")
            if spec.latent.norm_eps is not None:
                self._latent_norm = RmsNorm(loader, "routed_expert_norm", width, spec.latent.norm_eps)
        self._params = MoeParams(
            bias=bias,
            experts_per_token=spec.experts_per_token,
            renormalize=spec.renormalize,
            scaling_factor=spec.routed_scaling_factor,
            experts=_packed_experts(loader, width, spec, situ),
        )
        self._shared = _shared(loader, hidden_size, spec, situ)
        self._shared_gate = None
        if spec.shared_gate and self._shared is not None:
            gate_weight = loader.linear("shared_expert_gate", hidden_size, 1).float()
            self._shared_gate = pack(gate_weight, name="moe.shared_gate", role="gate")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> residual + experts [N, D]; `residual` may be overwritten."""
        ops = self._kernels
        logits = ops.linear(x, self._router)
        shared = None if self._shared is None else self._shared(x)
        gate = None if self._shared_gate is None else ops.linear(x, self._shared_gate)
        if self._down is None:
            return ops.moe(x, logits, self._params, shared=shared, residual=residual, shared_gate=gate)
        # From here on x is not read: the norm of a latent as wide as it may reuse its memory.
        total = ops.moe(ops.linear(x, self._down), logits, self._params, shared=None, residual=None)
        if self._latent_norm is not None:
            total = self._latent_norm(total)
        if shared is None:
            return ops.linear(total, self._up, residual=residual)
        return ops.add_shared(ops.linear(total, self._up), shared, residual=residual, gate=gate)


def _shared(loader: Loader, hidden_size: int, spec: MoeSpec, situ: SituSpec | None) -> DenseMlp | None:
    if not spec.shared_intermediate_size:
        return None
    inner = spec.shared_intermediate_size
    return DenseMlp(loader.under(spec.names.shared), hidden_size, inner, "moe.shared", situ=situ)


ExpertWeights = tuple[Matrix, Matrix, Matrix]
"""gate [inner, in], up [inner, in], down [in, inner]."""


def _packed_experts(loader: Loader, width: int, spec: MoeSpec, situ: SituSpec | None) -> Any:
    """One expert is read and packed after the other."""

    def coded() -> Iterator[ExpertWeights]:
        for gate, up, down in _expert_weights(loader, width, spec):
            yield loader.coded(gate, "expert"), loader.coded(up, "expert"), loader.coded(down, "expert")

    is_plain = spec.router == "sigmoid" and situ is None and spec.latent is None and not spec.packed_mxfp4
    activation = SWIGLU if situ is None else GluActivation(situ.beta, situ.linear_beta)
    return loader.kernels.pack_experts(coded(), activation=activation, composed_if_old=not is_plain)


def _expert_weights(loader: Loader, width: int, spec: MoeSpec) -> Iterator[ExpertWeights]:
    """Separate tensors per expert, or `gate_up_proj` and `down_proj` of all experts stacked."""
    inner = spec.expert_intermediate_size
    experts = loader.under("experts")
    if experts.has("gate_up_proj") or experts.has("down_proj"):
        gate_up = experts.unread("gate_up_proj", spec.num_experts, 2 * inner, width)
        down = experts.unread("down_proj", spec.num_experts, width, inner)
        for number in range(spec.num_experts):
            both = gate_up[number]
            parts = both[:inner], both[inner:], down[number]
            gate, up, low = (StoredMatrix((part,)) for part in parts)
            yield gate, up, low
        return
    for number in range(spec.num_experts):
        expert = experts.under(str(number))
        yield _mxfp4_expert(expert, width, spec) if spec.packed_mxfp4 else _separate(expert, width, spec)


def _separate(expert: Loader, width: int, spec: MoeSpec) -> ExpertWeights:
    names, inner = spec.names, spec.expert_intermediate_size
    gate, up = (expert.matrix(name, width, inner) for name in (names.gate, names.up))
    return gate, up, expert.matrix(names.down, inner, width)


def _mxfp4_expert(expert: Loader, width: int, spec: MoeSpec) -> ExpertWeights:
    """Packed if there are scales, else as it is: a checkpoint may leave some experts out."""
    names, inner = spec.names, spec.expert_intermediate_size
    shapes = ((names.gate, width, inner), (names.up, width, inner), (names.down, inner, width))
    if not any(expert.has(f"{name}.weight_scale") for name, *_ in shapes):
        return _separate(expert, width, spec)
    gate, up, down = (_mxfp4(expert.under(name), *shape) for name, *shape in shapes)
    return gate, up, down


def _mxfp4(loader: Loader, in_features: int, out_features: int) -> Mxfp4Weight:
    packed = loader.bytes("weight_packed", out_features, in_features // 2)
    groups = in_features // MXFP4_GROUP
    scales = loader.bytes("weight_scale", out_features, groups, nan=_E8M0_NAN)
    return Mxfp4Weight(packed, scales, loader.dtype)
