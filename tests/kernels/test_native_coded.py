"""Native products with weights of few bits: close to the reference, and every row alone decides its bits."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.helpers import assert_close
from tests.kernels.native_support import (
    DTYPES,
    FUSED,
    ISAS,
    NAN,
    Product,
    assert_rows_stand_alone,
    library,
    randn,
    same_bits,
    using,
)

from milepost.kernels import reference, reference_layers
from milepost.kernels.arguments import MoeParams
from milepost.kernels.native import MXFP4_SCALES, NativeOperations
from milepost.kernels.native_library import native_library
from milepost.kernels.native_workspace import DecodedOnUse
from milepost.kernels.reference_coded import IntegerWeight, Mxfp4Weight, quantized
from milepost.kernels.schemes import IntegerScheme

if not native_library().has_coded_weights:
    pytest.skip("the native library is older than weights of few bits", allow_module_level=True)

SCHEMES = [IntegerScheme(8, 64), IntegerScheme(8, 8), IntegerScheme(4, 32), IntegerScheme(4, 16)]
SHAPES = [(1, 1), (7, 3), (16, 16), (33, 48), (64, 65), (192, 192), (100, 131), (257, 40)]
"""(out, in)"""
ROWS = [0, 1, 2, 3, 5, 12, 13, 31, 70]
coded_by = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def pack(weight: IntegerWeight, *, paired: bool = False) -> object:
    scheme = weight.scheme
    return library.pack_integers(weight.codes, weight.scales, scheme.bits, scheme.group, paired)


def product(x: torch.Tensor, packed: object, dtype: torch.dtype | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], packed.out_features), NAN, dtype=dtype or x.dtype)  # type: ignore[attr-defined]
    library.linear(x, packed, out)
    return out


def floats(rows: int, width: int, *, seed: int = 0, low: int = 100, high: int = 140) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, width // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, (rows, width // 32), generator=generator, dtype=torch.uint8)
    return Mxfp4Weight(packed, scales, torch.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@coded_by
def test_close_to_exact_for_any_number_of_rows(isa: str, dtype: torch.dtype, scheme: IntegerScheme) -> None:
    with using(isa):
        for shape in SHAPES:
            coded = quantized(randn(*shape, seed=1), scheme)
            packed = pack(coded)
            for rows in ROWS:
                x = randn(rows, shape[1], seed=rows, dtype=dtype)
                expected = x.double() @ coded.decode().double().t()
                assert_close(product(x, packed, torch.float32), expected, 2e-6)
                assert_close(product(x, packed), expected, 2e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "mxfp4"])
def test_a_row_has_the_same_bits_in_any_company(isa: str, dtype: torch.dtype, kind: str) -> None:
    width = 160 if kind == "mxfp4" else 131
    x = randn(97, width, seed=2, dtype=dtype)

    def make() -> Product:
        if kind == "mxfp4":
            weight = floats(70, width)
            packed = library.pack_mxfp4(weight.packed, weight.scales)
        else:
            scheme = IntegerScheme(8, 64) if kind == "int8" else IntegerScheme(4, 32)
            packed = pack(quantized(randn(70, width, seed=1), scheme))
        return lambda rows: product(rows, packed)

    assert_rows_stand_alone(isa, x, make)


@pytest.mark.parametrize("isa", ISAS)
@coded_by
def test_the_order_of_sums_is_the_stated_one(isa: str, scheme: IntegerScheme) -> None:
    """A sum per group from zero, then total = scale * sum + total: redone one operation at a time."""
    coded, x = quantized(randn(20, 3 * scheme.group + 2, seed=3), scheme), randn(1, 3 * scheme.group + 2)
    codes, scales = coded.codes.double(), coded.scales.double()
    total = torch.zeros(20)
    # Products of fp32 and 8 bits are exact in double; one rounding to fp32 then is a fused operation.
    for group in range(scales.shape[1]):
        sums = torch.zeros(20)
        for k in range(group * scheme.group, min((group + 1) * scheme.group, x.shape[1])):
            term = x[0, k].double() * codes[:, k]
            sums = (term + sums.double()).float() if isa != "baseline" else term.float() + sums
        term = scales[:, group] * sums.double()
        total = (term + total.double()).float() if isa != "baseline" else term.float() + total
    with using(isa):
        assert same_bits(product(x, pack(coded))[0], total)


@pytest.mark.parametrize("dtype", DTYPES)
@coded_by
def test_fused_instruction_sets_agree(dtype: torch.dtype, scheme: IntegerScheme) -> None:
    coded, x = quantized(randn(75, 130, seed=1), scheme), randn(29, 130, seed=2, dtype=dtype)
    results = []
    for isa in FUSED:
        with using(isa):
            packed = pack(coded)
            results += [torch.cat([product(x[:1].clone(), packed), product(x[1:].clone(), packed)])]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@coded_by
@pytest.mark.parametrize("rows", [1, 2, 14])
def test_fusing_changes_no_bit(isa: str, dtype: torch.dtype, scheme: IntegerScheme, rows: int) -> None:
    gate_up = quantized(randn(2 * 37, 50, seed=1), scheme)
    x, residual = randn(rows, 50, seed=2, dtype=dtype), randn(rows, 74, seed=3, dtype=dtype)
    with using(isa):
        plain = product(x, pack(gate_up))
        out = torch.full((rows, 37), NAN, dtype=dtype)
        library.linear(x, pack(gate_up, paired=True), out)
        assert_close(out, reference.swiglu(plain), 1e-6 if dtype == torch.float32 else 2**-8)
        into = residual.clone()
        library.linear(x, pack(gate_up), into, into)
        assert same_bits(into, residual + plain)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("scales", [(110, 140), MXFP4_SCALES])
def test_4_bit_floats_give_the_bits_of_their_decoded_values(
    isa: str, dtype: torch.dtype, paired: bool, scales: tuple[int, int]
) -> None:
    """For weights in bf16, and in fp32; every nibble and every scale the decoder takes."""
    with using(isa):
        for out, width in ((2, 32), (34, 64), (100, 160), (258, 32)):
            coded = floats(out, width, seed=out, low=scales[0], high=scales[1] + 1)
            packed = library.pack_mxfp4(coded.packed, coded.scales, paired)
            plain = library.pack(coded.decode().to(dtype), paired=paired)
            for rows in (0, 1, 2, 3, 12, 13, 40):
                # Small rows: products with the largest scales stay finite.
                x = (randn(rows, width, seed=rows) * 2.0**-60).to(dtype)
                assert same_bits(product(x, packed), product(x, plain))


@pytest.mark.parametrize("isa", ISAS)
def test_scales_the_decoder_does_not_take_are_kept_decoded(isa: str) -> None:
    operations = NativeOperations(library)
    for scale in (0, 1, 253, 254):
        coded = floats(5, 64)
        coded.scales[2, 1] = scale
        with pytest.raises(ValueError, match=r"scales: must lie in \[2, 252\]"):
            library.pack_mxfp4(coded.packed, coded.scales)
        x = randn(3, 64) * 2.0**-60
        with using(isa):
            weight = operations.pack_linear(coded)
            expected = product(x, library.pack(coded.decode()))
            assert same_bits(operations.linear(x, weight), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_denormals_are_kept_whatever_the_caller_has_set(isa: str) -> None:
    x = torch.full((3, 8), 1e-40)
    for codes in (quantized(torch.eye(8), IntegerScheme(8, 8)), quantized(torch.eye(8), IntegerScheme(4, 8))):
        with using(isa):
            packed = pack(codes)
            expected = product(x, packed)
            assert float(expected.min()) > 0.0
            try:
                assert torch.set_flush_denormal(True)
                result = product(x, packed)
            finally:
                torch.set_flush_denormal(False)
            assert same_bits(result, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_extremes(isa: str) -> None:
    """Zero scales, infinite rows, overflow to infinity, NaN."""
    weight = torch.zeros(3, 16)
    weight[1] = 3.0e38
    weight[2, 0] = 1.0
    for scheme in (IntegerScheme(8, 16), IntegerScheme(4, 16)):
        with using(isa):
            packed = pack(quantized(weight, scheme))
            for rows in (1, 5):
                result = product(torch.full((rows, 16), 2.0), packed)
                assert torch.equal(result[:, 0], torch.zeros(rows))
                assert torch.isinf(result[:, 1]).all()
                assert torch.equal(result[:, 2], torch.full((rows,), 2.0))
                assert torch.isnan(product(torch.full((rows, 16), float("inf")), packed)[:, 0]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@coded_by
def test_experts_of_integers(isa: str, dtype: torch.dtype, scheme: IntegerScheme) -> None:
    """The whole operation against the reference over the same codes, and alone against together."""
    width, inner, count, rows = 48, 40, 5, 23
    experts = [
        tuple(
            quantized(randn(*shape, seed=10 * expert + part, dtype=dtype) * 0.2, scheme)
            for part, shape in enumerate(((inner, width), (inner, width), (width, inner)))
        )
        for expert in range(count)
    ]
    x, logits = randn(rows, width, seed=1, dtype=dtype), randn(rows, count, seed=2)
    residual = randn(rows, width, seed=3, dtype=dtype)

    def params(packed: object) -> MoeParams:
        return MoeParams(torch.zeros(count), 2, True, 1.5, packed)

    expected = reference_layers.moe(
        x, logits, params(reference_layers.pack_experts(experts)), shared=None, residual=residual
    )
    with using(isa) as operations:
        native = params(operations.pack_experts(experts))
        together = operations.moe(x, logits, native, shared=None, residual=residual.clone())
        assert_close(together, expected, 1e-5 if dtype == torch.float32 else 2**-7)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = operations.moe(
                x[one].clone(), logits[one].clone(), native, shared=None, residual=residual[one].clone()
            )
            assert same_bits(alone, together[one])


def test_errors_name_the_argument() -> None:
    codes, scales = torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 2, dtype=torch.bfloat16)
    for arguments, error, match in [
        ((codes.float(), scales, 8, 8), TypeError, "values: dtype must be int8"),
        ((codes, scales.float(), 8, 8), TypeError, "scales: dtype must be bfloat16"),
        ((codes, scales, 5, 8), ValueError, "bits: must be 4 or 8"),
        ((codes, scales, 8, 12), ValueError, "group: must be a multiple of 8"),
        ((codes, scales, 8, 16), ValueError, r"scales: must have shape \[4, 1\]"),
        ((codes + 8, scales, 4, 8), ValueError, r"values: must lie in \[-8, 7\]"),
        ((codes[:0], scales[:0], 8, 8), ValueError, "weight: must not be empty"),
        ((codes[:3], scales[:3], 8, 8, True), ValueError, "same number of rows"),
    ]:
        with pytest.raises(error, match=match):
            library.pack_integers(*arguments)
    with pytest.raises(ValueError, match="whole groups of 32 values"):
        library.pack_mxfp4(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8))
    with pytest.raises(TypeError, match="scales: dtype must be uint8"):
        library.pack_mxfp4(torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1))
    assert library.pack_integers(codes, scales, 4, 8).num_bytes == 2 * (64 + 8 * 32 // 2)


def test_a_library_without_them_decodes_4_bit_floats_on_use() -> None:
    class Old:
        """What an older library has."""

        pack, linear = staticmethod(library.pack), staticmethod(library.linear)

    operations, weight = NativeOperations(Old), floats(33, 64)  # type: ignore[arg-type]
    packed = operations.pack_linear(weight, parts=(30, 3))
    assert isinstance(packed, DecodedOnUse)
    x = randn(4, 64)
    expected = product(x, library.pack_mxfp4(weight.packed, weight.scales))
    assert same_bits(operations.linear(x, packed), expected)
    assert same_bits(operations.linear_parts(x, packed)[1], expected[:, 30:])
