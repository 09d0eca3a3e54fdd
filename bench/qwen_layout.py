"""Random Qwen3.5 text checkpoints in the published layout; `bench/make_model.py` writes them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ATTENTION_EVERY = 4
HEAD_DIM = 128
ROTATED_SHARE = 0.25
CONV_KERNEL = 4

Add = Callable[..., None]
"""Adds a tensor: `name`, `*shape`, and `scale` and `mean` of its values."""


def config(options: argparse.Namespace) -> dict[str, Any]:
    """config.json: three Gated DeltaNet layers, then one with grouped-query attention, and so on."""
    kinds = [
        "full_attention" if number % ATTENTION_EVERY == 0 else "linear_attention"
        for number in range(1, options.layers + 1)
    ]
    rotated = int(HEAD_DIM * ROTATED_SHARE)
    sections = [rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": options.dtype,
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "layer_types": kinds,
        "full_attention_interval": ATTENTION_EVERY,
        "num_attention_heads": options.attention_heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": options.linear_key_heads,
        "linear_num_value_heads": options.linear_value_heads,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": ROTATED_SHARE,
            "mrope_interleaved": True,
            "mrope_section": sections,
        },
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 7,
    }


def add_mixer(add: Add, prefix: str, values: dict[str, Any], number: int) -> None:
    """Attention or Gated DeltaNet of layer `number`, counted from 1; `prefix` ends at the layer."""
    hidden = values["hidden_size"]
    if values["layer_types"][number - 1] == "full_attention":
        prefix += "self_attn."
        heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
        # Queries and their output gates share a matrix.
        add(f"{prefix}q_proj.weight", 2 * heads * HEAD_DIM, hidden)
        add(f"{prefix}k_proj.weight", kv_heads * HEAD_DIM, hidden)
        add(f"{prefix}v_proj.weight", kv_heads * HEAD_DIM, hidden)
        add(f"{prefix}q_norm.weight", HEAD_DIM, scale=0.1)
        add(f"{prefix}k_norm.weight", HEAD_DIM, scale=0.1)
        add(f"{prefix}o_proj.weight", hidden, heads * HEAD_DIM)
        return
    prefix += "linear_attn."
    heads = values["linear_num_value_heads"]
    keys, width = values["linear_num_key_heads"] * HEAD_DIM, heads * HEAD_DIM
    add(f"{prefix}in_proj_qkv.weight", 2 * keys + width, hidden)
    add(f"{prefix}in_proj_z.weight", width, hidden)
    add(f"{prefix}in_proj_b.weight", heads, hidden)
    add(f"{prefix}in_proj_a.weight", heads, hidden)
    add(f"{prefix}conv1d.weight", 2 * keys + width, 1, CONV_KERNEL, scale=0.4)
    add(f"{prefix}A_log", heads, scale=0.8)
    add(f"{prefix}dt_bias", heads, scale=1.5, mean=-2.0)
    add(f"{prefix}norm.weight", HEAD_DIM, scale=0.1, mean=1.0)
    add(f"{prefix}out_proj.weight", hidden, width)


def write_tokenizer(directory: Path, source: Path, vocabulary: int) -> None:
    """The tokenizer of `source` with as many more tokens as the model has ids.

    No text becomes one of them, but every id has a text: other engines refuse ids without.
    """
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    entries = tokenizer["model"]["vocab"]
    first = max(entries.values()) + 1
    entries |= {f"<{number}>": number for number in range(first, vocabulary)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, directory / name)
