"""Random small checkpoints in published hub layout: config.json and safetensors with hub names."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "model_max_length": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4],
        "num_heads": 3,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """`TINY_CONFIG` with changes; keys of `linear_attn_config` are merged."""
    config = copy.deepcopy(TINY_CONFIG)
    config["linear_attn_config"].update(changes.pop("linear_attn_config", {}))
    config.update(changes)
    return config


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 tensors with the published names and shapes. Gates range from slow to fast decay."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        spread = scale if scale is not None else shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=generator) * spread + mean

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    add("model.embed_tokens.weight", vocab, hidden, scale=1.0)
    add("model.norm.weight", hidden, scale=0.1, mean=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", vocab, hidden)
    for number in range(1, config["num_hidden_layers"] + 1):
        prefix = f"model.layers.{number - 1}."
        add(prefix + "input_layernorm.weight", hidden, scale=0.1, mean=1.0)
        add(prefix + "post_attention_layernorm.weight", hidden, scale=0.1, mean=1.0)
        if number in config["linear_attn_config"]["kda_layers"]:
            _add_kda(add, config, prefix + "self_attn.")
        else:
            _add_mla(add, config, prefix + "self_attn.")
        _add_mlp(add, config, prefix, number - 1)
    return tensors


def _add_kda(add: Any, config: dict[str, Any], prefix: str) -> None:
    linear, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width = heads * dim
    for name in "qkv":
        add(f"{prefix}{name}_proj.weight", width, hidden)
        add(f"{prefix}{name}_conv1d.weight", width, 1, linear["short_conv_kernel_size"], scale=0.4)
    for name in "fg":
        add(f"{prefix}{name}_a_proj.weight", dim, hidden)
        add(f"{prefix}{name}_b_proj.weight", width, dim)
    add(prefix + "b_proj.weight", heads, hidden)
    add(prefix + "A_log", 1, 1, heads, 1, scale=0.8)
    add(prefix + "dt_bias", width, scale=1.5, mean=-2.0)
    add(prefix + "o_norm.weight", dim, scale=0.1, mean=1.0)
    add(prefix + "o_proj.weight", hidden, width)


def _add_mla(add: Any, config: dict[str, Any], prefix: str) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent, query_rank = config["kv_lora_rank"], config["q_lora_rank"]
    if query_rank is None:
        add(prefix + "q_proj.weight", heads * (nope + rope), hidden, scale=2 * hidden**-0.5)
    else:
        add(prefix + "q_a_proj.weight", query_rank, hidden)
        add(prefix + "q_a_layernorm.weight", query_rank, scale=0.1, mean=1.0)
        add(prefix + "q_b_proj.weight", heads * (nope + rope), query_rank, scale=2 * query_rank**-0.5)
    add(prefix + "kv_a_proj_with_mqa.weight", latent + rope, hidden)
    add(prefix + "kv_a_layernorm.weight", latent, scale=0.1, mean=1.0)
    add(prefix + "kv_b_proj.weight", heads * (nope + value), latent)
    add(prefix + "o_proj.weight", hidden, heads * value)


def _add_mlp(add: Any, config: dict[str, Any], prefix: str, index: int) -> None:
    hidden, experts = config["hidden_size"], config["num_experts"]
    routed = experts and index >= config["first_k_dense_replace"] and index % config["moe_layer_freq"] == 0

    def dense(name: str, inner: int) -> None:
        add(f"{name}.gate_proj.weight", inner, hidden)
        add(f"{name}.up_proj.weight", inner, hidden)
        add(f"{name}.down_proj.weight", hidden, inner)

    if not routed:
        dense(prefix + "mlp", config["intermediate_size"])
        return
    moe, inner = prefix + "block_sparse_moe.", config["moe_intermediate_size"]
    add(moe + "gate.weight", experts, hidden)
    add(moe + "gate.e_score_correction_bias", experts, scale=0.1)
    for expert in range(experts):
        add(f"{moe}experts.{expert}.w1.weight", inner, hidden)
        add(f"{moe}experts.{expert}.w3.weight", inner, hidden)
        add(f"{moe}experts.{expert}.w2.weight", hidden, inner)
    if config["num_shared_experts"]:
        dense(moe + "shared_experts", inner * config["num_shared_experts"])


FP32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias")
"""Tensors the published bf16 checkpoints keep in fp32."""


def write_checkpoint(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    num_shards: int = 1,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a checkpoint and returns its directory.

    `config["dtype"]` decides how the weights are stored. `num_shards` > 1 writes shards with an index.
    """
    config = config or tiny_config()
    tensors = tensors if tensors is not None else random_tensors(config, seed)
    if config.get("text_config", config).get("dtype") == "bfloat16":
        tensors = {
            name: tensor
            if name.endswith(FP32_SUFFIXES) or not tensor.is_floating_point()
            else tensor.bfloat16()
            for name, tensor in tensors.items()
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        return directory
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: tensors[name] for name in part}, directory / file_name, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
