"""Config parsing and descriptions: no torch, and every refusal names its key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import random_tensors, tiny_config

from milepost.errors import CheckpointFileError, ConfigError
from milepost.models import describe
from milepost.models.layout import cache_layout
from milepost.models.parameters import count_parameters
from milepost.models.registry import parse_config


def without(key: str) -> dict[str, Any]:
    config = tiny_config()
    del config[key]
    return config


def without_linear(key: str) -> dict[str, Any]:
    config = tiny_config()
    del config["linear_attn_config"][key]
    return config


BAD_CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("model_type", "supported: kimi_k3, kimi_linear, qwen3_5", tiny_config(model_type="llama")),
    ("model_type", "missing", without("model_type")),
    ("vocab_size", "missing", without("vocab_size")),
    ("hidden_size", "missing", without("hidden_size")),
    ("hidden_size", "whole number", tiny_config(hidden_size="48")),
    ("hidden_size", "at least 1", tiny_config(hidden_size=0)),
    ("num_hidden_layers", "whole number", tiny_config(num_hidden_layers=True)),
    ("linear_attn_config", "missing", without("linear_attn_config")),
    ("linear_attn_config.kda_layers", "missing", without_linear("kda_layers")),
    ("linear_attn_config.num_heads", "missing", without_linear("num_heads")),
    (
        "linear_attn_config.kda_layers",
        r"missing: \[3\]",
        tiny_config(linear_attn_config={"kda_layers": [1, 2, 5]}),
    ),
    (
        "linear_attn_config.kda_layers",
        "numbered 1 to 5",
        tiny_config(linear_attn_config={"kda_layers": [0, 1, 2, 4]}),
    ),
    (
        "linear_attn_config.full_attn_layers",
        "second time",
        tiny_config(linear_attn_config={"full_attn_layers": [4, 5]}),
    ),
    (
        "linear_attn_config.kda_layers",
        "list of whole numbers",
        tiny_config(linear_attn_config={"kda_layers": ["1"]}),
    ),
    (
        "linear_attn_config.short_conv_kernel_size",
        "at least 2",
        tiny_config(linear_attn_config={"short_conv_kernel_size": 1}),
    ),
    (
        "linear_attn_config.gate_lower_bound",
        r"\[-5, 0\)",
        tiny_config(linear_attn_config={"gate_lower_bound": -6.0}),
    ),
    (
        "linear_attn_config.use_full_rank_gate",
        "kimi_k3",
        tiny_config(linear_attn_config={"use_full_rank_gate": True}),
    ),
    ("layer_types", "unknown layer kind 'mamba'", tiny_config(layer_types=["mamba"] * 5)),
    ("layer_types", "disagrees", tiny_config(layer_types=["linear_attention"] * 5)),
    ("num_key_value_heads", "num_attention_heads 4", tiny_config(num_key_value_heads=2)),
    ("kv_lora_rank", "missing", without("kv_lora_rank")),
    ("q_lora_rank", "at least 1", tiny_config(q_lora_rank=0)),
    ("mla_use_nope", "rotary", tiny_config(mla_use_nope=False)),
    ("hidden_act", "'silu'", tiny_config(hidden_act="situ")),
    ("attn_res_block_size", "not supported", tiny_config(attn_res_block_size=12)),
    ("quantization_config", "not supported", tiny_config(quantization_config={"format": "mxfp4"})),
    ("num_experts_per_token", "more than num_experts 8", tiny_config(num_experts_per_token=9)),
    ("num_expert_group", "group-limited", tiny_config(num_expert_group=2)),
    ("moe_router_activation_func", "sigmoid", tiny_config(moe_router_activation_func="softmax")),
    ("rms_norm_eps", "positive", tiny_config(rms_norm_eps=0)),
    ("eos_token_id", "below vocab_size 131", tiny_config(eos_token_id=[2, 131])),
    ("dtype", "float16", tiny_config(dtype="float16")),
    ("max_position_embeddings", "missing", without("model_max_length")),
    ("tie_word_embeddings", "true or false", tiny_config(tie_word_embeddings=1)),
]


@pytest.mark.parametrize(
    ("field", "message", "config"), BAD_CONFIGS, ids=[f"{f}-{m[:12]}" for f, m, _ in BAD_CONFIGS]
)
def test_bad_config_names_the_key(field: str, message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(config)
    assert caught.value.field == field


def test_layer_pattern_counts_from_one() -> None:
    spec = parse_config(tiny_config())
    assert [layer.mixer for layer in spec.layers] == ["kda", "kda", "kda", "mla", "kda"]
    assert [layer.mlp for layer in spec.layers] == ["dense", "moe", "moe", "moe", "moe"]
    every_other = parse_config(tiny_config(first_k_dense_replace=2, moe_layer_freq=2))
    assert [layer.mlp for layer in every_other.layers] == ["dense", "dense", "moe", "dense", "moe"]
    assert [layer.mlp for layer in parse_config(tiny_config(num_experts=0)).layers] == ["dense"] * 5


def test_published_sizes() -> None:
    """Kimi-Linear-48B-A3B: 8,064 B of latents per token, 2,170,880 B of state per KDA layer (bf16)."""
    attention = [4, 8, 12, 16, 20, 24, 27]
    spec = parse_config(
        tiny_config(
            vocab_size=163840,
            hidden_size=2304,
            num_hidden_layers=27,
            num_attention_heads=32,
            num_key_value_heads=32,
            intermediate_size=9216,
            moe_intermediate_size=1024,
            num_experts=256,
            num_experts_per_token=8,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            linear_attn_config={
                "kda_layers": [number for number in range(1, 28) if number not in attention],
                "full_attn_layers": attention,
                "num_heads": 32,
                "head_dim": 128,
            },
        )
    )
    geometry = cache_layout(spec, "bfloat16").geometry(match_unit=32)
    assert geometry.bytes_per_token == 8064
    assert geometry.state_bytes == 20 * 2_170_880
    assert geometry.checkpoint_alignment == 1
    assert 47e9 < count_parameters(spec) < 50e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fields_of_a_record_do_not_overlap(dtype: str) -> None:
    layout = cache_layout(parse_config(tiny_config()), dtype)
    pages = layout.attention[0].page_fields(match_unit=16)
    assert sum(field.num_bytes for field in pages) == 16 * layout.attention[0].bytes_per_token
    for fields, size in (
        (pages, 16 * layout.attention[0].bytes_per_token),
        (layout.recurrent[0].fields, layout.recurrent[0].state_bytes),
    ):
        taken = sorted((field.offset, field.offset + field.num_bytes) for field in fields)
        assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
        assert taken[-1][1] == size
    assert {field.layer for field in layout.recurrent[0].fields} == {0, 1, 2, 4}


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 20, "tie_word_embeddings": True}])
def test_parameter_count_is_that_of_the_files(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    total = sum(tensor.numel() for tensor in random_tensors(config).values())
    assert count_parameters(parse_config(config)) == total


def test_the_epsilon_of_the_latent_norms_is_a_parameter() -> None:
    """The published code uses 1e-6 there, whatever rms_norm_eps says."""
    for config, expected in (({}, 1e-6), ({"mla_latent_norm_eps": 1e-5}, 1e-5)):
        mla = parse_config(tiny_config(rms_norm_eps=1e-4, **config)).mla
        assert mla is not None and mla.latent_norm_eps == expected
    with pytest.raises(ConfigError, match="mla_latent_norm_eps"):
        parse_config(tiny_config(mla_latent_norm_eps=0))


def test_models_without_one_kind_of_layer() -> None:
    only_kda = parse_config(
        tiny_config(linear_attn_config={"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []})
    )
    geometry = cache_layout(only_kda, "float32").geometry(16)
    assert (geometry.num_attention_groups, geometry.num_recurrent_groups) == (0, 1)


def test_describe_needs_the_config_only_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; import milepost.models as m; "
        f"d = m.describe({str(tmp_path)!r}); print(d.num_layers, d.num_moe_layers, d.bytes_per_token)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "4", str((16 + 8) * 4)]
    assert describe(tmp_path, dtype="bfloat16").bytes_per_token == (16 + 8) * 2
    with pytest.raises(ConfigError, match="int8"):
        describe(tmp_path, dtype="int8")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("{", "JSON"), ("[1]", "JSON object, not list"), ("\xff", "JSON")],
)
def test_unreadable_config(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointFileError, match=message) as caught:
        describe(tmp_path)
    assert "config.json" in str(caught.value)


def test_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="not a directory"):
        describe(tmp_path / "missing")
