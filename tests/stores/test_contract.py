"""What every store must do, whatever is behind it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tests.stores.harness import Harness
from tests.stores.segments import (
    FINGERPRINT,
    IDENTITY,
    LATE,
    OTHER_FINGERPRINT,
    SECONDS,
    chain,
    key_of,
    keys,
    payload,
    segment,
)

from milepost.stores import outcomes as oc
from milepost.stores.port import PoolPart, StoredSegment
from milepost.stores.segment_format import Identity, encode_head


def object_of(stored) -> bytes:
    return encode_head(stored) + payload(stored)


def assert_missed(harness: Harness, store, key: bytes, outcome: str) -> None:
    """A whole load finds nothing, and the store says why."""
    before = store.outcomes.get(oc.LOAD, outcome)
    assert store.load([key], deadline_seconds=SECONDS) == [None]
    assert store.outcomes.get(oc.LOAD, outcome) == before + 1


# ---------------------------------------------------------------- sound objects


def test_what_was_saved_comes_back_equal(harness: Harness) -> None:
    store = harness.open()
    segments = chain("equal", 5)
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 5
    assert store.lookup(keys(segments), deadline_seconds=SECONDS) == [each.header for each in segments]
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    for stored, each in zip(loaded, segments, strict=True):
        assert stored.header == each.header
        assert payload(stored) == payload(each)


def test_a_megabyte_and_views_of_live_memory(harness: Harness) -> None:
    store = harness.open()
    large = segment("large", record_bytes=1 << 20)
    live = bytearray(b"".join(large.payload))
    view = memoryview(live)
    pieces = (view[: 1 << 20], view[1 << 20 : 2 << 20], view[2 << 20 :])
    wanted = bytes(live)
    assert store.save([dataclasses.replace(large, payload=pieces)], deadline_seconds=SECONDS) == [True]
    live[:] = bytes(len(live))
    assert payload(store.load([large.header.key], deadline_seconds=SECONDS)[0]) == wanted


def test_a_head_that_is_longer_than_usual(harness: Harness) -> None:
    """Many pools with long names, between usual segments."""
    store = harness.open()
    parts = tuple(PoolPart(f"a pool with a name of some length {index}", 1, 9) for index in range(40))
    first, last = segment("before"), segment("after")
    header = msgspec.structs.replace(segment("long head").header, parts=parts)
    long = StoredSegment(header, [bytes(range(180)) * 2])
    assert len(encode_head(long)) > 2048
    segments = [first, long, last]
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 3
    assert store.lookup(keys(segments), deadline_seconds=SECONDS) == [each.header for each in segments]
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]


def test_misses_are_values_among_hits(harness: Harness) -> None:
    store = harness.open()
    segments = chain("some", 3)
    store.save(segments[::2], deadline_seconds=SECONDS)
    wanted = keys(segments)
    assert [bool(each) for each in store.lookup(wanted, deadline_seconds=SECONDS)] == [True, False, True]
    assert [bool(each) for each in store.load(wanted, deadline_seconds=SECONDS)] == [True, False, True]
    assert store.lookup([], deadline_seconds=SECONDS) == []
    assert store.load([], deadline_seconds=SECONDS) == []
    assert not any(outcome in oc.FAULTS for _, outcome in store.outcomes.snapshot())


def test_saving_again_keeps_the_first(harness: Harness) -> None:
    store = harness.open()
    first = segment("twice")
    again = dataclasses.replace(first, payload=[bytes(first.header.payload_bytes)])
    assert store.save([first, first], deadline_seconds=SECONDS) == [True, True]
    assert store.save([again], deadline_seconds=SECONDS) == [True]
    assert payload(store.load([first.header.key], deadline_seconds=SECONDS)[0]) == payload(first)


def test_an_object_whose_parent_is_gone_is_replaced_by_one_that_needs_none(harness: Harness) -> None:
    """The same state, kept with pages back to another checkpoint."""
    store = harness.open()
    parent, child = chain("merged", 2)
    merged = segment("whole", num_units=4, key=child.header.key)
    store.save([parent, child], deadline_seconds=SECONDS)
    store.save([merged], deadline_seconds=SECONDS)
    assert store.lookup([child.header.key], deadline_seconds=SECONDS) == [child.header]
    store.remove([parent.header.key], deadline_seconds=SECONDS)
    assert store.save([merged], deadline_seconds=SECONDS) == [True]
    assert payload(store.load([child.header.key], deadline_seconds=SECONDS)[0]) == payload(merged)


def test_removed_is_gone(harness: Harness) -> None:
    store = harness.open()
    segments = chain("removed", 3)
    store.save(segments, deadline_seconds=SECONDS)
    assert store.remove([*keys(segments[1:]), key_of("never")], deadline_seconds=SECONDS) == 2
    wanted = [segments[0].header, None, None]
    assert store.lookup(keys(segments), deadline_seconds=SECONDS) == wanted
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 3


# ---------------------------------------------------------------- damaged objects


@pytest.mark.parametrize("num_bytes", [0, 7, 87, 300, 511, 512, 513, 3000])
def test_a_torn_object_is_a_miss(harness: Harness, num_bytes: int) -> None:
    store = harness.open()
    torn, sound = chain("torn", 2)
    store.save([torn, sound], deadline_seconds=SECONDS)
    harness.damage(store, torn.header.key, lambda data: data[:num_bytes])
    loaded = store.load(keys([torn, sound]), deadline_seconds=SECONDS)
    assert loaded[0] is None and payload(loaded[1]) == payload(sound)
    assert store.outcomes.get(oc.LOAD, oc.CORRUPT) == 1
    # It is out of the way: the next save is a whole one.
    assert store.save([torn], deadline_seconds=SECONDS) == [True]
    assert payload(store.load([torn.header.key], deadline_seconds=SECONDS)[0]) == payload(torn)


def test_a_flipped_bit_anywhere_is_a_miss(harness: Harness) -> None:
    store = harness.open()
    flipped = segment("flipped", record_bytes=100)
    num_bytes = len(object_of(flipped))
    for offset in [*range(0, 88, 3), *range(88, num_bytes, 41), num_bytes - 1]:
        store.save([flipped], deadline_seconds=SECONDS)

        def flip(data: bytes, offset: int = offset) -> bytes:
            return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]

        harness.damage(store, flipped.header.key, flip)
        assert store.load([flipped.header.key], deadline_seconds=SECONDS) == [None], offset
        store.remove([flipped.header.key], deadline_seconds=SECONDS)


def test_an_object_with_bytes_behind_its_end_is_a_miss(harness: Harness) -> None:
    store = harness.open()
    long = segment("long")
    store.save([long], deadline_seconds=SECONDS)
    harness.damage(store, long.header.key, lambda data: data + b"x")
    assert_missed(harness, store, long.header.key, oc.CORRUPT)


def test_a_damaged_head_is_no_hit_of_a_lookup_either(harness: Harness) -> None:
    store = harness.open()
    damaged = segment("head")
    store.save([damaged], deadline_seconds=SECONDS)
    harness.damage(store, damaged.header.key, lambda data: data[:100] + b"\xff" + data[101:])
    assert store.lookup([damaged.header.key], deadline_seconds=SECONDS) == [None]
    assert store.outcomes.get(oc.LOOKUP, oc.CORRUPT) == 1


@pytest.mark.parametrize(
    "identity",
    [Identity(OTHER_FINGERPRINT), Identity(FINGERPRINT, (1, 2)), Identity(FINGERPRINT, (0, 2))],
    ids=["fingerprint", "rank", "world"],
)
def test_an_object_of_another_writer_under_our_name_is_foreign(harness: Harness, identity: Identity) -> None:
    """Model, numerics and quantisation are in the fingerprint; the shard stands beside it."""
    store = harness.open()
    theirs = segment("theirs", identity=identity)
    harness.damage(store, theirs.header.key, lambda _: object_of(theirs))
    assert store.lookup([theirs.header.key], deadline_seconds=SECONDS) == [None]
    assert_missed(harness, store, theirs.header.key, oc.FOREIGN)
    ours = segment("theirs")
    assert store.save([ours], deadline_seconds=SECONDS) == [True]
    assert store.lookup([ours.header.key], deadline_seconds=SECONDS) == [ours.header]


def test_an_object_of_another_key_is_foreign(harness: Harness) -> None:
    store = harness.open()
    moved = segment("moved")
    harness.damage(store, key_of("wrong place"), lambda _: object_of(moved))
    assert_missed(harness, store, key_of("wrong place"), oc.FOREIGN)


def test_another_format_version_is_foreign_and_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    store = harness.open()
    newer = [segment(("newer", index)) for index in range(3)]
    for each in newer:
        data = object_of(each)
        harness.damage(
            store, each.header.key, lambda _, data=data: data[:8] + (99).to_bytes(4, "little") + data[12:]
        )
    assert store.load(keys(newer), deadline_seconds=SECONDS) == [None] * 3
    assert store.outcomes.get(oc.LOAD, oc.FOREIGN) == 3
    assert sum("format version 99" in record.message for record in caplog.records) == 1


def test_a_header_that_contradicts_itself_is_a_miss(harness: Harness) -> None:
    """Its checksum is right: whoever wrote it was wrong."""
    from tests.stores.test_segment_format import forge

    store = harness.open()
    good = segment("contradiction")
    for change in ({"position": 17}, {"start": 16}, {"match_unit": 0}, {"parts": good.header.parts[:1]}):
        forged = forge(msgspec.structs.replace(good.header, **change), payload(good))
        harness.damage(store, good.header.key, lambda _, forged=forged: forged)
        assert_missed(harness, store, good.header.key, oc.CORRUPT)


def test_a_deadline_that_has_passed_is_a_miss_and_saves_nothing(harness: Harness) -> None:
    store = harness.open()
    segments = chain("late", 3)
    store.save(segments[:2], deadline_seconds=SECONDS)
    assert store.load(keys(segments), deadline_seconds=0.0) == [LATE] * 3
    assert store.outcomes.get(oc.LOAD, oc.TIMEOUT) == 3
    assert store.save(segments[2:], deadline_seconds=0.0) == [False]
    assert store.outcomes.get(oc.SAVE, oc.TIMEOUT) == 1
    assert store.lookup(keys(segments[2:]), deadline_seconds=SECONDS) == [None]


# ---------------------------------------------------------------- lives


def test_shards_and_models_do_not_see_each_other(harness: Harness) -> None:
    key = key_of("same key")
    identities = [IDENTITY, Identity(FINGERPRINT, (1, 2)), Identity(OTHER_FINGERPRINT)]
    stores = [harness.open(identity) for identity in identities]
    segments = [segment(identity, identity=identity, key=key) for identity in identities]
    for store, each in zip(stores, segments, strict=True):
        assert store.save([each], deadline_seconds=SECONDS) == [True]
    for store, each in zip(stores, segments, strict=True):
        assert payload(store.load([key], deadline_seconds=SECONDS)[0]) == payload(each)
        assert not any(outcome in oc.FAULTS for _, outcome in store.outcomes.snapshot())


def test_a_second_client_and_a_restart(harness: Harness) -> None:
    first = harness.open()
    segments = chain("shared", 3)
    first.save(segments, deadline_seconds=SECONDS)
    second = harness.open()
    loaded = second.load(keys(segments), deadline_seconds=SECONDS)
    if not harness.shared:
        assert loaded == [None] * 3
        return
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]
    assert second.remove([segments[2].header.key], deadline_seconds=SECONDS) == 1
    assert first.lookup(keys(segments), deadline_seconds=SECONDS)[2] is None
