"""What a native library before `MIXTURES_REVISION` has no call for, composed of its products and torch.

Roundings are those which such a library has always had: states stored under its name stay valid. Only of
experts with exactly equal scores others may be chosen than before.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from milepost.kernels import reference, reference_layers
from milepost.kernels.arguments import MoeParams
from milepost.kernels.index import AttentionIndex
from milepost.kernels.reference_coded import Matrix, stacked
from milepost.kernels.reference_experts import GluActivation, expert_sum
from milepost.kernels.reference_gqa import GqaInputs, GqaParams

REFERENCE_OPERATIONS = {
    name: getattr(reference_layers, name)
    for name in ("add_shared", "gate_values", "mix_sources", "rotate_heads")
}
"""Which of them torch serves alone."""
COMPOSED_OPERATIONS = ("gqa_mixer", "linear_swiglu", "moe", "store_keys_values")
"""Which of them are composed where they go beyond what there was."""
OPEN_GATE = 100.0
"""Its sigmoid is 1 in fp32; stands in where a layer has no output gate."""


class Products(Protocol):
    """The operations they are composed of."""

    def pack_linear(self, weight: Matrix, *, name: str, parts: tuple[int, ...] = ()) -> Any: ...

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor: ...

    def linear_parts(self, x: torch.Tensor, weight: Any) -> tuple[torch.Tensor, ...]: ...

    def gqa_mixer(
        self, inputs: GqaInputs, params: GqaParams, pages: torch.Tensor, index: AttentionIndex
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ComposedGlu:
    """Gate and up in two halves of one product, and what joins them."""

    gate_up: Any
    activation: GluActivation

    def run(self, ops: Products, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, inner]."""
        return self.activation(*ops.linear_parts(x, self.gate_up))


def pack_glu(ops: Products, gate_up: Matrix, name: str, activation: GluActivation) -> ComposedGlu:
    """Of [2 * inner, in], gate over up."""
    inner = gate_up.shape[0] // 2
    return ComposedGlu(ops.pack_linear(gate_up, name=name, parts=(inner, inner)), activation)


@dataclass(frozen=True, slots=True)
class ComposedExpert:
    """One expert."""

    ops: Products
    glu: ComposedGlu
    down: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(self.glu.run(self.ops, x), self.down)


@dataclass(frozen=True, slots=True)
class ComposedExperts:
    """Experts that are called one by one."""

    experts: tuple[ComposedExpert, ...]


def pack_expert(
    ops: Products, gate: Matrix, up: Matrix, down: Matrix, activation: GluActivation
) -> ComposedExpert:
    """Of gate and up [inner, in], down [in, inner]."""
    glu = pack_glu(ops, stacked([gate, up]), "moe.expert.inner", activation)
    return ComposedExpert(ops, glu, ops.pack_linear(down, name="moe.expert.out"))


def moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    params: MoeParams,
    *,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference_layers.moe` with `ComposedExperts`."""
    experts: ComposedExperts = params.experts
    total = expert_sum(x, *reference_layers.routed(logits, params), experts.experts)
    return reference.add_shared(total, shared, shared_gate, residual, x.dtype)


def with_open_gate(inputs: GqaInputs, params: GqaParams) -> GqaInputs:
    """The same with a gate that lets everything through behind the query of every head."""
    query = inputs.query_gate
    per_head = query.new_full((query.shape[0], params.num_heads, 2, params.head_dim), OPEN_GATE)
    per_head[:, :, 0] = query.reshape(-1, params.num_heads, params.head_dim)
    return inputs._replace(query_gate=per_head.flatten(1))


def store_keys_values(
    ops: Products,
    key: torch.Tensor,
    value: torch.Tensor,
    params: GqaParams,
    pages: torch.Tensor,
    index: AttentionIndex,
) -> None:
    """A mixer's call, so that attention over the context comes with it; nobody reads what becomes of the
    queries."""
    fewest = dataclasses.replace(
        params, num_heads=params.num_kv_heads, query_norm=params.key_norm, has_gate=True
    )
    unread = value.new_zeros(value.shape[0], 2 * value.shape[1])
    ops.gqa_mixer(GqaInputs(unread, key, value), fewest, pages, index)
