"""The self-test promises bits exactly where they are equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.checkpoints import tiny_config, write_checkpoint

from milepost.kernels.api import Kernels, select_kernels
from milepost.kernels.native_library import native_library
from milepost.models import load_model
from milepost.runner.selftest import self_test

needs_native = pytest.mark.skipif(native_library().module is None, reason="no native kernels")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def directory(request: Any, tmp_path_factory: Any) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config(dtype=request.param), seed=3)


@needs_native
def test_native_kernels_are_exact(directory: Any) -> None:
    result = self_test(load_model(directory))
    assert result.exact and result.largest_difference == 0.0
    assert result.text.startswith("exactness: exact;")
    assert "native kernels" in result.text and "\n" not in result.text


def test_the_reference_is_reported_as_it_is(directory: Any) -> None:
    """Whatever torch does here, the text and the promise follow the measurement."""
    result = self_test(load_model(directory, kernels=select_kernels("reference")))
    assert result.exact == (result.largest_difference == 0.0)
    assert ("exactness: exact" in result.text) == result.exact
    assert result.largest_difference < 0.1


def broken(change: Any) -> Kernels:
    """Reference kernels, but sums of products depend on something."""
    good = select_kernels("reference")

    def linear(x: torch.Tensor, weight: Any, **options: Any) -> torch.Tensor:
        result = good.linear(x, weight, **options)
        return result + change(x, result)

    return dataclasses.replace(good, linear=linear)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x, y: 1e-3 if x.shape[0] == 1 else 0.0, id="one-row"),
        pytest.param(lambda x, y: 1e-3 if x.shape[0] > 32 else 0.0, id="many-rows"),
        pytest.param(lambda x, y: 1e-3 * x[0].mean(), id="neighbour"),
        pytest.param(lambda x, y: float("nan") if x.shape[0] == 17 else 0.0, id="nan"),
        pytest.param(lambda x, y: 1e-3 if y.shape[1] == 131 and x.shape[0] < 4 else 0.0, id="head"),
    ],
)
def test_a_dependence_on_the_batch_is_found(tmp_path: Any, change: Any) -> None:
    directory = write_checkpoint(tmp_path, tiny_config(dtype="float32"), seed=3)
    result = self_test(load_model(directory, kernels=broken(change)))
    assert not result.exact
    assert result.largest_difference > 1e-5 or result.largest_difference != result.largest_difference
    assert result.text.startswith("exactness: numeric; a hit may change logits")
