"""Edges of the pure rules that mutation testing found untested (docs/mutation.md)."""

from __future__ import annotations

import itertools

import pytest
from tests.core.test_groups_and_coordinator import make_groups, make_path

from milepost.core import reasons
from milepost.core.chunking import effective_spacing, marked_units, settled_position
from milepost.core.coordinator import joint_hit
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.retention import LIVE_FLOOR, SegmentRecord, eviction_rank, export_order, segment_value


def test_a_settled_position_is_the_nearest_that_splits_nothing() -> None:
    """On the grid if there is one, else on the match unit, else 0; spans may touch, nest and overlap."""
    spans_to_try = ([], [(3, 9)], [(0, 5)], [(1, 14)], [(2, 5), (5, 9)], [(1, 6), (4, 11)], [(2, 12), (5, 7)])
    for unit, factor, spans in itertools.product((1, 2, 4), (1, 2, 3), spans_to_try):
        for position in range(16):
            whole = [p for p in range(position, 0, -1) if not any(a < p < b for a, b in spans)]
            on_grid = [p for p in whole if p % (factor * unit) == 0]
            expected = next(iter(on_grid or [p for p in whole if p % unit == 0]), 0)
            assert settled_position(position, unit, factor * unit, spans) == expected


def test_only_markers_mark_units() -> None:
    asked = [
        (position, reason)
        for position, reason in zip((5, 9, 13, 17), 2 * reasons.WANTED_BY_CALLER[1:], strict=True)
    ]
    assert asked == [(5, "message"), (9, "marker"), (13, "message"), (17, "marker")]
    assert marked_units(asked, 4, 4) == {2, 4}
    assert marked_units(asked, 4, 8) == {2, 4}
    assert marked_units([(3, "marker"), (9, "history")], 4, 4) == frozenset()


@pytest.mark.parametrize("limit", range(5))
def test_a_lookup_never_passes_its_limit_or_the_path(limit: int) -> None:
    """Without attention groups nothing but the limit and the path holds a hit back."""
    for length in range(5):
        _, recurrent = make_groups(0, 1)
        hit = joint_hit([], recurrent, make_path([((), (True,))] * length), limit)
        assert hit.attention_units == hit.units == min(limit, length)


@pytest.mark.parametrize("freed_bytes", [1, 2, 3, 4096])
def test_value_is_per_byte_for_any_number_of_bytes(freed_bytes: int) -> None:
    record = SegmentRecord(num_saved_tokens=512, freed_bytes=freed_bytes, reuse_index=0.5)
    assert segment_value(record) * freed_bytes == pytest.approx(256.0)


def test_any_spacing_above_zero_keeps_intervals() -> None:
    """On the grid, never finer than it, and not above what was asked for."""
    for asked, grid in itertools.product(range(-2, 20), (1, 2, 4, 6)):
        states = (RecurrentGroupSpec("kda", 100, grid),)
        geometry = CacheGeometry(1, (AttentionGroupSpec("mla", 1),), states)
        expected = max([grid, *(p for p in range(grid, 20, grid) if p <= asked)]) if asked > 0 else 0
        assert effective_spacing(asked, geometry) == expected


def _record(**changes: object) -> SegmentRecord:
    fields = {"num_saved_tokens": 64, "freed_bytes": 4096, "reuse_index": 0.5, **changes}
    return SegmentRecord(**fields)  # type: ignore[arg-type]


def test_guesses_go_first_and_pins_last_whatever_they_are_worth() -> None:
    dear, cheap = {"reuse_index": 100.0}, {"reuse_index": 0.0001}
    order = [
        _record(is_guess=True, **cheap),
        _record(is_guess=True, **dear),
        _record(**cheap),
        _record(**dear),
        _record(is_live=True, **cheap),
        _record(is_live=True, **dear),
        _record(is_pinned=True, **cheap),
        _record(is_pinned=True, **dear),
        # Who pins a guess wants it kept.
        _record(is_pinned=True, is_guess=True, is_live=True, reuse_index=1000.0),
    ]
    assert [order.index(record) for record in sorted(order, key=eviction_rank)] == list(range(9))
    assert eviction_rank(_record()) == eviction_rank(_record(is_guess=False, is_pinned=False))
    # Between classes with one value alike, the class alone decides, and it is the one the name says.
    assert eviction_rank(_record(**dear)) < LIVE_FLOOR < eviction_rank(_record(is_live=True, **cheap))
    alike = [_record(is_guess=True), _record(), _record(is_live=True), _record(is_pinned=True)]
    assert [eviction_rank(record)[0] for record in alike] == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", reasons.CHECKPOINT_REASONS)
def test_exports_that_matter_come_first_and_deep_ones_before_shallow(reason: str) -> None:
    if reason == reasons.INTERVAL:
        return
    positions = [96, 64, 128, 80, 160]
    ordered = sorted(positions, key=lambda p: export_order(p, reason))
    assert ordered == sorted(positions, reverse=True)
    for other in reasons.CHECKPOINT_REASONS:
        is_first = export_order(64, reason) < export_order(1024, other)
        assert is_first == (reasons.IMPORTANCE[reason] < reasons.IMPORTANCE[other])


def test_guesses_halve_the_gaps_so_that_any_number_of_them_is_evenly_spread() -> None:
    positions = [64 * number for number in range(1, 16)]
    ordered = sorted(positions, key=lambda p: export_order(p, reasons.INTERVAL))
    assert ordered == [64 * n for n in (8, 12, 4, 14, 10, 6, 2, 15, 13, 11, 9, 7, 5, 3, 1)]
    for count in (1, 3, 7, 15):
        kept = [0, *sorted(ordered[:count]), 1024]
        assert len({b - a for a, b in itertools.pairwise(kept)}) == 1


@pytest.mark.parametrize(
    ("unit", "alignment", "expected"),
    [(1, 1, 64), (32, 1, 64), (48, 1, 96), (64, 64, 64), (16, 24, 96), (128, 1, 128), (65, 1, 65)],
)
def test_unasked_checkpoints_are_64_tokens_apart_or_at_the_next_boundary(
    unit: int, alignment: int, expected: int
) -> None:
    geometry = CacheGeometry(
        unit, (AttentionGroupSpec("pages", 8),), (RecurrentGroupSpec("states", 1 << 20, alignment),)
    )
    assert effective_spacing(None, geometry) == expected
