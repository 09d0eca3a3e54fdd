"""Defaults from generation_config.json: used where a request says nothing, off when asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.engine.generation_config import GenerationDefaults, generation_defaults
from milepost.engine.params import SamplingOptions
from milepost.errors import CheckpointFileError, ConfigError

FULL = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
    "max_new_tokens": 12, "do_sample": True, "eos_token_id": [1, 2],
}  # fmt: skip


def write(directory: Path, content: dict[str, Any]) -> Path:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(content))
    return path


def test_values_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, FULL)
    found = generation_defaults(tmp_path)
    assert found == GenerationDefaults(0.6, 0.95, 20, 0.1, 1.05, 12)
    assert found.described().startswith("temperature 0.6, top_p 0.95, top_k 20")
    write(tmp_path, {"temperature": None, "top_k": -1})
    assert generation_defaults(tmp_path) == GenerationDefaults(top_k=-1)


def test_off_absent_and_elsewhere(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == GenerationDefaults()
    assert GenerationDefaults().described() == ""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(elsewhere, {"temperature": 0.1})
    write(tmp_path, FULL)
    for source in ("none", "vllm"):
        assert generation_defaults(tmp_path, source) == GenerationDefaults()
    for given in (elsewhere, path):
        assert generation_defaults(tmp_path, str(given)) == GenerationDefaults(temperature=0.1)
    with pytest.raises(ConfigError, match="no such file") as raised:
        generation_defaults(tmp_path, str(tmp_path / "missing"))
    assert raised.value.field == "generation_config"


def test_what_a_request_says_wins() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)
    options = defaults.applied(SamplingOptions(temperature=0.0, top_k=-1, min_tokens=3))
    assert options == SamplingOptions(temperature=0.0, top_p=0.9, top_k=-1, min_tokens=3)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": "warm"}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 1.5},
        {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0}, {"max_new_tokens": 0}, {"temperature": True},
        {"top_k": True}, {"temperature": float("inf")}, {"temperature": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be(tmp_path: Path, content: dict[str, Any]) -> None:
    path = write(tmp_path, content)
    (name,) = content
    with pytest.raises(CheckpointFileError) as raised:
        generation_defaults(tmp_path)
    assert str(path) in str(raised.value) and name in str(raised.value)
