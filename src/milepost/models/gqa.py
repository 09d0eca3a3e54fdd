"""Grouped-query attention layer with per-head norms, partial rotary positions and an output gate."""

from __future__ import annotations

import torch

from milepost.kernels.index import AttentionIndex
from milepost.kernels.reference import rms_norm, store_rows
from milepost.kernels.reference_gqa import (
    GqaInputs,
    GqaParams,
    inverse_frequencies,
    rotate,
    row_positions,
)
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader
from milepost.models.layout import KEY_VALUE_FIELD
from milepost.models.specs import GqaSpec


class GqaLayer:
    """Mixer of one layer. Caches per token rotated keys and values.

    Hub names: q_proj (per head query, then gate), k_proj, v_proj, q_norm, k_norm, o_proj.
    """

    def __init__(
        self, loader: Loader, layer: int, hidden_size: int, spec: GqaSpec, norm_offset: float
    ) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        width = spec.num_heads * spec.head_dim
        parts = (2 * width, spec.kv_width, spec.kv_width)
        inputs = loader.stacked(("q_proj", "k_proj", "v_proj"), hidden_size, parts)
        self._inputs = loader.pack_linear(inputs, name="gqa.inputs", parts=parts)
        self._out = loader.pack_linear(loader.linear("o_proj", width, hidden_size), name="gqa.out")
        self._params = GqaParams(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            query_norm=loader.tensor_fp32("q_norm.weight", spec.head_dim) + norm_offset,
            key_norm=loader.tensor_fp32("k_norm.weight", spec.head_dim) + norm_offset,
            norm_eps=spec.norm_eps,
            inverse_frequencies=inverse_frequencies(spec.rotary_dim, spec.rope_theta),
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, cache: CacheFields, index: AttentionIndex
    ) -> torch.Tensor:
        """x [N, D] after the input norm -> residual + output [N, D]; stores the rows in their pages.

        `residual` may be overwritten.
        """
        inputs = GqaInputs(*self._kernels.linear_parts(x, self._inputs))
        pages = cache[self._layer, KEY_VALUE_FIELD]
        mixed = self._kernels.gqa_mixer(inputs, self._params, pages, index)
        return self._kernels.linear(mixed, self._out, residual=residual)

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        """Stores the rows of x [N, D], after the input norm, in their pages, and computes nothing else."""
        params = self._params
        _, key, value = self._kernels.linear_parts(x, self._inputs)
        shape = (x.shape[0], params.num_kv_heads, params.head_dim)
        angles = row_positions(index).float().unsqueeze(1) * params.inverse_frequencies
        key = rotate(rms_norm(key.reshape(shape).float(), params.key_norm, params.norm_eps), angles)
        rows = torch.cat([value.reshape(shape).float(), key], dim=-1)
        store_rows(cache[self._layer, KEY_VALUE_FIELD], rows.reshape(x.shape[0], -1), index)
