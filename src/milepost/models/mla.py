"""Multi-head latent attention without positions, absorbed, over paged latents."""

from __future__ import annotations

import torch

from milepost.config import EXACT
from milepost.kernels.index import AttentionIndex
from milepost.kernels.rowwise import on_full_vectors
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, RmsNorm
from milepost.models.layout import LATENT_FIELD
from milepost.models.specs import MlaSpec


class MlaLayer:
    """Mixer of one layer. Caches per token the normed latent and the shared key part.

    The "rope" slice exists but is never rotated (`mla_use_nope`). In the default exactness mode keys and
    values are never expanded: queries go through the key expansion, outputs through the value expansion.
    Prefill and decode therefore compute the same thing. Other modes expand where the index says so.
    """

    def __init__(self, loader: Loader, layer: int, hidden_size: int, spec: MlaSpec) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        self._scale = spec.qk_head_dim**-0.5
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
        self._inputs = pack(loader.stacked(names, hidden_size, parts), name="mla.inputs", parts=parts)
        self._query_norm: RmsNorm | None = None
        if rank is not None:
            self._query_norm = RmsNorm(loader, "q_a_layernorm", rank, spec.latent_norm_eps)
            self._query = pack(loader.linear("q_b_proj", rank, query_width), name="mla.query")
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
        self._out = pack(loader.linear("o_proj", heads * spec.v_head_dim, hidden_size), name="mla.out")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, cache: CacheFields, index: AttentionIndex
    ) -> torch.Tensor:
        """x [N, D] after the input norm -> residual + output [N, D]; stores the rows' latents in their pages.

        `residual` may be overwritten.
        """
        ops = self._kernels
        pages = cache[self._layer, LATENT_FIELD]
        query, latent, *gates = ops.linear_parts(x, self._inputs)
        ops.store_latents(latent, self._latent_norm, self._latent_norm_eps, pages, index)
        if self._query_norm is not None:
            query = ops.linear(self._query_norm(query), self._query)
        values = ops.attend_latents(
            query, self._absorb_key, self._absorb_value, pages, index, self._scale, self._expand_key
        )
        for gate in gates:
            values = (values.float() * on_full_vectors(torch.sigmoid, gate.float())).to(values.dtype)
        return ops.linear(values, self._out, residual=residual)

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        """Stores the rows of x [N, D], after the input norm, in their pages, and computes nothing else."""
        _, latent, *_ = self._kernels.linear_parts(x, self._inputs)
        pages = cache[self._layer, LATENT_FIELD]
        self._kernels.store_latents(latent, self._latent_norm, self._latent_norm_eps, pages, index)
