"""`interval` checkpoints are guesses: as many as there is room for, and the first to go."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from tests.core.harness import Harness, make_cache, make_chain, make_geometry, numbered

from milepost.core import reasons
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.retention import export_order
from milepost.core.reuse import MAX_TURN_CLASS
from milepost.core.tree import Node
from milepost.sim.replay import ReplayOptions, ReplayRequest, replay

UNIT = 4


def begin(cache: PrefixCache, tokens: list[int], now: float, *, lineage: int = 0) -> Lease:
    chain = make_chain(tokens)
    lease = cache.open(cache.no_match(), chain, now)
    lease.lineage = lineage
    return lease


def publish(
    cache: PrefixCache, tokens: list[int], exports: list[tuple[int, str]], now: float = 0.0
) -> list[tuple[int, str]]:
    """Compute `tokens` in one chunk and hold nothing afterwards; returns the exports that found no room."""
    lease = begin(cache, tokens, now)
    reservation = cache.reserve(lease, len(tokens), exports, now)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, len(tokens), list(reservation.exports), None, now)
    cache.release(lease, None, now)
    assert cache.audit([]) == []
    return reservation.refused


def states(cache: PrefixCache, seed: int) -> list[tuple[int, str]]:
    """(position, reason) of the checkpoints on the path of `numbered(..., seed)`."""
    return sorted((n.depth * UNIT, n.reason) for n in cache.tree.state_nodes.values() if seed_of(n) == seed)


def seed_of(node: Node) -> int:
    return memoryview(node.tokens).cast("I")[0] // 1000 - 1


# ------------------------------------------------------------------ what they are for
@pytest.mark.parametrize(("match_unit", "closed_form"), [(16, 6208), (32, 6384)])
def test_two_chats_share_a_system_prompt_that_nobody_marked(match_unit: int, closed_form: int) -> None:
    """Ten turns each, as bare token ids: at most one spacing more than if the system prompt was marked."""
    geometry = CacheGeometry(
        match_unit,
        (AttentionGroupSpec("gqa", 3 * 1024),),
        (RecurrentGroupSpec("gdn", 9 * 8 * 128 * 128 * 4),),
    )
    rng = Random(0)
    chats = [array("I", range(2000)) for _ in range(2)]
    requests = []
    for turn in range(10):
        for chat in chats:
            chat.extend(rng.randrange(2000, 30_000) for _ in range(200))
            answer = array("I", [rng.randrange(2000, 30_000) for _ in range(64)])
            prompt = chat[:]
            requests.append(
                ReplayRequest(float(turn), len(prompt), 64, tokens=prompt.__copy__, outputs=answer)
            )
            chat.extend(answer)
    result = replay(requests, geometry, 1 << 30, ReplayOptions(max_output_tokens=64, step_tokens=512))
    num_computed = sum(result.num_prompt_tokens) - sum(result.num_cached_tokens)
    assert closed_form <= num_computed <= closed_form + 64


@pytest.mark.parametrize("parts_at", [130, 700, 1999])
def test_a_prompt_that_parts_anywhere_loses_less_than_one_spacing(parts_at: int) -> None:
    harness = Harness(checkpoint_interval=None, geometry=make_geometry(16))
    prompt = numbered(2000)
    harness.serve(prompt)
    second = harness.serve(prompt[:parts_at] + numbered(50, 1))
    assert parts_at - 64 < harness.cached(second) <= parts_at


# ------------------------------------------------------------------ they take what nothing else needs
def test_they_go_before_anything_else_however_old_that_is() -> None:
    cache = make_cache()
    publish(cache, numbered(12), [(8, reasons.TAIL)], now=0.0)
    publish(cache, numbered(44, 1), [(40, reasons.INTERVAL), (12, reasons.MESSAGE)], now=9000.0)
    assert cache.evictor.evict_one(9000.0) and cache.evictor.evict_one(9000.0)
    while (
        not cache.counters.evictions["merge", reasons.INTERVAL]
        + cache.counters.evictions["drop", reasons.INTERVAL]
    ):
        assert cache.evictor.evict_one(9000.0)
    assert states(cache, 0) == [(8, reasons.TAIL)]
    assert states(cache, 1) == [(12, reasons.MESSAGE)]


def test_they_push_out_nothing_that_somebody_asked_for() -> None:
    """Eight records: six hold a path that was never used, in 9,000 s, and the other two run the request."""
    cache = make_cache(8)
    publish(cache, numbered(24), [(20, reasons.TAIL)])
    refused = publish(cache, numbered(4, 1), [(4, reasons.INTERVAL)], now=9000.0)
    assert refused == [(4, reasons.INTERVAL)]
    assert states(cache, 0) == [(20, reasons.TAIL)]


def test_of_guesses_the_newest_and_coarsest_stay() -> None:
    cache = make_cache(14)
    publish(cache, numbered(16), [(p, reasons.INTERVAL) for p in (4, 8, 12)], 0.0)
    refused = publish(cache, numbered(16, 1), [(p, reasons.INTERVAL) for p in (4, 8, 12)], 900.0)
    assert (8, reasons.INTERVAL) not in refused
    assert (8, reasons.INTERVAL) in states(cache, 1)


def test_a_guess_that_was_hit_is_none_any_more() -> None:
    harness = Harness(checkpoint_interval=8)
    harness.serve(numbered(30))
    harness.serve(numbered(18) + numbered(20, 1))
    [node] = [n for n in harness.cache.tree.state_nodes.values() if n.num_hits]
    assert (node.depth * UNIT, node.reason) == (16, reasons.INTERVAL)
    while harness.cache.evictor.evict_one(harness.now):
        left = {n.reason for n in harness.cache.tree.state_nodes.values() if n is not node}
        if reasons.INTERVAL not in left:
            break
    assert node.states is not None, "all others of its kind went before it"


def test_what_finds_room_is_evenly_spread() -> None:
    positions = [(p, reasons.INTERVAL) for p in range(16, 257, 16)]
    ordered = [p for p, _ in sorted(positions, key=lambda e: export_order(*e))]
    for count in (1, 2, 4, 8, 16):
        assert sorted(ordered[:count]) == [256 // count * (i + 1) for i in range(count)]
    mixed = [(64, reasons.INTERVAL), (16, reasons.TAIL), (48, reasons.MESSAGE), (32, reasons.MESSAGE)]
    assert sorted(mixed, key=lambda e: export_order(*e)) == [mixed[1], mixed[2], mixed[3], mixed[0]]


def test_thinning_by_eviction_keeps_the_gaps_even() -> None:
    """What lies between two guesses becomes worth more when one of them goes."""
    cache = make_cache()
    publish(cache, numbered(65), [(p, reasons.INTERVAL) for p in range(4, 64, 4)] + [(64, reasons.TAIL)])
    for _ in range(8):
        assert cache.evictor.evict_one(10.0)
    left = [p for p, _ in states(cache, 0)]
    gaps = [high - low for low, high in zip([0, *left], left, strict=False)]
    assert max(gaps) <= 12, left


# ------------------------------------------------------------------ exports compare values
def test_an_export_does_not_push_out_what_is_worth_more() -> None:
    """A live conversation's only checkpoint against the message end of a one-off request."""
    cache = make_cache(10)
    lease = begin(cache, numbered(32), 0.0, lineage=MAX_TURN_CLASS)
    reservation = cache.reserve(lease, 32, [(28, reasons.TAIL)], 0.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, 32, [28], None, 0.0)
    cache.release(lease, None, 0.0)
    assert publish(cache, numbered(4, 1), [(4, reasons.MESSAGE)], 1.0) == [(4, reasons.MESSAGE)]
    assert states(cache, 0) == [(28, reasons.TAIL)]
    assert cache.counters.refusals == {(reasons.REFUSED_NO_MEMORY, reasons.MESSAGE): 1}


def test_an_export_pushes_out_what_is_worth_less() -> None:
    cache = make_cache(11)
    publish(cache, numbered(24), [(4, reasons.MESSAGE), (20, reasons.TAIL)], 0.0)
    assert publish(cache, numbered(12, 1), [(8, reasons.TAIL)], 900.0) == []
    assert states(cache, 1) == [(8, reasons.TAIL)]


# ------------------------------------------------------------------ what the model is told
def test_a_conversation_whose_checkpoint_is_gone_keeps_its_turns() -> None:
    harness = Harness(num_records=400)
    tokens = numbered(21)
    for turn in range(3):
        request_id = harness.serve(tokens, 2)
        tokens = harness.tokens_of(request_id) + numbered(9, turn + 1)
        harness.cache.reset()
    harness.serve(tokens, 2)
    assert {n.num_hits for n in harness.cache.tree.state_nodes.values() if n.reason == reasons.TAIL} == {3}


def test_a_side_request_does_not_inherit_turns_from_what_is_gone() -> None:
    harness = Harness(num_records=400)
    for owner, expected in (("chat", 1), ("title", 0)):
        harness.cache.reset()
        harness.serve(numbered(21, 5), 2, conversation="chat" if owner == "chat" else "other")
        harness.cache.reset()
        harness.serve(numbered(21, 5) + [1] * 9, 2, conversation=owner)
        tails = [n for n in harness.cache.tree.state_nodes.values() if n.reason == reasons.TAIL]
        assert {n.num_hits for n in tails} == {expected}


def test_what_lies_behind_a_checkpoint_changes_its_class() -> None:
    """The same class decides about a checkpoint that was counted for it."""
    harness = Harness()
    harness.serve(numbered(21), 6, wanted=[(8, "message")])
    evictor = harness.cache.evictor
    nodes = sorted(harness.cache.tree.state_nodes.values(), key=lambda n: n.depth)
    assert [(n.depth * UNIT, n.is_passed) for n in nodes] == [(8, True), (20, True), (24, False)]
    for node in nodes:
        assert evictor.reuse._waiting[node.key].reuse_class == evictor.reuse_class(node)
