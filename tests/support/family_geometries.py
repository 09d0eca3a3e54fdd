"""Cache geometries of published models of each family, from config values; no torch.

The core sees a model only through these: bytes per token, bytes per state, and the grid of exports.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from milepost.core.geometry import CacheGeometry
from milepost.models.layout import cache_layout
from milepost.models.registry import parse_config

_CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"
_QWEN: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "hidden_size": 2048,
    "intermediate_size": 12288,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
_VALUES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_EXPERTS, "vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512},
    "qwen3_5": {"vocab_size": 248320, "num_hidden_layers": 32, "num_key_value_heads": 4},
    "qwen3_5_moe": {**_EXPERTS, "vocab_size": 248320, "num_hidden_layers": 40},
}
FAMILIES = ("kimi_linear", "kimi_k3", *_VALUES)
"""Kimi-Linear-48B-A3B, Kimi K3, and sizes of Qwen3-Next-80B-A3B, Qwen3.5-9B and Qwen3.5-35B-A3B."""


def _config(family: str) -> dict[str, Any]:
    if family in _VALUES:
        return {"model_type": family, **_QWEN, **_VALUES[family]}
    name = {"kimi_linear": "kimi-linear-48b-a3b", "kimi_k3": "kimi-k3"}[family]
    config: dict[str, Any] = json.loads((_CONFIGS / name / "config.json").read_text())
    return config


@cache
def family_geometry(family: str, match_unit: int, alignment: int | None = 1) -> CacheGeometry:
    """`alignment`: of the exports, tokens; the CPU kernels have 1, others a grid or (None) no exports."""
    geometry = cache_layout(parse_config(_config(family)), "bfloat16").geometry(match_unit)
    recurrent = tuple(
        dataclasses.replace(spec, checkpoint_alignment=alignment) for spec in geometry.recurrent
    )
    return dataclasses.replace(geometry, recurrent=recurrent)


def tokens_per_state(family: str) -> float:
    """Tokens whose attention KV takes as many bytes as one state."""
    geometry = family_geometry(family, 1)
    return geometry.state_bytes / geometry.bytes_per_token
