"""Multi-head latent attention without positions, absorbed, over paged latents."""

from __future__ import annotations

import torch

from milepost.kernels.index import AttentionIndex
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, RmsNorm
from milepost.models.layout import LATENT_FIELD
from milepost.models.specs import MlaSpec


class MlaLayer:
    """Mixer of one layer. Caches per token the normed latent and the shared key part.

    The "rope" slice exists but is never rotated (`mla_use_nope`). Keys and values are never
    expanded: queries go through the key expansion, outputs through the value expansion. Prefill and
    decode therefore compute the same thing.
    """

    def __init__(self, loader: Loader, layer: int, hidden_size: int, spec: MlaSpec) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        self._spec = spec
        heads = spec.num_heads
        query_width = heads * spec.qk_head_dim
        self._query_norm: RmsNorm | None = None
        if spec.q_lora_rank is None:
            self._query = loader.linear("q_proj", hidden_size, query_width)
        else:
            self._query_in = loader.linear("q_a_proj", hidden_size, spec.q_lora_rank)
            self._query_norm = RmsNorm(loader, "q_a_layernorm", spec.q_lora_rank, spec.latent_norm_eps)
            self._query = loader.linear("q_b_proj", spec.q_lora_rank, query_width)
        self._latent = loader.linear("kv_a_proj_with_mqa", hidden_size, spec.latent_width)
        self._latent_norm = RmsNorm(loader, "kv_a_layernorm", spec.kv_lora_rank, spec.latent_norm_eps)
        expand = loader.linear(
            "kv_b_proj", spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        )
        per_head = expand.view(heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
        key, value = per_head[:, : spec.qk_nope_head_dim], per_head[:, spec.qk_nope_head_dim :]
        # fp32 [H, nope, latent] and [H, latent, v]: widened once instead of in every step.
        self._absorb_key = key.float().contiguous()
        self._absorb_value = value.float().transpose(1, 2).contiguous()
        self._out = loader.linear("o_proj", heads * spec.v_head_dim, hidden_size)

    def __call__(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> torch.Tensor:
        """x [N, D] after the input norm -> [N, D]; stores the rows' latents in their pages."""
        ops, spec = self._kernels, self._spec
        num_rows = x.shape[0]
        pages = cache[self._layer, LATENT_FIELD]
        compressed = ops.linear(x, self._latent)
        latent, shared_key = compressed[:, : spec.kv_lora_rank], compressed[:, spec.kv_lora_rank :]
        ops.store_rows(pages, torch.cat([self._latent_norm(latent), shared_key], dim=-1), index)

        query_in = x if self._query_norm is None else self._query_norm(ops.linear(x, self._query_in))
        query = ops.linear(query_in, self._query).view(num_rows, spec.num_heads, spec.qk_head_dim)
        content, shared = query[..., : spec.qk_nope_head_dim], query[..., spec.qk_nope_head_dim :]
        absorbed = torch.cat([ops.per_head_linear(content, self._absorb_key), shared.float()], dim=-1)
        mixed = ops.latent_attention(
            absorbed, pages, index, value_width=spec.kv_lora_rank, scale=spec.qk_head_dim**-0.5
        )
        values = ops.per_head_linear(mixed, self._absorb_value).to(x.dtype)
        return ops.linear(values.reshape(num_rows, -1), self._out)
