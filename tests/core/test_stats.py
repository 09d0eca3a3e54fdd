"""Counters and gauges: queried = hits + misses, always; sums over reasons agree with the cache itself."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import RECORD_BYTES, Harness, make_geometry, numbered

from milepost.core.reasons import CHECKPOINT_REASONS, HIT, MISS_REASONS


def check_counters(harness: Harness) -> None:
    stats = harness.scheduler.stats()
    counters = stats.counters
    reports = [r for request_id, r in harness.reuse.items() if harness.requests[request_id].is_counted]
    assert counters.num_queried_tokens == counters.num_hit_tokens + counters.num_missed_tokens
    # An admission shows in the counters one step before its report is delivered.
    if harness.plan is None:
        assert counters.num_queried_tokens == sum(r.num_prompt_tokens for r in reports)
        assert counters.num_hit_tokens == sum(r.num_cached_tokens for r in reports)
        assert sum(counters.misses_by_reason.values()) == len(reports)
        assert set(counters.misses_by_reason) <= {HIT, *MISS_REASONS}
        computed = sum(harness.computed.values())
        assert counters.num_prefill_tokens + counters.num_decode_tokens == computed
        assert counters.num_steps == len(harness.plans)
    nodes = list(harness.cache.tree.index.values())
    checkpoints = [node for node in nodes if node.states is not None]
    assert stats.num_checkpoints == len(checkpoints) == sum(stats.states_by_reason.values())
    assert set(stats.states_by_reason) <= set(CHECKPOINT_REASONS)
    assert stats.num_units == len(nodes)
    assert stats.num_running == harness.scheduler.num_running
    assert stats.num_waiting == harness.scheduler.num_waiting
    assert stats.page_bytes + stats.state_bytes + stats.running_state_bytes == stats.used_bytes
    assert stats.state_bytes == len(checkpoints) * harness.geometry.checkpoint_bytes
    assert stats.used_bytes <= stats.committed_bytes <= stats.peak_committed_bytes <= stats.budget_bytes
    freed = sum(count for (move, _), count in counters.evictions.items() if move != "reclaim")
    assert (counters.evicted_bytes > 0) == (freed > 0)
    published = sum(counters.checkpoints_by_reason.values())
    lost = sum(count for (move, _), count in counters.evictions.items() if move != "stranded")
    assert len(checkpoints) == published - lost


@pytest.mark.parametrize("num_records", [14, 30, 400])
def test_counters_agree_with_the_truth_over_random_work(num_records: int) -> None:
    """B84: preemptions, aborts, repeated lookups and failed admissions count nothing twice."""
    for seed in range(12):
        rng = random.Random(seed)
        harness = Harness(
            geometry=make_geometry(num_recurrent=rng.choice([1, 2])),
            num_records=num_records,
            budget=rng.choice([3, 9, 60]),
            decode_interval=rng.choice([0, 8]),
            max_states_per_path=rng.choice([None, 2]),
            checkpoint_interval=rng.choice([0, 8]),
        )
        live: list[int] = []
        for _ in range(50):
            action = rng.random()
            if action < 0.3:
                prompt = numbered(rng.randrange(1, 24), rng.randrange(3)) + numbered(rng.randrange(3), 7)
                live.append(harness.add(prompt, rng.randrange(1, 8)))
            elif action < 0.4 and live:
                harness.scheduler.abort(rng.choice(live))
            elif action < 0.5 and live:
                harness.scheduler.preempt(rng.choice(live))
            else:
                harness.step()
            check_counters(harness)
        harness.run()
        check_counters(harness)


def test_a_preempted_request_is_queried_once() -> None:
    harness = Harness(budget=8)
    request_id = harness.add(numbered(30), 2)
    for _ in range(3):
        harness.step()
        harness.scheduler.preempt(request_id)
    harness.run()
    counters = harness.scheduler.stats().counters
    assert (counters.num_queried_tokens, counters.num_hit_tokens) == (30, 0)
    assert counters.misses_by_reason == {"cold": 1}
    assert counters.num_preemptions == 3


def test_requests_that_are_not_counted_leave_no_trace_in_the_hit_rate() -> None:
    harness = Harness()
    harness.serve(numbered(20))
    before = harness.scheduler.stats().counters
    queried, hits = before.num_queried_tokens, before.num_hit_tokens
    harness.serve(numbered(20), uses_cache=False, is_counted=False)
    after = harness.scheduler.stats().counters
    assert (after.num_queried_tokens, after.num_hit_tokens) == (queried, hits)
    assert sum(after.misses_by_reason.values()) == 1


def test_a_request_that_never_started_is_no_query() -> None:
    harness = Harness()
    request_id = harness.add(numbered(20))
    harness.scheduler.abort(request_id)
    harness.run()
    assert harness.scheduler.stats().counters.num_queried_tokens == 0


def test_gauges_of_a_known_state() -> None:
    harness = Harness(num_records=50)
    harness.serve(numbered(10), wanted=[(4, "message")])
    harness.add(numbered(6, 1), 5)
    harness.step()
    stats = harness.scheduler.stats()
    assert stats.states_by_reason == {"message": 1, "tail": 2}
    assert stats.num_units == 3
    assert stats.page_bytes == (2 + 2) * RECORD_BYTES
    assert (stats.state_bytes, stats.running_state_bytes) == (3 * RECORD_BYTES, RECORD_BYTES)
    assert stats.budget_bytes == 50 * RECORD_BYTES
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.counters.num_prefill_tokens == 16
    assert stats.smallest_hit_prompt == 5
