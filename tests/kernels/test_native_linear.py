"""Native products: close to the reference, and every row alone decides its bits."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.helpers import assert_close
from tests.kernels.native_support import (
    DTYPES,
    FUSED,
    ISAS,
    NAN,
    assert_rows_stand_alone,
    library,
    randn,
    same_bits,
    using,
)

from milepost.kernels import reference

SHAPES = [(1, 1), (7, 3), (16, 16), (33, 48), (64, 65), (192, 192), (100, 131), (257, 40)]
"""(out, in)"""
ROWS = [0, 1, 2, 3, 5, 12, 13, 31, 70]


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), NAN, dtype=dtype or weight.dtype)
    library.linear(x, library.pack(weight), out)
    return out


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else 2**-8


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_exact_for_any_number_of_rows(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = randn(*shape, seed=1, dtype=dtype)
    with using(isa):
        for rows in ROWS:
            x = randn(rows, shape[1], seed=rows, dtype=dtype)
            assert_close(product(x, weight), x.double() @ weight.double().t(), tolerance(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(isa: str, dtype: torch.dtype) -> None:
    weight, x = randn(70, 129, seed=1, dtype=dtype), randn(97, 129, seed=2, dtype=dtype)
    assert_rows_stand_alone(isa, x, lambda: lambda rows: product(rows, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_instruction_sets_agree(dtype: torch.dtype) -> None:
    weight, x = randn(75, 130, seed=1, dtype=dtype), randn(29, 130, seed=2, dtype=dtype)
    results = []
    for isa in FUSED:
        with using(isa):
            results.append(product(x, weight))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 14])
def test_fusing_changes_no_bit(isa: str, dtype: torch.dtype, rows: int) -> None:
    """SwiGLU and residual give what separate roundings give."""
    gate_up, x = randn(2 * 37, 50, seed=1, dtype=dtype), randn(rows, 50, seed=2, dtype=dtype)
    residual = randn(rows, 74, seed=3, dtype=dtype)
    with using(isa):
        plain = product(x, gate_up)
        out = torch.full((rows, 37), NAN, dtype=dtype)
        library.linear(x, library.pack(gate_up, paired=True), out)
        assert_close(out, reference.swiglu(plain), 1e-6 if dtype == torch.float32 else 2**-8)
        into = residual.clone()
        library.linear(x, library.pack(gate_up), into, into)
        assert same_bits(into, residual + plain)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_head_weights(isa: str, dtype: torch.dtype) -> None:
    heads, out_features, in_features, rows = 3, 20, 17, 6
    weight = randn(heads, in_features, out_features, seed=1, dtype=dtype)
    x = randn(rows, heads, in_features, seed=2, dtype=dtype)
    with using(isa):
        out = torch.full((rows, heads, out_features), NAN)
        library.linear(x, library.pack(weight.transpose(1, 2)), out)
        assert_close(out, reference.per_head_linear(x, weight), 2e-6)
        # fp32 rows with the model's weights, as the value expansion has them.
        library.linear(x.float(), library.pack(weight.transpose(1, 2)), out)
        assert_close(out, reference.per_head_linear(x, weight), 2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_denormals_are_kept_whatever_the_caller_has_set(isa: str) -> None:
    x, weight = torch.full((3, 8), 1e-40), torch.eye(8)
    with using(isa):
        expected = product(x, weight)
        assert float(expected.min()) > 0.0
        try:
            assert torch.set_flush_denormal(True)
            result = product(x, weight)
        finally:
            torch.set_flush_denormal(False)
        assert same_bits(result, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_infinities_and_rounding_of_bf16(isa: str) -> None:
    """Rounds to nearest even as torch does; NaN stays NaN, overflow becomes infinity."""
    values = torch.tensor(
        [1.0, 1.00390625, 1.01171875, -1.00390625, 3.3e38, 3.4e38, 1e-40, float("inf"), 0.0, -0.0]
    )
    with using(isa):
        out = torch.empty(1, 10, dtype=torch.bfloat16)
        library.linear(torch.ones(1, 1), library.pack(values.unsqueeze(1)), out)
        assert same_bits(out[0, :9], values[:9].to(torch.bfloat16))
        library.linear(torch.full((1, 1), NAN), library.pack(values.unsqueeze(1)), out)
        assert torch.isnan(out.float()).all()


@pytest.mark.parametrize("isa", ISAS)
def test_the_numerics_id_tells_contracts_apart(isa: str) -> None:
    """Same id, same bits; a path whose bits differ has an id of its own that does not change."""
    weight, x = randn(64, 301, seed=1), randn(9, 301, seed=2)
    seen: dict[str, torch.Tensor] = {}
    for other in ISAS:
        with using(other):
            # Products of bf16 are exact in fp32, so fp32 ones tell fused from unfused.
            parts = [product(x.to(dtype), weight.to(dtype), torch.float32) for dtype in DTYPES]
            result = torch.cat(parts)
            assert same_bits(seen.setdefault(library.numerics_id(), result), result)
    assert len({result.numpy().tobytes() for result in seen.values()}) == len(seen)
    with using(isa):
        first = library.numerics_id()
        assert first.startswith("milepost-") and library.numerics_id() == first


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="this CPU has no bf16 products")
def test_pairs_of_products_flush_denormals_and_nothing_else() -> None:
    """The contract of bf16 rows times bf16 weights where the CPU multiplies pairs."""
    with using("avx512_bf16"):
        tiny = torch.full((1, 2), 1e-39, dtype=torch.bfloat16)
        one = torch.ones(1, 2, dtype=torch.bfloat16)
        assert float(product(tiny, one, torch.float32)) == 0.0
        small = torch.full((1, 2), 2.0**-126, dtype=torch.bfloat16)
        assert float(product(small, one, torch.float32)) == 2.0**-125
        # Rows in fp32 keep the other contract.
        assert float(product(tiny.float(), one, torch.float32)) > 0.0
        # Exact where fp32 is exact, whatever the order.
        x = torch.arange(-64, 64).view(4, 32).to(torch.bfloat16)
        assert same_bits(product(x, x, torch.float32), x.float() @ x.float().t())


def test_errors_name_the_argument() -> None:
    packed = library.pack(randn(8, 4))
    x, out = randn(3, 4), torch.empty(3, 8)
    for arguments, error, match in [
        ((randn(3, 5), packed, out), ValueError, r"x: must have shape \[any, 4\], not \[3, 5\]"),
        ((x, packed, torch.empty(3, 7)), ValueError, r"out: must have shape \[any, 8\]"),
        ((x, packed, torch.empty(2, 8)), ValueError, "out: must have as many rows as x"),
        ((x.double(), packed, out), TypeError, "x: dtype must be float32 or bfloat16"),
        ((x.t().contiguous().t(), packed, out), ValueError, "x: must be contiguous"),
        (([1.0], packed, out), TypeError, "x: must be a tensor"),
        ((randn(4), packed, out), ValueError, r"x: must be \[rows, width\]"),
        ((x, packed, out, randn(3, 7)), ValueError, "residual: must have shape"),
        ((x, packed, out, randn(3, 8).bfloat16()), TypeError, "residual: dtype must be float32"),
    ]:
        with pytest.raises(error, match=match):
            library.linear(*arguments)
    square = library.pack(randn(4, 4))
    with pytest.raises(ValueError, match="out: must not overlap x"):
        library.linear(x, square, x)
    with pytest.raises(ValueError, match="weight: must not be empty"):
        library.pack(torch.empty(0, 4))
    with pytest.raises(ValueError, match="same number of rows"):
        library.pack(randn(3, 4), paired=True)


def test_numpy_arrays_are_tensors_too() -> None:
    x, weight = randn(3, 4), randn(8, 4)
    out = torch.empty(3, 8)
    library.linear(x.numpy(), library.pack(weight.numpy()), out)
    assert same_bits(out, product(x, weight))


def test_an_instruction_set_this_cpu_lacks_is_refused() -> None:
    before = library.isa()
    with pytest.raises(ValueError, match="'amx' is not available on this CPU; available: baseline"):
        library.set_isa("amx")
    assert library.isa() == before
    with pytest.raises(ValueError, match="count"):
        library.set_num_threads(0)
