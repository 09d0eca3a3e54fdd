"""Stores that keep to a bound in bytes: it holds, and what is given up is what is missed least."""

from __future__ import annotations

from tests.stores.harness import Harness
from tests.stores.segments import SECONDS, chain, keys, payload, segment

from milepost.stores import outcomes as oc
from milepost.stores.segment_format import encode_head


def object_of(stored) -> bytes:
    return encode_head(stored) + payload(stored)


def test_a_full_store_gives_up_the_oldest_first(bounded: Harness) -> None:
    one = segment("size", record_bytes=30_000)
    num_bytes = len(object_of(one)) + bounded.object_overhead_bytes
    store = bounded.open(budget_bytes=4 * num_bytes)
    many = [segment(("many", index), record_bytes=30_000) for index in range(12)]
    for each in many:
        assert store.save([each], deadline_seconds=SECONDS) == [True]
        assert bounded.used_bytes(store) <= 4 * num_bytes
    found = [bool(each) for each in store.lookup(keys(many), deadline_seconds=SECONDS)]
    assert found == [False] * 8 + [True] * 4


def test_what_is_larger_than_the_store_is_not_saved(bounded: Harness) -> None:
    store = bounded.open(budget_bytes=50_000)
    small = segment("small")
    assert store.save([small, segment("huge", record_bytes=100_000)], deadline_seconds=SECONDS) == [
        True,
        False,
    ]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == 1
    assert store.lookup([small.header.key], deadline_seconds=SECONDS) == [small.header]


def test_a_path_is_given_up_from_its_end(bounded: Harness) -> None:
    """A parent is never less recent than what builds on it."""
    path = chain("path", 4, record_bytes=30_000)
    num_bytes = len(object_of(path[0])) + bounded.object_overhead_bytes
    store = bounded.open(budget_bytes=5 * num_bytes)
    store.save(path, deadline_seconds=SECONDS)
    for index in range(1, 4):
        store.save([segment(("other", index), record_bytes=30_000)], deadline_seconds=SECONDS)
        found = [bool(each) for each in store.lookup(keys(path), deadline_seconds=SECONDS)]
        assert found == [True] * min(4, 5 - index) + [False] * (4 - min(4, 5 - index))


def test_a_loaded_path_outlives_what_was_saved_after_it(bounded: Harness) -> None:
    path, others = chain("old", 2, record_bytes=30_000), chain("new", 2, record_bytes=30_000)
    num_bytes = len(object_of(path[0])) + bounded.object_overhead_bytes
    store = bounded.open(budget_bytes=4 * num_bytes)
    store.save([*path, *others], deadline_seconds=SECONDS)
    store.load(keys(path), deadline_seconds=SECONDS)
    store.save(chain("newest", 2, record_bytes=30_000), deadline_seconds=SECONDS)
    assert store.lookup(keys([*path, *others]), deadline_seconds=SECONDS) == [
        *(each.header for each in path),
        None,
        None,
    ]


def test_a_segment_never_pushes_out_what_it_builds_on(bounded: Harness) -> None:
    path = chain("deep", 4, record_bytes=30_000)
    num_bytes = len(object_of(path[0])) + bounded.object_overhead_bytes
    store = bounded.open(budget_bytes=3 * num_bytes)
    assert store.save(path, deadline_seconds=SECONDS) == [True, True, True, False]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == 1
    assert all(store.lookup(keys(path[:3]), deadline_seconds=SECONDS))


def test_a_segment_in_use_stays_whole_while_it_is_evicted(bounded: Harness) -> None:
    one = segment("held", record_bytes=30_000)
    store = bounded.open(budget_bytes=2 * (len(object_of(one)) + bounded.object_overhead_bytes))
    store.save([one], deadline_seconds=SECONDS)
    (held,) = store.load([one.header.key], deadline_seconds=SECONDS)
    for index in range(4):
        store.save([segment(("push", index), record_bytes=30_000)], deadline_seconds=SECONDS)
    assert store.lookup([one.header.key], deadline_seconds=SECONDS) == [None]
    assert payload(held) == payload(one)
