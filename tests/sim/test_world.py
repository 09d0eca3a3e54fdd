"""The world itself, and the smallest form of what its random runs have found in the core."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.plan import SampledToken
from milepost.core.request import RequestUpdate
from milepost.errors import RequestError
from milepost.sim.clients import ClientDriver
from milepost.sim.cost import CostModel
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.workload import TurnSizes, greedy, growing, multiturn, random_tokens
from milepost.sim.world import SimulationError, World

UNIT = 4
GEOMETRY = CacheGeometry(
    match_unit=UNIT,
    attention=(AttentionGroupSpec("full", 1024),),
    recurrent=(RecurrentGroupSpec("kda", 4096),),
)


def make_world(
    cache_bytes: int = 1 << 30,
    *,
    step_tokens: int = 16,
    num_seqs: int = 4,
    max_len: int = 4096,
    cost: CostModel | None = None,
) -> World:
    return World(
        GEOMETRY,
        CacheConfig(cache_bytes, match_unit=UNIT),
        SchedulerConfig(step_tokens, num_seqs, max_len),
        cost=cost,
    )


def test_a_lone_request_gives_up_the_checkpoint_it_has_left_behind() -> None:
    """A budget for exactly one request, steps that end between boundaries: the state kept at the last
    boundary held the bytes of the next page, and the request waited for ever."""
    one = make_world(GEOMETRY.request_bytes(16), step_tokens=3, max_len=16)
    request_id = one.add(RequestSpec(random_tokens(Random(0), 14), 2, greedy()))
    one.drain()
    assert one.outcomes[request_id].finish_reason == "length"


def test_finished_requests_reach_the_worker_although_a_step_fails() -> None:
    """The plan that told the worker of an ended request failed before it began."""
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 1, greedy()))
    one.step()
    one.worker.faults.fails_before = iter([True, False, False]).__next__
    one.step()
    assert one.worker.live
    one.worker.faults.fails_before = lambda: False
    one.drain()
    assert not one.worker.live


def test_time_to_first_token_follows_the_cost_model() -> None:
    cost = CostModel(seconds_per_step=1.0, seconds_per_token=0.5)
    one = make_world(step_tokens=8, cost=cost)
    request_id = one.add(RequestSpec(random_tokens(Random(0), 16), 2, greedy()))
    one.drain()
    outcome = one.outcomes[request_id]
    assert outcome.num_passes == 3
    assert outcome.time_to_first_token == 2 * (1.0 + 8 * 0.5)
    assert outcome.finished_at == pytest.approx(2 * 5.0 + 1.5)


def test_cost_of_attention_and_states() -> None:
    one = make_world(step_tokens=64)
    one.add(RequestSpec(random_tokens(Random(0), 6), 1, greedy()))
    plan = one.schedule()
    assert CostModel(seconds_per_attended_token=1.0).step_seconds(plan) == 1 + 2 + 3 + 4 + 5 + 6
    assert CostModel(seconds_per_exported_state=1.0).step_seconds(plan) == len(plan.chunks[0].exports) == 1
    assert CostModel(seconds_per_restored_state=1.0).step_seconds(plan) == 0.0
    one.execute()
    one.drain()
    one.add(RequestSpec(random_tokens(Random(0), 6), 1, greedy()))
    assert CostModel(seconds_per_restored_state=1.0).step_seconds(one.schedule()) == 1.0


def test_conversations_wait_for_their_answers_and_keep_their_barrier() -> None:
    one = make_world(cost=CostModel(seconds_per_step=1.0))
    outcomes = ClientDriver(one).run([growing(Random(0), 3, 20, 40, 10)])
    rounds = [[o for o in outcomes if f"round {n}" in o.spec.label] for n in range(3)]
    assert [len(r) for r in rounds] == [3, 3, 3]
    for earlier, later in zip(rounds, rounds[1:], strict=False):
        assert min(o.arrival for o in later) >= max(o.finished_at or 0.0 for o in earlier)
    assert [o.num_cached_tokens for o in rounds[1] + rounds[2]] == [20] * 3 + [28] * 3


def test_think_time_moves_the_clock() -> None:
    one = make_world()
    sizes = TurnSizes(8, 2, 2, think_seconds=100.0)
    ClientDriver(one).run([multiturn(Random(3), random_tokens(Random(0), 9), 3, sizes)])
    assert one.now > 10.0


def test_clients_can_leave() -> None:
    one = make_world(step_tokens=4)
    prompt = random_tokens(Random(0), 40)
    early = one.add(RequestSpec(prompt, 8, greedy(), abort_after_steps=3))
    reader = one.add(RequestSpec(random_tokens(Random(1), 8), 30, greedy(), abort_after_tokens=2))
    one.drain()
    assert [one.outcomes[r].finish_reason for r in (early, reader)] == ["abort", "abort"]
    assert len(one.outcomes[reader].output_tokens) >= 2
    assert not one.outcomes[early].output_tokens


def test_a_refused_request_changes_nothing() -> None:
    one = make_world(GEOMETRY.request_bytes(16), max_len=16)
    with pytest.raises(RequestError):
        one.add(RequestSpec(random_tokens(Random(0), 17), 1, greedy()))
    assert not one.running and not one.outcomes
    one.drain()


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 2, greedy()))
    commit = one.scheduler.commit

    def lie(result: object) -> list[RequestUpdate]:
        updates = commit(result)  # type: ignore[arg-type]
        for update in updates:
            update.tokens = [SampledToken(token.token_id + 1) for token in update.tokens]
        return updates

    monkeypatch.setattr(one.scheduler, "commit", lie)
    with pytest.raises(SimulationError, match="a cold run answers"):
        one.drain()


def test_a_wrong_count_of_reused_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 1, greedy()))
    one.drain()
    one.add(RequestSpec(random_tokens(Random(0), 6), 1, greedy()))
    commit = one.scheduler.commit

    def lie(result: object) -> list[RequestUpdate]:
        updates = commit(result)  # type: ignore[arg-type]
        for update in updates:
            if update.reuse is not None:
                update.reuse.num_cached_tokens += 1
        return updates

    monkeypatch.setattr(one.scheduler, "commit", lie)
    with pytest.raises(SimulationError, match="rows computed"):
        one.drain()


def test_a_livelock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 2, greedy()))
    monkeypatch.setattr(one.scheduler, "_admit", lambda plan, budget, **_: budget)
    with pytest.raises(SimulationError, match="wait for ever"):
        one.drain()


def test_a_published_page_that_holds_something_else_is_found() -> None:
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 2, greedy()))
    one.step()
    page = next(iter(one.scheduler.cache.tree.index.values())).pages[0]
    one.worker.pages[0][page][1] += 1
    with pytest.raises(SimulationError, match="does not hold its unit"):
        one.step()


def test_a_published_state_that_holds_something_else_is_found() -> None:
    one = make_world()
    one.add(RequestSpec(random_tokens(Random(0), 6), 2, greedy()))
    one.step()
    node = next(iter(one.scheduler.cache.tree.state_nodes.values()))
    assert node.states is not None
    one.worker.slots[1][node.states[0]] += 1
    with pytest.raises(SimulationError, match="does not hold its state"):
        one.step()


def test_outcome_counts() -> None:
    outcome = Outcome(0, RequestSpec(array("I", [1, 2, 3])), 0.0, num_cached_tokens=2)
    assert (outcome.num_prompt_tokens, outcome.num_recomputed_tokens) == (3, 1)
