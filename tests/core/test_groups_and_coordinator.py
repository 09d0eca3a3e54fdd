"""Joint hits against brute force, over every path of up to four units and over random long ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from milepost.core.coordinator import joint_hit
from milepost.core.groups.attention import AttentionGroup
from milepost.core.groups.recurrent import RecurrentGroup
from milepost.core.tree import NO_RECORD, Node

UnitRecords = tuple[tuple[bool, ...], tuple[bool, ...] | None]
"""Which attention groups have a page for the unit, which recurrent groups a state behind it."""


def make_path(units: Sequence[UnitRecords]) -> list[Node]:
    path: list[Node] = []
    parent = Node(b"root", None, b"", [], 0.0)
    for index, (pages, states) in enumerate(units):
        records = [index if exists else NO_RECORD for exists in pages]
        parent = Node(b"%d" % index, parent, b"", records, 0.0)
        if states is not None:
            parent.states = [index if exists else NO_RECORD for exists in states]
        path.append(parent)
    return path


def make_groups(num_attention: int, num_recurrent: int) -> tuple[list[AttentionGroup], list[RecurrentGroup]]:
    return (
        [AttentionGroup(i, f"a{i}") for i in range(num_attention)],
        [RecurrentGroup(i, f"r{i}", num_attention + i) for i in range(num_recurrent)],
    )


def has_pages(units: Sequence[UnitRecords], group: int, k: int) -> bool:
    return all(pages[group] for pages, _ in units[:k])


def has_state(units: Sequence[UnitRecords], group: int, k: int) -> bool:
    states = units[k - 1][1]
    return states is not None and states[group]


def check(units: Sequence[UnitRecords], limit: int, num_attention: int, num_recurrent: int) -> None:
    attention, recurrent = make_groups(num_attention, num_recurrent)
    path = make_path(units)
    hit = joint_hit(attention, recurrent, path, limit)
    candidates = range(0, min(limit, len(units)) + 1)
    reach = {
        group.name: max(k for k in candidates if has_pages(units, i, k)) for i, group in enumerate(attention)
    }
    reach |= {
        group.name: max(k for k in candidates if k == 0 or has_state(units, i, k))
        for i, group in enumerate(recurrent)
    }
    all_pages = max(k for k in candidates if all(has_pages(units, i, k) for i in range(num_attention)))
    joint = max(
        k
        for k in candidates
        if k <= all_pages and (k == 0 or all(has_state(units, i, k) for i in range(num_recurrent)))
    )
    assert hit.units_by_group == reach
    assert hit.attention_units == all_pages
    assert hit.units == joint
    shortest = min(reach.values())
    if shortest == max(reach.values()):
        assert hit.limiting_group is None
    else:
        assert hit.limiting_group is not None
        assert reach[hit.limiting_group] == shortest


def test_every_path_of_up_to_three_units() -> None:
    pages = list(itertools.product((True, False), repeat=2))
    states = [None, *itertools.product((True, False), repeat=2)]
    unit_records: list[UnitRecords] = list(itertools.product(pages, states))
    for length in range(0, 3):
        for units in itertools.product(unit_records, repeat=length):
            for limit in range(0, length + 2):
                check(units, limit, 2, 2)


def test_every_path_of_one_group_each_up_to_five_units() -> None:
    unit_records: list[UnitRecords] = [((p,), s) for p in (True, False) for s in (None, (True,))]
    for length in range(0, 6):
        for units in itertools.product(unit_records, repeat=length):
            check(units, length, 1, 1)


def test_models_with_one_kind_of_layer() -> None:
    for length in range(0, 6):
        for flags in itertools.product((True, False), repeat=length):
            check([((flag,), None) for flag in flags], length, 1, 0)
            check([((), (flag,)) for flag in flags], length, 0, 1)


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_long_paths(data: st.DataObject, num_attention: int, num_recurrent: int) -> None:
    mostly = st.sampled_from([True, True, True, False])
    unit = st.tuples(
        st.tuples(*[mostly] * num_attention),
        st.none() | st.tuples(*[st.booleans()] * num_recurrent),
    )
    units = data.draw(st.lists(unit, max_size=30))
    check(units, data.draw(st.integers(0, 32)), num_attention, num_recurrent)


def test_groups_look_at_their_own_records_only() -> None:
    path = make_path([((True, False), (False, True)), ((True, True), (True, False))])
    assert [AttentionGroup(i, "").longest(path, 2) for i in range(2)] == [2, 0]
    assert [RecurrentGroup(i, "", i).deepest(path, 2) for i in range(2)] == [2, 1]
    assert AttentionGroup(0, "").longest(path, 1) == 1
    assert RecurrentGroup(0, "", 2).deepest(path, 1) == 0
    assert RecurrentGroup(1, "kda", 3).pool == 3, "records of a state group lie behind the pages' pools"
