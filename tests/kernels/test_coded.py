"""How integers are chosen for weights, and that decoding gives what was stored."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.helpers import assert_close

from milepost.errors import ConfigError
from milepost.kernels import api, reference, reference_layers
from milepost.kernels.native_library import NativeLibrary
from milepost.kernels.reference_coded import IntegerWeight, Mxfp4Weight, coded_linear, quantized, stacked
from milepost.kernels.schemes import IntegerScheme

SCHEMES = [IntegerScheme(8, 64), IntegerScheme(8, 8), IntegerScheme(4, 32), IntegerScheme(4, 16)]
NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 100), (2, 129)])
def test_codes_are_the_nearest_to_the_values(scheme: IntegerScheme, shape: tuple[int, int]) -> None:
    """One value after the other, in double precision; scales are bf16 of the farthest value."""
    weight = randn(*shape, seed=shape[1])
    coded = quantized(weight, scheme)
    limit = 1 << (scheme.bits - 1)
    assert coded.codes.dtype == torch.int8 and coded.scales.dtype == torch.bfloat16
    assert coded.scales.shape == (shape[0], -(-shape[1] // scheme.group))
    for row in range(shape[0]):
        for group in range(coded.scales.shape[1]):
            columns = slice(group * scheme.group, min((group + 1) * scheme.group, shape[1]))
            values = weight[row, columns].tolist()
            farthest = max(values, key=abs)
            scale = float(coded.scales[row, group])
            assert scale == float(torch.tensor(farthest / -limit).bfloat16())
            for value, code in zip(values, coded.codes[row, columns].tolist(), strict=True):
                nearest = min(range(-limit, limit), key=lambda number: abs(number * scale - value))
                assert code == nearest or math.isclose(abs(code - value / scale), 0.5, abs_tol=1e-5)
    exact = coded.codes.double() * coded.scales.double().repeat_interleave(scheme.group, 1)[:, : shape[1]]
    assert torch.equal(coded.decode().double(), exact)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_zeros_small_and_large_values_and_ties(scheme: IntegerScheme) -> None:
    group, limit = scheme.group, 1 << (scheme.bits - 1)
    rows = torch.zeros(6, group)
    rows[1, 0] = 1e-40  # its scale is denormal or nothing
    rows[2, 0], rows[2, 1] = 3.0e38, -1.0e38
    rows[3, 0], rows[3, 1] = 1.0, -1.0  # equally far: the negative one
    rows[4, 0] = NAN
    rows[5, 0] = -0.0
    coded = quantized(rows, scheme)
    decoded = coded.decode()
    assert torch.equal(decoded[0], torch.zeros(group)) and torch.equal(decoded[5], torch.zeros(group))
    assert float(decoded[1].abs().max()) <= 1.1e-40
    assert float(decoded[2, 0]) == pytest.approx(3.0e38, rel=2**-8)
    assert float(coded.scales[3, 0]) == 1.0 / limit
    assert coded.codes[3, :2].tolist() == [limit - 1, -limit]
    assert torch.isnan(decoded[4]).any(), "a weight that is no number must not become one"
    assert torch.isfinite(decoded[[0, 1, 2, 3, 5]]).all()


def test_the_error_is_what_the_bits_allow() -> None:
    weight = randn(64, 512)
    for scheme, bound in ((IntegerScheme(4, 32), 0.095), (IntegerScheme(8, 64), 0.0065)):
        error = (quantized(weight, scheme).decode() - weight).norm() / weight.norm()
        assert bound / 2 < float(error) < bound


def test_rows_are_coded_alone_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(37, 100).bfloat16()
    scheme = IntegerScheme(4, 32)
    whole = quantized(weight, scheme)
    assert whole.dtype == torch.bfloat16 and whole.shape == weight.shape
    monkeypatch.setattr("milepost.kernels.reference_coded._VALUES_AT_ONCE", 250)
    pieces = quantized(weight, scheme)
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scales, pieces.scales)
    both = stacked([quantized(weight[:5], scheme), quantized(weight[5:], scheme)])
    assert isinstance(both, IntegerWeight)
    assert torch.equal(both.codes, whole.codes) and torch.equal(both.scales, whole.scales)
    with pytest.raises(TypeError, match="alike"):
        stacked([weight, whole])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 1000), st.sampled_from(SCHEMES))
def test_a_product_is_that_of_the_decoded_weight(
    num_rows: int, width: int, seed: int, scheme: IntegerScheme
) -> None:
    coded = quantized(randn(7, width, seed=seed), scheme)
    x = randn(num_rows, width, seed=seed + 1)
    expected = x.double() @ coded.decode().double().t()
    assert_close(coded_linear(x, coded), expected, 2e-6)
    assert_close(reference_layers.linear(x, reference_layers.pack_linear(coded)), expected, 2e-6)


def test_layers_take_coded_weights() -> None:
    """SwiGLU, parts and experts of integers are those of the decoded values."""
    scheme = IntegerScheme(8, 64)
    x, residual = randn(4, 24), randn(4, 24, seed=1)
    gate, up, down = randn(10, 24, seed=2), randn(10, 24, seed=3), randn(24, 10, seed=4)
    coded = [quantized(weight, scheme) for weight in (gate, up, down)]
    plain = [weight.decode() for weight in coded]
    gate_up = reference_layers.pack_swiglu(stacked(coded[:2]))
    inner = reference_layers.linear_swiglu(x, gate_up)
    assert_close(inner, F.silu(x @ plain[0].t()) * (x @ plain[1].t()), 1e-6)
    parts = reference_layers.linear_parts(x, reference_layers.pack_linear(stacked(coded[:2]), parts=(10, 10)))
    assert_close(parts[1], x @ plain[1].t(), 1e-6)
    ids, weights = torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    experts = [(coded[0], coded[1], coded[2]), (plain[0], plain[1], plain[2])]
    result = reference.routed_experts(x, ids, weights, experts)
    expected = inner @ plain[2].t()
    assert_close(result, expected * weights.sum(1, keepdim=True), 1e-5)
    down_packed = reference_layers.pack_linear(coded[2])
    assert_close(reference_layers.linear(inner, down_packed, residual=residual), residual + expected, 1e-6)


def test_decoding_of_4_bit_floats() -> None:
    """Every byte and every scale that is a number, against the format's definition."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for scale in (0, 1, 2, 126, 127, 128, 252, 253, 254):
        scales = torch.full((16, 1), scale, dtype=torch.uint8)
        decoded = Mxfp4Weight(packed, scales, torch.float32).decode()
        for row, column, nibble in ((0, 3, 0), (15, 31, 15), (9, 4, 2), (9, 5, 9)):
            assert int(packed[row, column // 2] >> (4 * (column % 2)) & 15) == nibble
            sign = -1.0 if nibble & 8 else 1.0
            expected = sign * table[nibble & 7] * 2.0 ** (scale - 127)
            value = float(decoded[row, column])
            assert value == expected or (math.isinf(value) and abs(expected) >= 2.0**128)
            assert math.copysign(1.0, value) == sign


def test_schemes_that_no_kernel_has_are_refused() -> None:
    for bits, group in ((5, 32), (4, 12), (8, 0)):
        with pytest.raises(ValueError, match="4 or 8 bits and a multiple of 8"):
            IntegerScheme(bits, group)
    assert IntegerScheme(4, 32).num_bytes(64) == 32 + 2 * 2


def test_an_older_library_leaves_integers_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "0.1.0"

        @staticmethod
        def numerics_id() -> str:
            return "milepost-0"

    monkeypatch.setattr(api, "native_library", lambda: NativeLibrary(Old, "old"))  # type: ignore[arg-type]
    kernels = api.select_kernels(coded_weights=True)
    assert kernels.implementation == "reference"
    assert "`make native` rebuilds it" in kernels.choices[0].reason
    with pytest.raises(ConfigError, match="older than weights of few bits"):
        api.select_kernels("native", coded_weights=True)
    plain = api.select_kernels()
    assert plain.implementation == "mixed", "torch serves what else the library lacks"
    with pytest.raises(ConfigError, match="older than weights of few bits"):
        plain.pack_linear(quantized(randn(4, 8), IntegerScheme(8, 8)))
