"""`shares_generated_tokens=False`: nothing behind a prompt is published, whatever happens to its request."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, numbered


def harness(**options) -> Harness:
    return Harness(budget=16, shares_generated_tokens=False, **options)


def follow(bench: Harness, request: int) -> list[int]:
    return [*bench.requests[request].prompt_tokens, *bench.outputs[request]]


@pytest.mark.parametrize("num_prompt_tokens", [31, 32, 33])
def test_a_next_turn_reuses_the_prompt_alone(num_prompt_tokens: int) -> None:
    bench = harness()
    first = bench.serve(numbered(num_prompt_tokens), max_tokens=20)
    turn = [*follow(bench, first), *numbered(5, seed=7)]
    second = bench.serve(turn, max_tokens=3)
    assert bench.cached(second) == num_prompt_tokens // 4 * 4
    # Now these tokens are those of a prompt.
    third = bench.serve(turn, max_tokens=3)
    assert bench.cached(third) == (len(turn) - 1) // 4 * 4


def test_with_it_the_answer_is_reused_as_well() -> None:
    bench = Harness(budget=16)
    first = bench.serve(numbered(32), max_tokens=20)
    second = bench.serve([*follow(bench, first), *numbered(5, seed=7)], max_tokens=3)
    assert bench.cached(second) == (32 + 19) // 4 * 4


@pytest.mark.parametrize("steps", range(3, 24, 3))
def test_a_preempted_request_publishes_no_more(steps: int) -> None:
    """It is prefilled again together with what it has generated."""
    bench = harness()
    request = bench.add(numbered(30), max_tokens=20)
    for _ in range(steps):
        bench.step()
    bench.scheduler.preempt(request)
    bench.run()
    turn = [*follow(bench, request), *numbered(5, seed=7)]
    second = bench.serve(turn, max_tokens=3)
    assert bench.cached(second) == 28
