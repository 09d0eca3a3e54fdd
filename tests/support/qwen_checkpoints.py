"""Random small Qwen3-Next and Qwen3.5 checkpoints in published hub layout."""

from __future__ import annotations

import copy
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_OLD_ROPE: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_NEW_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
}


def next_config(**changes: Any) -> dict[str, Any]:
    """Qwen3-Next; full attention in every fourth layer, experts everywhere."""
    return {
        **_COMMON,
        **_EXPERTS,
        **_OLD_ROPE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 96,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **changes,
    }


def dense_config(**changes: Any) -> dict[str, Any]:
    """Qwen3.5 without experts, the text decoder alone."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
    return {
        **_COMMON,
        **copy.deepcopy(_NEW_ROPE),
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": 96,
        "layer_types": kinds,
        "attn_output_gate": True,
        **changes,
    }


def moe_config(**changes: Any) -> dict[str, Any]:
    """Qwen3.5 with experts, wrapped as published: the decoder is under `text_config`."""
    text = {
        **_COMMON,
        **_EXPERTS,
        **copy.deepcopy(_NEW_ROPE),
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 4,
        "attn_output_gate": True,
        **changes,
    }
    return wrapped(text, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")


def wrapped(text: dict[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    """A multimodal config around a text config."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 7,
        "vision_config": {"model_type": f"{model_type}_vision", "depth": 2},
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 tensors with the published names and shapes; gates range from slow to fast decay."""
    text = config.get("text_config", config)
    prefix = "model.language_model." if "text_config" in config else "model."
    maker = _Maker(text, interleaved=config["model_type"] == "qwen3_next", seed=seed)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    maker.add(prefix + "embed_tokens.weight", vocab, hidden, scale=1.0)
    maker.norm(prefix + "norm", hidden)
    if not text["tie_word_embeddings"]:
        maker.add("lm_head.weight", vocab, hidden)
    for index in range(text["num_hidden_layers"]):
        maker.layer(f"{prefix}layers.{index}.", index)
    return maker.tensors


class _Maker:
    def __init__(self, text: dict[str, Any], *, interleaved: bool, seed: int) -> None:
        self._text = text
        self._interleaved = interleaved
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        spread = scale if scale is not None else shape[-1] ** -0.5
        self.tensors[name] = torch.randn(shape, generator=self._generator) * spread + mean

    def norm(self, name: str, width: int) -> None:
        """Stored zero-centred."""
        self.add(f"{name}.weight", width, scale=0.1)

    def layer(self, prefix: str, index: int) -> None:
        text = self._text
        self.norm(prefix + "input_layernorm", text["hidden_size"])
        self.norm(prefix + "post_attention_layernorm", text["hidden_size"])
        if "layer_types" in text:
            full = text["layer_types"][index] == "full_attention"
        else:
            full = (index + 1) % text["full_attention_interval"] == 0
        if full:
            self._attention(prefix + "self_attn.")
        else:
            self._linear_attention(prefix + "linear_attn.")
        routed = text.get("num_experts", 0) and index not in text.get("mlp_only_layers", [])
        if routed and (index + 1) % text.get("decoder_sparse_step", 1) == 0:
            self._experts(prefix + "mlp.")
        else:
            self._mlp(prefix + "mlp", text["intermediate_size"])

    def _attention(self, prefix: str) -> None:
        text, hidden, dim = self._text, self._text["hidden_size"], self._text["head_dim"]
        heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        self.add(prefix + "q_proj.weight", 2 * heads * dim, hidden, scale=2 * hidden**-0.5)
        self.add(prefix + "k_proj.weight", kv_heads * dim, hidden)
        self.add(prefix + "v_proj.weight", kv_heads * dim, hidden)
        self.norm(prefix + "q_norm", dim)
        self.norm(prefix + "k_norm", dim)
        self.add(prefix + "o_proj.weight", hidden, heads * dim)

    def _linear_attention(self, prefix: str) -> None:
        text, hidden = self._text, self._text["hidden_size"]
        heads, value_dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = heads * value_dim
        if self._interleaved:
            self.add(prefix + "in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
            self.add(prefix + "in_proj_ba.weight", 2 * heads, hidden)
        else:
            self.add(prefix + "in_proj_qkv.weight", 2 * keys + values, hidden)
            self.add(prefix + "in_proj_z.weight", values, hidden)
            self.add(prefix + "in_proj_b.weight", heads, hidden)
            self.add(prefix + "in_proj_a.weight", heads, hidden)
        channels = 2 * keys + values
        self.add(prefix + "conv1d.weight", channels, 1, text["linear_conv_kernel_dim"], scale=0.4)
        self.add(prefix + "A_log", heads, scale=0.8)
        self.add(prefix + "dt_bias", heads, scale=1.5, mean=-2.0)
        self.add(prefix + "norm.weight", value_dim, scale=0.1, mean=1.0)
        self.add(prefix + "out_proj.weight", hidden, values)

    def _mlp(self, name: str, inner: int) -> None:
        hidden = self._text["hidden_size"]
        self.add(f"{name}.gate_proj.weight", inner, hidden)
        self.add(f"{name}.up_proj.weight", inner, hidden)
        self.add(f"{name}.down_proj.weight", hidden, inner)

    def _experts(self, prefix: str) -> None:
        text, hidden = self._text, self._text["hidden_size"]
        experts, inner = text["num_experts"], text["moe_intermediate_size"]
        self.add(prefix + "gate.weight", experts, hidden)
        if self._interleaved:  # Qwen3-Next is published with separate experts, Qwen3.5 stacked.
            for expert in range(experts):
                self._mlp(f"{prefix}experts.{expert}", inner)
        else:
            self.add(prefix + "experts.gate_up_proj", experts, 2 * inner, hidden)
            self.add(prefix + "experts.down_proj", experts, hidden, inner)
        self._mlp(prefix + "shared_expert", text["shared_expert_intermediate_size"])
        self.add(prefix + "shared_expert_gate.weight", 1, hidden)
