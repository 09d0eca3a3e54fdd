"""Log-probabilities of prompt tokens: every row once, nothing of it reused, everything of it published."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.harness import Harness, numbered

from milepost.core import reasons
from milepost.core.plan import ChunkResult, StepResult


class Scoring(Harness):
    """Collects what was scored, in order."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.scored: dict[int, list[int]] = {}

    def commit(self, result: StepResult):
        updates = super().commit(result)
        for update in updates:
            self.scored.setdefault(update.request_id, []).extend(t.token_id for t in update.scores)
        return updates


def test_every_token_but_the_first_is_scored_once_and_in_order() -> None:
    harness = Scoring(budget=7)
    prompt = numbered(50)
    request = harness.serve(prompt, prompt_logprobs=0)
    assert harness.scored[request] == prompt[1:]
    assert not harness.requests[request].is_scored


def test_nothing_is_reused_and_the_reason_says_so() -> None:
    harness = Scoring(budget=64)
    prompt = numbered(50)
    harness.serve(prompt)
    scored = harness.serve(prompt, prompt_logprobs=3)
    assert harness.cached(scored) == 0 and harness.computed[scored] == 50
    assert harness.reuse[scored].reason == reasons.PROMPT_LOGPROBS
    assert harness.scored[scored] == prompt[1:]
    counters = harness.cache.counters
    assert counters.misses_by_reason[reasons.PROMPT_LOGPROBS] == 1
    assert counters.missed_tokens_by_reason[reasons.PROMPT_LOGPROBS] == 50


def test_what_it_computed_serves_others() -> None:
    harness = Scoring(budget=64)
    prompt = numbered(50)
    harness.serve(prompt, prompt_logprobs=0)
    again = harness.serve(prompt)
    assert harness.cached(again) == 48 and harness.reuse[again].reason == reasons.HIT


def test_a_prompt_too_short_to_hit_says_that() -> None:
    harness = Scoring()
    request = harness.serve(numbered(4), prompt_logprobs=0)
    assert harness.reuse[request].reason == reasons.TOO_SHORT
    one = harness.serve(numbered(1, 7), prompt_logprobs=0)
    assert harness.scored.get(one, []) == []


def test_it_waits_for_no_sibling() -> None:
    harness = Scoring(budget=8)
    prompt = numbered(60)
    leader = harness.add(prompt)
    scored = harness.add(prompt, prompt_logprobs=0)
    harness.step()
    assert harness.cache.counters.num_sibling_waits == 0
    harness.run()
    assert harness.scored[scored] == prompt[1:] and harness.computed[leader] == 60


def test_without_prefix_caching_it_works_as_well() -> None:
    harness = Scoring(budget=9, enable_prefix_caching=False)
    request = harness.serve(numbered(30), prompt_logprobs=0)
    assert harness.scored[request] == numbered(30)[1:]
    assert harness.reuse[request].reason == reasons.DISABLED


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 60),
    outputs=st.integers(1, 12),
    budget=st.integers(1, 20),
    stops=st.lists(st.integers(1, 12), max_size=4),
    unit=st.sampled_from([2, 4, 8]),
)
def test_preemptions_lose_and_repeat_nothing(
    size: int, outputs: int, budget: int, stops: list[int], unit: int
) -> None:
    """What was scored before a preemption may be reused behind it, and is not scored again."""
    from tests.core.harness import make_geometry

    harness = Scoring(budget=budget, geometry=make_geometry(unit))
    prompt = numbered(size)
    request = harness.add(prompt, outputs, prompt_logprobs=0)
    for steps in stops:
        for _ in range(steps):
            if request not in harness.ended:
                harness.step()
        harness.scheduler.preempt(request)
        harness.check()
    harness.run()
    assert harness.scored.get(request, []) == prompt[1:]
    assert len(harness.outputs[request]) == outputs


def test_a_worker_that_scores_too_little_fails_the_request() -> None:
    harness = Scoring(budget=64)
    request = harness.add(numbered(20), prompt_logprobs=0)
    plan = harness.schedule()
    (chunk,) = plan.chunks
    assert array("I", chunk.scored_tokens).tolist() == numbered(20)[1:]
    result = harness.worker.execute(plan)
    whole = result.chunk_results[0]
    short = ChunkResult(whole.request_id, whole.end, whole.exported_positions, whole.sampled)
    harness.commit(StepResult(plan.step_id, [short]))
    assert "scored 0 tokens, planned were 19" in (harness.ended[request].error or "")


@pytest.mark.parametrize("num_prompt", [1, 2, 33])
def test_a_request_without_it_scores_nothing(num_prompt: int) -> None:
    harness = Scoring()
    request = harness.serve(numbered(num_prompt), 3)
    assert harness.scored.get(request, []) == []
    assert all(not chunk.scored_tokens for plan in harness.plans for chunk in plan.chunks)
