"""Where chunks end and what they export: every small case against what the docstrings say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core import reasons
from milepost.core.chunking import (
    ChunkDecision,
    effective_spacing,
    interval_positions,
    is_legal_export,
    plan_chunk,
    prefill_wanted,
)
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec

Wanted = list[tuple[int, str]]


# ------------------------------------------------------------------ the restatement
def legal_positions(start: int, end: int, unit: int, alignment: int | None) -> set[int]:
    """Boundaries strictly inside the pass that lie on the kernel's absolute grid."""
    if alignment is None:
        return set()
    return {p for p in range(start + 1, end) if p % unit == 0 and p % alignment == 0}


def check_decision(
    decision: ChunkDecision,
    start: int,
    prefill_end: int,
    budget: int,
    wanted: Wanted,
    unit: int,
    alignment: int | None,
    spacing: int,
) -> None:
    end = decision.end
    assert start < end <= min(start + budget, prefill_end), "progress, within budget and prefill"
    legal = legal_positions(start, end, unit, alignment)
    exported = dict(decision.exports)
    assert list(exported) == sorted(exported), "ascending, one reason each"
    assert len(exported) == len(decision.exports)
    assert set(exported) <= legal
    reason_of = dict(wanted)
    required = {p for p, reason in wanted if reason in reasons.REQUIRED or alignment is None}
    # An end is a unit boundary wherever one fits, unless the prefill is over.
    natural = min(start + budget, prefill_end)
    if natural < prefill_end and natural - natural % unit > start:
        natural -= natural % unit
    assert end <= natural
    if end < natural:
        spaced = {p for p in range(start + 1, natural + 1) if spacing and p % spacing == 0}
        cut_by = required | (spaced if alignment is None else set())
        assert end in cut_by, "only a required position that is not legal ends a chunk early"
        assert end not in legal_positions(start, natural, unit, alignment)
    for position in required:
        if start < position < end:
            assert exported.get(position) is not None, "a required position was passed over"
        if position == end:
            assert decision.end_reason is not None
    # The reason of the end.
    if end in reason_of:
        assert decision.end_reason == reason_of[end]
    elif spacing and end % spacing == 0:
        assert decision.end_reason == reasons.INTERVAL
    else:
        assert decision.end_reason is None
    check_optional(decision, start, wanted, unit, alignment, spacing, legal)


def check_optional(
    decision: ChunkDecision,
    start: int,
    wanted: Wanted,
    unit: int,
    alignment: int | None,
    spacing: int,
    legal: set[int],
) -> None:
    """Legal positions are exported under the most important reason that lands on them; others move
    to the next lower legal one or are counted as dropped."""
    end = decision.end
    inside = {p: reason for p, reason in wanted if start < p < end}
    if spacing:
        for position in range(start + 1, end):
            if position % spacing == 0:
                inside.setdefault(position, reasons.INTERVAL)
    expected: dict[int, str] = {}
    num_moved = num_dropped = 0
    for position, reason in sorted(inside.items()):
        target = position
        if position not in legal:
            lower = [p for p in legal if p < position]
            if not lower:
                num_dropped += 1
                continue
            num_moved += 1
            target = max(lower)
        known = expected.get(target)
        if known is None or reasons.IMPORTANCE[reason] < reasons.IMPORTANCE[known]:
            expected[target] = reason
    assert dict(decision.exports) == expected
    assert (decision.num_moved, len(decision.dropped)) == (num_moved, num_dropped)
    assert set(decision.dropped) <= {reason for _, reason in wanted} | {reasons.INTERVAL}


# ------------------------------------------------------------------ exhaustive
def wanted_subsets(num_tokens: int, unit: int) -> Iterator[Wanted]:
    """`tail` and `end` as they always are, and every way to want one or two more boundaries."""
    boundaries = range(unit, num_tokens + 1, unit)
    yield []
    for count in (0, 1, 2):
        for positions in itertools.combinations(boundaries, count):
            for named in itertools.product((reasons.HISTORY, reasons.MESSAGE), repeat=count):
                yield prefill_wanted(num_tokens, unit, list(zip(positions, named, strict=True)))


@pytest.mark.parametrize("unit", [1, 2, 3, 4])
def test_every_small_chunk(unit: int) -> None:
    alignments = (None, 1, 2, unit, 2 * unit, 3)
    for num_tokens in range(1, 4 * unit + 2 if unit > 1 else 8):
        for wanted in wanted_subsets(num_tokens, unit):
            for alignment, spacing in itertools.product(alignments, (0, unit, 2 * unit)):
                for start in range(num_tokens):
                    for budget in {1, unit - 1, unit, unit + 1, 2 * unit + 1, num_tokens} - {0}:
                        arguments = (start, num_tokens, budget, wanted, unit, alignment, spacing)
                        check_decision(plan_chunk(*arguments), *arguments)


@given(st.data())
def test_large_chunks(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([4, 16, 32]))
    alignment = data.draw(st.sampled_from([None, 1, 8, 16, 64, 96]))
    num_tokens = data.draw(st.integers(1, 1000))
    named = st.tuples(st.integers(0, num_tokens), st.sampled_from(reasons.WANTED_BY_CALLER))
    wanted = prefill_wanted(num_tokens, unit, data.draw(st.lists(named, max_size=6)))
    start = data.draw(st.integers(0, num_tokens - 1))
    budget = data.draw(st.integers(1, 1000))
    spacing = data.draw(st.sampled_from([0, unit, 4 * unit]))
    arguments = (start, num_tokens, budget, wanted, unit, alignment, spacing)
    check_decision(plan_chunk(*arguments), *arguments)


# ------------------------------------------------------------------ whole prefills (B42)
def kept_positions(
    num_tokens: int, budgets: Iterator[int], wanted: Wanted, unit: int, alignment: int | None
) -> dict[int, str]:
    """Position -> reason of everything a prefill keeps under a sequence of budgets."""
    kept: dict[int, str] = {}
    start = 0
    while start < num_tokens:
        decision = plan_chunk(start, num_tokens, next(budgets), wanted, unit, alignment)
        kept.update(decision.exports)
        if decision.end_reason is not None:
            kept[decision.end] = decision.end_reason
        assert decision.end > start
        start = decision.end
    return kept


@given(st.data())
def test_required_positions_do_not_depend_on_the_load(data: st.DataObject) -> None:
    """B42: whatever the step budgets, every required position of a prefill is kept, under its reason."""
    unit = data.draw(st.sampled_from([2, 4, 16]))
    alignment = data.draw(st.sampled_from([None, 1, unit, 2 * unit, 3 * unit + 1]))
    num_tokens = data.draw(st.integers(1, 12 * unit))
    named = st.tuples(st.integers(0, num_tokens), st.sampled_from(reasons.WANTED_BY_CALLER))
    wanted = prefill_wanted(num_tokens, unit, data.draw(st.lists(named, max_size=5)))
    budgets = data.draw(st.lists(st.integers(1, 4 * unit), min_size=1, max_size=8))
    kept = kept_positions(num_tokens, itertools.cycle(budgets), wanted, unit, alignment)
    required = {p: r for p, r in wanted if r in reasons.REQUIRED or alignment is None}
    assert {p: r for p, r in kept.items() if r in reasons.REQUIRED or p in required} == required


def test_required_positions_with_every_budget_of_a_small_prefill() -> None:
    for unit, alignment in itertools.product((2, 4), (None, 1, 4, 8, 6)):
        for num_tokens in range(1, 5 * unit + 1):
            wanted = prefill_wanted(
                num_tokens, unit, [(2 * unit, reasons.HISTORY)] if num_tokens >= 8 else []
            )
            for budget in range(1, num_tokens + 1):
                kept = kept_positions(num_tokens, itertools.repeat(budget), wanted, unit, alignment)
                assert {p for p, _ in wanted} <= set(kept)


# ------------------------------------------------------------------ the parts
def test_wanted_positions_of_a_prefill() -> None:
    for unit in (1, 2, 3, 4):
        for num_tokens in range(1, 5 * unit):
            wanted = dict(prefill_wanted(num_tokens, unit))
            tail = max((p for p in range(0, num_tokens, unit)), default=0)
            expected = {tail: reasons.TAIL} if tail else {}
            if num_tokens % unit == 0:
                expected[num_tokens] = reasons.END
            assert wanted == expected


def test_asked_positions_are_rounded_down_and_history_or_the_more_important_reason_wins() -> None:
    asked = [(0, "history"), (3, "history"), (9, "message"), (11, "history"), (8, "marker")]
    assert prefill_wanted(18, 4, asked) == [(8, "history"), (16, "tail")]
    assert prefill_wanted(16, 4, [(16, "history"), (12, "marker")]) == [(12, "tail"), (16, "history")]
    assert prefill_wanted(3, 4, [(3, "history")]) == []
    order = [
        prefill_wanted(40, 4, [(8, a), (8, b)]) for a, b in itertools.permutations(("marker", "message"))
    ]
    assert order == [[(8, "message"), (36, "tail"), (40, "end")]] * 2


NAMING = (reasons.HISTORY, *(r for r in reasons.CHECKPOINT_REASONS if r != reasons.HISTORY))


@given(st.data())
def test_wanted_positions_settle_where_kernels_export_and_no_media_is_split(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 2, 4]))
    grid = unit * data.draw(st.sampled_from([1, 2, 3]))
    num_tokens = data.draw(st.integers(1, 60))
    spans = [
        (start, min(num_tokens, start + length))
        for start, length in data.draw(
            st.lists(st.tuples(st.integers(0, num_tokens - 1), st.integers(1, 20)), max_size=3)
        )
    ]
    named = st.tuples(st.integers(0, num_tokens), st.sampled_from(reasons.WANTED_BY_CALLER))
    asked = data.draw(st.lists(named, max_size=4))

    def settle(position: int, own_grid: int) -> int:
        """Search downwards: on the own grid, else on the match unit."""
        whole = [p for p in range(position, 0, -1) if not any(a < p < b for a, b in spans)]
        on_grid = [p for p in whole if p % own_grid == 0]
        return next(iter(on_grid or [p for p in whole if p % unit == 0]), 0)

    expected: dict[int, str] = {}
    named_positions = [((num_tokens - 1) // unit * unit, reasons.TAIL), *asked]
    if num_tokens % unit == 0:
        named_positions.append((num_tokens, reasons.END))
    for position, reason in named_positions:
        settled = settle(position, unit if reason in reasons.REQUIRED else grid)
        known = expected.get(settled)
        if settled and (known is None or NAMING.index(reason) < NAMING.index(known)):
            expected[settled] = reason
    assert prefill_wanted(num_tokens, unit, asked, spans, grid) == sorted(expected.items())


def test_interval_positions() -> None:
    for start, end, spacing in itertools.product(range(20), range(20), range(0, 7)):
        expected = [p for p in range(start + 1, end) if spacing and p % spacing == 0]
        assert interval_positions(start, end, spacing) == expected


def test_legal_exports() -> None:
    for unit, alignment in itertools.product((1, 2, 4), (None, 1, 2, 3, 4, 8)):
        for start, end, position in itertools.product(range(12), range(14), range(14)):
            expected = position in legal_positions(start, end, unit, alignment)
            assert is_legal_export(start, end, position, unit, alignment) is expected


@pytest.mark.parametrize(
    ("asked", "unit", "alignment", "expected"),
    [
        (None, 16, 1, 64), (None, 32, 1, 64), (None, 64, 64, 64), (None, 48, 1, 96), (None, 128, 64, 128),
        (None, 16, 128, 128), (0, 16, 1, 0), (64, 16, 1, 64), (80, 16, 1, 80), (80, 16, 64, 64),
        (16, 16, 64, 64), (1024, 16, 64, 1024), (1024, 16, None, 1024), (0, 16, None, 0),
    ],
)  # fmt: skip
def test_spacing_is_what_was_asked_for_or_as_fine_as_exports_are_cheap(
    asked: int | None, unit: int, alignment: int | None, expected: int
) -> None:
    assert effective_spacing(asked, sized_geometry(unit, alignment)) == expected


def test_without_exports_the_grid_is_the_match_unit() -> None:
    assert effective_spacing(9, sized_geometry(3, None)) == 9
    assert effective_spacing(1, sized_geometry(3, None)) == 3


def test_spacing_where_a_checkpoint_ends_a_pass_or_costs_no_bytes() -> None:
    """There the model's sizes say how far apart they are."""
    for geometry in (sized_geometry(16, None), sized_geometry(16, 1, num_recurrent=0)):
        assert effective_spacing(None, geometry) == geometry.default_checkpoint_interval() >= 512


def sized_geometry(unit: int, alignment: int | None, num_recurrent: int = 1) -> CacheGeometry:
    states = [RecurrentGroupSpec(f"kda {i}", 3_000_000, alignment) for i in range(num_recurrent)]
    return CacheGeometry(unit, (AttentionGroupSpec("mla", 1024),), tuple(states))


def test_a_late_wanted_position_beyond_the_chunk_is_left_for_the_next_one() -> None:
    wanted: Sequence[tuple[int, str]] = [(8, "history"), (24, "tail")]
    decision = plan_chunk(0, 27, 16, wanted, 4, 1)
    assert decision == ChunkDecision(16, ((8, "history"),), None)
    assert plan_chunk(16, 27, 16, wanted, 4, 1) == ChunkDecision(27, ((24, "tail"),), None)
