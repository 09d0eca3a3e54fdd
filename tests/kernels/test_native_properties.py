"""Every native kernel times every property, in every instruction set. A kernel that is missing here fails.

A kernel runs over the rows of one sequence, cut into calls of any size. Memory that nobody wrote (pages,
slots, gaps between rows) is NaN throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index, recurrent_index
from tests.kernels.native_support import DTYPES, ISAS, NAN, randn, same_bits, shifted, strided, using

from milepost.kernels.api import OPERATIONS, select_kernels
from milepost.kernels.arguments import KdaInputs, KdaParams, MoeParams
from milepost.kernels.native_library import native_library
from milepost.kernels.reference_coded import IntegerWeight, Mxfp4Weight, quantized
from milepost.kernels.reference_experts import GluActivation
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.kernels.reference_gqa import GqaInputs, GqaParams, inverse_frequencies
from milepost.kernels.schemes import IntegerScheme

ROWS = 37
UNIT = 16
PAGES = [4, 1, 5]
EXTREME = 1e4
SITU = GluActivation(4.0, 25.0)

Rows = list[torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """Attributes:
    widths: of the row inputs, all in the model dtype; the last `num_fp32` of them in fp32.
    start: operations and dtype -> a function of (row inputs, first row) for one call; the calls share pools.
    gates: numbers of the inputs that go through an exponential.
    """

    widths: tuple[int, ...]
    start: Callable[[Any, torch.dtype], Callable[[Rows, int], torch.Tensor]]
    gates: tuple[int, ...] = ()
    num_fp32: int = 0
    scale: float = 1.0

    def inputs(self, rows: int, dtype: torch.dtype) -> Rows:
        dtypes = [dtype] * (len(self.widths) - self.num_fp32) + [torch.float32] * self.num_fp32
        return [
            randn(rows, width, seed=number + 1, dtype=each) * self.scale
            for number, (width, each) in enumerate(zip(self.widths, dtypes, strict=True))
        ]

    def run(self, ops: Any, dtype: torch.dtype, inputs: Rows, counts: Sequence[int]) -> torch.Tensor:
        call = self.start(ops, dtype)
        ends = list(accumulate(counts))
        parts = []
        for count, end in zip(counts, ends, strict=True):
            parts.append(call([x[end - count : end] for x in inputs], end - count).clone())
        return torch.cat(parts)


def places(first: int, count: int) -> Any:
    if count == 0:
        return attention_index([], [], [], UNIT)
    return attention_index([count], [first], [PAGES[: -(-(first + count) // UNIT)]], UNIT)


def states(first: int, count: int) -> Any:
    if count == 0:
        return recurrent_index([], [], [], [])
    return recurrent_index([count], [first], [0 if first else -1], [0])


# ------------------------------------------------------------------ one entry per operation


def linear(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_linear(randn(33, 21, seed=50, dtype=dtype))
    return lambda rows, first: ops.linear(rows[0], weight, residual=rows[1].clone())


def linear_parts(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_linear(randn(33, 21, seed=50, dtype=dtype), name="x", parts=(5, 28))
    return lambda rows, first: torch.cat(ops.linear_parts(rows[0], weight), dim=1)


def linear_swiglu(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_swiglu(randn(2 * 19, 21, seed=50, dtype=dtype), name="x")
    return lambda rows, first: ops.linear_swiglu(rows[0], weight)


def rms_norm(ops: Any, dtype: torch.dtype) -> Any:
    weight = randn(21, seed=50)
    return lambda rows, first: ops.rms_norm(rows[0], weight, 1e-5)


def embedding(ops: Any, dtype: torch.dtype) -> Any:
    """The rows are the table; ids visit them backwards."""

    def call(rows: Rows, first: int) -> torch.Tensor:
        ids = torch.arange(rows[0].shape[0] - 1, -1, -1)
        return ops.embedding(ids, rows[0]).flip(0) if len(ids) else ops.embedding(ids, rows[0])

    return call


def store_latents(ops: Any, dtype: torch.dtype) -> Any:
    pages, weight = torch.full((6, UNIT, 21), NAN, dtype=dtype), 1.0 + 0.1 * randn(13, seed=50)

    def call(rows: Rows, first: int) -> torch.Tensor:
        index = places(first, rows[0].shape[0])
        ops.store_latents(rows[0], weight, 1e-5, pages, index)
        return pages[index.write_pages, index.write_offsets]

    return call


def attend_latents(ops: Any, dtype: torch.dtype) -> Any:
    heads, nope, shared, latent, value = 3, 12, 8, 24, 10
    keys = ops.pack_heads(0.3 * randn(heads, latent, nope, seed=50, dtype=dtype))
    values = ops.pack_heads(0.3 * randn(heads, value, latent, seed=51, dtype=dtype))
    pages, weight = torch.full((6, UNIT, latent + shared), NAN, dtype=dtype), torch.ones(latent)

    def call(rows: Rows, first: int) -> torch.Tensor:
        index = places(first, rows[0].shape[0])
        ops.store_latents(rows[1], weight, 1e-5, pages, index)
        return ops.attend_latents(rows[0], keys, values, pages, index, 0.2)

    return call


def gqa_mixer(ops: Any, dtype: torch.dtype) -> Any:
    heads, kv_heads, dim = 4, 2, 20
    norms = [1.0 + 0.1 * randn(dim, seed=seed) for seed in (50, 51)]
    params = GqaParams(heads, kv_heads, dim, *norms, 1e-6, inverse_frequencies(10, 1e4))
    pages = torch.full((6, UNIT, kv_heads * 2 * dim), NAN, dtype=dtype)
    return lambda rows, first: ops.gqa_mixer(GqaInputs(*rows), params, pages, places(first, rows[0].shape[0]))


def kda_mixer(bound: float | None) -> Any:
    def start(ops: Any, dtype: torch.dtype) -> Any:
        heads, dim = 2, 20
        width = heads * dim
        params = KdaParams(
            heads, dim, randn(4, 3 * width, seed=50) * 0.5, randn(heads, seed=51),
            randn(width, seed=52) - 2.0, 1.0 + 0.1 * randn(dim, seed=53), 1e-5, bound,
        )  # fmt: skip
        tails, pool = torch.full((3, 3, 3 * width), NAN, dtype=dtype), torch.full((3, heads, dim, dim), NAN)
        return lambda rows, first: ops.kda_mixer(
            KdaInputs(*rows), params, tails, pool, states(first, rows[0].shape[0])
        )

    return start


def gdn_mixer(ops: Any, dtype: torch.dtype) -> Any:
    key_heads, heads, key_dim, value_dim = 2, 4, 16, 12
    channels = 2 * key_heads * key_dim + heads * value_dim
    params = GdnParams(
        key_heads, heads, key_dim, value_dim, 0.5 * randn(4, channels, seed=50), randn(heads, seed=51),
        randn(heads, seed=52) - 1.0, 1.0 + 0.1 * randn(value_dim, seed=53), 1e-6,
    )  # fmt: skip
    tails, pool = (
        torch.full((3, 3, channels), NAN, dtype=dtype),
        torch.full((3, heads, key_dim, value_dim), NAN),
    )
    return lambda rows, first: ops.gdn_mixer(
        GdnInputs(*rows), params, tails, pool, states(first, rows[0].shape[0])
    )


def store_keys_values(ops: Any, dtype: torch.dtype) -> Any:
    kv_heads, dim = 2, 20
    norm = 1.0 + 0.1 * randn(dim, seed=50)
    params = GqaParams(4, kv_heads, dim, norm, norm, 1e-6, inverse_frequencies(10, 1e4))
    pages = torch.full((6, UNIT, kv_heads * 2 * dim), NAN, dtype=dtype)

    def call(rows: Rows, first: int) -> torch.Tensor:
        index = places(first, rows[0].shape[0])
        ops.store_keys_values(*rows, params, pages, index)
        return pages[index.write_pages, index.write_offsets]

    return call


def gqa_mixer_without_gate(ops: Any, dtype: torch.dtype) -> Any:
    heads, kv_heads, dim = 4, 2, 20
    norms = [1.0 + 0.1 * randn(dim, seed=seed) for seed in (50, 51)]
    params = GqaParams(heads, kv_heads, dim, *norms, 1e-6, inverse_frequencies(10, 1e4), has_gate=False)
    pages = torch.full((6, UNIT, kv_heads * 2 * dim), NAN, dtype=dtype)
    return lambda rows, first: ops.gqa_mixer(GqaInputs(*rows), params, pages, places(first, rows[0].shape[0]))


def rotate_heads(is_interleaved: bool) -> Any:
    def start(ops: Any, dtype: torch.dtype) -> Any:
        frequencies = inverse_frequencies(10, 1e4)

        def call(rows: Rows, first: int) -> torch.Tensor:
            index = places(first, rows[0].shape[0])
            return ops.rotate_heads(
                rows[0], 3, frequencies, index, amplitude=1.5, is_interleaved=is_interleaved
            )

        return call

    return start


def random_experts(dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    return [
        tuple(
            randn(*shape, seed=60 + 3 * e + n, dtype=dtype)
            for n, shape in enumerate([(7, 20), (7, 20), (20, 7)])
        )
        for e in range(5)
    ]


def moe(ops: Any, dtype: torch.dtype) -> Any:
    params = MoeParams(0.2 * randn(5, seed=50), 2, True, 2.4, ops.pack_experts(random_experts(dtype)))
    return lambda rows, first: ops.moe(rows[0], rows[2], params, shared=None, residual=rows[1].clone())


def moe_softmax(ops: Any, dtype: torch.dtype) -> Any:
    params = MoeParams(None, 3, True, 1.0, ops.pack_experts(random_experts(dtype)))

    def call(rows: Rows, first: int) -> torch.Tensor:
        x, residual, shared, logits, gate = rows
        return ops.moe(x, logits, params, shared=shared, residual=residual.clone(), shared_gate=gate)

    return call


def moe_situ(ops: Any, dtype: torch.dtype) -> Any:
    """What works in a latent space: the sum alone."""
    packed = ops.pack_experts(random_experts(dtype), activation=SITU)
    params = MoeParams(0.2 * randn(5, seed=50), 2, True, 2.4, packed)
    return lambda rows, first: ops.moe(rows[0], rows[1], params, shared=None, residual=None)


def linear_swiglu_situ(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_swiglu(randn(2 * 19, 21, seed=50, dtype=dtype), name="x", activation=SITU)
    return lambda rows, first: ops.linear_swiglu(rows[0], weight)


def gate_values(ops: Any, dtype: torch.dtype) -> Any:
    return lambda rows, first: ops.gate_values(*rows)


def add_shared(ops: Any, dtype: torch.dtype) -> Any:
    def call(rows: Rows, first: int) -> torch.Tensor:
        x, shared, residual, gate = rows
        return ops.add_shared(x, shared, residual=residual.clone(), gate=gate)

    return call


def mix_sources(ops: Any, dtype: torch.dtype) -> Any:
    query = randn(21, seed=50)
    return lambda rows, first: ops.mix_sources(rows, query, 1e-5)


# -------------------------------------------------------- the same with weights of few bits

INT8, INT4 = IntegerScheme(8, 64), IntegerScheme(4, 8)


def integers(
    rows: int, width: int, dtype: torch.dtype, scheme: IntegerScheme, seed: int = 50
) -> IntegerWeight:
    return quantized(randn(rows, width, seed=seed, dtype=dtype), scheme)


def linear_int8(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_linear(integers(33, 21, dtype, INT8))
    return lambda rows, first: ops.linear(rows[0], weight, residual=rows[1].clone())


def linear_parts_mxfp4(ops: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(50)
    packed = torch.randint(0, 256, (33, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (33, 2), generator=generator, dtype=torch.uint8)
    weight = ops.pack_linear(Mxfp4Weight(packed, scales, dtype), name="x", parts=(5, 28))
    return lambda rows, first: torch.cat(ops.linear_parts(rows[0], weight), dim=1)


def linear_swiglu_int4(ops: Any, dtype: torch.dtype) -> Any:
    weight = ops.pack_swiglu(integers(2 * 19, 21, dtype, INT4), name="x")
    return lambda rows, first: ops.linear_swiglu(rows[0], weight)


def moe_mxfp4(ops: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(50)

    def matrix(rows: int, width: int) -> Mxfp4Weight:
        packed = torch.randint(0, 256, (rows, width // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, (rows, width // 32), generator=generator, dtype=torch.uint8)
        return Mxfp4Weight(packed, scales, dtype)

    weights = [(matrix(32, 64), matrix(32, 64), matrix(64, 32)) for _ in range(5)]
    params = MoeParams(0.2 * randn(5, seed=50), 2, True, 1.0, ops.pack_experts(weights, activation=SITU))
    return lambda rows, first: ops.moe(rows[0], rows[2], params, shared=None, residual=rows[1].clone())


def moe_int4(ops: Any, dtype: torch.dtype) -> Any:
    experts = [
        tuple(
            integers(*shape, dtype, INT4, seed=60 + 3 * e + n)
            for n, shape in enumerate([(7, 20), (7, 20), (20, 7)])
        )
        for e in range(5)
    ]
    params = MoeParams(0.2 * randn(5, seed=50), 2, True, 2.4, ops.pack_experts(experts))
    return lambda rows, first: ops.moe(rows[0], rows[2], params, shared=None, residual=rows[1].clone())


KERNELS = {
    "embedding": Kernel((21,), embedding),
    "linear": Kernel((21, 33), linear),
    "linear_parts": Kernel((21,), linear_parts),
    "linear_swiglu": Kernel((21,), linear_swiglu, gates=(0,)),
    "rms_norm": Kernel((21,), rms_norm),
    "store_latents": Kernel((21,), store_latents),
    "attend_latents": Kernel((60, 32), attend_latents, gates=(0,)),
    "gqa_mixer": Kernel((4 * 2 * 20, 40, 40), gqa_mixer, gates=(0,)),
    "kda_mixer": Kernel((120, 40, 2, 40), kda_mixer(None), gates=(1, 2, 3)),
    "kda_mixer, bounded": Kernel((120, 40, 2, 40), kda_mixer(-5.0), gates=(1, 2, 3)),
    "gdn_mixer": Kernel((112, 48, 4, 4), gdn_mixer, gates=(1, 2, 3)),
    "moe": Kernel((20, 20, 5), moe, gates=(2,), num_fp32=1),
}

if native_library().has_mixtures:
    KERNELS |= {
        "linear_swiglu, situ": Kernel((21,), linear_swiglu_situ, gates=(0,)),
        "store_keys_values": Kernel((40, 40), store_keys_values),
        "gqa_mixer, no gate": Kernel((4 * 20, 40, 40), gqa_mixer_without_gate),
        "rotate_heads": Kernel((3 * 21,), rotate_heads(False)),
        "rotate_heads, interleaved": Kernel((3 * 21,), rotate_heads(True)),
        "gate_values": Kernel((21, 21), gate_values, gates=(1,)),
        "moe, softmax": Kernel((20, 20, 20, 5, 1), moe_softmax, gates=(3, 4), num_fp32=2),
        "moe, situ": Kernel((20, 5), moe_situ, gates=(1,), num_fp32=1),
        "moe, mxfp4": Kernel((64, 64, 5), moe_mxfp4, gates=(2,), num_fp32=1),
        "add_shared": Kernel((21, 21, 21, 1), add_shared, gates=(3,), num_fp32=1),
        "mix_sources": Kernel((21, 21, 21), mix_sources, gates=(1,)),
    }

if native_library().has_coded_weights:
    KERNELS |= {
        "linear, int8": Kernel((21, 33), linear_int8),
        "linear_parts, mxfp4": Kernel((64,), linear_parts_mxfp4),
        "linear_swiglu, int4": Kernel((21,), linear_swiglu_int4, gates=(0,)),
        "moe, int4": Kernel((20, 20, 5), moe_int4, gates=(2,), num_fp32=1),
    }

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_kernel = pytest.mark.parametrize("name", sorted(KERNELS))


def tolerance(dtype: torch.dtype) -> float:
    return 5e-5 if dtype == torch.float32 else 2**-5


def whole(name: str, ops: Any, dtype: torch.dtype, inputs: Rows) -> torch.Tensor:
    return KERNELS[name].run(ops, dtype, inputs, [inputs[0].shape[0]])


def test_no_kernel_is_missing() -> None:
    """`pack_*` prepare weights; the kernels that take them are here."""
    if not native_library().has_mixtures:
        pytest.skip("the native library is older than some of them")
    assert {name.split(",")[0] for name in KERNELS} == {
        name for name in OPERATIONS if not name.startswith("pack_")
    }


@every_isa
@every_dtype
@every_kernel
def test_the_reference_twin_and_nan_in_unwritten_memory(isa: str, dtype: torch.dtype, name: str) -> None:
    inputs = KERNELS[name].inputs(ROWS, dtype)
    expected = whole(name, select_kernels("reference"), dtype, inputs)
    with using(isa) as ops:
        result = whole(name, ops, dtype, inputs)
    assert torch.isfinite(result.float()).all() and result.dtype == dtype
    assert_close(result, expected, tolerance(dtype))


@every_isa
@every_dtype
@every_kernel
def test_ragged_and_empty_calls(isa: str, dtype: torch.dtype, name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(ROWS, dtype)
    with using(isa) as ops:
        expected = whole(name, ops, dtype, inputs)
        assert same_bits(kernel.run(ops, dtype, inputs, [1, 0, 2, 13, 0, 1, 20]), expected)
        empty = kernel.run(ops, dtype, [x[:0] for x in inputs], [0])
        assert empty.shape == (0, expected.shape[1]) and empty.dtype == dtype
    with using(isa, threads=2) as ops:
        assert same_bits(whole(name, ops, dtype, inputs), expected)


@every_isa
@every_dtype
@every_kernel
def test_misaligned_and_strided_rows(isa: str, dtype: torch.dtype, name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(ROWS, dtype)
    with using(isa) as ops:
        expected = whole(name, ops, dtype, inputs)
        for by in (1, 3):
            assert same_bits(whole(name, ops, dtype, [shifted(x, by) for x in inputs]), expected)
        assert same_bits(whole(name, ops, dtype, [strided(x) for x in inputs]), expected)


@every_isa
@every_dtype
@every_kernel
def test_denormals(isa: str, dtype: torch.dtype, name: str) -> None:
    """They count, and what the caller has set does not."""
    kernel = KERNELS[name]
    inputs = [(x.float() * 1e-39).to(x.dtype) for x in kernel.inputs(ROWS, dtype)]
    reference = whole(name, select_kernels("reference"), dtype, inputs)
    with using(isa) as ops:
        expected = whole(name, ops, dtype, inputs)
        assert torch.isfinite(expected.float()).all()
        try:
            assert torch.set_flush_denormal(True)
            result = whole(name, ops, dtype, inputs)
        finally:
            torch.set_flush_denormal(False)
        assert same_bits(result, expected)
    scale = float(reference.abs().max())
    # torch's own bf16 products flush, so that only fp32 ones can be compared.
    if dtype == torch.float32:
        worst = float((expected.double() - reference.double()).abs().max())
        assert worst <= max(tolerance(dtype) * scale, 1e-41)


@every_isa
@every_dtype
@pytest.mark.parametrize("extreme", [EXTREME, -EXTREME])
@pytest.mark.parametrize("name", sorted(name for name in KERNELS if KERNELS[name].gates))
def test_gates_at_their_extremes(isa: str, dtype: torch.dtype, name: str, extreme: float) -> None:
    kernel = KERNELS[name]
    inputs = kernel.inputs(ROWS, dtype)
    for gate in kernel.gates:
        # Every other row, so that extremes and usual values meet in one state.
        inputs[gate][::2] = inputs[gate][::2].abs() * extreme
    expected = whole(name, select_kernels("reference"), dtype, inputs)
    with using(isa) as ops:
        result = whole(name, ops, dtype, inputs)
        assert torch.isfinite(result.float()).all()
        assert_close(result, expected, 4 * tolerance(dtype))
        assert same_bits(kernel.run(ops, dtype, inputs, [3, 1, 33]), result)
