"""Native attention over paged latents: a row depends on its query and on the keys up to its position."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index
from tests.kernels.native_support import DTYPES, FUSED, ISAS, NAN, library, randn, same_bits, using

from milepost.kernels import reference, reference_layers
from milepost.kernels.index import AttentionIndex

HEADS, WIDTH, VALUE_WIDTH = 3, 20, 13


class Cache:
    """Keys of one sequence in pages of its own order; everything else is NaN."""

    def __init__(
        self, keys: torch.Tensor, match_unit: int, seed: int = 0, num_pages: int | None = None
    ) -> None:
        needed = -(-keys.shape[0] // match_unit)
        total = num_pages or needed + 3
        self.table = random.Random(seed).sample(range(total), needed)
        self.pages = torch.full((total, match_unit, keys.shape[1]), NAN, dtype=keys.dtype)
        for position, key in enumerate(keys):
            self.pages[self.table[position // match_unit], position % match_unit] = key
        self.match_unit = match_unit

    def index(self, position: int, rows: int) -> AttentionIndex:
        needed = -(-(position + rows) // self.match_unit)
        return attention_index([rows], [position], [self.table[:needed]], self.match_unit)


def attend(
    query: torch.Tensor, pages: torch.Tensor, index: AttentionIndex, value_width: int, scale: float = 0.3
) -> torch.Tensor:
    spans = [(span.first_row, span.end_row, span.position) for span in index.spans]
    plan = library.AttentionPlan(spans, list(index.page_tables), index.write_pages, index.write_offsets)
    out = torch.full((*query.shape[:2], value_width), NAN)
    library.attend(query, pages, plan, value_width, scale, out)
    return out


def tolerance(isa: str, dtype: torch.dtype) -> float:
    """Where the CPU multiplies pairs of bf16, queries and softmax weights are rounded to bf16."""
    return 2**-6 if isa == "avx512_bf16" and dtype == torch.bfloat16 else 5e-6


def rows(
    cache: Cache, query: torch.Tensor, first: int, end: int, value_width: int = VALUE_WIDTH
) -> torch.Tensor:
    return attend(query[first:end].clone(), cache.pages, cache.index(first, end - first), value_width)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "value_width"), [(20, 13), (80, 64), (33, 33), (1, 1), (48, 32)])
def test_close_to_the_reference(isa: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    """Sequences of 1 and of many rows, short and across tiles of 256 keys, in one call."""
    lengths, positions = [1, 30, 1, 270], [0, 250, 511, 0]
    caches = [Cache(randn(600, width, seed=n, dtype=dtype), 16, n, 60) for n in range(4)]
    pages = torch.cat([cache.pages for cache in caches])
    tables = [[page + 60 * n for page in cache.table] for n, cache in enumerate(caches)]
    index = attention_index(lengths, positions, tables, 16)
    query = randn(sum(lengths), HEADS, width, seed=9)
    finite = torch.nan_to_num(pages)
    expected = reference.latent_attention(query, finite, index, value_width=value_width, scale=0.3)
    with using(isa):
        assert_close(attend(query, pages, index, value_width), expected, tolerance(isa, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_cut_changes_a_bit(isa: str, dtype: torch.dtype) -> None:
    total = 530
    keys, query = randn(total, WIDTH, seed=1, dtype=dtype), 2 * randn(total, HEADS, WIDTH, seed=2)
    cache = Cache(keys, 16)
    with using(isa):
        whole = rows(cache, query, 0, total)
        for cut in (1, 17, 33, 255, 256, 257, 300, 512, 529):
            parts = torch.cat([rows(cache, query, 0, cut), rows(cache, query, cut, total)])
            assert same_bits(parts, whole), cut
        for row in (0, 1, 15, 16, 31, 255, 256, 257, 511, 512, 529):
            assert same_bits(rows(cache, query, row, row + 1), whole[row : row + 1]), row
        # Other pages of another size in another order.
        for match_unit, seed in ((1, 3), (5, 4), (64, 5), (600, 6)):
            assert same_bits(rows(Cache(keys, match_unit, seed), query, 0, total), whole)
    with using(isa, threads=2):
        assert same_bits(rows(cache, query, 0, total), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4, 32, 100])
def test_any_number_of_heads(isa: str, dtype: torch.dtype, heads: int) -> None:
    cache = Cache(randn(40, WIDTH, seed=1, dtype=dtype), 16)
    query = randn(40, heads, WIDTH, seed=2)
    expected = reference.latent_attention(
        query, torch.nan_to_num(cache.pages), cache.index(0, 40), value_width=VALUE_WIDTH, scale=0.3
    )
    with using(isa):
        whole = rows(cache, query, 0, 40)
        assert_close(whole, expected, tolerance(isa, dtype))
        assert same_bits(rows(cache, query, 39, 40), whole[39:])


@pytest.mark.parametrize("isa", ISAS)
def test_fused_instruction_sets_agree_and_packing_is_alone(isa: str) -> None:
    cache = Cache(randn(300, WIDTH, seed=1, dtype=torch.bfloat16), 16)
    query = randn(300, HEADS, WIDTH, seed=2)
    index = attention_index([7, 1, 20], [280, 290, 3], [cache.table] * 3, 16)
    packed_query = torch.cat([query[280:287], query[290:291], query[3:23]])
    with using(isa):
        packed = attend(packed_query, cache.pages, index, VALUE_WIDTH)
        alone = [rows(cache, query, 280, 287), rows(cache, query, 290, 291), rows(cache, query, 3, 23)]
        assert same_bits(packed, torch.cat(alone))
    if isa in FUSED:
        with using(FUSED[0]):
            assert same_bits(attend(packed_query, cache.pages, index, VALUE_WIDTH), packed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("end", [40, 41])
def test_what_lies_behind_a_row_does_not_matter(
    isa: str, dtype: torch.dtype, poison: float, end: int
) -> None:
    """Later tokens of the same chunk, in the same page and tile, may hold anything."""
    keys, query = randn(60, WIDTH, seed=1, dtype=dtype), randn(60, HEADS, WIDTH, seed=2)
    spoiled = keys.clone()
    spoiled[end:] = poison
    with using(isa):
        clean = rows(Cache(keys, 16), query, 0, 60)
        result = rows(Cache(spoiled, 16), query, 0, 60)
        assert same_bits(result[:end], clean[:end])
        if poison != poison:
            assert torch.isnan(result[end:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_broken_sequence_stays_alone(isa: str) -> None:
    good, bad = randn(40, WIDTH, seed=1), torch.full((40, WIDTH), NAN)
    query = randn(40, HEADS, WIDTH, seed=2)
    pages = torch.cat([Cache(good, 8, num_pages=5).pages, Cache(bad, 8, num_pages=5).pages])
    table = Cache(good, 8, num_pages=5).table
    other = [page + 5 for page in Cache(bad, 8, num_pages=5).table]
    with using(isa):
        alone = rows(Cache(good, 8, num_pages=5), query, 0, 40)
        index = attention_index([40, 40, 1], [0, 0, 39], [other, table, other], 8)
        packed = attend(torch.cat([query, query, query[39:]]), pages, index, VALUE_WIDTH)
        assert same_bits(packed[40:80], alone)
        assert torch.isnan(packed[:40]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_peaked_softmax_and_negative_zero(isa: str) -> None:
    keys, query = randn(300, WIDTH, seed=1), 1e4 * randn(300, HEADS, WIDTH, seed=2)
    with using(isa):
        cache = Cache(keys, 16)
        whole = rows(cache, query, 0, 300)
        assert torch.isfinite(whole).all()
        expected = reference.latent_attention(
            query, torch.nan_to_num(cache.pages), cache.index(0, 300), value_width=VALUE_WIDTH, scale=0.3
        )
        assert_close(whole, expected, 1e-4)
        minus = Cache(torch.full((300, WIDTH), -0.0), 16)
        zeros = rows(minus, query, 0, 300)
        assert same_bits(zeros, torch.zeros_like(zeros))
        assert same_bits(rows(minus, query, 299, 300), zeros[299:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_attention(isa: str, dtype: torch.dtype) -> None:
    heads, nope, shared, latent, value = 3, 12, 8, 24, 10
    absorb_key = randn(heads, latent, nope, seed=1, dtype=dtype) * 0.3
    absorb_value = randn(heads, value, latent, seed=2, dtype=dtype) * 0.3
    cache = Cache(randn(50, latent + shared, seed=3, dtype=dtype), 16)
    query = randn(50, heads * (nope + shared), seed=4, dtype=dtype)
    index = cache.index(0, 50)
    expected = reference_layers.attend_latents(
        query,
        reference_layers.pack_heads(absorb_key),
        reference_layers.pack_heads(absorb_value),
        torch.nan_to_num(cache.pages),
        index,
        0.2,
    )
    with using(isa) as ops:
        packed = ops.pack_heads(absorb_key), ops.pack_heads(absorb_value)
        whole = ops.attend_latents(query, *packed, cache.pages, index, 0.2).clone()
        assert_close(whole, expected, 1e-5 if dtype == torch.float32 else 2**-7)
        last = ops.attend_latents(query[49:], *packed, cache.pages, cache.index(49, 1), 0.2)
        assert same_bits(last, whole[49:])


def test_errors_name_the_argument() -> None:
    cache = Cache(randn(40, WIDTH), 16)
    query, index = randn(40, HEADS, WIDTH), cache.index(0, 40)
    table = torch.tensor(cache.table)

    def plan(**changes: object) -> object:
        arguments = {
            "spans": [(0, 40, 0)],
            "page_tables": [table],
            "write_pages": index.write_pages,
            "write_offsets": index.write_offsets,
        }
        return library.AttentionPlan(**(arguments | changes))

    for arguments, match in [
        ({"page_tables": []}, "page_tables: must be one per span"),
        ({"write_pages": index.write_pages[1:]}, "write_offsets: must have shape"),
        ({"spans": [(0, 39, 0)]}, "write_pages: must have one entry per row"),
        ({"spans": [(1, 41, 0)]}, "spans: must follow each other"),
    ]:
        with pytest.raises(ValueError, match=match):
            plan(**arguments)
    out = torch.empty(40, HEADS, VALUE_WIDTH)
    for bad, match in [
        (plan(page_tables=[table[:2]]), "page table 0 covers fewer than 40 positions"),
        (plan(page_tables=[table + 100]), "a page id is outside of 6 pages"),
        (plan(page_tables=[table - 50]), "a page id is outside of 6 pages"),
        (plan(write_offsets=index.write_offsets + 1), "a write offset is outside of a page of 16 entries"),
    ]:
        with pytest.raises(ValueError, match=match):
            library.attend(query, cache.pages, bad, VALUE_WIDTH, 0.3, out)
    with pytest.raises(ValueError, match="value_width: must lie within an entry"):
        attend(query, cache.pages, index, WIDTH + 1)
    with pytest.raises(ValueError, match=r"query: must have shape \[40, any, 20\]"):
        attend(query[1:], cache.pages, index, VALUE_WIDTH)
