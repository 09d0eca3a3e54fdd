"""Owners that compete get equal shares, and one that asks for more waits for itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.harness import Harness, numbered

from milepost.core.queues import FairShare


def first_steps(harness: Harness) -> dict[int, int]:
    """Request id -> number of the step in which it was first computed."""
    first: dict[int, int] = {}
    for number, plan in enumerate(harness.plans):
        for chunk in plan.chunks:
            first.setdefault(chunk.request_id, number)
    return first


def test_one_owner_is_served_in_order_of_arrival() -> None:
    harness = Harness(budget=16)
    rng = random.Random(3)
    ids = [harness.add(numbered(rng.randrange(5, 60), seed), owner="a") for seed in range(12)]
    harness.run()
    first = first_steps(harness)
    assert sorted(ids, key=lambda i: (first[i], i)) == ids


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seats=st.integers(1, 4), owners=st.sampled_from(["a", "ab"]))
def test_hits_let_nobody_pass_who_came_later(data: st.DataObject, seats: int, owners: str) -> None:
    """What was expected of a prompt was its length, what it costs is less when it hits: requests that come
    then have earlier turns than they would have had, but not than their owner's that wait."""
    harness = Harness(budget=24, max_num_seqs=seats)
    for seed in range(3):
        harness.serve(numbered(60, seed))
    arrivals: list[int] = []
    for _ in range(data.draw(st.integers(5, 30))):
        if data.draw(st.booleans()):
            prompt = numbered(60, data.draw(st.integers(0, 5)))[: data.draw(st.integers(5, 60))]
            owner = data.draw(st.sampled_from(owners))
            arrivals.append(harness.add(prompt, data.draw(st.integers(1, 12)), owner=owner))
            if data.draw(st.integers(0, 9)) == 0:
                harness.scheduler.abort(data.draw(st.sampled_from(arrivals)))
        else:
            harness.step()
    harness.run()
    first = first_steps(harness)
    for owner in owners:
        served = [i for i in arrivals if harness.requests[i].owner == owner and i in first]
        assert sorted(served, key=lambda i: (first[i], i)) == served


def test_a_burst_of_one_owner_does_not_hold_up_another() -> None:
    harness = Harness(budget=16)
    burst = [harness.add(numbered(64, seed), owner="greedy") for seed in range(20)]
    for _ in range(3):
        harness.step()
    late = harness.add(numbered(64, 99), owner="modest")
    harness.run()
    first = first_steps(harness)
    ahead = [i for i in burst if first[i] < first[late]]
    assert len(ahead) <= 2, "it waits for what was begun, not for the whole burst"


def test_generated_tokens_are_charged() -> None:
    harness = Harness(budget=64, max_num_seqs=1)
    talks = harness.add(numbered(8, 1), 200, owner="talks")
    harness.step()
    queued = [harness.add(numbered(8, 10 + n), owner=owner) for n, owner in enumerate(("talks", "asks"))]
    harness.run()
    more = [harness.add(numbered(8, 20 + n), owner=owner) for n, owner in enumerate(("talks", "asks"))]
    harness.run()
    first = first_steps(harness)
    assert first[talks] == 0 and first[queued[1]] > 0
    assert first[more[1]] < first[more[0]], "who was answered at length comes second"


def test_cached_tokens_are_free() -> None:
    shares = FairShare()
    harness = Harness(budget=512)
    harness.serve(numbered(400), owner="a")
    again = harness.serve(numbered(400), owner="a")
    assert harness.cached(again) >= 396
    request = harness.requests[again]
    shares.arrive(request)
    assert shares._ends == {"a": 400}
    shares.end(request, ())
    assert shares._ends["a"] <= 8


def test_a_preempted_request_keeps_its_turn() -> None:
    harness = Harness(budget=32)
    first = harness.add(numbered(100, 1), owner="a")
    harness.step()
    turn = harness.requests[first].turn
    second = harness.add(numbered(100, 2), owner="a")
    harness.scheduler.preempt(first)
    assert harness.requests[first].turn == turn < harness.requests[second].turn
    harness.run()
    assert first_steps(harness)[first] < first_steps(harness)[second]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=25
    ),
    budget=st.integers(4, 40),
    seats=st.integers(1, 5),
)
def test_everybody_is_served_and_nothing_is_kept(
    sizes: list[tuple[str, int, int]], budget: int, seats: int
) -> None:
    harness = Harness(budget=budget, max_num_seqs=seats)
    ids = [
        harness.add(numbered(size, seed), outputs, owner=owner)
        for seed, (owner, size, outputs) in enumerate(sizes)
    ]
    harness.run()
    assert set(harness.ended) == set(ids)
    shares = harness.scheduler.waiting._shares
    assert len(shares._ends) <= 3


@pytest.mark.parametrize("seats", [1, 4, 64])
@pytest.mark.parametrize("sizes", [(40, 40), (20, 160), (160, 20)])
def test_backlogged_owners_get_the_same_work(sizes: tuple[int, int], seats: int) -> None:
    """While both have requests waiting, what was computed for them differs by what they may have running."""
    harness = Harness(budget=32, max_num_seqs=seats)
    total = 1600
    owner_of: dict[int, str] = {}
    for seed in range(max(total // size for size in sizes)):
        for owner, size in zip("ab", sizes, strict=True):
            if seed < total // size:
                owner_of[harness.add(numbered(size, 2 * seed + (owner == "b")), owner=owner)] = owner
    work = {"a": 0, "b": 0}
    while all(any(o == owner for r in harness.scheduler.waiting for o in [r.owner]) for owner in "ab"):
        harness.step()
        work = {owner: sum(n for i, n in harness.computed.items() if owner_of[i] == owner) for owner in "ab"}
        assert abs(work["a"] - work["b"]) <= 2 * max(sizes) + 32, work
    assert min(work.values()) > total // 2
