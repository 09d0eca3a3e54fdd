"""Grouped-query attention layer; per-head norms, rotary scaling and the output gate are optional."""

from __future__ import annotations

import torch

from milepost.kernels.index import AttentionIndex
from milepost.kernels.reference_gqa import GqaInputs, GqaParams, inverse_frequencies
from milepost.models import rope
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, place_of_sum
from milepost.models.layout import KEY_VALUE_FIELD
from milepost.models.specs import GqaSpec

NO_NORM_EPS = 2.0**80
NO_NORM_WEIGHT = 2.0**40
"""A norm that leaves its input as it is: x / sqrt(mean(x^2) + eps) * sqrt(eps). In fp32 no mean below 2**55
shows beside this eps, and both factors are powers of two."""


class GqaLayer:
    """Mixer of one layer. Caches per token rotated keys and values.

    Hub names: q_proj (per head query, then gate if there is one), k_proj, v_proj, q_norm, k_norm, o_proj.
    """

    def __init__(
        self,
        loader: Loader,
        layer: int,
        hidden_size: int,
        spec: GqaSpec,
        norm_offset: float,
        *,
        input_size: int | None = None,
        name: str = "gqa",
    ) -> None:
        """
        Args:
            input_size: values per row that the projections read; None = `hidden_size`.
            name: layers with the same name and shapes share result buffers.
        """
        self._kernels = loader.kernels
        self._layer = layer
        width = spec.num_heads * spec.head_dim
        parts = ((1 + spec.output_gate) * width, spec.kv_width, spec.kv_width)
        inputs = loader.stacked(("q_proj", "k_proj", "v_proj"), input_size or hidden_size, parts)
        self._inputs = loader.pack_linear(inputs, name=f"{name}.inputs", parts=parts)
        self._out = loader.pack_linear(loader.matrix("o_proj", width, hidden_size), name=f"{name}.out")
        self._params = _params(loader, spec, norm_offset)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: CacheFields,
        index: AttentionIndex,
        *,
        keeps_residual: bool = False,
    ) -> torch.Tensor:
        """x [N, input size] after the input norm -> residual + output [N, D]; stores the rows in their pages.

        `residual` (None = zeros) may be overwritten unless it is to be kept.
        """
        query, key, value = self._kernels.linear_parts(x, self._inputs)
        pages = cache[self._layer, KEY_VALUE_FIELD]
        mixed = self._kernels.gqa_mixer(GqaInputs(query, key, value), self._params, pages, index)
        return self._kernels.linear(
            mixed, self._out, residual=residual, place=place_of_sum(residual, keeps_residual)
        )

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        """Stores the rows of x, after the input norm, in their pages, and computes nothing else."""
        _, key, value = self._kernels.linear_parts(x, self._inputs)
        pages = cache[self._layer, KEY_VALUE_FIELD]
        self._kernels.store_keys_values(key, value, self._params, pages, index)


def _params(loader: Loader, spec: GqaSpec, norm_offset: float) -> GqaParams:
    """Norms, or what stands in for them, and frequencies; what multiplies rotated entries of queries and keys
    is taken into the queries' norm."""
    has_norms = loader.has("q_norm.weight") if spec.head_norms is None else spec.head_norms
    if has_norms:
        query_norm = loader.tensor_fp32("q_norm.weight", spec.head_dim) + norm_offset
        key_norm = loader.tensor_fp32("k_norm.weight", spec.head_dim) + norm_offset
    else:
        query_norm = torch.full((spec.head_dim,), NO_NORM_WEIGHT)
        key_norm = query_norm.clone()
    if spec.rope is None:
        frequencies = inverse_frequencies(spec.rotary_dim, spec.rope_theta)
    else:
        frequencies = torch.tensor(rope.inverse_frequencies(spec.rope), dtype=torch.float32)
        query_norm[: spec.rope.width] *= spec.rope.amplitude**2 * spec.rope.score_factor
    return GqaParams(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        query_norm=query_norm,
        key_norm=key_norm,
        norm_eps=spec.norm_eps if has_norms else NO_NORM_EPS,
        inverse_frequencies=frequencies,
        has_gate=spec.output_gate,
    )
