"""Each way to lose a checkpoint says what it cost: to the request that misses it, and to the counters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.harness import Harness, make_chain, make_geometry, numbered

from milepost.core import losses
from milepost.core.hashing import MediaSpan
from milepost.core.losses import Loss, LostCheckpoints
from milepost.sim.fakes import WorkerFaults

PROMPT = numbered(13)
"""Tail at 12 with units of 4 tokens."""


# ------------------------------------------------------------------ the list
def test_the_deepest_loss_between_hit_and_limit_counts() -> None:
    chain = make_chain(numbered(20))
    keys = chain.extend(5)
    lost = LostCheckpoints()
    assert lost.beyond(chain, 0, 5) is None
    lost.remember(keys[1], "merge", "tail")
    lost.remember(keys[3], "drop", "end")
    assert lost.beyond(chain, 0, 5) == Loss(4, "drop", "end")
    assert lost.beyond(chain, 0, 4) == Loss(4, "drop", "end")
    assert lost.beyond(chain, 0, 3) == lost.beyond(chain, 1, 3) == Loss(2, "merge", "tail")
    assert lost.beyond(chain, 2, 3) is None and lost.beyond(chain, 4, 5) is None
    assert lost.beyond(make_chain(numbered(20, 1)), 0, 5) is None
    lost.remember(keys[3], "thin", "decode")
    assert lost.beyond(chain, 0, 5) == Loss(4, "thin", "decode"), "the last loss is why it is not there"
    lost.forget(keys[3])
    lost.forget(keys[4])
    assert lost.beyond(chain, 0, 5) == Loss(2, "merge", "tail")
    lost.forget_all_but({keys[1]})
    assert len(lost) == 1 and lost.beyond(chain, 0, 5) == Loss(2, "merge", "tail")
    lost.forget_all_but({keys[0]})
    assert len(lost) == 0 and lost.beyond(chain, 0, 5) is None


def test_a_boundary_inside_a_media_item_was_never_of_use() -> None:
    chain = make_chain(numbered(20), media=[MediaSpan(6, 10, b"image")])
    keys = chain.extend(5)
    lost = LostCheckpoints()
    lost.remember(keys[1], "drop", "tail")
    assert lost.beyond(chain, 0, 5) is None
    lost.remember(keys[0], "drop", "tail")
    assert lost.beyond(chain, 0, 5) == Loss(1, "drop", "tail")


def test_the_oldest_losses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_REMEMBERED", 3)
    lost = LostCheckpoints()
    for name in (b"a", b"b", b"c", b"a", b"d"):
        lost.remember(name, "drop", "tail")
    assert [name in lost for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert len(lost) == 3


# ------------------------------------------------------------------ every cause
def dropped() -> Harness:
    harness = Harness()
    harness.serve(PROMPT)
    harness.cache.evictor.evict_one(harness.now)
    return harness


def merged() -> Harness:
    """A longer path goes on behind 12; the client of this one asked to give it up first."""
    harness = Harness()
    harness.serve(numbered(24), wanted=[(12, "message")])
    chain = make_chain(numbered(24))
    node = harness.cache.node_at(chain, 12)
    assert node is not None
    harness.cache.evictor.give_up_state(node)
    return harness


def bounded() -> Harness:
    harness = Harness(max_states_per_path=1)
    harness.serve(numbered(24), wanted=[(12, "message")])
    return harness


def thinned() -> Harness:
    """A long answer keeps its last decode checkpoints only, once half of the budget is used."""
    harness = Harness(num_records=16)
    harness.serve(PROMPT[:5], 24)
    return harness


def reclaimed() -> Harness:
    """No room beside the request itself: it goes on in the slot of the checkpoint it stands on."""
    harness = Harness(geometry=make_geometry(alignment=None), num_records=5)
    harness.serve(PROMPT)
    return harness


def not_written() -> Harness:
    harness = Harness(faults=WorkerFaults(acknowledges=lambda chunk, export: False))
    harness.serve(PROMPT)
    harness.worker.faults = WorkerFaults()
    return harness


def refused() -> Harness:
    harness = Harness(checkpoint_interval=4, num_records=6)
    harness.serve(numbered(16))
    return harness


def stranded() -> Harness:
    """Without recurrent layers pages are all there is to lose."""
    harness = Harness(geometry=make_geometry(num_recurrent=0))
    harness.serve(PROMPT, 9)
    harness.cache.evictor.evict_one(harness.now)
    return harness


def pages_only() -> Harness:
    """Units that a prompt ends in count as its checkpoint."""
    harness = stranded()
    harness.cache.evictor.evict_one(harness.now)
    return harness


def condemned() -> Harness:
    harness = Harness()
    request_id = harness.serve(PROMPT)
    assert harness.scheduler.condemn(harness.requests[request_id], 12) == 1
    return harness


CAUSES: dict[str, tuple[Callable[[], Harness], int, int, str]] = {
    # name: scenario, tokens of the prompt that comes by, position that was lost, its reason
    "drop": (dropped, 13, 12, "tail"),
    "merge": (merged, 13, 12, "message"),
    "states_per_path": (bounded, 13, 12, "message"),
    "thin": (thinned, 14, 12, "decode"),
    "reclaim": (reclaimed, 13, 12, "tail"),
    "not_written": (not_written, 13, 12, "tail"),
    "no_memory": (refused, 9, 8, "interval"),
    "stranded": (stranded, 21, 20, "interval"),
    "condemned": (condemned, 13, 12, "tail"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_a_loss_costs_is_reported_once(cause: str) -> None:
    scenario, num_tokens, position, reason = CAUSES[cause]
    harness = scenario()
    counters = harness.cache.counters
    assert not counters.tokens_lost_to_eviction
    path = harness.tokens_of(0)
    again = harness.add(path[:num_tokens])
    harness.run()
    report = harness.reuse[again]
    assert report.eviction == (cause, reason)
    assert report.num_tokens_lost_to_eviction == position - report.num_cached_tokens > 0
    assert dict(counters.tokens_lost_to_eviction) == {(cause, reason): report.num_tokens_lost_to_eviction}
    counted = counters.evictions[cause, reason] + counters.refusals[cause, reason]
    assert counted >= 1


def test_what_is_computed_again_is_lost_no_more() -> None:
    harness = dropped()
    first, second = harness.serve(PROMPT), harness.serve(PROMPT)
    assert harness.reuse[first].num_tokens_lost_to_eviction == 12
    assert harness.reuse[second].num_tokens_lost_to_eviction == 0
    assert harness.reuse[second].eviction is None
    assert len(harness.cache.evictor.losses) == 0
    assert harness.cache.counters.tokens_lost_to_eviction.total() == 12


def test_units_that_come_back_are_lost_no_more() -> None:
    harness = pages_only()
    again = harness.serve(PROMPT)
    assert harness.reuse[again].eviction == ("drop", "tail")
    assert harness.reuse[again].num_tokens_lost_to_eviction == 12
    third = harness.serve(PROMPT)
    assert harness.reuse[third].num_tokens_lost_to_eviction == 0
    longer = harness.serve(harness.tokens_of(0))
    assert harness.reuse[longer].eviction == ("stranded", "interval")


def test_a_reset_is_no_loss() -> None:
    harness = Harness()
    harness.serve(PROMPT)
    assert harness.scheduler.reset_prefix_cache()
    again = harness.serve(PROMPT)
    assert harness.reuse[again].num_tokens_lost_to_eviction == 0


def test_requests_that_do_not_use_the_cache_lose_nothing() -> None:
    harness = dropped()
    again = harness.serve(PROMPT, uses_cache=False)
    assert harness.reuse[again].num_tokens_lost_to_eviction == 0
    off = Harness(enable_prefix_caching=False)
    off.serve(PROMPT)
    again = off.serve(PROMPT)
    assert off.reuse[again].num_tokens_lost_to_eviction == 0
    assert len(off.cache.evictor.losses) == 0


def test_a_refused_export_of_somebody_who_shares_the_path_is_no_loss() -> None:
    """The checkpoint is there, made by another request."""
    harness = Harness()
    harness.serve(PROMPT)
    chain = make_chain(PROMPT)
    match = harness.cache.match(chain, 13)
    lease = harness.cache.open(match, chain, 0.0)
    harness.cache._refuse(lease, 12, "no_memory", "tail", 0.0)
    assert len(harness.cache.evictor.losses) == 0
    harness.cache.release(lease, None, 0.0)
