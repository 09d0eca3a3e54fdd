"""Expanded latent attention: the same numbers up to rounding, and bits that no cut changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.kernels.helpers import assert_close
from tests.kernels.native_support import DTYPES, FUSED, ISAS, NAN, randn, same_bits, using
from tests.kernels.test_native_attention import Cache

from milepost.config import EXACTNESS_MODES
from milepost.errors import ConfigError
from milepost.kernels import native_library as finding
from milepost.kernels import reference_layers
from milepost.kernels.api import select_kernels
from milepost.kernels.index import AttentionIndex, RowSpan

HEADS, NOPE, SHARED, LATENT, VALUE = 3, 12, 8, 24, 10
TOTAL = 300
"""Longer than a tile of 256 keys."""


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [heads, nope, latent] and values [heads, value, latent]."""
    return (
        randn(HEADS, NOPE, LATENT, seed=1, dtype=dtype) * 0.3,
        randn(HEADS, VALUE, LATENT, seed=2, dtype=dtype) * 0.3,
    )


def attend(ops, query: torch.Tensor, cache: Cache, index: AttentionIndex) -> torch.Tensor:  # type: ignore[no-untyped-def]
    key, value = weights(query.dtype)
    packed = ops.pack_heads(key.transpose(1, 2)), ops.pack_heads(value)
    return ops.attend_latents(query, *packed, cache.pages, index, 0.2, ops.pack_heads(key)).clone()


def case(dtype: torch.dtype) -> tuple[torch.Tensor, Cache]:
    query = randn(TOTAL, HEADS * (NOPE + SHARED), seed=4, dtype=dtype)
    return query, Cache(randn(TOTAL, LATENT + SHARED, seed=3, dtype=dtype), 16)


def expanded(cache: Cache, first: int, end: int) -> AttentionIndex:
    return dataclasses.replace(cache.index(first, end - first), expanded=frozenset({0}))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_close_to_the_reference_and_to_absorbed(isa: str, dtype: torch.dtype) -> None:
    query, cache = case(dtype)
    finite = Cache(torch.nan_to_num(randn(TOTAL, LATENT + SHARED, seed=3, dtype=dtype)), 16)
    finite.pages = torch.nan_to_num(finite.pages)
    reference = attend(reference_layers, query, finite, expanded(finite, 0, TOTAL))
    absorbed = attend(reference_layers, query, finite, finite.index(0, TOTAL))
    assert_close(reference, absorbed, 1e-5 if dtype == torch.float32 else 2**-6)
    with using(isa) as ops:
        assert_close(
            attend(ops, query, cache, expanded(cache, 0, TOTAL)),
            reference,
            1e-5 if dtype == torch.float32 else 2**-6,
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_cut_changes_a_bit(isa: str, dtype: torch.dtype) -> None:
    query, cache = case(dtype)
    with using(isa) as ops:
        whole = attend(ops, query, cache, expanded(cache, 0, TOTAL))
        for first, end in ((0, 1), (0, 17), (17, 256), (255, 257), (299, 300), (100, 300)):
            part = attend(ops, query[first:end].clone(), cache, expanded(cache, first, end))
            assert same_bits(part, whole[first:end]), (first, end)
        other = Cache(randn(TOTAL, LATENT + SHARED, seed=3, dtype=dtype), 64, seed=5)
        assert same_bits(attend(ops, query, other, expanded(other, 0, TOTAL)), whole)
    with using(isa, threads=2) as ops:
        assert same_bits(attend(ops, query, cache, expanded(cache, 0, TOTAL)), whole)
    if isa in FUSED:
        with using(FUSED[0]) as ops:
            assert same_bits(attend(ops, query, cache, expanded(cache, 0, TOTAL)), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kinds_mix_in_a_step_without_touching_each_other(isa: str, dtype: torch.dtype) -> None:
    query, cache = case(dtype)
    parts = [(0, 40, True), (40, 41, False), (41, 90, False), (90, 300, True)]
    spans = tuple(RowSpan(first, end, first) for first, end, _ in parts)
    marked = frozenset(number for number, part in enumerate(parts) if part[2])
    table = torch.tensor(cache.table)
    index = dataclasses.replace(cache.index(0, TOTAL), spans=spans, page_tables=(table,) * 4, expanded=marked)
    finite = Cache(randn(TOTAL, LATENT + SHARED, seed=3, dtype=dtype), 16)
    finite.pages = torch.nan_to_num(finite.pages)
    with using(isa) as ops:
        mixed = attend(ops, query, cache, index)
        for first, end, is_expanded in parts:
            alone = expanded(cache, first, end) if is_expanded else cache.index(first, end - first)
            assert same_bits(mixed[first:end], attend(ops, query[first:end].clone(), cache, alone))
    reference = attend(reference_layers, query, finite, index)
    assert_close(mixed, reference, 1e-5 if dtype == torch.float32 else 2**-6)


@pytest.mark.parametrize("isa", ISAS)
def test_what_lies_behind_a_row_does_not_matter(isa: str) -> None:
    query, cache = case(torch.bfloat16)
    spoiled = randn(TOTAL, LATENT + SHARED, seed=3, dtype=torch.bfloat16)
    spoiled[41:] = NAN
    with using(isa) as ops:
        clean = attend(ops, query, cache, expanded(cache, 0, TOTAL))
        bad = Cache(spoiled, 16)
        result = attend(ops, query, bad, expanded(bad, 0, TOTAL))
        assert same_bits(result[:41], clean[:41])
        assert torch.isnan(result[41:].float()).all()


def test_errors_name_the_argument() -> None:
    query, cache = case(torch.float32)
    key, value = weights(torch.float32)
    with using(ISAS[-1]) as ops:
        packed = ops.pack_heads(key.transpose(1, 2)), ops.pack_heads(value)
        index = expanded(cache, 0, TOTAL)
        with pytest.raises(ValueError, match="expand_key: is missing"):
            ops.attend_latents(query, *packed, cache.pages, index, 0.2)
        with pytest.raises(ValueError, match="expand_key: does not fit"):
            ops.attend_latents(query, *packed, cache.pages, index, 0.2, ops.pack_heads(value))


def test_modes_are_chosen_by_name_and_an_older_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {mode: select_kernels(exactness=mode).numerics for mode in EXACTNESS_MODES}
    assert len(set(names.values())) == 3 and names["exact"] == select_kernels().numerics
    with pytest.raises(ConfigError, match="exactness: must be one of exact, prompt, off, not 'yes'"):
        select_kernels(exactness="yes")
    monkeypatch.setattr(finding.NativeLibrary, "expands_latents", False)
    assert select_kernels(exactness="exact").implementation != "reference"
    with pytest.raises(ConfigError, match="exactness: the installed milepost-kernels is older"):
        select_kernels(exactness="prompt")
