"""Which weights become integers at load, what they then give, and that nobody mistakes one for another."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from tests.support.driver import Driver, random_tokens
from tests.support.families import LAYOUTS, Shelf, without_experts_in_bf16

from milepost.engine.memory import weight_bytes
from milepost.errors import ConfigError
from milepost.kernels.api import select_kernels
from milepost.kernels.native_library import native_library
from milepost.kernels.reference_coded import IntegerWeight, Mxfp4Weight, read
from milepost.models import load_model
from milepost.models.description import describe, read_spec
from milepost.models.identity import fingerprint
from milepost.models.parameters import bytes_saved, count_by_role
from milepost.models.quantization import QUANTIZATIONS, Quantization, Role, quantization_of
from milepost.runner.selftest import self_test

needs_native = pytest.mark.skipif(not native_library().has_coded_weights, reason="no native coded weights")
NUM_TOKENS = 60


class Packed:
    """Reference kernels that remember what they packed."""

    def __init__(self) -> None:
        self.weights: list[tuple[str, Any]] = []

    def kernels(self) -> Any:
        good = select_kernels("reference")

        def pack_linear(weight: Any, *, name: str = "", parts: Any = ()) -> Any:
            self.weights.append((name or "head", weight))
            return good.pack_linear(weight, name=name, parts=parts)

        def pack_swiglu(weight: Any, *, name: str = "", **more: Any) -> Any:
            self.weights.append((name, weight))
            return good.pack_swiglu(weight, name=name, **more)

        def pack_heads(weight: Any) -> Any:
            self.weights.append(("heads", weight))
            return good.pack_heads(weight)

        def pack_experts(experts: Any, **more: Any) -> Any:
            experts = list(experts)
            self.weights += [("moe.expert", part) for expert in experts for part in expert]
            return good.pack_experts(experts, **more)

        return dataclasses.replace(
            good,
            pack_linear=pack_linear,
            pack_swiglu=pack_swiglu,
            pack_heads=pack_heads,
            pack_experts=pack_experts,
        )


def logits_of(model: Any) -> torch.Tensor:
    driver = Driver(model, match_unit=16)
    tokens = random_tokens(NUM_TOKENS, model.vocab_size, 3)
    result = driver.logits(driver.plan((driver.sequence(tokens, 0), NUM_TOKENS), sample=False)).clone()
    driver.worker.close()
    return result


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_linears_and_experts_become_integers_and_nothing_else(layout: str, name: str, shelf: Shelf) -> None:
    seen = Packed()
    load_model(shelf.directory(layout), quantization=name, kernels=seen.kernels())
    assert {kind for kind, _ in seen.weights} >= {"head"}
    for kind, weight in seen.weights:
        if kind in ("moe.router", "moe.shared_gate", "heads"):
            assert isinstance(weight, torch.Tensor), kind
        elif layout == "kimi_k3_packed" and kind.startswith("moe.expert"):
            assert isinstance(weight, Mxfp4Weight), kind
        else:
            assert isinstance(weight, IntegerWeight), kind
            assert weight.scheme.bits == (8 if kind == "head" else int(name[3:]))
            assert weight.dtype == torch.float32


@pytest.mark.parametrize("family", ["kimi_linear", "kimi_k3", "qwen3_5"])
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_logits_are_near_those_of_the_full_weights(family: str, implementation: str, shelf: Shelf) -> None:
    """Experts left out: of two near scores the other expert may win."""
    if implementation == "native" and not native_library().has_coded_weights:
        pytest.skip("no native coded weights")
    changes = without_experts_in_bf16(family, "bfloat16") | {"dtype": "float32"}
    kernels = select_kernels(implementation)
    directory = shelf.directory(family, **changes)
    exact = logits_of(load_model(directory, kernels=kernels))
    errors = {}
    for name in QUANTIZATIONS:
        found = logits_of(load_model(directory, quantization=name, kernels=kernels))
        errors[name] = float((found - exact).norm() / exact.norm())
    # Sixteen times the step, about that much of the error; small random models amplify it.
    assert 0.001 < errors["int8"] < 0.1 and 8 < errors["int4"] / errors["int8"] < 32, errors


@needs_native
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_native_and_reference_agree(layout: str, name: str, shelf: Shelf) -> None:
    """The same integers in both: what is left is the order of sums."""
    logits = [
        logits_of(
            load_model(shelf.directory(layout), quantization=name, kernels=select_kernels(implementation))
        )
        for implementation in ("native", "reference")
    ]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 1e-4


@needs_native
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_self_test_covers_them(layout: str, name: str, shelf: Shelf) -> None:
    result = self_test(load_model(shelf.directory(layout, dtype="bfloat16"), quantization=name))
    assert result.exact and result.largest_difference == 0.0
    assert f"bfloat16, {name} weights, native kernels" in result.text


def num_bytes(weight: Any) -> int:
    if isinstance(weight, IntegerWeight):
        return weight.scheme.num_bytes(weight.codes.numel())
    if isinstance(weight, Mxfp4Weight):
        return weight.packed.numel() + weight.scales.numel()
    known = read(weight)
    assert isinstance(known, torch.Tensor)
    return int(known.nbytes)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_plan_counts_what_is_packed(layout: str, name: str, shelf: Shelf) -> None:
    """Counted from the config, by role, against the weights that were really packed."""
    directory = shelf.directory(layout)
    sizes = {}
    for quantization in (None, name):
        seen = Packed()
        load_model(directory, quantization=quantization, kernels=seen.kernels())
        sizes[quantization] = sum(num_bytes(weight) for _, weight in seen.weights)
    about = describe(directory, quantization=name)
    # Scales are counted in total; the last group of a weight may be short.
    assert 0 < about.quantized_bytes_saved == pytest.approx(sizes[None] - sizes[name], abs=16)
    plain = describe(directory)
    assert plain.quantized_bytes_saved == 0
    assert weight_bytes(directory, plain) - weight_bytes(directory, about) == about.quantized_bytes_saved


def test_roles_cover_every_weight(shelf: Shelf) -> None:
    for layout in sorted(LAYOUTS):
        spec = read_spec(shelf.directory(layout))
        counts = count_by_role(spec)
        assert set(counts) <= set(get_args(Role))
        assert counts.total() == describe(shelf.directory(layout)).num_parameters
        assert bytes_saved(spec, "float32", None) == 0


def test_a_tied_head_is_coded_beside_the_table(shelf: Shelf) -> None:
    seen = Packed()
    model = load_model(
        shelf.directory("qwen3_5", tie_word_embeddings=True), quantization="int8", kernels=seen.kernels()
    )
    kind, head = seen.weights[-1]
    assert kind == "head" and isinstance(head, IntegerWeight)
    assert model.decoder._embedding.dtype == torch.float32


def test_names() -> None:
    assert quantization_of(None) is None and quantization_of("none") is None
    for name in QUANTIZATIONS:
        found = quantization_of(name)
        assert isinstance(found, Quantization) and found.name == name
    with pytest.raises(ConfigError, match="'int3' is not supported; use one of none, int8, int4") as raised:
        quantization_of("int3")
    assert raised.value.field == "quantization"


def test_states_of_other_weights_are_foreign(shelf: Shelf) -> None:
    """The name of the numerics, and with it the fingerprint of stored states, tells them apart."""
    directory = shelf.directory("kimi_linear")
    numerics, prints = set(), set()
    for name in (None, *QUANTIZATIONS):
        model = load_model(directory, quantization=name)
        numerics.add(model.numerics)
        prints.add(
            fingerprint(
                directory, model.layout, dtype=model.dtype, numerics=model.numerics, exactness="exact"
            )
        )
    assert len(numerics) == len(prints) == 3
    plain = load_model(directory)
    assert plain.numerics == plain.kernels.numerics, "stored states of unquantised models stay valid"
    # Every part of a scheme is in the name.
    int4 = quantization_of("int4")
    assert int4 is not None
    assert int4.numerics == "int4-1(expert=int4/32,head=int8/64,projection=int4/32)"
