"""Many requests against little memory: everybody ends, nobody starves, nothing exceeds the budget."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.core.harness import RECORD_BYTES, Harness, make_cache, make_chain, make_geometry, numbered
from tests.core.test_eviction import grow, random_forest

from milepost.core.admission import in_use_bytes, largest_request_tokens, worst_case_bytes
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.queues import BACKGROUND_PRIORITY
from milepost.errors import RequestError


def records_for(num_tokens: int) -> int:
    """Records one request of so many tokens needs while it runs."""
    return make_geometry().request_bytes(num_tokens) // RECORD_BYTES


def finish_all(harness: Harness) -> None:
    harness.run()
    for request_id, update in harness.ended.items():
        assert update.finish_reason == "length", update
        truth = harness.worker.truth(request_id)
        assert harness.outputs[request_id] == truth.outputs(harness.requests[request_id].max_tokens)
    assert harness.cache.memory.peak_committed_bytes <= harness.cache.memory.budget_bytes


@pytest.mark.parametrize("shares_a_prefix", [False, True])
@pytest.mark.parametrize("budget", [16, 200])
def test_two_hundred_requests_against_a_budget_for_three(shares_a_prefix: bool, budget: int) -> None:
    """B73 and the issue's own case. 24 prompt and 8 generated tokens: 8 pages and a state each."""
    harness = Harness(num_records=3 * 9, budget=budget)
    harness.check = lambda: None  # type: ignore[method-assign]
    for seed in range(200):
        own = numbered(24, seed)
        harness.add(numbered(12, 900) + own[:12] if shares_a_prefix else own, 8)
    finish_all(harness)
    assert len(harness.ended) == 200
    order = list(harness.ended)
    lateness = [order.index(request_id) - request_id for request_id in range(200)]
    assert max(lateness) <= 12, "first come, first served, but for a few places"
    assert harness.scheduler.audit() == []


@pytest.mark.parametrize("num_requests", [2, 3, 7])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_pool_of_what_is_needed_less_one_page(num_requests: int, missing: int) -> None:
    """B73: one record short of serving all at once. Preempting and resuming must make progress."""
    for prompt_length, max_tokens in ((5, 30), (24, 9), (13, 1)):
        need = records_for(prompt_length + max_tokens)
        harness = Harness(num_records=num_requests * need - missing)
        for seed in range(num_requests):
            harness.add(numbered(prompt_length, seed), max_tokens)
        finish_all(harness)
        assert sum(harness.computed.values()) <= 3 * num_requests * (prompt_length + max_tokens)


@pytest.mark.parametrize("prompt_length", range(1, 14))
def test_one_request_that_needs_the_whole_budget(prompt_length: int) -> None:
    """It must also get past its own checkpoints, which share the budget with it."""
    for max_tokens, budget, alignment in itertools.product((1, 2, 5, 9), (1, 3, 5, 64), (1, 8, None)):
        geometry = make_geometry(alignment=alignment)
        need = geometry.request_bytes(prompt_length + max_tokens) // RECORD_BYTES
        harness = Harness(geometry=geometry, num_records=need, budget=budget)
        harness.add(numbered(prompt_length), max_tokens, wanted=[(prompt_length // 2, "history")])
        finish_all(harness)
        again = harness.add(numbered(prompt_length), max_tokens)
        finish_all(harness)
        assert len(harness.outputs[again]) == max_tokens


def test_a_request_larger_than_the_whole_budget_is_refused_and_others_go_on() -> None:
    """B83: one entry larger than the budget."""
    harness = Harness(num_records=6)
    with pytest.raises(RequestError) as caught:
        harness.add(numbered(21))
    assert caught.value.code == "context_length_exceeded"
    harness.add(numbered(19))
    finish_all(harness)


def test_a_full_cache_gives_way_to_requests() -> None:
    """Many entries, each as large as the budget allows: none is refused, none stays too long."""
    harness = Harness(num_records=7)
    for seed in range(12):
        harness.serve(numbered(19, seed), 2)
        assert harness.cache.memory.committed_bytes <= 7 * RECORD_BYTES
    assert all(update.finish_reason == "length" for update in harness.ended.values())


def test_a_big_request_is_not_overtaken_for_ever() -> None:
    """It waits at the head of the queue; small ones behind it do not slip past."""
    harness = Harness(num_records=14)
    harness.add(numbered(5, 0), 20)
    harness.add(numbered(5, 1), 20)
    harness.step()
    big = harness.add(numbered(40, 2))
    small = [harness.add(numbered(3, 10 + seed)) for seed in range(5)]
    harness.run()
    order = list(harness.ended)
    assert all(order.index(big) < order.index(request_id) for request_id in small)


def test_high_priority_requests_do_not_lock_out_the_rest_once_they_end() -> None:
    harness = Harness(num_records=12)
    low = harness.add(numbered(10), 12, priority=5)
    for wave in range(6):
        for seed in range(3):
            harness.add(numbered(7, 10 * wave + seed), 3)
        for _ in range(4):
            harness.step()
    finish_all(harness)
    assert low in harness.ended


def test_two_requests_that_keep_preempting_each_other_still_end() -> None:
    """Random sizes, priorities, chunk budgets and pools between one and two requests."""
    for seed in range(40):
        rng = random.Random(seed)
        geometry = make_geometry(alignment=rng.choice([1, 8, None]), num_attention=rng.choice([1, 2]))
        need = geometry.request_bytes(60) // RECORD_BYTES
        harness = Harness(
            geometry=geometry, num_records=need + rng.randrange(need), budget=rng.choice([2, 5, 40])
        )
        for number in range(rng.randrange(2, 8)):
            length = rng.randrange(1, 40)
            harness.add(
                numbered(length, rng.choice([0, number + 1])), rng.randrange(1, 20), priority=rng.randrange(3)
            )
            for _ in range(rng.randrange(4)):
                harness.step()
        finish_all(harness)


@pytest.mark.parametrize(
    ("attention", "recurrent"),
    [([700], [9000]), ([40_000], [1]), ([1, 5000], [4096, 100_000]), ([], [50_000]), ([3000], [])],
)
def test_records_of_very_different_sizes_share_one_budget(attention: list[int], recurrent: list[int]) -> None:
    geometry = CacheGeometry(
        4,
        tuple(AttentionGroupSpec(f"a{i}", size) for i, size in enumerate(attention)),
        tuple(RecurrentGroupSpec(f"r{i}", size) for i, size in enumerate(recurrent)),
    )
    need = -(-geometry.request_bytes(30) // RECORD_BYTES)
    for factor in (1.0, 1.5, 2.7):
        harness = Harness(geometry=geometry, num_records=int(need * factor), budget=13, max_model_len=30)
        for seed in range(10):
            harness.add(numbered(4 + 2 * seed, seed % 4), 5)
        finish_all(harness)


@pytest.mark.parametrize("num_background", [1, 2, 5])
def test_all_background_requests_make_way_for_one_that_needs_everything(num_background: int) -> None:
    """They do not run while it waits, so waiting for their end would be for ever."""
    harness = Harness(num_records=30, budget=200)
    for seed in range(num_background):
        harness.add(numbered(12, seed), 6, priority=BACKGROUND_PRIORITY)
    harness.step()
    assert harness.scheduler.num_running == num_background
    big = harness.add(numbered(100, 9), 5)
    harness.step()
    assert harness.requests[big].num_processed > 0
    finish_all(harness)
    assert list(harness.ended)[0] == big


# ------------------------------------------------------------------ arithmetic
def test_worst_case_counts_the_next_token() -> None:
    cache = make_cache(geometry=make_geometry(4, num_attention=2, num_recurrent=3))
    page, state = 2 * RECORD_BYTES, 3 * RECORD_BYTES
    for num_tokens, held, running in itertools.product(range(1, 30), range(0, 9), (False, True)):
        units = max(0, -(-(num_tokens + 1) // 4) - held)
        expected = units * page + (0 if running else state)
        assert worst_case_bytes(cache, num_tokens, held, has_running=running) == expected


def test_bytes_in_use_are_what_is_left_after_evicting_everything() -> None:
    """Brute force: leases on a random forest; what a new request would pin counts as well."""
    for seed in range(60):
        cache, leases = random_forest(random.Random(seed), 2)
        path = random.Random(seed).choice([[], *([lease.tip] for lease in leases)])
        for node in path:
            path = [node, *cache.tree.ancestors(node)][-2::-1]
        in_use = in_use_bytes(cache, leases, path)
        cache.evictor.evict_all()
        assert cache.memory.used_bytes == in_use
        fresh = make_chain(numbered(9, 50))
        lease = cache.open(cache.match(fresh, 9), fresh, 0.0)
        reservation = cache.reserve(lease, 9, [(4, "message"), (8, "tail")], 0.0)
        assert reservation is not None
        cache.confirm(lease, reservation)
        leases.append(lease)
        assert in_use_bytes(cache, leases) == cache.memory.used_bytes
        cache.publish(lease, 9, [8], None, 0.0)
        assert in_use_bytes(cache, leases) == cache.memory.used_bytes
        match = cache.match(make_chain(numbered(9, 50)), 9)
        assert in_use_bytes(cache, leases, match.path[: match.units]) == cache.memory.used_bytes


def test_a_path_that_would_be_pinned_counts_before_it_is() -> None:
    cache = make_cache(geometry=make_geometry(4, 2, 3))
    grow(cache, numbered(16), [4, 8, 16])
    match = cache.match(make_chain(numbered(12)), 12)
    assert match.units == 2
    assert in_use_bytes(cache, [], match.path[:2]) == (2 * 2 + 3) * RECORD_BYTES
    assert in_use_bytes(cache, [], match.path[:0]) == 0


def test_the_largest_request_is_bounded_by_model_and_budget() -> None:
    from milepost.config import CacheConfig, SchedulerConfig

    geometry = make_geometry(4)
    for num_records, limit in itertools.product(range(2, 12), (2, 7, 100)):
        cache = CacheConfig(num_records * RECORD_BYTES, match_unit=4)
        longest = largest_request_tokens(geometry, cache, SchedulerConfig(max_model_len=limit))
        assert longest == min(limit, 4 * (num_records - 1))


def test_nobody_who_was_admitted_is_preempted_while_nothing_is_generated() -> None:
    """Prompts that share beginnings, with checkpoints to stand on, near the ceiling: `fits` knows it all."""
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(num_records=rng.randrange(14, 40), budget=rng.choice([4, 8, 16, 64]))
        harness.check = lambda: None  # type: ignore[method-assign]
        trunk = numbered(40, 900)
        for number in range(rng.randrange(3, 9)):
            shared = rng.randrange(30)
            prompt = trunk[:shared] + numbered(rng.randrange(1, 20), number)
            wanted = [(shared, "history")] if shared > 4 and rng.random() < 0.5 else []
            harness.add(prompt, wanted=wanted)
            for _ in range(rng.randrange(3)):
                harness.step()
        finish_all(harness)
        assert sum(request.num_preemptions for request in harness.requests.values()) == 0, seed
