"""The area that bytes pass through on their way to a peer."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import StoreError
from milepost.stores.objects import Deadline
from milepost.stores.staging import ALIGNMENT_BYTES, Leases, StagingArea

UNIT = ALIGNMENT_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * UNIT))))
def test_places_never_overlap_and_all_bytes_come_back(actions: list[tuple[bool, int]]) -> None:
    area = StagingArea(16 * UNIT)
    taken: dict[int, int] = {}
    for is_take, number in actions:
        if is_take:
            before = area.largest_hole
            offset = area.take(number)
            assert (offset is None) == (number > before)
            if offset is not None:
                for other, size in taken.items():
                    assert offset + number <= other or other + size <= offset
                assert 0 <= offset and offset + number <= area.num_bytes
                taken[offset] = number
        elif taken:
            area.give_back(offset := sorted(taken)[number % len(taken)])
            del taken[offset]
        assert area.used_bytes == sum(-(-size // UNIT) * UNIT for size in taken.values())
    for offset in taken:
        area.give_back(offset)
    assert area.used_bytes == 0 and area.largest_hole == area.num_bytes


def test_a_place_is_given_back_once_and_an_area_has_a_size() -> None:
    area = StagingArea(4 * UNIT)
    area.give_back(area.take(1) or 0)
    with pytest.raises(KeyError):
        area.give_back(0)
    with pytest.raises(StoreError, match="at least"):
        StagingArea(100)
    assert area.take(5 * UNIT) is None


def test_who_waits_is_told_when_there_is_room() -> None:
    area = StagingArea(4 * UNIT)
    offset = area.take(3 * UNIT)
    assert offset is not None
    assert not area.wait_for_room(Deadline(0.01, time.monotonic), lambda: area.largest_hole >= 2 * UNIT)
    threading.Timer(0.02, area.give_back, [offset]).start()
    assert area.wait_for_room(Deadline(20, time.monotonic), lambda: area.largest_hole >= 2 * UNIT)


def test_a_lease_ends_when_it_is_released_or_late() -> None:
    now = [0.0]
    area = StagingArea(4 * UNIT)
    leases = Leases(area, 10.0, lambda: now[0])
    first, second = leases.open([area.take(1) or 0]), leases.open([area.take(1) or 0, area.take(1) or 0])
    assert leases.close(first) and not leases.close(first)
    assert not leases.close(99)
    assert area.used_bytes == 2 * UNIT
    now[0] = 9.0
    assert leases.close_late() == 0 and len(leases) == 1
    now[0] = 10.0
    assert leases.close_late() == 1 and area.used_bytes == 0
    assert not leases.close(second)
