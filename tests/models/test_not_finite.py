"""A weight that is not finite is named, whoever looks at it: the reader, or the kernels while they pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import FAMILIES, kinds_of_tensors, write_family

from milepost.errors import CheckpointFileError
from milepost.kernels.api import NATIVE, REFERENCE, Kernels, select_kernels
from milepost.kernels.native_library import native_library
from milepost.models import load_model

needs_native = pytest.mark.skipif(native_library().module is None, reason="no native kernels")
KINDS = [pytest.param(NATIVE, marks=needs_native), REFERENCE]


def refused(directory: Path, kernels: Kernels, **options: Any) -> str:
    with pytest.raises(CheckpointFileError) as caught:
        load_model(directory, kernels=kernels, **options)
    return str(caught.value)


@pytest.mark.parametrize("implementation", KINDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_kind_of_tensor(family: str, implementation: str, tmp_path: Path) -> None:
    """One value in the middle of one tensor, of each kind: stacked with others, fused, per expert."""
    directory, kernels = write_family(tmp_path / "model", family), select_kernels(implementation)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    unused = set(load_model(directory, kernels=kernels).unused_tensors)
    for name in kinds_of_tensors(sorted(set(tensors) - unused)):
        if not tensors[name].is_floating_point():
            continue
        good = tensors[name]
        bad = good.clone().flatten()
        bad[bad.numel() // 2] = float("nan")
        save_file({**tensors, name: bad.view(good.shape)}, path)
        assert refused(directory, kernels) == f"{path}: tensor {name} holds NaN or infinity", name
    load_model(directory, kernels=kernels, check_finite=False)


@pytest.mark.parametrize("implementation", KINDS)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_what_a_narrow_dtype_cannot_hold_is_refused(
    implementation: str, quantization: str | None, tmp_path: Path
) -> None:
    """The largest fp32 is infinity as a bf16."""
    directory = write_family(tmp_path / "model", "kimi_linear")
    path = directory / "model.safetensors"
    kernels = select_kernels(implementation)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(path)
    tensors[name][2, 3] = torch.finfo(torch.float32).max
    save_file(tensors, path)
    if quantization is None:
        load_model(directory, kernels=kernels, dtype="float32")
    message = refused(directory, kernels, dtype="bfloat16", quantization=quantization)
    assert message == f"{path}: tensor {name} holds NaN or infinity as bfloat16"
