"""What callers tell about retention: markers with a time to live, and names of conversations."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, numbered

from milepost.core.hashing import CacheDomain, MediaSpan
from milepost.core.reasons import CHECKPOINT_REASONS
from milepost.core.reuse import MAX_CONVERSATIONS, KnownConversations
from milepost.core.tree import Node


def node_at(harness: Harness, request_id: int, position: int) -> Node:
    chain = harness.requests[request_id].chain
    assert chain is not None
    node = harness.cache.node_at(chain, position)
    assert node is not None
    return node


# ------------------------------------------------------------------ markers
@pytest.mark.parametrize(
    ("position", "beside", "expected"),
    [(9, None, 8), (8, None, 8), (13, "history", 12), (13, "message", 12), (17, None, 16), (20, None, 20)],
)
def test_a_marker_is_pinned_whatever_reason_its_checkpoint_has(
    position: int, beside: str | None, expected: int
) -> None:
    """Rounded down, it may meet `history`, `tail` or `end`, which are more important and give the name."""
    harness = Harness()
    wanted = [(position, "marker")] + ([(position, beside)] if beside else [])
    request_id = harness.serve(numbered(20), wanted=wanted, pin_seconds=30.0)
    pinned = [n.depth * 4 for n in harness.cache.tree.state_nodes.values() if n.pinned_until > 0.0]
    assert pinned == [expected]
    assert node_at(harness, request_id, expected).pinned_until == pytest.approx(30.0, abs=1.0)


def test_without_a_time_to_live_nothing_is_pinned() -> None:
    harness = Harness()
    harness.serve(numbered(20), wanted=[(8, "marker")])
    assert all(node.pinned_until <= harness.now for node in harness.cache.tree.state_nodes.values())


def test_the_time_starts_anew_with_every_request_that_marks_the_place() -> None:
    harness = Harness()
    first = harness.serve(numbered(20), wanted=[(8, "marker"), (12, "message")], pin_seconds=30.0)
    node = node_at(harness, first, 8)
    before = node.pinned_until
    harness.now = 20.0
    harness.serve(numbered(20) + [1])
    assert node.pinned_until == before, "passing by is not asking for it"
    harness.serve(numbered(20) + [1, 2], wanted=[(8, "marker"), (14, "marker")], pin_seconds=30.0)
    assert node.pinned_until == pytest.approx(52.0, abs=3.0)
    message = node_at(harness, first, 12)
    assert message.pinned_until == pytest.approx(52.0, abs=3.0), "a checkpoint that existed is marked too"
    harness.serve(numbered(20) + [1, 2], wanted=[(8, "marker")], pin_seconds=1.0)
    assert node.pinned_until == pytest.approx(52.0, abs=3.0), "a shorter time takes nothing away"


def test_a_renewed_marker_outlives_newer_checkpoints() -> None:
    """Its old rank, from when its time had run out, must not count any more."""
    harness = Harness()
    marked = harness.serve(numbered(8), wanted=[(4, "marker")], pin_seconds=5.0)
    for seed in range(1, 9):
        harness.serve(numbered(8, seed))
    harness.now = 100.0
    assert harness.cache.evictor.evict_one(harness.now), "everything is ranked, the pin has run out"
    if not node_at(harness, marked, 4).states:
        harness.serve(numbered(8), wanted=[(4, "marker")], pin_seconds=500.0)
    harness.serve(numbered(8) + [1], wanted=[(4, "marker")], pin_seconds=500.0)
    while len(harness.cache.tree.state_nodes) > 1:
        assert harness.cache.evictor.evict_one(harness.now)
    assert node_at(harness, marked, 4).states is not None


def test_a_marker_inside_of_an_image_moves_below_it() -> None:
    harness = Harness()
    media = [MediaSpan(6, 15, b"picture")]
    harness.serve(numbered(24), wanted=[(14, "marker")], pin_seconds=30.0, media=media)
    assert [n.depth for n in harness.cache.tree.state_nodes.values() if n.pinned_until] == [1]


# ------------------------------------------------------------------ conversations
def test_a_known_conversation_goes_on_even_where_nothing_of_it_hits() -> None:
    """An edit near the start: the new path belongs to a conversation that lives, not to a passer-by."""
    harness = Harness()
    harness.serve(numbered(20), conversation="c")
    named = harness.serve(numbered(20, 1), conversation="c")
    unnamed = harness.serve(numbered(20, 2))
    other = harness.serve(numbered(20, 3), conversation="d")
    hits = [node_at(harness, request_id, 16).num_hits for request_id in (named, unnamed, other)]
    assert hits == [1, 0, 0]


def test_a_side_request_does_not_inherit_the_turns_of_the_conversation_it_reads() -> None:
    """A title, a summary, a safety check: built on a live conversation, asked once."""
    harness = Harness()
    prompt = numbered(20)
    for turn in range(3):
        request_id = harness.serve(prompt, conversation="c")
        prompt = harness.tokens_of(request_id) + numbered(7, turn + 1)
    history = harness.tokens_of(request_id)
    going_on = node_at(harness, request_id, len(history) // 4 * 4 - 4).num_hits
    assert going_on >= 2
    side = harness.serve(history + numbered(9, 50))
    foreign = harness.serve(history + numbered(9, 51), conversation="title")
    after = harness.serve(history + numbered(9, 52), conversation="c")
    depth = (len(history) + 9 - 1) // 4 * 4
    assert harness.cached(side) == harness.cached(foreign) == harness.cached(after) > 16
    assert [node_at(harness, r, depth).num_hits for r in (side, foreign)] == [0, 0]
    assert node_at(harness, after, depth).num_hits > going_on


def test_without_names_hits_alone_tell_who_goes_on() -> None:
    harness = Harness()
    first = harness.serve(numbered(20))
    second = harness.serve(harness.tokens_of(first) + numbered(9, 1))
    assert node_at(harness, second, 28).num_hits == 1


def test_names_are_no_part_of_the_key_and_tenants_have_their_own() -> None:
    harness = Harness()
    harness.serve(numbered(20), conversation="a")
    assert harness.cached(harness.serve(numbered(20), conversation="b")) == 16
    elsewhere = harness.serve(numbered(20), conversation="a", domain=CacheDomain(b"x"))
    assert node_at(harness, elsewhere, 16).num_hits == 0, "the name is known, but not in this domain"


def test_a_side_request_goes_before_the_conversation_it_read() -> None:
    """When room is made, the live conversation's newest state stays."""
    harness = Harness()
    prompt = numbered(20)
    for turn in range(4):
        request_id = harness.serve(prompt, conversation="c")
        prompt = harness.tokens_of(request_id) + numbered(7, turn + 1)
    live = harness.tokens_of(request_id)
    side = harness.serve(live + numbered(9, 50))
    while node_at(harness, side, (len(live) + 8) // 4 * 4).states is not None:
        assert harness.cache.evictor.evict_one(harness.now)
        assert max(harness.checkpoints(live)) >= len(live) // 4 * 4 - 4
        if harness.cache.node_at(harness.requests[side].chain, (len(live) + 8) // 4 * 4) is None:
            break


def test_only_so_many_names_are_remembered() -> None:
    known = KnownConversations()

    def note(name: str) -> bool:
        was_known = known.is_known((b"r", name))
        known.note((b"r", name))
        return was_known

    assert not note("first")
    for number in range(MAX_CONVERSATIONS - 1):
        assert not note(str(number))
    assert note("first"), "used again, so it is the newest"
    assert not note("one more")
    assert not note("0"), "the oldest one was forgotten"
    assert note("first")


def test_reasons_stay_the_known_ones() -> None:
    harness = Harness()
    harness.serve(numbered(20), wanted=[(8, "marker"), (8, "history")], pin_seconds=9.0)
    assert set(harness.scheduler.stats().states_by_reason) <= set(CHECKPOINT_REASONS)
