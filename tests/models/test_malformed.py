"""Malformed checkpoints of every family are refused with the name of the tensor that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import family_geometries
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES, LAYOUTS, kinds_of_tensors, write_family

from milepost.errors import CheckpointFileError
from milepost.models import load_model
from milepost.models.dry_run import check_checkpoint
from milepost.models.registry import PARSERS

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tensors(layout: str) -> Tensors:
    return LAYOUTS[layout].tensors(LAYOUTS[layout].config())


def expect_refusal(
    directory: Path, layout: str, tensors: Tensors, name: str, *parts: str, headers_only: bool = True
) -> None:
    write_checkpoint(directory, LAYOUTS[layout].config(), tensors=tensors)
    with pytest.raises(CheckpointFileError) as caught:
        if headers_only:
            check_checkpoint(directory)
        else:
            load_model(directory)
    for part in (name, *parts):
        assert part in str(caught.value), str(caught.value)


def kinds(layout: str, tensors: Tensors) -> list[str]:
    """Of another way to store a family only what is stored differently."""
    names = kinds_of_tensors(list(tensors))
    if layout in FAMILIES:
        assert len(names) > 20
        return names
    special = [name for name in names if "weight_" in name]
    assert special
    return special


def test_every_model_type_has_a_family_here() -> None:
    types = {name.removesuffix("_text") for name in PARSERS}
    assert types == set(FAMILIES) == set(family_geometries.FAMILIES)


def test_intact_ones_are_accepted(tmp_path: Path, layout: str, tensors: Tensors) -> None:
    directory = write_family(tmp_path, layout, num_shards=3)
    report = check_checkpoint(directory)
    assert report.num_tensors == len(tensors) and report.unused_tensors == []
    assert load_model(directory).unused_tensors == []


def test_missing_tensor(tmp_path: Path, layout: str, tensors: Tensors) -> None:
    for name in kinds(layout, tensors):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        expect_refusal(tmp_path / "model", layout, rest, name, "lacks tensor")


def test_wrong_shape(tmp_path: Path, layout: str, tensors: Tensors) -> None:
    for name in kinds(layout, tensors):
        tensor = tensors[name]
        wrong = torch.cat([tensor, tensor[:1]])
        # The decay rates of K3 may be longer than needed, not shorter.
        if name.endswith("A_log") and tensor.dim() == 1:
            wrong = tensor[:2]
        shapes = (str(list(wrong.shape)), "expected")
        expect_refusal(tmp_path / "model", layout, {**tensors, name: wrong}, name, *shapes)


def test_wrong_dtype(tmp_path: Path, layout: str, tensors: Tensors) -> None:
    for name in kinds(layout, tensors):
        wrong = tensors[name].to(torch.int32)
        expect_refusal(tmp_path / "model", layout, {**tensors, name: wrong}, name, "I32", "expected one of")


def test_not_finite(tmp_path: Path, layout: str, tensors: Tensors) -> None:
    for number, name in enumerate(kinds(layout, tensors)):
        if name.endswith("weight_packed"):
            continue  # every byte is a pair of numbers
        wrong = tensors[name].clone()
        nan = (float("nan"), float("inf"), -float("inf"))[number % 3]
        wrong.view(-1)[number % wrong.numel()] = 255 if wrong.dtype == torch.uint8 else nan
        changed = {**tensors, name: wrong}
        expect_refusal(tmp_path / "model", layout, changed, name, "NaN", headers_only=False)


def test_large_finite_values_are_fine(tmp_path: Path) -> None:
    """Their sum overflows, which is no reason to refuse them."""
    family = FAMILIES["qwen3_5"]
    tensors = family.tensors(family.config())
    tensors["lm_head.weight"] = torch.full((131, 48), 3e38)
    directory = write_checkpoint(tmp_path, family.config(), tensors=tensors)
    assert load_model(directory).unused_tensors == []


def test_truncated_shard(tmp_path: Path, layout: str) -> None:
    directory = write_family(tmp_path, layout, num_shards=3)
    shard = directory / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    for load in (check_checkpoint, load_model):
        with pytest.raises(CheckpointFileError, match=r"model-00002.*truncated: tensor \S+ ends at byte"):
            load(directory)
