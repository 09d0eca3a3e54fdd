"""A set of keys that does not grow without end."""

from __future__ import annotations

from milepost.engine.known_keys import KnownKeys


def test_the_least_recently_noted_goes_first() -> None:
    known = KnownKeys(2)
    for key in (b"a", b"b", b"a", b"c"):
        known.add(key)
    assert [key in known for key in (b"a", b"b", b"c")] == [True, False, True]
    known.discard(b"a", b"unknown", b"c")
    assert b"a" not in known and b"c" not in known
