"""Sizes of published models from their config values alone: computed, not looked up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from milepost.cli.info import show_info
from milepost.engine.serving import ServingOptions
from milepost.errors import CheckpointFileError
from milepost.models import describe
from milepost.models.description import ModelDescription, describe_spec
from milepost.models.registry import parse_config

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"


def config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return values


def described(values: dict[str, Any], dtype: str = "bfloat16") -> ModelDescription:
    return describe_spec(parse_config(values), dtype)


def test_kimi_k3() -> None:
    about = describe(CONFIGS / "kimi-k3")
    assert (about.num_layers, about.layer_kinds.count("kda"), about.layer_kinds.count("mla")) == (93, 69, 24)
    assert about.num_moe_layers == 92
    assert about.layer_state_bytes == 6_512_640
    assert about.state_bytes == 69 * 6_512_640 == 449_372_160
    assert about.bytes_per_token == 27_648
    assert about.break_even_tokens == pytest.approx(16_254, abs=1)
    assert 2.7e12 < about.num_parameters < 2.9e12
    assert about.max_model_len == 1 << 20


def test_kimi_linear_48b() -> None:
    about = describe(CONFIGS / "kimi-linear-48b-a3b")
    assert (about.num_layers, about.layer_kinds.count("kda")) == (27, 20)
    assert about.layer_state_bytes == 2_170_880
    assert about.state_bytes == 20 * 2_170_880
    assert about.bytes_per_token == 8_064
    assert about.break_even_tokens == pytest.approx(5_384, abs=1)
    assert 48e9 < about.num_parameters < 50e9


def test_half_the_heads_halve_the_matrix_and_the_tail() -> None:
    values = config("kimi-k3")
    values["text_config"]["linear_attn_config"]["num_heads"] = 48
    about = described(values)
    assert about.layer_state_bytes == 6_512_640 // 2
    assert about.bytes_per_token == 27_648


def test_another_layer_pattern() -> None:
    values = config("kimi-k3")
    linear = values["text_config"]["linear_attn_config"]
    linear["kda_layers"].remove(92 - 1)
    linear["full_attn_layers"].append(92 - 1)
    about = described(values)
    assert about.state_bytes == 68 * 6_512_640
    assert about.bytes_per_token == 25 * 1152
    assert about.break_even_tokens == pytest.approx(68 * 6_512_640 / (25 * 1152))


def test_another_latent_and_convolution() -> None:
    values = config("kimi-linear-48b-a3b")
    values["kv_lora_rank"] = 256
    values["linear_attn_config"]["short_conv_kernel_size"] = 3
    about = described(values)
    assert about.bytes_per_token == 7 * (256 + 64) * 2
    assert about.layer_state_bytes == 32 * 128 * 128 * 4 + 2 * 3 * 32 * 128 * 2
    wide = described(values, "float32")
    assert wide.bytes_per_token == 2 * about.bytes_per_token
    assert wide.layer_state_bytes == 32 * 128 * 128 * 4 + 2 * 3 * 32 * 128 * 4


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "kimi-k3",
            {
                "KV bytes per token": "27,648",
                "bytes per state": "449,372,160",
                "of one linear layer": "6,512,640",
                "one state costs as much as": "16,253 tokens",
                "layers": "93 (69 kda, 24 mla); 92 with experts",
            },
        ),
        (
            "kimi-linear-48b-a3b",
            {
                "KV bytes per token": "8,064",
                "bytes per state": "43,417,600",
                "of one linear layer": "2,170,880",
                "one state costs as much as": "5,384 tokens",
            },
        ),
    ],
)
def test_info_prints_them(name: str, rows: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    show_info(CONFIGS / name, ServingOptions(cache_bytes=16 << 30))
    out = capsys.readouterr().out
    for label, value in rows.items():
        assert re.search(rf"{re.escape(label)}\W+{re.escape(value)}", out), (label, out)


def test_info_checks_weights_when_asked(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    show_info(None, ServingOptions(), check_weights=True)
    assert re.search(r"weights\W+87 tensors as expected", capsys.readouterr().out)
    with pytest.raises(CheckpointFileError, match="neither model.safetensors"):
        show_info(CONFIGS / "kimi-k3", ServingOptions(cache_bytes=16 << 30), check_weights=True)
