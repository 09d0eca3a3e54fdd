"""Looking at the cache says what is there, what would go next, and changes nothing."""

from __future__ import annotations

from random import Random

import pytest
from tests.core.harness import Harness, make_geometry, numbered

from milepost.core.inspection import next_evictions, view_cache, view_requests
from milepost.sim.swarm import Swarm


def test_checkpoints_are_linked_by_path() -> None:
    harness = Harness(geometry=make_geometry())
    harness.serve(numbered(21), wanted=[(8, "message")])
    harness.serve(numbered(8) + [5] * 9)
    view = view_cache(harness.cache, harness.now, limit=100)
    by_position = {(c.position, c.start) for c in view.checkpoints}
    assert view.num_checkpoints == len(view.checkpoints)
    first = next(c for c in view.checkpoints if c.position == 8)
    assert (first.start, first.parent_key, first.reason) == (0, "", "message")
    assert {c.parent_key for c in view.checkpoints if c.start == 8} == {first.key}
    assert (16, 8) in by_position
    assert first.segment_bytes == harness.cache.checkpoint_bytes + 2 * harness.cache.unit_bytes


def test_the_most_recent_ones_are_shown_with_what_they_stand_on() -> None:
    harness = Harness(geometry=make_geometry())
    for seed in range(12):
        harness.serve(numbered(30, seed), wanted=[(8, "message"), (16, "message")])
    view = view_cache(harness.cache, harness.now, limit=3)
    assert len(view.checkpoints) < view.num_checkpoints
    keys = {c.key for c in view.checkpoints}
    assert all(c.parent_key in keys or c.start == 0 for c in view.checkpoints)


def test_the_next_eviction_is_the_one_that_happens() -> None:
    harness = Harness(geometry=make_geometry())
    for seed in range(6):
        harness.serve(numbered(20 + 4 * seed, seed))
    for _ in range(6):
        before = set(harness.cache.tree.state_nodes)
        [expected] = next_evictions(harness.cache, harness.now, 1)
        assert harness.cache.evictor.evict_one(harness.now)
        [gone] = before - set(harness.cache.tree.state_nodes)
        assert gone[:8].hex() == expected.key


def test_requests_say_what_they_wait_for() -> None:
    harness = Harness(geometry=make_geometry(), budget=8)
    leader = harness.add(numbered(40), 3)
    harness.step()
    follower = harness.add(numbered(40) + [1])
    held = harness.add(numbered(12, 3))
    harness.scheduler.transfers.hold(held)
    waiting = harness.add(numbered(12, 4))
    scheduler = harness.scheduler
    views = view_requests(scheduler.requests, scheduler.siblings, scheduler.transfers, limit=10)
    found = {v.request_id: (v.status, v.waits_for) for v in views}
    assert found == {
        leader: ("running", ""),
        follower: ("waiting", "sibling"),
        held: ("waiting", "load"),
        waiting: ("waiting", "turn"),
    }
    assert views[0].num_computed_tokens == 8
    assert len(view_requests(scheduler.requests, scheduler.siblings, scheduler.transfers, limit=2)) == 2


@pytest.mark.parametrize("seed", range(6))
def test_looking_changes_nothing(seed: int) -> None:
    def play(looks: bool) -> list[object]:
        swarm = Swarm(Random(seed))
        seen: list[object] = []
        for _ in range(80):
            seen.append(swarm.act())
            scheduler = swarm.world.scheduler
            if looks:
                view_cache(scheduler.cache, swarm.world.now, limit=20)
                view_requests(scheduler.requests, scheduler.siblings, scheduler.transfers, limit=9)
            seen.append(sorted(scheduler.cache.tree.state_nodes))
        return seen

    assert play(True) == play(False)
