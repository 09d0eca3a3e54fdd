"""Multi-head latent attention, absorbed, over paged latents; with rotary positions where a layer has any."""

from __future__ import annotations

import torch

from milepost.config import EXACT
from milepost.kernels.api import Kernels
from milepost.kernels.index import AttentionIndex
from milepost.models import rope
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, RmsNorm, place_of_sum
from milepost.models.layout import LATENT_FIELD
from milepost.models.rope import RopeSpec
from milepost.models.specs import MlaSpec


class MlaLayer:
    """Mixer of one layer. Caches per token the normed latent and the shared key part.

    The "rope" slice of decoders exists but is never rotated (`mla_use_nope`); layers with positions rotate it
    before it is stored, and its part of the queries. In the default exactness mode keys and values are
    never expanded: queries go through the key expansion, outputs through the value expansion.
    Prefill and decode therefore compute the same thing. Other modes expand where the index says so.
    """

    def __init__(
        self,
        loader: Loader,
        layer: int,
        hidden_size: int,
        spec: MlaSpec,
        *,
        input_size: int | None = None,
        name: str = "mla",
    ) -> None:
        """
        Args:
            input_size: values per row that the projections read; None = `hidden_size`.
            name: layers with the same name and shapes share result buffers.
        """
        self._kernels = loader.kernels
        self._layer = layer
        self._scale = spec.qk_head_dim**-0.5
        self._rotation: _Rotation | None = None
        if spec.rope is not None:
            self._scale *= spec.rope.score_factor
            self._rotation = _Rotation(loader.kernels, spec.rope)
        self._num_heads = spec.num_heads
        pack = loader.pack_linear
        heads, query_width, latent_width = (
            spec.num_heads,
            spec.num_heads * spec.qk_head_dim,
            spec.latent_width,
        )
        # q_proj, or q_a_proj if queries are low-rank, reads the same input as the latent and the gate.
        rank = spec.q_lora_rank
        names: tuple[str, ...] = ("q_proj" if rank is None else "q_a_proj", "kv_a_proj_with_mqa")
        parts: tuple[int, ...] = (query_width if rank is None else rank, latent_width)
        if spec.output_gate:
            names, parts = (*names, "g_proj"), (*parts, heads * spec.v_head_dim)
        self._inputs = pack(
            loader.stacked(names, input_size or hidden_size, parts), name=f"{name}.inputs", parts=parts
        )
        self._query_norm: RmsNorm | None = None
        if rank is not None:
            self._query_norm = RmsNorm(loader, "q_a_layernorm", rank, spec.latent_norm_eps)
            self._query = pack(loader.matrix("q_b_proj", rank, query_width), name=f"{name}.query")
        self._latent_norm = loader.tensor_fp32("kv_a_layernorm.weight", spec.kv_lora_rank)
        self._latent_norm_eps = spec.latent_norm_eps
        expand = loader.linear(
            "kv_b_proj", spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        )
        per_head = expand.view(heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
        key, value = per_head[:, : spec.qk_nope_head_dim], per_head[:, spec.qk_nope_head_dim :]
        # Role "absorbed": quantisation leaves them as they are.
        self._absorb_key = self._kernels.pack_heads(key.transpose(1, 2))
        self._absorb_value = self._kernels.pack_heads(value)
        self._expand_key = None if self._kernels.exactness == EXACT else self._kernels.pack_heads(key)
        self._out = pack(loader.matrix("o_proj", heads * spec.v_head_dim, hidden_size), name=f"{name}.out")

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: CacheFields,
        index: AttentionIndex,
        *,
        keeps_residual: bool = False,
    ) -> torch.Tensor:
        """x [N, input size] after the input norm -> residual + output [N, D]; stores the rows' latents.

        `residual` (None = zeros) may be overwritten unless it is to be kept.
        """
        ops = self._kernels
        pages = cache[self._layer, LATENT_FIELD]
        query, latent, *gates = ops.linear_parts(x, self._inputs)
        if self._rotation is not None:
            latent = self._rotation.of_latents(latent, index)
        ops.store_latents(latent, self._latent_norm, self._latent_norm_eps, pages, index)
        if self._query_norm is not None:
            query = ops.linear(self._query_norm(query), self._query)
        if self._rotation is not None:
            query = self._rotation.of_queries(query, self._num_heads, index)
        values = ops.attend_latents(
            query, self._absorb_key, self._absorb_value, pages, index, self._scale, self._expand_key
        )
        for gate in gates:
            values = ops.gate_values(values, gate)
        return ops.linear(values, self._out, residual=residual, place=place_of_sum(residual, keeps_residual))

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        """Stores the rows of x, after the input norm, in their pages, and computes nothing else."""
        _, latent, *_ = self._kernels.linear_parts(x, self._inputs)
        if self._rotation is not None:
            latent = self._rotation.of_latents(latent, index)
        pages = cache[self._layer, LATENT_FIELD]
        self._kernels.store_latents(latent, self._latent_norm, self._latent_norm_eps, pages, index)


class _Rotation:
    """Rotary positions of the last entries of a row."""

    def __init__(self, kernels: Kernels, spec: RopeSpec) -> None:
        self._kernels = kernels
        self._spec = spec
        self._frequencies = torch.tensor(rope.inverse_frequencies(spec), dtype=torch.float32)

    def of_latents(self, latent: torch.Tensor, index: AttentionIndex) -> torch.Tensor:
        """[N, latent + shared key part], the shared part rotated; valid until the next call."""
        return self._rotated(latent, 1, 1.0, index)

    def of_queries(self, query: torch.Tensor, num_heads: int, index: AttentionIndex) -> torch.Tensor:
        """[N, heads * (nope + rope)], the last part of every head rotated; valid until the next call. Takes
        what keys are multiplied by as well."""
        return self._rotated(query, num_heads, self._spec.amplitude**2, index)

    def _rotated(
        self, x: torch.Tensor, num_heads: int, amplitude: float, index: AttentionIndex
    ) -> torch.Tensor:
        return self._kernels.rotate_heads(
            x,
            num_heads,
            self._frequencies,
            index,
            amplitude=amplitude,
            is_interleaved=self._spec.is_interleaved,
        )
