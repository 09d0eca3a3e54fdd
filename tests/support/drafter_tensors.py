"""Random tensors of drafters' checkpoints."""

from __future__ import annotations

from typing import Any

import torch


class RandomTensors:
    """Draws tensors one after the other, by name.

    Args:
        norm_spread: deviation of norm weights around 1.
    """

    def __init__(self, seed: int, norm_spread: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._norm_spread = norm_spread
        self.made: dict[str, torch.Tensor] = {}

    def linear(
        self, name: str, width: int, width_in: int, scale: float = 1.0, *, has_bias: bool = False
    ) -> None:
        weight = torch.randn(width, width_in, generator=self._generator) * scale * width_in**-0.5
        self.made[f"{name}.weight"] = weight
        if has_bias:
            self.made[f"{name}.bias"] = torch.randn(width, generator=self._generator) * 0.3

    def norm(self, name: str, width: int) -> None:
        drawn = torch.randn(width, generator=self._generator) * self._norm_spread
        self.made[f"{name}.weight"] = drawn + 1.0

    def attention(
        self, at: str, layer: dict[str, Any], width_in: int, query_scale: float = 1.0, *, has_norms: bool
    ) -> None:
        """Of a layer whose config is `layer`, latent if it says so.

        Args:
            width_in: of what queries, keys and values are made from.
            has_norms: grouped attention norms queries and keys.
        """
        hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
        if "kv_lora_rank" in layer:
            self._latent(at, layer, width_in, query_scale)
            return
        dim = layer["head_dim"]
        self.linear(at + "q_proj", heads * dim, width_in, query_scale)
        for part in ("k_proj", "v_proj"):
            self.linear(at + part, layer["num_key_value_heads"] * dim, width_in)
        self.linear(at + "o_proj", hidden, heads * dim)
        if has_norms:
            self.norm(at + "q_norm", dim)
            self.norm(at + "k_norm", dim)

    def _latent(self, at: str, layer: dict[str, Any], width_in: int, query_scale: float) -> None:
        heads, latent = layer["num_attention_heads"], layer["kv_lora_rank"]
        query = heads * (layer["qk_nope_head_dim"] + layer["qk_rope_head_dim"])
        if layer["q_lora_rank"] is None:
            self.linear(at + "q_proj", query, width_in, query_scale)
        else:
            self.linear(at + "q_a_proj", layer["q_lora_rank"], width_in)
            self.norm(at + "q_a_layernorm", layer["q_lora_rank"])
            self.linear(at + "q_b_proj", query, layer["q_lora_rank"], query_scale)
        self.linear(at + "kv_a_proj_with_mqa", latent + layer["qk_rope_head_dim"], width_in)
        self.norm(at + "kv_a_layernorm", latent)
        self.linear(at + "kv_b_proj", heads * (layer["qk_nope_head_dim"] + layer["v_head_dim"]), latent)
        self.linear(at + "o_proj", layer["hidden_size"], heads * layer["v_head_dim"])
