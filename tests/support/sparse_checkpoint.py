"""Checkpoints of any size whose files hold headers only: the data is a hole that takes no disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SHARD_BYTES = 5_000_000_000
_ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""


def kimi_linear_shapes(config: dict[str, Any]) -> Shapes:
    """Published names, dtypes and shapes of a Kimi-Linear checkpoint."""
    linear, hidden = config["linear_attn_config"], config["hidden_size"]
    width = linear["num_heads"] * linear["head_dim"]
    heads, nope, rope = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    latent, value = config["kv_lora_rank"], config["v_head_dim"]
    shapes: Shapes = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        shapes[name] = (dtype, shape)

    def mlp(prefix: str, names: tuple[str, str, str], inner: int) -> None:
        gate, up, down = names
        add(f"{prefix}.{gate}.weight", inner, hidden)
        add(f"{prefix}.{up}.weight", inner, hidden)
        add(f"{prefix}.{down}.weight", hidden, inner)

    published = ("gate_proj", "up_proj", "down_proj")
    for name in ("model.embed_tokens", "lm_head"):
        add(f"{name}.weight", config["vocab_size"], hidden)
    add("model.norm.weight", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        attention = layer + "self_attn."
        add(layer + "input_layernorm.weight", hidden)
        add(layer + "post_attention_layernorm.weight", hidden)
        if index + 1 in linear["kda_layers"]:
            for name in "qkv":
                add(f"{attention}{name}_proj.weight", width, hidden)
                add(f"{attention}{name}_conv1d.weight", width, 1, linear["short_conv_kernel_size"])
            for name in "fg":
                add(f"{attention}{name}_a_proj.weight", linear["head_dim"], hidden)
                add(f"{attention}{name}_b_proj.weight", width, linear["head_dim"])
            add(attention + "A_log", 1, 1, linear["num_heads"], 1, dtype="F32")
            add(attention + "dt_bias", width, dtype="F32")
            add(attention + "b_proj.weight", linear["num_heads"], hidden)
            add(attention + "o_norm.weight", linear["head_dim"])
            add(attention + "o_proj.weight", hidden, width)
        else:
            add(attention + "q_proj.weight", heads * (nope + rope), hidden)
            add(attention + "kv_a_proj_with_mqa.weight", latent + rope, hidden)
            add(attention + "kv_a_layernorm.weight", latent)
            add(attention + "kv_b_proj.weight", heads * (nope + value), latent)
            add(attention + "o_proj.weight", hidden, heads * value)
        if index < config["first_k_dense_replace"]:
            mlp(layer + "mlp", published, config["intermediate_size"])
            continue
        moe, inner = layer + "block_sparse_moe.", config["moe_intermediate_size"]
        add(moe + "gate.weight", config["num_experts"], hidden)
        add(moe + "gate.e_score_correction_bias", config["num_experts"], dtype="F32")
        for expert in range(config["num_experts"]):
            mlp(f"{moe}experts.{expert}", ("w1", "w3", "w2"), inner)
        mlp(moe + "shared_experts", published, inner * config["num_shared_experts"])
    return shapes


def write_sparse(directory: Path, config: dict[str, Any], shapes: Shapes) -> int:
    """Shards of about 5 GB with an index; returns the bytes of all tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shards: list[Shapes] = [{}]
    filled = total = 0
    for name, (dtype, shape) in shapes.items():
        num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if filled and filled + num_bytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += num_bytes
        total += num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, shapes: Shapes) -> None:
    header = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)
