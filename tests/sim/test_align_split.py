"""Chunk ends and retained boundaries of the upstream rules: every recorded row, then their kinds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance import params

from milepost.sim.policies.align import (
    WAIT,
    align_chunk_ends,
    align_split,
    mtp_reserve,
    proof_margin,
    replay_boundaries,
)
from milepost.sim.policies.align_rules import default_partial_hits


@pytest.mark.parametrize("row", params("align_split"))
def test_align_split(row: dict[str, Any]) -> None:
    ends = align_chunk_ends(row)
    if "expected_chunk_ends" in row:
        assert ends == row["expected_chunk_ends"]
    else:
        assert ends[0] == row["expected_first_chunk_end"]


@pytest.mark.parametrize("row", params("align_split"))
def test_partial_hits_follow_from_the_blocks(row: dict[str, Any]) -> None:
    assert default_partial_hits(row["hash_block_size"], row["block_size"], row["dcp"]) is row["partial_hits"]
    assert align_chunk_ends({**row, "partial_hits": None}) == align_chunk_ends(row)


@pytest.mark.parametrize("row", params("replay_boundaries"))
def test_replay_boundaries(row: dict[str, Any]) -> None:
    args = (row["num_tokens"], row["scheduler_block_size"], row["drop_eagle_block"])
    assert replay_boundaries(*args) == row["expected"]


@pytest.mark.parametrize("row", params("proof_margin"))
def test_proof_margin(row: dict[str, Any]) -> None:
    assert (
        proof_margin(row["group_block_size"], row["hash_block_size"], row["fine_lookup"]) == row["expected"]
    )


@pytest.mark.parametrize("row", params("mtp_reserve"))
def test_mtp_reserve(row: dict[str, Any]) -> None:
    names = ("prefill_lookahead", "prefill_end", "query_start", "wanted_end")
    assert mtp_reserve(**{name: row[name] for name in names}) == row["expected_end"]


# ------------------------------------------------------------------ the kinds behind the rows

BASE: dict[str, Any] = {
    "mamba_block_size": 64,
    "hash_block_size": 8,
    "scheduler_block_size": 64,
    "checkpoint_alignment": None,
    "max_tokens_per_step": 4096,
}


def ends(prompt: int, budgets: list[int] | None = None, **overrides: Any) -> list[int | str]:
    row = {
        **BASE,
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "start": 0,
        "budgets": budgets,
        **overrides,
    }
    row["block_size"] = row.pop("mamba_block_size")
    return align_chunk_ends(row)


@pytest.mark.parametrize("blocks", range(1, 8))
@pytest.mark.parametrize("block", [16, 512, 1536])
def test_a_block_aligned_prompt_stops_one_block_early(blocks: int, block: int) -> None:
    """vLLM #50235: without that stop a repeat of the prompt would find no state it may use."""
    geometry = {"mamba_block_size": block, "hash_block_size": block, "scheduler_block_size": block}
    expected = [block * (blocks - 1), block * blocks] if blocks > 1 else [block]
    assert ends(block * blocks, max_tokens_per_step=block * 8, **geometry) == expected
    exported = ends(block * blocks, max_tokens_per_step=block * 8, checkpoint_alignment=16, **geometry)
    assert exported == [block * blocks]


@pytest.mark.parametrize("alignment", [None, 1, 8, 16, 24])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("prompt", range(100, 140, 3))
def test_a_stop_replaces_every_checkpoint_that_cannot_be_exported(
    prompt: int, drop: bool, alignment: int | None
) -> None:
    """Either the tail lies inside one pass and on the kernel's grid, or a chunk ends there."""
    tail = (prompt // 8 - 1) * 8 if drop else (prompt - 1) // 8 * 8
    actual = ends(prompt, checkpoint_alignment=alignment, drop_eagle_block=drop)
    if alignment is not None and tail % alignment == 0:
        assert actual == [prompt]
    else:
        block_stop = max(0, prompt // 64 * 64 - 64) if drop else (prompt - 1) // 64 * 64
        # a chunk that starts at a tail inside a block ends with that block
        block_end = {-(-tail // 64) * 64} if tail // 64 < prompt // 64 else set()
        assert actual == sorted(({block_stop, tail, prompt} | block_end) - {0})


def test_lookahead_moves_both_stops_down() -> None:
    assert ends(131) == [128, 131]
    assert ends(137) == [128, 136, 137]
    assert ends(137, lookahead=1) == [128, 136, 137]
    assert ends(137, lookahead=2) == [128, 137]
    assert ends(129, lookahead=4) == [64, 120, 128, 129]
    assert ends(132, lookahead=4) == [128, 132]


def test_decode_is_never_cut() -> None:
    split = {**BASE, "prompt_tokens": 100, "num_budget_tokens": 4096}
    assert align_split(start=100, total_tokens=101, **split) == 1
    assert align_split(start=123, total_tokens=124, **split, junction=123) == 1
    assert align_split(start=127, total_tokens=128, **{**split, "num_budget_tokens": 0}) == 0
    # a resumed request whose outputs are computed again is a prefill up to its last token
    assert align_split(start=100, total_tokens=140, **split) == 128 - 100


@pytest.mark.parametrize(("prompt", "total"), [(100, 300), (100, 101), (250, 300), (64, 129)])
def test_a_resumed_request_keeps_only_the_tail_stop_of_its_prompt(prompt: int, total: int) -> None:
    """After preemption the prefill ends at total - 1, and block stops count from the total."""
    last_cache = (total - 1) // 64 * 64
    tail = (prompt - 1) // 8 * 8
    actual = ends(prompt, total_tokens=total)
    expected = {last_cache, total} | ({tail} if last_cache < tail < prompt else set())
    assert actual == sorted(expected - {0})


@pytest.mark.parametrize("start", [8, 40, 56])
def test_a_partial_resume_stops_at_the_next_block_boundary(start: int) -> None:
    assert ends(300, start=start)[0] == 64
    assert ends(300, start=start, budgets=[64 - start, 150]) == [64, 192, 256, 296, 300]
    # ... unless the whole rest is one pass that exports its checkpoint itself
    assert ends(300, start=start, checkpoint_alignment=8) == [300]


@pytest.mark.parametrize("budget", range(1, 64))
def test_a_budget_below_a_block_waits(budget: int) -> None:
    assert ends(300, budgets=[budget]) == [WAIT, *ends(300)]
    if budget > 16:  # the next block boundary from 48 lies 16 tokens away
        assert ends(300, start=48, budgets=[budget])[0] == 64


def test_a_limit_of_exactly_a_block_still_waits_for_whole_blocks() -> None:
    assert ends(200, budgets=[40], max_tokens_per_step=64) == [WAIT, 64, 128, 192, 200]
    assert ends(200, budgets=[40], long_prefill_threshold=64) == [WAIT, 64, 128, 192, 200]


def test_the_prefill_of_a_resumed_request_ends_before_its_last_token() -> None:
    """A chunk that ends there is the last one, which is not rounded down to a block."""
    split = {**BASE, "start": 256, "prompt_tokens": 100, "total_tokens": 300}
    assert align_split(**split, num_budget_tokens=43) == 43
    assert align_split(**split, num_budget_tokens=42) == 0


@pytest.mark.parametrize("limit", [10, 40, 63])
@pytest.mark.parametrize("name", ["max_tokens_per_step", "long_prefill_threshold"])
def test_a_limit_below_a_block_makes_progress_inside_blocks(name: str, limit: int) -> None:
    """Where no step could ever hold a block, chunks may end inside one, but none crosses a boundary."""
    actual = ends(200, **{name: limit})
    assert WAIT not in actual
    chunks = list(itertools.pairwise([0, *actual]))
    assert all(end - start <= limit for start, end in chunks)
    assert {64, 128, 192} <= set(actual)


def test_the_threshold_caps_one_prefill_among_several_only() -> None:
    split = {**BASE, "start": 0, "prompt_tokens": 1000, "total_tokens": 1000, "num_budget_tokens": 4096}
    assert align_split(**split, long_prefill_threshold=256) == 256
    assert align_split(**split, long_prefill_threshold=300) == 256
    assert align_split(**split, long_prefill_threshold=300, threshold_binds=False) == 960
    assert align_split(**split, long_prefill_threshold=0) == 960


@pytest.mark.parametrize(
    ("junction", "feature", "expected"),
    [
        (72, True, [72, 128, 192, 199]),
        (72, False, [64, 192, 199]),
        (40, False, [192, 199]),
        (40, True, [40, 64, 192, 199]),
        (192, True, [192, 199]),
        (199, True, [192, 199]),
        (0, True, [192, 199]),
    ],
)
def test_junction(junction: int, feature: bool, expected: list[int]) -> None:
    assert ends(199, junction=junction, junction_feature=feature) == expected


def test_a_junction_stops_a_pass_that_exports_its_checkpoint() -> None:
    assert ends(200, junction=72, junction_feature=True, checkpoint_alignment=8) == [72, 200]
    assert ends(200, junction=72, checkpoint_alignment=8) == [64, 200]


def test_without_partial_hits_the_checkpoint_lies_on_the_scheduler_block() -> None:
    """A finer hash alone is not enough: a sliding-window draft group turns partial hits off."""
    geometry = {"hash_block_size": 8, "partial_hits": False, "scheduler_block_size": 128}
    assert ends(300, **geometry) == [256, 300]
    assert ends(350, **geometry) == [320, 350]
    # the exported position is 256, on the scheduler block, and 256 is a legal offset of the kernel
    assert ends(350, checkpoint_alignment=64, **geometry) == [350]
    assert ends(350, checkpoint_alignment=96, **geometry) == [320, 350]


@given(
    prompt=st.integers(1, 700),
    outputs=st.integers(0, 40),
    start=st.integers(0, 60),
    hash_units=st.sampled_from([1, 2, 4, 8]),
    alignment=st.sampled_from([None, 1, 8, 16, 64]),
    drop=st.booleans(),
    budgets=st.lists(st.integers(1, 300), max_size=6),
    junction=st.none() | st.integers(0, 700),
    feature=st.booleans(),
    limit=st.integers(5, 500),
)
def test_every_prefill_ends_and_every_stop_has_a_reason(
    prompt: int,
    outputs: int,
    start: int,
    hash_units: int,
    alignment: int | None,
    drop: bool,
    budgets: list[int],
    junction: int | None,
    feature: bool,
    limit: int,
) -> None:
    unit = 64 // hash_units
    start = min(start * unit, (prompt - 1) // unit * unit)
    total = prompt + outputs
    actual = ends(
        prompt,
        budgets,
        total_tokens=total,
        start=start,
        hash_block_size=unit,
        checkpoint_alignment=alignment,
        drop_eagle_block=drop,
        junction=junction,
        junction_feature=feature,
        max_tokens_per_step=limit,
    )
    scheduled = [end for end in actual if end != WAIT]
    assert scheduled[-1] == total
    assert all(a < b for a, b in itertools.pairwise([start, *scheduled]))
    assert actual.count(WAIT) <= len(budgets)
    tail = max(0, prompt // unit * unit - unit) if drop else (prompt - 1) // unit * unit
    for begin, end in itertools.pairwise([start, *scheduled]):
        at_limit = limit < 64 or end - begin >= min([limit, *budgets])
        # Without the feature a junction is rounded down on a grid that begins with the chunk.
        at_junction = junction is not None and end - begin == (junction - begin) // 64 * 64
        named = end in (total, tail, junction) or at_junction
        assert end % 64 == 0 or named or end >= max(prompt, total - 1) or at_limit


@given(st.integers(1, 9), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_mtp_reserve_keeps_the_drafters_lookahead(
    lookahead: int, prefill_end: int, begin: int, more: int
) -> None:
    wanted = begin + more
    end = mtp_reserve(lookahead, prefill_end, begin, wanted)
    assert begin <= end <= wanted
    if end != wanted:
        assert 0 < prefill_end - wanted < lookahead
        assert end == max(begin, prefill_end - lookahead)
    assert end == begin or not 0 < prefill_end - end < lookahead


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 12, 13])
def test_replay_boundaries_are_never_negative_and_usable(num_tokens: int) -> None:
    assert replay_boundaries(num_tokens, 4, False) == [max(0, num_tokens - 1)]
    kept = replay_boundaries(num_tokens, 4, True)
    assert kept == sorted({max(0, (num_tokens - 1) // 4 * 4 - 4), max(0, num_tokens // 4 * 4 - 4)})


def test_proof_margin_of_one_unit_needs_a_finer_hash() -> None:
    for block, unit, fine in itertools.product((16, 64, 512), (16, 64), (False, True)):
        assert proof_margin(block, unit, fine) == (unit if fine and block > unit else block)
