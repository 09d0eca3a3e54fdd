"""A set of keys that does not grow."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256

from milepost.engine.known_keys import KnownKeys


def key_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def test_what_is_added_is_known_until_it_is_discarded() -> None:
    known = KnownKeys(4000)
    keys = [key_of(number) for number in range(1000)]
    for key in keys[:500]:
        known.add(key)
        known.add(key)
    assert all(key in known for key in keys[:500])
    assert not any(key in known for key in keys[500:])
    known.discard(*keys[:250], *keys[500:])
    assert not any(key in known for key in keys[:250]) and all(key in known for key in keys[250:500])


def test_of_one_place_the_least_recently_noted_goes_first() -> None:
    known = KnownKeys(4)
    a, b, c, d, e = (key_of(number) for number in range(5))
    for key in (a, b, c, d, a, e):
        known.add(key)
    assert [key in known for key in (a, b, c, d, e)] == [True, False, True, True, True]
    known.discard(a, b)
    known.add(b)
    assert [key in known for key in (a, b, c, d, e)] == [False, True, True, True, True]


def test_nearly_all_of_half_as_many_as_there_is_room_for_are_known() -> None:
    known = KnownKeys(8192)
    keys = [key_of(number) for number in range(4096)]
    for key in keys:
        known.add(key)
    assert sum(key in known for key in keys) > 0.93 * len(keys)


def test_memory_does_not_grow() -> None:
    known = KnownKeys(1024)
    for number in range(1024):
        known.add(key_of(number))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(5000):
            known.add(key_of(number))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096


def test_a_key_that_looks_like_no_key() -> None:
    known = KnownKeys(4)
    assert bytes(32) not in known
    known.add(bytes(32))
    assert bytes(32) in known
