"""Edges of the pure rules that mutation testing found untested (docs/mutation.md)."""

from __future__ import annotations

import itertools

import pytest
from tests.core.test_groups_and_coordinator import make_groups, make_path

from milepost.core import reasons
from milepost.core.chunking import effective_spacing, marked_units, settled_position
from milepost.core.coordinator import joint_hit
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.retention import SegmentRecord, segment_value


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
