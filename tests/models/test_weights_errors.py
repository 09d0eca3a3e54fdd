"""Every kind of bad weight file is refused with the file, the tensor and both shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.driver import Driver, random_tokens

from milepost.errors import CheckpointFileError
from milepost.models import load_model
from milepost.models.weights import WeightReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


def expect_error(directory: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(CheckpointFileError) as caught:
        load_model(directory, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def edit(directory: Path, change: Any) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", num_shards=3)


def test_no_weights_at_all(single: Path) -> None:
    (single / SINGLE).rename(single / "other.safetensors")
    expect_error(single, "neither model.safetensors nor model.safetensors.index.json", "other.safetensors")


def test_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    expect_error(sharded, SECOND, "does not exist", INDEX)


def test_tensor_not_in_its_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = SECOND
    (sharded / INDEX).write_text(json.dumps(index))
    expect_error(sharded, SECOND, "lm_head.weight", "lacks")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ("[", "JSON"),
        ("[" * 100_000, "JSON"),
        ('{"weight_map": {"lm_head.weight": "../model.safetensors"}}', "odd file"),
        ('{"weight_map": {"lm_head.weight": 3}}', "odd file"),
    ],
)
def test_bad_index(sharded: Path, content: str, message: str) -> None:
    (sharded / INDEX).write_text(content)
    expect_error(sharded, INDEX, message)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1, -5000])
def test_truncated_file(single: Path, keep: int) -> None:
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[:keep])
    expect_error(single, SINGLE, "truncated")


def header(value: Any, data: bytes = b"") -> bytes:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(content).to_bytes(8, "little") + content + data


SHARED = [("a", [0, 3]), ("b", [2, 5])]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + b"x" * 500, "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "no safetensors file"),
        (header(b"not json at all"), "header is not JSON"),
        (header(b"[" * 100_000), "header is not JSON"),
        (header([1, 2]), "not a JSON object"),
        (header({"a": {"dtype": "F32"}}), "broken header entry for tensor a"),
        (
            header({"a": {"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
            "unknown dtype 'F12'",
        ),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "corrupt: tensor a"),
        (
            header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"1234"),
            "corrupt: tensor a",
        ),
        (
            header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
            "truncated: tensor a",
        ),
        (
            header(
                {name: {"dtype": "U8", "shape": [3], "data_offsets": span} for name, span in SHARED}, b"12345"
            ),
            "corrupt: tensors a and b share bytes",
        ),
        (
            header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}', b"12"),
            "names 'a' twice",
        ),
    ],
)
def test_foreign_or_corrupt_file(single: Path, data: bytes, message: str) -> None:
    (single / SINGLE).write_bytes(data)
    expect_error(single, SINGLE, message)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.A_log",
        "model.layers.2.self_attn.k_conv1d.weight",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.4.block_sparse_moe.experts.7.w2.weight",
        "model.layers.4.block_sparse_moe.gate.e_score_correction_bias",
    ],
)
def test_missing_tensor(single: Path, name: str) -> None:
    edit(single, lambda tensors: tensors.pop(name))
    expect_error(single, str(single), "lacks tensor", name)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", [50, 48], "[48, 48]"),
        ("model.layers.0.self_attn.q_conv1d.weight", [48, 1, 3], "[48, 1, 4]"),
        ("model.layers.0.self_attn.A_log", [1, 1, 4, 1], "[3]"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", [16, 48], "[24, 48]"),
        ("model.layers.3.self_attn.q_proj.weight", [48, 80], "[80, 48]"),
        ("model.layers.1.block_sparse_moe.gate.weight", [9, 48], "[8, 48]"),
        ("model.embed_tokens.weight", [130, 48], "[131, 48]"),
    ],
)
def test_wrong_shape_names_both(single: Path, name: str, shape: list[int], expected: str) -> None:
    edit(single, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    expect_error(single, SINGLE, name, str(shape), expected)


def test_unexpected_dtype(single: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    edit(single, lambda tensors: tensors.update({name: torch.zeros(48, 48, dtype=torch.int8)}))
    expect_error(single, SINGLE, name, "I8", "F32")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_found_unless_told_not_to_look(single: Path, value: float) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w1.weight"
    edit(single, lambda tensors: tensors[name].__setitem__((3, 7), value))
    load_model(single, check_finite=False)
    expect_error(single, SINGLE, name, "NaN or infinity")


def test_progress_ends_at_the_total(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(sharded, progress=lambda done, total: calls.append((done, total)))
    done = [first for first, _ in calls]
    assert done == sorted(done) and len(set(done)) == len(done)
    total = sum(t.numel() * t.element_size() for t in random_tensors(tiny_config()).values())
    assert calls[-1] == (total, total)


def logits(directory: Path) -> torch.Tensor:
    driver = Driver(load_model(directory))
    tokens = random_tokens(24, driver.model.vocab_size, seed=1)
    return driver.logits(driver.plan((driver.sequence(tokens, running_slot=0), 24)))


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    # Not bitwise: matrix products may take another path for weights at another alignment.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_shards_single_file_and_other_layouts_are_the_same_model(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    expected = logits(write_checkpoint(tmp_path / "single", tensors=tensors))
    assert_same(logits(write_checkpoint(tmp_path / "sharded", tensors=tensors, num_shards=4)), expected)
    # A_log also as [H]; the decoder under the prefix of multimodal checkpoints.
    flat = {name: t.flatten() if name.endswith("A_log") else t for name, t in tensors.items()}
    nested = {f"language_model.{name}": tensor for name, tensor in flat.items()}
    assert_same(logits(write_checkpoint(tmp_path / "nested", tensors=nested)), expected)


def test_tied_embeddings_use_the_embedding_as_head(tmp_path: Path) -> None:
    tied = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(tied)
    untied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    expected = logits(write_checkpoint(tmp_path / "untied", tensors=untied))
    assert_same(logits(write_checkpoint(tmp_path / "tied", tied, tensors=tensors)), expected)


def test_unused_tensors_are_listed_and_progress_still_ends_at_the_total(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"vision_tower.x": torch.zeros(2)}))
    calls: list[tuple[int, int]] = []
    loaded = load_model(single, progress=lambda done, total: calls.append((done, total)))
    assert loaded.unused_tensors == ["vision_tower.x"]
    assert calls[-1][0] == calls[-1][1] == calls[-2][0] + 8


def test_unaligned_data_is_copied(tmp_path: Path) -> None:
    """The header length need not be a multiple of the item size."""
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    content = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    while len(content) % 4 != 1:
        content += b" "
    (tmp_path / SINGLE).write_bytes(header(content, values.numpy().tobytes()))
    assert torch.equal(WeightReader(tmp_path).take("a", (2, 3), torch.float32), values)


def test_weights_are_views_of_the_file_and_cannot_change_it(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    before = (directory / SINGLE).read_bytes()
    reader = WeightReader(directory)
    weight = reader.take("lm_head.weight", (131, 48), torch.float32)
    again = reader.take("lm_head.weight", (131, 48), torch.float32)
    assert weight.data_ptr() == again.data_ptr()
    weight.zero_()
    assert (directory / SINGLE).read_bytes() == before


def test_messages_do_not_hide_the_directory(single: Path) -> None:
    (single / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointFileError, match=re.escape(str(single / SINGLE))):
        load_model(single)
