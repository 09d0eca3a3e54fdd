"""Bytes: never more than the budget, never held for nothing, never a reason to stop serving."""

from __future__ import annotations

from typing import Any

import pytest
from tests.bugs.scene import SHAPES, Scene, Shape
from tests.support.pairwise import pairwise, row_id

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.admission import largest_request_tokens
from milepost.core.memory import Memory
from milepost.core.scheduler import Scheduler
from milepost.errors import ConfigError, RequestError
from milepost.sim.fakes import FailAt
from milepost.sim.spec import Outcome

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
half_of_the_shapes = pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
some_shapes = pytest.mark.parametrize("shape", SHAPES[2::3], ids=str)


def cached(outcome: Outcome) -> int:
    assert outcome.num_cached_tokens is not None
    return outcome.num_cached_tokens


# --- B64: side requests push out the conversation ----------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("kind", ["title of the chat", "unrelated", "many unrelated"])
def test_side_requests_leave_the_conversation_its_state(shape: Shape, kind: str) -> None:
    """Room for the pages of all and for two states besides the running ones. Side prompts run between
    two turns; the second turn still resumes at the end of the first prompt, or behind it."""
    turn_units, side_units = 8, 3
    num_sides = 6 if kind == "many unrelated" else 2
    budget = shape.bytes_of(num_units=turn_units + 2 * side_units + 4, num_states=3)
    with Scene(shape.varied(max_num_seqs=1), cache_bytes=budget, decode_interval=0) as scene:
        prompt = scene.tokens(turn_units * shape.unit - 3)
        wanted = ((len(prompt), "history"),)
        first = scene.send(prompt, max_tokens=4, wanted=wanted, conversation="chat")
        history = prompt + first.output_tokens
        for _ in range(num_sides):
            scene.world.now += 1.0
            side = history if kind == "title of the chat" else scene.tokens(0)
            side = side + scene.tokens(side_units * shape.unit - 5)
            scene.send(side, max_tokens=2, priority=1)
        scene.world.now += 1.0
        second = scene.send(history + scene.tokens(9), max_tokens=2, wanted=wanted, conversation="chat")
        assert cached(second) >= shape.floor(len(prompt))


# --- B71: every configuration works or is refused by name --------------------------------------


CONFIGURATIONS = pairwise(
    {
        "unit": (1, 16, 48),
        "grid": (1, 64, 7, None),
        "interval": (None, 0, 48, 30),
        "decode_interval": (0, 48, 10),
        "states_per_path": (None, 1, 0),
        "caching": (True, False),
        "step": (1, 33, 512),
        "num_seqs": (1, 8),
        "groups": ((1, 1), (0, 2), (2, 0), (0, 0), (1, 3)),
        "budget": ("ample", "one request", "too small"),
    }
)


@pytest.mark.parametrize("row", CONFIGURATIONS, ids=row_id)
def test_each_configuration_works_or_is_refused_with_its_name(row: dict[str, Any]) -> None:
    unit = row["unit"]
    num_attention, num_recurrent = row["groups"]
    shape = Shape(unit, row["grid"], num_attention, num_recurrent, row["step"], row["num_seqs"])
    wrong = {
        "model": not num_attention + num_recurrent,
        "prefix_cache_retention_interval": bool(row["interval"]) and row["interval"] % unit != 0,
        "decode_interval": row["decode_interval"] % unit != 0,
        "max_states_per_path": row["states_per_path"] == 0,
        "cache_bytes": row["budget"] == "too small",
    }
    prompt_units = -(-64 // unit)

    def build() -> Scene:
        budget = {
            "ample": 1 << 32,
            "one request": shape.bytes_of(num_units=2 * prompt_units + 2, num_states=1),
            "too small": shape.bytes_of(num_units=1, num_states=1) - 1,
        }[row["budget"]]
        return Scene(
            shape,
            cache_bytes=budget,
            interval=row["interval"],
            decode_interval=row["decode_interval"],
            max_states_per_path=row["states_per_path"],
            enable_prefix_caching=row["caching"],
        )

    if any(wrong.values()):
        with pytest.raises(ConfigError) as refusal:
            build()
        assert wrong[refusal.value.field]
        return
    with build() as scene:
        prompt = scene.tokens(prompt_units * unit + 1)
        first = scene.send(prompt, max_tokens=4)
        again = scene.send(prompt, max_tokens=4)
        assert again.output_tokens == first.output_tokens
        if row["caching"] and row["budget"] == "ample":
            assert cached(again) == len(prompt) - 1
        if not row["caching"]:
            assert (cached(again), again.reuse_reason) == (0, "disabled")


# --- B73: livelock near the ceiling ------------------------------------------------------------


@shapes
@pytest.mark.parametrize("num_generated", [1, 20])
def test_a_request_that_needs_one_unit_too_many_is_refused_at_once(shape: Shape, num_generated: int) -> None:
    units = 7
    budget = shape.bytes_of(num_units=units, num_states=1)
    with Scene(shape, cache_bytes=budget) as scene:
        before = scene.scheduler.stats()
        for length in (units * shape.unit, units * shape.unit + 1, 10 * units * shape.unit):
            with pytest.raises(RequestError, match="--cache-bytes"):
                scene.submit(scene.tokens(length), max_tokens=num_generated)
        assert scene.scheduler.stats() == before
        assert scene.world.worker.counters.num_steps == 0
        largest = scene.send(scene.tokens(units * shape.unit - 1), max_tokens=num_generated)
        assert largest.finish_reason == "length"
        assert len(largest.output_tokens) == 1


@half_of_the_shapes
@pytest.mark.parametrize("num_requests", [2, 5])
@pytest.mark.parametrize("spare_units", [0, 1, 4])
def test_requests_that_fit_only_one_after_the_other_all_end(
    shape: Shape, num_requests: int, spare_units: int
) -> None:
    """Each fits alone with nearly nothing to spare. Prefilled rows are computed about once."""
    units = 5
    budget = shape.bytes_of(num_units=units + spare_units, num_states=2)
    with Scene(shape.varied(max_num_seqs=64), cache_bytes=budget) as scene:
        prompts = [scene.tokens((units - 1) * shape.unit - index) for index in range(num_requests)]
        batch = [scene.submit(prompt, max_tokens=shape.unit) for prompt in prompts]
        scene.run_until(*batch)
        rows = sum(outcome.num_computed_tokens for outcome in batch)
        needed = sum(len(outcome.spec.prompt) + len(outcome.output_tokens) - 1 for outcome in batch)
        assert rows <= 2 * needed
        assert scene.counters.num_preemptions == sum(outcome.num_preemptions for outcome in batch)


@some_shapes
def test_growing_answers_take_turns_near_the_ceiling(shape: Shape) -> None:
    """Short prompts, long answers: nobody knew how long. The first to come ends first, all end."""
    units = 10
    budget = shape.bytes_of(num_units=units, num_states=4)
    with Scene(shape.varied(max_num_seqs=64), cache_bytes=budget) as scene:
        batch = [scene.submit(scene.tokens(5), max_tokens=6 * shape.unit) for _ in range(4)]
        scene.run_until(batch[0])
        assert batch[0].num_preemptions == 0
        scene.run_until(*batch)
        assert scene.counters.num_preemptions == sum(outcome.num_preemptions for outcome in batch) > 0


# --- B77: every exit gives back what was taken -------------------------------------------------


@some_shapes
@pytest.mark.parametrize("then", ["abort", "go on", "preempt"])
def test_an_admission_that_fails_half_way_holds_nothing(
    shape: Shape, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the n-th record on a request gets none, for every n: pages, running state, exports."""
    acquire = Memory.acquire
    num_tried = 0
    for at in range(1, 60):
        with Scene(shape.varied(max_num_seqs=8, step_tokens=40 + 4 * shape.unit), seed=at) as scene:
            shared = scene.tokens(2 * shape.unit)
            scene.send(shared + scene.tokens(3), wanted=((len(shared), "message"),))
            busy = scene.submit(scene.tokens(3), max_tokens=40)
            while not busy.output_tokens:
                scene.world.step()
            used = scene.scheduler.cache.memory.used_bytes
            fails = FailAt(at, every=1)
            monkeypatch.setattr(
                Memory,
                "acquire",
                lambda memory, pool, fails=fails: None if fails() else acquire(memory, pool),
            )
            outcome = scene.submit(shared + scene.tokens(2 * shape.unit + 1), max_tokens=2)
            plan = scene.world.schedule()
            monkeypatch.setattr(Memory, "acquire", acquire)
            is_planned = outcome.request_id in [chunk.request_id for chunk in plan.chunks]
            if not is_planned:
                assert scene.scheduler.cache.memory.used_bytes == used
                num_tried += 1
            scene.world.execute()
            if then == "abort":
                scene.world.abort(outcome.request_id)
            elif then == "preempt":
                scene.world.preempt(outcome.request_id)
            scene.run_until(busy)
            scene.run_until(outcome)
            if not fails.num_failures:
                break
    else:
        raise AssertionError("there should be an end to what one chunk asks for")
    assert num_tried >= 1
    assert at > shape.num_attention + shape.num_recurrent


@shapes
@pytest.mark.parametrize("when", ["waiting", "scheduled", "executed", "decoding", "following"])
def test_a_client_that_leaves_takes_everything_along(shape: Shape, when: str) -> None:
    with Scene(shape) as scene:
        shared = scene.tokens(3 * shape.unit)
        scene.send(shared + scene.tokens(2), wanted=((len(shared), "message"),))
        used = scene.scheduler.cache.memory.used_bytes
        outcome = scene.submit(shared + scene.tokens(2 * shape.unit), max_tokens=9)
        if when == "following":
            follower = scene.submit(outcome.spec.prompt + scene.tokens(4))
            scene.world.schedule()
            scene.world.abort(follower.request_id)
            scene.world.execute()
            assert follower.finish_reason == "abort"
        if when in ("scheduled", "executed"):
            scene.world.schedule()
        if when == "executed":
            scene.world.execute()
        while when == "decoding" and not outcome.output_tokens:
            scene.world.step()
        scene.world.abort(outcome.request_id)
        scene.run_until(outcome)
        assert outcome.finish_reason == ("length" if outcome.output_tokens[8:] else "abort")
        if when == "waiting":
            assert scene.scheduler.cache.memory.used_bytes == used
        assert all(node.pins == 0 for node in scene.scheduler.cache.tree.index.values())


# --- B78: nothing can be evicted ---------------------------------------------------------------


@shapes
@pytest.mark.parametrize("num_requests", [1, 3])
def test_serving_goes_on_when_no_state_is_free(shape: Shape, num_requests: int) -> None:
    """As many states as requests run, plenty of pages: checkpoints are refused and counted, answers come."""
    budget = shape.bytes_of(num_units=9 * num_requests, num_states=num_requests)
    with Scene(shape.varied(max_num_seqs=64), cache_bytes=budget) as scene:
        prompts = [scene.tokens(8 * shape.unit - 5) for _ in range(num_requests)]
        wanted = tuple((unit * shape.unit, "marker") for unit in (1, 3, 5))
        batch = [scene.submit(prompt, max_tokens=shape.unit // 2, wanted=wanted) for prompt in prompts]
        scene.run_until(*batch)
        assert all(outcome.finish_reason == "length" for outcome in batch)
        given_up = sum(scene.counters.refusals.values()) + sum(scene.counters.evictions.values())
        assert given_up > 0


# --- B82: the pool is smaller than what is promised --------------------------------------------


@shapes
def test_the_budget_is_checked_when_the_engine_starts(shape: Shape) -> None:
    smallest = shape.bytes_of(num_units=1, num_states=1)
    config = SchedulerConfig(shape.step_tokens, 64, 32768)

    def cache(num_bytes: int) -> CacheConfig:
        return CacheConfig(num_bytes, match_unit=shape.unit, decode_interval=0, checkpoint_interval=0)

    with pytest.raises(ConfigError, match="--cache-bytes") as refusal:
        Scheduler(shape.geometry, cache(smallest - 1), config)
    assert str(smallest) in str(refusal.value)
    Scheduler(shape.geometry, cache(smallest), config)
    for num_units in (1, 2, 9):
        budget = shape.bytes_of(num_units=num_units, num_states=1)
        assert largest_request_tokens(shape.geometry, cache(budget), config) == num_units * shape.unit
        assert (
            largest_request_tokens(shape.geometry, cache(budget - 1), config) < num_units * shape.unit
            if num_units > 1
            else True
        )


@half_of_the_shapes
@pytest.mark.parametrize("num_fitting", [1, 2, 4])
def test_more_clients_than_states_wait_instead_of_failing(shape: Shape, num_fitting: int) -> None:
    """Maximum concurrency is promised, memory is there for fewer: never more run than fit, all end."""
    units = 4
    budget = shape.bytes_of(num_units=units * num_fitting, num_states=num_fitting)
    with Scene(shape.varied(max_num_seqs=16), cache_bytes=budget) as scene:
        batch = [
            scene.submit(scene.tokens(units * shape.unit - 6), max_tokens=5, wanted=((shape.unit, "marker"),))
            for _ in range(8)
        ]
        most = 0
        while any(outcome.finish_reason is None for outcome in batch):
            scene.world.step()
            most = max(most, scene.scheduler.num_running)
        assert 1 <= most <= num_fitting
        assert all(outcome.finish_reason == "length" for outcome in batch)
        assert scene.counters.num_preemptions <= num_fitting


# --- B83: a limit is a limit -------------------------------------------------------------------


@shapes
def test_no_entry_and_no_number_of_entries_exceeds_the_budget(shape: Shape) -> None:
    """One entry larger than the limit, then many of every size; the worker counts what it really holds."""
    units = 12
    budget = shape.bytes_of(num_units=units, num_states=3) + 5
    with Scene(shape, cache_bytes=budget, interval=shape.export_grid) as scene:
        with pytest.raises(RequestError):
            scene.submit(scene.tokens(budget // shape.geometry.unit_bytes * shape.unit + 1))
        sizes = [1, units - 2, 3, units, 2, 5, units - 1, 4]
        for round_number in range(3):
            for size in sizes:
                scene.submit(scene.tokens(size * shape.unit - 1 - round_number), max_tokens=3)
            scene.world.drain()
            stats = scene.scheduler.stats()
            assert stats.committed_bytes <= stats.peak_committed_bytes <= budget
            assert scene.world.worker.committed_bytes <= budget
        assert sum(scene.counters.evictions.values()) > 0
