"""The index of recency by itself; stores are compared with a model in test_lru_model.py."""

from __future__ import annotations

from milepost.stores.lru import Entry, LruIndex


def index_of(*names: str) -> LruIndex:
    """Each builds on the one before it."""
    index = LruIndex()
    parent = None
    for name in names:
        index.add(name, Entry(10, parent))
        parent = name
    return index


def test_an_object_that_is_replaced_counts_once() -> None:
    index = index_of("a", "b")
    index.add("a", Entry(25))
    assert (len(index), index.total_bytes) == (2, 35)
    index.remove("a")
    index.remove("never")
    assert (len(index), index.total_bytes) == (1, 10)
    assert index.entry("a") is None and index.entry("b") == Entry(10, "a")


def test_a_path_ends_where_an_object_is_missing() -> None:
    index = index_of("a", "b", "c")
    assert index.path("c") == ["c", "b", "a"] and index.path(None) == []
    index.remove("b")
    assert index.path("c") == ["c"] and index.path("b") == []


def test_a_circle_ends() -> None:
    """Nobody writes one, but a file may say anything."""
    index = index_of("a", "b")
    index.add("a", Entry(10, "b"))
    assert index.path("a") == ["a", "b"]


def test_victims_are_the_oldest_that_may_go() -> None:
    index = index_of("a", "b", "c", "d")
    assert index.victims(0, ()) == []
    assert index.victims(1, ()) == ["a"]
    assert index.victims(10, ()) == ["a"]
    assert index.victims(11, ()) == ["a", "b"]
    assert index.victims(11, {"a", "c"}) == ["b", "d"]
    assert index.victims(41, ()) is None and index.victims(31, {"a"}) is None
    index.touch_path("b")
    assert index.victims(40, ()) == ["c", "d", "b", "a"]
    index.move_to_end("c")
    assert index.victims(40, ()) == ["d", "b", "a", "c"]


def test_what_others_wrote_is_discovered_once() -> None:
    asked: list[str] = []

    def discover(name: str) -> Entry | None:
        asked.append(name)
        return Entry(7, parent_known=False) if name in ("x", "y") else None

    index = LruIndex(lambda name: {"y": "x", "x": "gone"}.get(name), discover)
    assert index.path("y") == ["y", "x"]
    assert index.path("y") == ["y", "x"]
    assert asked == ["y", "x", "gone", "gone"] and index.total_bytes == 14
    entry = index.entry("y")
    assert entry is not None and entry.parent_known and entry.parent == "x"
