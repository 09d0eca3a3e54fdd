"""The scheduler's own rules: budgets, order, ends, updates, and calls at the wrong time."""

from __future__ import annotations

import pytest
from tests.core.harness import RECORD_BYTES, Harness, make_geometry, numbered

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import ChunkResult, SampledToken, SamplingParams, StepResult
from milepost.core.request import Request, RequestStatus
from milepost.core.scheduler import Scheduler
from milepost.errors import ConfigError, RequestError


def accept(harness: Harness, token: int) -> None:
    """Commit the plan in flight; every sampled token is `token`."""
    plan = harness.plan
    assert plan is not None
    results = [
        ChunkResult(
            c.request_id, c.end, [e.position for e in c.exports], [SampledToken(token)] * c.num_samples
        )
        for c in plan.chunks
    ]
    harness.commit(StepResult(plan.step_id, results))


# ------------------------------------------------------------------ construction and add
def test_geometry_and_cache_must_agree_on_the_match_unit() -> None:
    with pytest.raises(ConfigError) as caught:
        Scheduler(make_geometry(8), CacheConfig(1 << 20, match_unit=4), SchedulerConfig())
    assert caught.value.field == "prefix_match_unit"


def test_a_budget_for_less_than_one_request_is_refused_before_any_work() -> None:
    config = SchedulerConfig()
    geometry = make_geometry(4)
    with pytest.raises(ConfigError) as caught:
        Scheduler(geometry, CacheConfig(2 * RECORD_BYTES - 1, match_unit=4), config)
    assert caught.value.field == "cache_bytes"
    assert str(2 * RECORD_BYTES) in str(caught.value)
    assert Scheduler(geometry, CacheConfig(2 * RECORD_BYTES, match_unit=4), config).max_model_len == 4
    one = SchedulerConfig(max_model_len=1)
    with pytest.raises(ConfigError):
        Scheduler(geometry, CacheConfig(1 << 20, match_unit=4), one)


def test_ids_in_use_and_prompts_that_can_never_fit_are_refused() -> None:
    harness = Harness(num_records=5)
    assert harness.scheduler.max_model_len == 16
    harness.add(numbered(15), 9)
    assert harness.requests[0].max_tokens == 1, "the answer is cut to what fits"
    with pytest.raises(RequestError) as caught:
        harness.scheduler.add(Request(0, [1], SamplingParams(), max_tokens=1))
    assert caught.value.param == "request_id"
    for num_tokens in (16, 17, 1000):
        with pytest.raises(RequestError) as caught:
            harness.add(numbered(num_tokens))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        assert str(num_tokens) in str(caught.value)
    assert harness.scheduler.num_waiting == 1
    harness.run()
    assert harness.ended[0].finish_reason == "length"
    harness.scheduler.add(Request(0, [1], SamplingParams(), max_tokens=1))


def test_the_context_limit_binds_before_the_budget_does() -> None:
    harness = Harness(max_model_len=10)
    request_id = harness.add(numbered(6), 50)
    harness.run()
    assert len(harness.outputs[request_id]) == 4
    assert harness.ended[request_id].finish_reason == "length"


# ------------------------------------------------------------------ steps
def test_schedule_and_commit_alternate() -> None:
    harness = Harness()
    harness.add(numbered(5), 2)
    with pytest.raises(ValueError, match="does not belong"):
        harness.scheduler.commit(StepResult(0, []))
    plan = harness.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        harness.scheduler.schedule(1.0)
    with pytest.raises(ValueError, match=f"step {plan.step_id + 1}"):
        harness.scheduler.commit(StepResult(plan.step_id + 1, []))
    accept(harness, 3)
    with pytest.raises(ValueError, match="does not belong"):
        harness.scheduler.commit(StepResult(plan.step_id, []))
    harness.check()


def test_an_empty_scheduler_makes_empty_plans() -> None:
    harness = Harness()
    for _ in range(3):
        plan = harness.schedule()
        assert (plan.chunks, plan.started, plan.finished, plan.discards) == ([], [], [], [])
        assert harness.execute() == []
    assert not harness.scheduler.has_unfinished_requests


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 9, 64])
def test_a_step_never_exceeds_its_budget(budget: int) -> None:
    harness = Harness(budget=budget)
    for seed in range(6):
        harness.add(numbered(5 + 7 * seed, seed), 6)
    harness.run()
    sizes = [plan.num_tokens for plan in harness.plans]
    assert max(sizes) <= budget
    assert all(len({c.request_id for c in plan.chunks}) == len(plan.chunks) for plan in harness.plans)


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    """Decodes are served before the prompt's chunk takes what is left."""
    harness = Harness(budget=10)
    decoding = [harness.add(numbered(2, seed), 30) for seed in range(3)]
    for _ in range(3):
        harness.step()
    harness.add(numbered(60, 9))
    for _ in range(5):
        plan = harness.schedule()
        assert [c.request_id for c in plan.chunks[:3]] == decoding
        assert plan.chunks[3].end - plan.chunks[3].start in (7, 4), "the rest, down to a unit"
        harness.execute()


def test_a_prefill_ahead_of_many_decoders_still_advances() -> None:
    harness = Harness(budget=4)
    for seed in range(8):
        harness.add(numbered(1, seed), 12, priority=1)
    for _ in range(6):
        harness.step()
    prompt = harness.add(numbered(9, 50), priority=0)
    harness.run()
    assert harness.ended[prompt].finish_reason == "length"
    assert all(update.finish_reason == "length" for update in harness.ended.values())


def test_the_number_of_running_requests_is_bounded() -> None:
    harness = Harness(max_num_seqs=3)
    for seed in range(8):
        harness.add(numbered(3, seed), 3)
    while harness.scheduler.has_unfinished_requests:
        harness.step()
        assert harness.scheduler.num_running <= 3
    assert len(harness.ended) == 8


def test_priority_then_arrival_decides_who_starts() -> None:
    harness = Harness(max_num_seqs=1)
    for number, priority in enumerate([1, 0, 1, 0, -1]):
        harness.add(numbered(3, number), priority=priority)
    harness.run()
    assert list(harness.ended) == [4, 1, 3, 0, 2]


def test_plans_name_what_is_new_to_the_worker_and_what_is_over() -> None:
    harness = Harness()
    harness.add(numbered(6), 2)
    plan = harness.schedule()
    assert [s.request_id for s in plan.started] == [0]
    assert plan.started[0].page_tables == [[]]
    assert plan.started[0].num_prompt_tokens == 6
    assert plan.started[0].tokens == b""
    harness.execute()
    assert harness.schedule().started == []
    harness.execute()
    assert harness.schedule().finished == [0]
    harness.execute()
    assert harness.schedule().finished == []


def test_a_sampling_that_needs_history_gets_the_tokens() -> None:
    harness = Harness(budget=4)
    sampling = SamplingParams(temperature=0.0, presence_penalty=0.5)
    harness.add(numbered(6), 5, sampling=sampling)
    plan = harness.schedule()
    assert plan.started[0].tokens == harness.requests[0].tokens.tobytes()
    harness.execute()
    for _ in range(3):
        harness.step()
    harness.scheduler.preempt(0)
    plan = harness.schedule()
    assert plan.started[0].tokens == harness.requests[0].tokens.tobytes()
    assert harness.requests[0].num_output_tokens > 0
    assert plan.started[0].num_prompt_tokens == 6


def test_only_the_last_chunk_of_a_prefill_samples_and_the_noise_key_counts_outputs() -> None:
    harness = Harness(budget=8)
    harness.add(numbered(19), 4)
    samples = []
    while harness.scheduler.has_unfinished_requests:
        for chunk in harness.schedule().chunks:
            samples.append((chunk.start, chunk.end, chunk.num_samples, chunk.output_position))
        harness.execute()
    assert samples == [
        (0, 8, 0, 0),
        (8, 16, 0, 0),
        (16, 19, 1, 0),
        (19, 20, 1, 1),
        (20, 21, 1, 2),
        (21, 22, 1, 3),
    ]


# ------------------------------------------------------------------ ends
def test_a_stop_id_ends_and_is_the_last_token() -> None:
    harness = Harness()
    harness.add(numbered(5), 10, sampling=SamplingParams(stop_token_ids=[7]))
    for token in (3, 4, 7):
        harness.schedule()
        accept(harness, token)
    update = harness.ended[0]
    assert (update.finish_reason, update.stop_token_id) == ("stop", 7)
    assert harness.outputs[0] == [3, 4, 7]


def test_a_stop_id_wins_over_the_length_in_the_same_step() -> None:
    harness = Harness()
    harness.add(numbered(5), 1, sampling=SamplingParams(stop_token_ids=[7]))
    harness.schedule()
    accept(harness, 7)
    assert harness.ended[0].finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", range(0, 5))
def test_stop_ids_count_only_after_min_tokens(min_tokens: int) -> None:
    """While fewer than min_tokens were generated the worker cannot sample a stop id; the core agrees."""
    harness = Harness()
    harness.add(numbered(5), 4, sampling=SamplingParams(stop_token_ids=[7], min_tokens=min_tokens))
    while harness.scheduler.has_unfinished_requests:
        harness.schedule()
        accept(harness, 7)
    expected = ("stop", min_tokens + 1) if min_tokens < 4 else ("length", 4)
    assert (harness.ended[0].finish_reason, len(harness.outputs[0])) == expected


def test_abort_while_waiting_running_and_in_flight() -> None:
    for state in ("waiting", "running", "in flight"):
        harness = Harness(budget=8)
        harness.add(numbered(20), 5)
        if state != "waiting":
            harness.step()
        if state == "in flight":
            harness.schedule()
        harness.scheduler.abort(0)
        harness.scheduler.abort(0)
        harness.scheduler.abort(1234)
        harness.check()
        if state == "in flight":
            assert harness.requests[0].status is RequestStatus.RUNNING, "its step is not over"
        updates = harness.execute() if state == "in flight" else harness.step()
        assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [(0, "abort", None)]
        assert harness.step() == []
        assert harness.requests[0].finish_reason == "abort"
        assert not harness.scheduler.has_unfinished_requests


def test_tokens_of_the_step_in_flight_are_still_delivered_on_abort() -> None:
    harness = Harness()
    harness.add(numbered(5), 9)
    harness.step()
    harness.schedule()
    harness.scheduler.abort(0)
    [update] = harness.execute()
    assert (len(update.tokens), update.finish_reason) == (1, "abort")


def test_the_first_of_finish_and_abort_counts() -> None:
    harness = Harness()
    harness.add(numbered(5), 9)
    harness.step()
    harness.schedule()
    harness.scheduler.finish(0)
    harness.scheduler.abort(0)
    harness.execute()
    assert (harness.ended[0].finish_reason, harness.ended[0].stop_token_id) == ("stop", None)


def test_preempt_is_ignored_where_it_makes_no_sense() -> None:
    harness = Harness(budget=8)
    harness.scheduler.preempt(5)
    harness.add(numbered(20), 3)
    harness.scheduler.preempt(0)
    harness.schedule()
    harness.scheduler.preempt(0)
    harness.execute()
    assert harness.scheduler.stats().counters.num_preemptions == 0
    harness.scheduler.preempt(0)
    harness.scheduler.preempt(0)
    harness.check()
    assert harness.scheduler.stats().counters.num_preemptions == 1
    assert harness.requests[0].status is RequestStatus.PREEMPTED
    harness.run()
    assert harness.outputs[0] == harness.worker.truth(0).outputs(3)
    assert harness.requests[0].num_preemptions == 1


def test_a_preempted_request_keeps_its_place_and_may_come_back_in_the_next_step() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(numbered(6), 5)
    harness.add(numbered(6, 1), 5)
    harness.step()
    harness.scheduler.preempt(0)
    plan = harness.schedule()
    assert plan.finished == [0] and [s.request_id for s in plan.started] == [0]
    harness.execute()
    harness.run()
    assert list(harness.ended) == [0, 1]


def test_reset_while_a_plan_is_in_flight_does_nothing() -> None:
    harness = Harness()
    harness.serve(numbered(20))
    harness.schedule()
    assert not harness.scheduler.reset_prefix_cache()
    assert len(harness.cache.tree) == 5
    harness.execute()
    assert harness.scheduler.reset_prefix_cache()
    assert len(harness.cache.tree) == 0
    second = harness.serve(numbered(20))
    assert harness.cached(second) == 0


# ------------------------------------------------------------------ condemned paths
def test_condemn_drops_a_path_and_restarts_who_builds_on_it() -> None:
    harness = Harness()
    first = harness.serve(numbered(16), wanted=[(8, "message")])
    request = harness.requests[first]
    user = harness.add(numbered(16) + [1, 2, 3], 9)
    bystander = harness.add(numbered(20, 1), 9)
    harness.step()
    assert harness.cached(user) == 16
    with pytest.raises(RuntimeError, match="in flight"):
        harness.schedule()
        harness.scheduler.condemn(request, 16)
    harness.execute()
    assert harness.scheduler.condemn(request, 0) == 0
    assert harness.scheduler.condemn(request, 12) >= 2
    harness.check()
    assert harness.checkpoints(numbered(16)) == [8]
    assert harness.requests[user].num_preemptions == 1
    assert harness.requests[bystander].num_preemptions == 0
    assert harness.scheduler.condemn(request, 12) == 0
    harness.run()
    assert harness.outputs[user] == harness.worker.truth(user).outputs(9)


def test_the_same_calls_give_the_same_plans() -> None:
    """Nothing in the core depends on hashes of objects, on time or on chance."""

    def trace() -> list[object]:
        harness = Harness(geometry=make_geometry(num_attention=2, num_recurrent=2), budget=11, num_records=80)
        for seed in range(9):
            harness.add(numbered(6 + 5 * seed, seed % 3), 7, priority=seed % 2)
            if seed % 3 == 0:
                harness.step()
            if seed == 5:
                harness.scheduler.preempt(1)
                harness.scheduler.abort(2)
        harness.run()
        return list(harness.plans)

    assert trace() == trace()
