"""Native Gated DeltaNet and grouped-query attention: the reference's numbers, bits no cut changes."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index, recurrent_index
from tests.kernels.native_support import DTYPES, FUSED, ISAS, NAN, randn, same_bits, strided, using

from milepost.kernels import reference_gdn, reference_gqa
from milepost.kernels.native import NativeOperations
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.kernels.reference_gqa import GqaInputs, GqaParams

NUM_SLOTS = 9


def gdn(
    rows: int, dtype: torch.dtype, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[GdnInputs, GdnParams, torch.Tensor, torch.Tensor]:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    inputs = GdnInputs(
        strided(randn(rows, channels, seed=1, dtype=dtype)),
        randn(rows, value_heads * value_dim, seed=2, dtype=dtype),
        strided(randn(rows, value_heads, seed=3, dtype=dtype)),
        strided(2 * randn(rows, value_heads, seed=4, dtype=dtype)),
    )
    params = GdnParams(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        0.5 * randn(4, channels, seed=5),
        randn(value_heads, seed=6),
        randn(value_heads, seed=7) - 1.0,
        1.0 + 0.1 * randn(value_dim, seed=8),
        1e-6,
    )
    tails = torch.full((NUM_SLOTS, 3, channels), NAN, dtype=dtype)
    states = torch.full((NUM_SLOTS, value_heads, key_dim, value_dim), NAN)
    return inputs, params, tails, states


def between(inputs: GdnInputs, first: int, end: int) -> GdnInputs:
    return GdnInputs(*(x[first:end] for x in inputs))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 16, 16), (1, 3, 10, 20), (2, 4, 64, 32), (2, 4, 48, 80)])
def test_gdn_is_close_to_the_reference(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    lengths = [1, 70, 2]
    inputs, params, tails, states = gdn(sum(lengths), dtype, *shape)
    tails[0], states[0] = (
        randn(*tails.shape[1:], seed=9, dtype=dtype),
        0.3 * randn(*states.shape[1:], seed=10),
    )
    index = recurrent_index(lengths, [9, 0, 4], [0, -1, 0], [0, 1, 2], [(0, 1, 3), (1, 1, 4), (1, 66, 5)])
    expected_tails, expected_states = tails.clone(), states.clone()
    expected = reference_gdn.gdn_mixer(inputs, params, expected_tails, expected_states, index)
    with using(isa) as ops:
        out = ops.gdn_mixer(inputs, params, tails, states, index)
    assert_close(out, expected, 3e-5 if dtype == torch.float32 else 2**-7)
    for slot in range(6):
        assert same_bits(tails[slot], expected_tails[slot]), slot
        assert_close(states[slot], expected_states[slot], 2e-5)
    assert torch.isnan(states[6:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_no_cut_changes_a_bit_of_gdn(isa: str, dtype: torch.dtype, threads: int) -> None:
    """Value heads of one key head share tails; in place, none may read what another wrote."""
    rows = 100
    inputs, params, tails, states = gdn(rows, dtype, 2, 6, 32, 20)
    whole_tails, whole_states = tails.clone(), states.clone()
    with using(isa) as ops:
        index = recurrent_index([rows], [0], [-1], [0], [(0, 33, 1)])
        whole = ops.gdn_mixer(inputs, params, whole_tails, whole_states, index).clone()
    with using(isa, threads) as ops:
        parts = []
        first = 0
        for count in (1, 1, 31, 1, 2, 64):
            index = recurrent_index([count], [first], [0 if first else -1], [0])
            part = ops.gdn_mixer(between(inputs, first, first + count), params, tails, states, index)
            parts.append(part.clone())
            first += count
            if first == 33:
                assert same_bits(states[0], whole_states[1]) and same_bits(tails[0], whole_tails[1])
        assert same_bits(torch.cat(parts), whole)
        assert same_bits(states[0], whole_states[0]) and same_bits(tails[0], whole_tails[0])


def gqa(
    rows: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary: int
) -> tuple[GqaInputs, GqaParams]:
    inputs = GqaInputs(
        strided(randn(rows, heads * 2 * dim, seed=1, dtype=dtype)),
        strided(randn(rows, kv_heads * dim, seed=2, dtype=dtype)),
        strided(randn(rows, kv_heads * dim, seed=3, dtype=dtype)),
    )
    params = GqaParams(
        heads,
        kv_heads,
        dim,
        1.0 + 0.2 * randn(dim, seed=4),
        1.0 + 0.2 * randn(dim, seed=5),
        1e-6,
        reference_gqa.inverse_frequencies(rotary, 1e4),
    )
    return inputs, params


def part_of(inputs: GqaInputs, first: int, end: int) -> GqaInputs:
    return GqaInputs(*(x[first:end] for x in inputs))


def tolerance(isa: str, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 2e-5
    return 2**-5 if isa == "avx512_bf16" else 2**-7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 32, 16), (3, 1, 20, 6), (2, 2, 64, 64), (8, 2, 128, 32)])
def test_gqa_is_close_to_the_reference(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Two sequences, one of them across a tile of 256 keys."""
    heads, kv_heads, dim, _ = shape
    lengths, positions = [5, 40], [0, 230]
    inputs, params = gqa(45, dtype, *shape)
    pages = randn(30, 16, kv_heads * 2 * dim, seed=9, dtype=dtype)
    index = attention_index(lengths, positions, [[3], [n for n in range(4, 30) if n % 5]], 16)
    expected_pages = pages.clone()
    expected = reference_gqa.gqa_mixer(inputs, params, expected_pages, index)
    with using(isa) as ops:
        out = ops.gqa_mixer(inputs, params, pages, index)
    assert_close(out, expected, tolerance(isa, dtype))
    assert_close(pages, expected_pages, 1e-6 if dtype == torch.float32 else 2**-8)
    assert int((pages != expected_pages).sum()) < 0.02 * pages.numel()


def run_gqa(
    ops: NativeOperations,
    inputs: GqaInputs,
    params: GqaParams,
    counts: list[int],
    match_unit: int,
    order: list[int],
) -> torch.Tensor:
    pages = torch.full((len(order), match_unit, params.num_kv_heads * 2 * params.head_dim), NAN)
    pages = pages.to(inputs.key.dtype)
    parts, first = [], 0
    for count in counts:
        needed = -(-(first + count) // match_unit)
        index = attention_index([count], [first], [order[:needed]], match_unit)
        parts.append(ops.gqa_mixer(part_of(inputs, first, first + count), params, pages, index).clone())
        first += count
    return torch.cat(parts)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_cut_changes_a_bit_of_gqa(isa: str, dtype: torch.dtype) -> None:
    inputs, params = gqa(290, dtype, 6, 2, 40, 20)
    order = [7, 3, 11, 0, *(n for n in range(1, 20) if n not in (3, 7, 11))]
    with using(isa) as ops:
        whole = run_gqa(ops, inputs, params, [290], 16, order)
        assert torch.isfinite(whole.float()).all()
        cut = run_gqa(ops, inputs, params, [1, 2, 30, 222, 1, 1, 33], 16, order)
        assert same_bits(cut, whole)
        assert same_bits(run_gqa(ops, inputs, params, [290], 64, [4, 1, 0, 2, 3]), whole)
    with using(isa, threads=2) as ops:
        assert same_bits(run_gqa(ops, inputs, params, [100, 190], 16, order), whole)
    if isa in FUSED:
        with using(FUSED[0]) as ops:
            assert same_bits(run_gqa(ops, inputs, params, [290], 16, order), whole)


def test_errors_name_the_argument() -> None:
    with using(ISAS[-1]) as ops:
        inputs, params, tails, states = gdn(4, torch.float32, 2, 4, 16, 16)
        index = recurrent_index([4], [0], [-1], [0])
        with pytest.raises(ValueError, match="raw: must hold q and k of a divisor of the value heads"):
            ops.gdn_mixer(inputs._replace(raw=inputs.raw[:, :64]), params, tails, states, index)
        with pytest.raises(ValueError, match="states: must have heads, keys and values"):
            ops.gdn_mixer(inputs, params, tails, states[:, :, :0], index)
        with pytest.raises(ValueError, match=r"decay: must have shape \[4, 4\]"):
            ops.gdn_mixer(inputs._replace(decay=inputs.decay[:, :3]), params, tails, states, index)
        attention, sizes = gqa(4, torch.float32, 4, 2, 16, 8)
        pages = torch.zeros(1, 16, 64)
        places = attention_index([4], [0], [[0]], 16)
        with pytest.raises(ValueError, match=r"pages: must have shape \[any, any, 64\]"):
            ops.gqa_mixer(attention, sizes, pages[..., :32], places)
        with pytest.raises(ValueError, match="value: must have shape"):
            ops.gqa_mixer(attention._replace(value=attention.value[:, :16]), sizes, pages, places)
