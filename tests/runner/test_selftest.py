"""The self-test promises bits exactly where they are equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.families import FAMILIES, LAYOUTS, Shelf, without_experts_in_bf16

from milepost.kernels.api import Kernels, select_kernels
from milepost.kernels.native_library import native_library
from milepost.models import load_model
from milepost.runner.selftest import self_test

needs_native = pytest.mark.skipif(native_library().module is None, reason="no native kernels")


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_native_kernels_are_exact_for_every_family(layout: str, dtype: str, shelf: Shelf) -> None:
    """P2: cuts, hits and neighbours leave every bit alone."""
    result = self_test(shelf.model(layout, dtype=dtype))
    assert result.exact and result.largest_difference == 0.0
    assert result.text.startswith("exactness: exact;")
    assert "native kernels" in result.text and "\n" not in result.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_reference_is_reported_as_it_is(family: str, dtype: str, shelf: Shelf) -> None:
    """Whatever torch does here, the text and the promise follow the measurement."""
    changes = without_experts_in_bf16(family, dtype)
    result = self_test(shelf.model(family, implementation="reference", **changes))
    assert result.exact == (result.largest_difference == 0.0)
    assert ("exactness: exact" in result.text) == result.exact
    assert result.largest_difference < (1e-3 if dtype == "float32" else 0.3)


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
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_dependence_on_the_batch_is_found(family: str, change: Any, shelf: Shelf) -> None:
    result = self_test(load_model(shelf.directory(family), kernels=broken(change)))
    assert not result.exact
    assert result.largest_difference > 1e-5 or result.largest_difference != result.largest_difference
    assert result.text.startswith("exactness: numeric; a hit may change logits")
