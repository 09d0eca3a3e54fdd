"""Every operation that can fail is made to fail once at every place it is called, and then to go on.

One scenario, run again and again: the first call of an operation fails, then the second, and so on
until a run ends in which it was called less often than that. After every action the world audits the
core; at the end nothing may be held, and whoever was not in a failed step must have a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.eviction import Evictor
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.memory import Memory
from milepost.core.prefix_cache import PrefixCache
from milepost.sim.fakes import FailAt, WorkerFaults
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.workload import greedy, random_tokens, seeded
from milepost.sim.world import World

UNIT = 4
GEOMETRY = CacheGeometry(
    match_unit=UNIT,
    attention=(AttentionGroupSpec("full", 1024), AttentionGroupSpec("small", 1)),
    recurrent=(RecurrentGroupSpec("kda", 4096), RecurrentGroupSpec("gdn", 9000)),
)
MAX_LEN = 48
MAX_PLACES = 400


def specs() -> list[RequestSpec]:
    """Siblings, a conversation, a resend, sampled and greedy: enough to reach every path of reserve."""
    rng = Random(7)
    shared = random_tokens(rng, 18)
    prompts = [shared + random_tokens(rng, length) for length in (3, 6, 9)]
    prompts += [random_tokens(rng, 11), shared[:], prompts[1] + random_tokens(rng, 5)]
    return [
        RequestSpec(
            prompt,
            max_tokens=5,
            sampling=greedy() if number % 2 else seeded(rng),
            wanted=((len(prompt) // 2, "message"), (len(prompt) - 1, "history")),
        )
        for number, prompt in enumerate(prompts)
    ]


def run_scenario(faults: WorkerFaults | None = None, room: float = 1.6) -> tuple[World, list[Outcome]]:
    one = World(
        GEOMETRY,
        CacheConfig(
            round(room * GEOMETRY.request_bytes(MAX_LEN)),
            match_unit=UNIT,
            checkpoint_interval=8,
            decode_interval=8,
        ),
        SchedulerConfig(13, 3, MAX_LEN),
        faults=faults,
    )
    for number, spec in enumerate(specs()):
        one.add(spec)
        for _ in range(number % 3):
            one.step()
    one.drain()
    return one, list(one.outcomes.values())


def every_place(run: Callable[[FailAt], list[Outcome]]) -> int:
    """Fail the first call, the second, ... until it was not called any more; returns how many there were."""
    for place in range(1, MAX_PLACES):
        fails = FailAt(place)
        check_all_ended(run(fails))
        if not fails.num_failures:
            return place - 1
    raise AssertionError(f"more than {MAX_PLACES} places")


def check_all_ended(outcomes: list[Outcome]) -> None:
    assert all(outcome.finish_reason in ("length", "error") for outcome in outcomes), outcomes


def check_all_whole(outcomes: list[Outcome]) -> None:
    assert all(outcome.finish_reason == "length" and len(outcome.output_tokens) == 5 for outcome in outcomes)


def test_scenario_without_faults() -> None:
    one, outcomes = run_scenario()
    check_all_whole(outcomes)
    counters = one.scheduler.cache.counters
    assert counters.num_hit_tokens and counters.evictions


@pytest.mark.parametrize(
    ("owner", "name", "failure"),
    [(Memory, "acquire", None), (PrefixCache, "reserve", None), (Evictor, "evict_one", False)],
    ids=["acquire", "reserve", "evict_one"],
)
def test_memory_fails_at_every_place(
    owner: type, name: str, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of memory costs time, never an answer."""
    real = getattr(owner, name)

    def run(fails: FailAt) -> list[Outcome]:
        def may_fail(self: Any, *rest: Any, **options: Any) -> Any:
            return failure if fails() else real(self, *rest, **options)

        monkeypatch.setattr(owner, name, may_fail)
        _, outcomes = run_scenario()
        check_all_whole(outcomes)
        return outcomes

    assert every_place(run) > 10


@pytest.mark.parametrize("every", [9, 11, 23])
def test_memory_fails_again_and_again(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Memory.acquire
    fails = FailAt(1, every)
    monkeypatch.setattr(Memory, "acquire", lambda self, pool: None if fails() else real(self, pool))
    check_all_whole(run_scenario()[1])
    assert fails.num_failures >= 5


@pytest.mark.parametrize("kind", ["fails_before", "fails_torn"])
def test_worker_step_fails_at_every_place(kind: str) -> None:
    def run(fails: FailAt) -> list[Outcome]:
        one, outcomes = run_scenario(WorkerFaults(**{kind: fails}))
        failed = [outcome for outcome in outcomes if outcome.finish_reason == "error"]
        assert all("injected" in str(outcome.error) for outcome in failed)
        assert len(failed) <= 3 and one.num_failed_steps == fails.num_failures
        return outcomes

    assert every_place(run) > 10


def test_chunk_result_is_lost_at_every_place() -> None:
    def run(fails: FailAt) -> list[Outcome]:
        _, outcomes = run_scenario(WorkerFaults(drops=lambda chunk: fails()))
        failed = [outcome for outcome in outcomes if outcome.finish_reason == "error"]
        assert len(failed) == fails.num_failures
        return outcomes

    assert every_place(run) > 30


def test_export_is_not_acknowledged_at_every_place() -> None:
    """A state that was not written is a miss for later requests, and nothing else."""

    def run(fails: FailAt) -> list[Outcome]:
        one, outcomes = run_scenario(WorkerFaults(acknowledges=lambda chunk, export: not fails()))
        check_all_whole(outcomes)
        refused = sum(
            count for (why, _), count in one.scheduler.cache.counters.refusals.items() if why == "not_written"
        )
        assert refused == fails.num_failures
        return outcomes

    assert every_place(run) >= 5


@pytest.mark.parametrize("every", [1, 2, 3])
def test_worker_that_fails_again_and_again(every: int) -> None:
    """Requests end with an error, the core goes on, and a healthy worker then serves from a sound cache."""
    fails = FailAt(1, every)
    one, outcomes = run_scenario(WorkerFaults(fails_torn=fails), room=50.0)
    check_all_ended(outcomes)
    one.worker.faults.fails_torn = lambda: False
    again = [one.add(spec) for spec in specs()]
    one.drain()
    check_all_whole([one.outcomes[request_id] for request_id in again])
