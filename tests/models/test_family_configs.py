"""Configs of Kimi K3 and the Qwen hybrids: what they mean, and refusals that name the key."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.families import LAYOUTS
from tests.support.kimi_k3_checkpoints import PACKED, k3_config
from tests.support.qwen_checkpoints import dense_config, moe_config, next_config

from milepost.errors import ConfigError
from milepost.models.layout import cache_layout
from milepost.models.parameters import count_parameters
from milepost.models.registry import parse_config


def k3(**changes: Any) -> dict[str, Any]:
    return k3_config(**changes)


def k3_without(key: str) -> dict[str, Any]:
    config = k3_config()
    del config["text_config"][key]
    return config


def rope(**changes: Any) -> dict[str, Any]:
    config = dense_config()
    config["rope_parameters"].update(changes)
    return config


BAD_CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("text_config.hidden_act", "'gelu'", k3(hidden_act="gelu")),
    ("text_config.hidden_act", "missing", k3_without("hidden_act")),
    ("text_config.linear_attn_config", "missing", k3_without("linear_attn_config")),
    ("text_config.activation_situ_beta", "positive", k3(activation_situ_beta=0)),
    ("text_config.attn_res_block_size", "at least 1", k3(attn_res_block_size=0)),
    ("text_config.mla_use_nope", "rotary", k3(mla_use_nope=False)),
    ("text_config.topk_method", "correction bias", k3(topk_method="greedy")),
    (
        "text_config.linear_attn_config.allow_neg_eigval",
        "not doubled",
        k3(linear_attn_config={"allow_neg_eigval": True}),
    ),
    ("text_config.routed_expert_hidden_size", "whole number", k3(routed_expert_hidden_size="32")),
    (
        "text_config.linear_attn_config.gate_lower_bound",
        r"\[-5, 0\)",
        k3(linear_attn_config={"gate_lower_bound": 0.0}),
    ),
    ("text_config.quantization_config.format", "int4", k3(quantization_config={"format": "int4"})),
    ("text_config.quantization_config.format", "missing", k3(quantization_config={})),
    (
        "text_config.quantization_config",
        "40 inputs",
        k3(quantization_config=PACKED, routed_expert_hidden_size=40),
    ),
    ("text_config.num_experts_per_token", "more than num_experts 8", k3(num_experts_per_token=9)),
    ("text_config.dtype", "float16", k3(dtype="float16")),
    ("hidden_act", "'silu'", dense_config(hidden_act="gelu")),
    ("attention_bias", "no bias", dense_config(attention_bias=True)),
    ("attn_output_gate", "output gate", dense_config(attn_output_gate=False)),
    ("use_sliding_window", "sliding", next_config(use_sliding_window=True)),
    ("quantization_config", "not supported", next_config(quantization_config={"quant_method": "fp8"})),
    ("layer_types", "has 2 entries", dense_config(layer_types=["full_attention"] * 2)),
    ("layer_types", "unknown layer kind 'mamba'", dense_config(layer_types=["mamba"] * 5)),
    ("full_attention_interval", "at least 1", next_config(full_attention_interval=0)),
    ("linear_num_value_heads", "multiple of linear_num_key_heads 2", next_config(linear_num_value_heads=5)),
    ("linear_conv_kernel_dim", "at least 2", next_config(linear_conv_kernel_dim=1)),
    ("num_key_value_heads", "must divide num_attention_heads 4", next_config(num_key_value_heads=3)),
    ("partial_rotary_factor", "even number", next_config(partial_rotary_factor=0.2)),
    ("partial_rotary_factor", "even number", next_config(partial_rotary_factor=1.5)),
    ("rope_parameters.partial_rotary_factor", "even number", rope(partial_rotary_factor=0.01)),
    ("rope_parameters.rope_type", "'yarn'", rope(rope_type="yarn")),
    ("rope_scaling.type", "'linear'", next_config(rope_scaling={"type": "linear", "factor": 2.0})),
    ("rope_theta", "missing", {k: v for k, v in next_config().items() if k != "rope_theta"}),
    ("num_experts_per_tok", "more than num_experts 8", next_config(num_experts_per_tok=9)),
    ("text_config.num_experts_per_tok", "more than", moe_config(num_experts_per_tok=9)),
    ("text_config.head_dim", "whole number", moe_config(head_dim=1.5)),
    ("text_config", "must be an object", {"model_type": "qwen3_5", "text_config": []}),
]


@pytest.mark.parametrize(
    ("field", "message", "config"), BAD_CONFIGS, ids=[f"{f}-{m[:12]}" for f, m, _ in BAD_CONFIGS]
)
def test_bad_config_names_the_key(field: str, message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(config)
    assert caught.value.field == field


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_parameter_count_is_that_of_the_files(layout: str) -> None:
    family = LAYOUTS[layout]
    config = family.config()
    total = 0
    for name, tensor in family.tensors(config).items():
        if name.endswith("weight_scale"):
            continue
        # Packed bytes hold two values; K3 stores more decay rates than it has heads.
        count = 3 if name.endswith("A_log") and tensor.shape == (8,) else tensor.numel()
        total += 2 * count if name.endswith("weight_packed") else count
    assert count_parameters(parse_config(config)) == total


def test_keys_beside_the_text_config_are_inherited() -> None:
    config = moe_config()
    for key in ("dtype", "eos_token_id", "tie_word_embeddings"):
        config[key] = config["text_config"].pop(key)
    config["dtype"] = "bfloat16"
    spec = parse_config(config)
    assert (spec.dtype, spec.eos_token_ids, spec.tie_word_embeddings) == ("bfloat16", (2,), False)
    # What the section says itself counts.
    config["text_config"]["dtype"] = "float32"
    assert parse_config(config).dtype == "float32"


def test_a_k3_config_without_wrapper() -> None:
    flat = {**k3_config()["text_config"], "model_type": "kimi_k3"}
    assert parse_config(flat) == parse_config(k3_config())


def test_rope_of_older_and_newer_configs() -> None:
    old = parse_config(next_config()).gqa
    assert old is not None and (old.rotary_dim, old.rope_theta) == (4, 10000.0)
    new = parse_config(rope(rope_theta=5e6, partial_rotary_factor=0.25)).gqa
    assert new is not None and (new.rotary_dim, new.rope_theta) == (4, 5e6)


def test_layer_patterns() -> None:
    pattern = [layer.mixer for layer in parse_config(next_config(num_hidden_layers=8)).layers]
    assert pattern == ["gdn", "gdn", "gdn", "gqa"] * 2
    mlps = parse_config(next_config(mlp_only_layers=[1], decoder_sparse_step=2)).layers
    assert [layer.mlp for layer in mlps] == ["dense", "dense", "dense", "moe", "dense"]


def test_draft_layers_of_k3_are_left_out() -> None:
    spec = parse_config(k3(num_nextn_predict_layers=2))
    assert len(spec.layers) == 6
    assert "language_model.model.layers.6." in spec.skipped and "model.layers.7." in spec.skipped


def test_published_sizes_of_qwen3_next() -> None:
    """Qwen3-Next-80B-A3B: 12 attention and 36 linear layers; conv tail [3, 8192], S [32, 128, 128]."""
    spec = parse_config(
        next_config(
            vocab_size=151936,
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        )
    )
    layout = cache_layout(spec, "bfloat16")
    assert layout.layer_state_bytes == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    geometry = layout.geometry(match_unit=32)
    assert geometry.state_bytes == 36 * layout.layer_state_bytes
    assert geometry.bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert 79e9 < count_parameters(spec) < 81e9
