"""What a segment is worth, and what the reuse model learns: against plain restatements and extremes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.harness import Harness, numbered

from milepost.core import reasons
from milepost.core.eviction import MAX_STALE
from milepost.core.retention import MAX_PRIORITY, SegmentRecord, eviction_rank, segment_value
from milepost.core.reuse import (
    EDGES,
    MAX_REMEMBERED,
    NUM_BINS,
    REFRESH_EVENTS,
    ReuseClass,
    ReuseModel,
    Wait,
    age_bin,
    keep_index,
    prior_hazards,
)

RECORD = SegmentRecord(num_saved_tokens=512, freed_bytes=1 << 20, reuse_index=0.01)
TAIL: ReuseClass = (reasons.TAIL, False, 0, 12)


# ------------------------------------------------------------------ value
def test_value_is_tokens_saved_times_reuse_per_byte() -> None:
    assert segment_value(RECORD) == pytest.approx(512 * 0.01 / (1 << 20))
    for field, more, factor in (
        ("num_saved_tokens", 1024, 2.0),
        ("freed_bytes", 1 << 21, 0.5),
        ("reuse_index", 0.03, 3.0),
        ("priority", 3, 8.0),
        ("priority", -1, 0.5),
        ("priority", 1000, 2.0**MAX_PRIORITY),
        ("priority", -1000, 2.0**-MAX_PRIORITY),
    ):
        changed = replace(RECORD, **{field: more})
        assert segment_value(changed) == pytest.approx(factor * segment_value(RECORD)), field


def test_records_without_bytes_have_a_finite_value() -> None:
    assert math.isfinite(segment_value(replace(RECORD, freed_bytes=0)))


def test_a_pin_outranks_any_value() -> None:
    worthless = replace(RECORD, num_saved_tokens=1, reuse_index=0.0, is_pinned=True)
    priceless = replace(RECORD, reuse_index=1e9, priority=MAX_PRIORITY)
    assert eviction_rank(priceless) < eviction_rank(worthless)
    assert eviction_rank(worthless) < eviction_rank(replace(priceless, is_pinned=True))


# ------------------------------------------------------------------ ages and prior
def test_age_bins_cover_everything_in_order() -> None:
    assert age_bin(-5.0) == age_bin(0.0) == 0
    assert age_bin(1e12) == NUM_BINS - 1
    for index, edge in enumerate(EDGES[:-1]):
        assert age_bin(edge * 0.999) == index
        assert age_bin(edge) == index + 1
    assert EDGES == sorted(EDGES)
    assert EDGES[2] == pytest.approx(2 * EDGES[0])


def test_the_prior_prefers_what_people_return_to() -> None:
    def worth(reason: str, turns: int, age: float = 30.0) -> float:
        return ReuseModel().index((reason, False, turns, 12), age, age)

    assert worth(reasons.TAIL, 1) > worth(reasons.TAIL, 0), "a live conversation beats a one-off request"
    assert worth(reasons.MARKER, 0) > worth(reasons.TAIL, 0) > worth(reasons.INTERVAL, 0)
    assert worth(reasons.JUNCTION, 0) > worth(reasons.TAIL, 0) == worth(reasons.DECODE, 0)
    passed = ReuseModel().index((reasons.DECODE, True, 0, 12), 30.0, 30.0)
    assert worth(reasons.DECODE, 0) > passed, "the conversation went on behind it"
    for reason, turns in itertools.product(reasons.CHECKPOINT_REASONS, range(5)):
        hazards = prior_hazards((reason, False, turns, 12))
        assert len(hazards) == NUM_BINS and all(0.0 < h <= 0.9 for h in hazards)


def test_without_observations_the_order_is_least_recently_used() -> None:
    model = ReuseModel()
    values = [model.index(TAIL, 2.0**power, 0.0) for power in range(-2, 19)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1] > 0.0


# ------------------------------------------------------------------ index
@given(st.lists(st.floats(0.0, 0.95), min_size=NUM_BINS, max_size=NUM_BINS), st.integers(0, NUM_BINS - 1))
def test_the_index_is_the_best_ratio_over_all_horizons(hazards: list[float], first: int) -> None:
    ratios = []
    for last in range(first, NUM_BINS):
        reached = [math.prod(1.0 - h for h in hazards[first:index]) for index in range(first, last + 1)]
        used = [r * hazards[index] for index, r in enumerate(reached, start=first)]
        widths = [EDGES[i] - (EDGES[i - 1] if i else 0.0) for i in range(first, last + 1)]
        # What is used inside a bin is used half-way through it.
        kept = [w * (r - u / 2) for w, r, u in zip(widths, reached, used, strict=True)]
        ratios.append(sum(used) / sum(kept))
    assert keep_index(hazards, first) == pytest.approx(max(ratios))


# ------------------------------------------------------------------ learning
def observe(model: ReuseModel, reuse_class: ReuseClass, age: float, count: int, used: bool) -> None:
    for number in range(count):
        key = f"{reuse_class}{age}{number}{used}".encode()
        model.created(key, reuse_class, 0.0)
        if used:
            assert key in model._waiting
            model.used(key, age)
            assert key not in model._waiting


def test_what_is_used_soon_is_worth_more_than_what_never_is() -> None:
    model = ReuseModel()
    often, never = (reasons.TAIL, False, 1, 12), (reasons.MESSAGE, False, 0, 12)
    observe(model, often, 20.0, REFRESH_EVENTS, used=True)
    observe(model, never, 0.0, REFRESH_EVENTS, used=False)
    now = 10_000.0
    assert model.index(often, 5.0, now) > 10 * model.index(never, 5.0, now)
    fresh = ReuseModel()
    assert model.index(often, 5.0, now) > fresh.index(often, 5.0, now)
    assert model.index(never, 5.0, now) < fresh.index(never, 5.0, now)


def test_a_wait_that_peaks_late_is_kept_until_then() -> None:
    """If a class is always used after about 1,000 s, one that is 900 s old is worth more than a new one."""
    model = ReuseModel()
    observe(model, TAIL, 1000.0, REFRESH_EVENTS, used=True)
    assert model.index(TAIL, 900.0, 2000.0) > model.index(TAIL, 1.0, 2000.0)
    assert model.index(TAIL, 900.0, 2000.0) > model.index(TAIL, 5000.0, 2000.0)


def test_classes_do_not_learn_from_each_other() -> None:
    model = ReuseModel()
    other = (reasons.MARKER, True, 2, 12)
    before = model.index(other, 5.0, 0.0)
    observe(model, TAIL, 1.0, REFRESH_EVENTS, used=True)
    assert model.index(other, 5.0, 10.0) == before


def test_a_use_that_was_not_waited_for_counts_nothing() -> None:
    model = ReuseModel()
    before = model.index(TAIL, 5.0, 0.0)
    for _ in range(REFRESH_EVENTS):
        model.used(b"unknown", 3.0)
    assert model.index(TAIL, 5.0, 10.0) == before


def test_the_model_remembers_a_bounded_number_of_waits() -> None:
    model = ReuseModel()
    for number in range(MAX_REMEMBERED + 50):
        model.created(number.to_bytes(4, "little"), TAIL, float(number))
    assert len(model._waiting) == MAX_REMEMBERED
    assert (49).to_bytes(4, "little") not in model._waiting
    assert (50).to_bytes(4, "little") in model._waiting


def test_a_wait_that_starts_again_is_one_wait() -> None:
    model = ReuseModel()
    for now in (0.0, 5.0, 9.0):
        model.created(b"key", TAIL, now)
    assert len(model._waiting) == 1
    model.used(b"key", 10.0)
    assert sum(model._counts[TAIL].used) == 1.0
    assert model._counts[TAIL].used[age_bin(1.0)] == 1.0


def test_a_longer_prompt_ends_the_wait_of_the_deepest_checkpoint_it_reached() -> None:
    harness = Harness()
    harness.serve(numbered(13), wanted=[(4, "message")])
    harness.now = 200.0
    harness.serve(numbered(13) + numbered(20, 1))
    counts = {key[0]: sum(c.used) for key, c in harness.cache.evictor.reuse._counts.items() if key[3]}
    assert counts == {"tail": 1.0}, "12 was reached again; 4 still waits for a prompt of its own"


def test_every_hit_starts_a_new_wait_of_a_continued_checkpoint() -> None:
    harness = Harness()
    harness.serve(numbered(13))
    [(key, wait)] = harness.cache.evictor.reuse._waiting.items()
    assert wait == Wait(0.0, ("tail", False, 0, 4), num_prompt_tokens=13)
    harness.now = 50.0
    harness.add(numbered(13) + [1])
    harness.schedule()
    assert harness.cache.evictor.reuse._waiting[key] == Wait(
        50.0, ("tail", False, 1, 4), num_prompt_tokens=14
    )
    harness.execute()


# ------------------------------------------------------------------ bounded bookkeeping
def test_a_roomy_cache_does_not_collect_outdated_entries() -> None:
    """Thousands of hits on the same few checkpoints, and never an eviction."""
    harness = Harness()
    harness.check = lambda: None  # type: ignore[method-assign]
    for turn in range(400):
        harness.serve(numbered(9, turn % 4), 2)
    evictor = harness.cache.evictor
    assert len(evictor._changed) <= len(harness.cache.tree.index)
    assert len(evictor._heap) <= 2 * len(harness.cache.tree.state_nodes) + MAX_STALE


def test_rare_evictions_do_not_let_the_ranking_grow() -> None:
    harness = Harness(num_records=200)
    harness.check = lambda: None  # type: ignore[method-assign]
    for turn in range(400):
        harness.serve(numbered(9, turn % 4), 2)
        if turn % 3 == 0:
            harness.cache.evictor.evict_one(harness.now)
        evictor = harness.cache.evictor
        bound = 2 * len(harness.cache.tree.index) + MAX_STALE
        assert len(evictor._heap) + len(evictor._changed) <= bound + 8
    assert harness.scheduler.audit() == []
