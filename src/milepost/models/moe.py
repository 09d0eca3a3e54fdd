"""Mixture of experts: routed gated MLPs, and a shared MLP that always runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from milepost.kernels.api import MoeParams
from milepost.kernels.reference import route
from milepost.kernels.reference_coded import Matrix, Mxfp4Weight, stacked
from milepost.kernels.reference_experts import Expert, GluActivation, expert_sum, softmax_route
from milepost.kernels.rowwise import on_full_vectors
from milepost.kernels.stored import StoredMatrix
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.specs import MXFP4_GROUP, MoeSpec, SituSpec

_E8M0_NAN = 255


def moe_mlp(loader: Loader, hidden_size: int, spec: MoeSpec, situ: SituSpec | None) -> MoeMlp | RoutedMlp:
    """The expert layer of a family: one operation where it is that of Kimi-Linear, else composed."""
    if spec.router == "sigmoid" and situ is None and spec.latent is None and not spec.packed_mxfp4:
        return MoeMlp(loader, hidden_size, spec)
    return RoutedMlp(loader, hidden_size, spec, situ)


class MoeMlp:
    """Sigmoid router and SwiGLU experts as one operation of the kernels."""

    def __init__(self, loader: Loader, hidden_size: int, spec: MoeSpec) -> None:
        self._kernels = loader.kernels
        gate = loader.under("gate")
        router = gate.tensor_fp32("weight", spec.num_experts, hidden_size)
        self._router = loader.pack_linear(router, name="moe.router", role="router")
        experts = [
            tuple(loader.coded(part, "expert") for part in expert)
            for expert in _expert_weights(loader, hidden_size, spec)
        ]
        self._params = MoeParams(
            bias=gate.tensor_fp32("e_score_correction_bias", spec.num_experts),
            experts_per_token=spec.experts_per_token,
            renormalize=spec.renormalize,
            scaling_factor=spec.routed_scaling_factor,
            experts=self._kernels.pack_experts(experts),
        )
        self._shared = _shared(loader, hidden_size, spec, None)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> residual + experts [N, D]; `residual` may be overwritten."""
        ops = self._kernels
        logits = ops.linear(x, self._router)
        shared = None if self._shared is None else self._shared(x)
        return ops.moe(x, logits, self._params, shared=shared, residual=residual)


class RoutedMlp:
    """Any router and activation; experts may work in a latent space and be stored as 4-bit floats.

    With a latent space: down projection, experts, weighted sum, norm of the sum, up projection. The
    router and the shared MLP read the full width.
    """

    def __init__(self, loader: Loader, hidden_size: int, spec: MoeSpec, situ: SituSpec | None) -> None:
        self._kernels = loader.kernels
        self._spec = spec
        pack = loader.pack_linear
        gate = loader.under("gate")
        router = gate.tensor_fp32("weight", spec.num_experts, hidden_size)
        self._router = pack(router, name="moe.router", role="router")
        self._bias: torch.Tensor | None = None
        if spec.router == "sigmoid":
            self._bias = gate.tensor_fp32("e_score_correction_bias", spec.num_experts)
        self._down = self._up = self._latent_norm = None
        width = hidden_size
        if spec.latent is not None:
            width = spec.latent.width
            down = loader.matrix("routed_expert_down_proj", hidden_size, width)
            self._down = pack(down, name="moe.latent")
            self._up = pack(loader.matrix("routed_expert_up_proj", width, hidden_size), name="moe.up")
            if spec.latent.norm_eps is not None:
                self._latent_norm = RmsNorm(loader, "routed_expert_norm", width, spec.latent.norm_eps)
        activation = GluActivation() if situ is None else GluActivation(situ.beta, situ.linear_beta)
        self._experts = _experts(loader, width, spec, activation)
        self._shared = _shared(loader, hidden_size, spec, situ)
        self._shared_gate = None
        if spec.shared_gate and self._shared is not None:
            gate_weight = loader.linear("shared_expert_gate", hidden_size, 1).float()
            self._shared_gate = pack(gate_weight, name="moe.shared_gate", role="gate")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [N, D] -> residual + experts [N, D]; `residual` may be overwritten."""
        ops, dtype = self._kernels, x.dtype
        # First: later norms of the same width may reuse the memory of x.
        shared = None if self._shared is None else self._gated(self._shared(x), x)
        ids, weights = self._route(ops.linear(x, self._router))
        latent = x if self._down is None else ops.linear(x, self._down)
        total = expert_sum(latent, ids, weights, self._experts)
        if self._latent_norm is not None:
            total = self._latent_norm(total.to(dtype))
        if self._up is not None:
            total = ops.linear(total.to(dtype), self._up).float()
        if shared is not None:
            total = total + shared
        return residual + total.to(dtype)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        if self._bias is None:
            return softmax_route(logits, spec.experts_per_token, renormalize=spec.renormalize)
        return route(
            logits,
            self._bias,
            spec.experts_per_token,
            renormalize=spec.renormalize,
            scaling_factor=spec.routed_scaling_factor,
        )

    def _gated(self, shared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """fp32 [N, D]: the shared MLP's output, times its gate if the family has one."""
        if self._shared_gate is None:
            return shared.float()
        gate = self._kernels.linear(x, self._shared_gate)
        return on_full_vectors(torch.sigmoid, gate) * shared.float()


def _shared(loader: Loader, hidden_size: int, spec: MoeSpec, situ: SituSpec | None) -> DenseMlp | None:
    if not spec.shared_intermediate_size:
        return None
    inner = spec.shared_intermediate_size
    return DenseMlp(loader.under(spec.names.shared), hidden_size, inner, "moe.shared", situ=situ)


ExpertWeights = tuple[StoredMatrix, StoredMatrix, StoredMatrix]
"""gate [inner, in], up [inner, in], down [in, inner]."""


class ExpertMlp:
    """One routed expert with packed weights."""

    def __init__(
        self, loader: Loader, gate_up: Matrix, down: Matrix, inner: int, activation: GluActivation
    ) -> None:
        """
        Args:
            gate_up: [2 * inner, in], gate over up; down [in, inner].
        """
        self._kernels = loader.kernels
        self._activation = activation
        self._gate_up = loader.pack_linear(
            gate_up, name="moe.expert.inner", parts=(inner, inner), role="expert"
        )
        self._down = loader.pack_linear(down, name="moe.expert.out", role="expert")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._activation(*self._kernels.linear_parts(x, self._gate_up))
        return self._kernels.linear(inner, self._down)


def _experts(loader: Loader, width: int, spec: MoeSpec, activation: GluActivation) -> list[Expert]:
    if spec.packed_mxfp4:
        return [_mxfp4_expert(loader, width, spec, number, activation) for number in range(spec.num_experts)]
    return [_plain_expert(loader, weights, activation) for weights in _expert_weights(loader, width, spec)]


def _plain_expert(loader: Loader, weights: ExpertWeights, activation: GluActivation) -> Expert:
    gate, up, down = weights
    return ExpertMlp(loader, stacked([gate, up]), down, gate.shape[0], activation)


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
        yield _separate(experts.under(str(number)), width, spec)


def _separate(expert: Loader, width: int, spec: MoeSpec) -> ExpertWeights:
    names, inner = spec.names, spec.expert_intermediate_size
    gate, up = (expert.matrix(name, width, inner) for name in (names.gate, names.up))
    return gate, up, expert.matrix(names.down, inner, width)


def _mxfp4_expert(
    loader: Loader, width: int, spec: MoeSpec, number: int, activation: GluActivation
) -> Expert:
    """Packed if there are scales, else as it is: a checkpoint may leave some experts out."""
    expert = loader.under(f"experts.{number}")
    names, inner = spec.names, spec.expert_intermediate_size
    shapes = ((names.gate, width, inner), (names.up, width, inner), (names.down, inner, width))
    if not any(expert.has(f"{name}.weight_scale") for name, *_ in shapes):
        return _plain_expert(loader, _separate(expert, width, spec), activation)
    gate, up, down = (_mxfp4(expert.under(name), *shape) for name, *shape in shapes)
    return ExpertMlp(loader, stacked([gate, up]), down, inner, activation)


def _mxfp4(loader: Loader, in_features: int, out_features: int) -> Mxfp4Weight:
    packed = loader.bytes("weight_packed", out_features, in_features // 2)
    groups = in_features // MXFP4_GROUP
    scales = loader.bytes("weight_scale", out_features, groups, nan=_E8M0_NAN)
    return Mxfp4Weight(packed, scales, loader.dtype)
