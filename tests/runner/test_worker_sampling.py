"""Who samples in a step: the native library in one call, or torch; both name the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.driver import Driver, TrackedRequest, random_tokens, token_bytes
from tests.support.families import Shelf

from milepost.core.plan import SamplingParams, StepResult
from milepost.kernels.api import select_kernels
from milepost.kernels.native_library import native_library
from milepost.kernels.native_sampling import NativeSampling
from milepost.models import load_model

if not native_library().samples:
    pytest.skip("no native library that samples", allow_module_level=True)

RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 5},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 30, "seed": 6, "num_logprobs": 2},
    {"temperature": 1.0, "min_p": 0.01, "seed": 7},
    {"temperature": 0.0, "num_logprobs": 0},
]
PENALISED = {"temperature": 1.0, "frequency_penalty": 1.5, "logit_bias": {3: 2.0}, "seed": 8}


class Counting(NativeSampling):
    num_calls = 0

    def sample(self, *arguments: Any) -> Any:
        self.num_calls += 1
        return super().sample(*arguments)


def driver_with(shelf: Shelf, sampling: NativeSampling | None) -> Driver:
    kernels = dataclasses.replace(select_kernels("native"), sampling=sampling)
    driver = Driver(load_model(shelf.directory("kimi_linear"), kernels=kernels), match_unit=16)
    driver.poison()
    return driver


def start(driver: Driver, rules: list[dict[str, Any]]) -> tuple[list[TrackedRequest], StepResult]:
    """Requests that differ in their prompts and rules, and the step that ends their prompts."""
    requests = [
        driver.sequence(
            random_tokens(20 + number, driver.model.vocab_size, seed=number),
            number,
            sampling=SamplingParams(**options),
        )
        for number, options in enumerate(rules)
    ]
    return requests, driver.run(driver.plan(*((request, len(request.tokens)) for request in requests)))


def tokens_of(result: StepResult) -> list[list[int]]:
    assert result.error is None
    return [[token.token_id for token in chunk.sampled] for chunk in result.chunk_results]


def test_one_native_call_per_step(shelf: Shelf) -> None:
    counting = Counting(native_library().module)  # type: ignore[arg-type]
    driver = driver_with(shelf, counting)
    _, result = start(driver, RULES)
    assert counting.num_calls == 1
    twin = driver_with(shelf, None)
    _, expected = start(twin, RULES)
    assert tokens_of(result) == tokens_of(expected)
    for mine, theirs in zip(result.chunk_results, expected.chunk_results, strict=True):
        for token, other in zip(mine.sampled, theirs.sampled, strict=True):
            assert token.logprob == (other.logprob and pytest.approx(other.logprob, abs=1e-5))
            assert [each for each, _ in token.top_logprobs] == [each for each, _ in other.top_logprobs]


def test_rows_that_python_changes_take_one_more(shelf: Shelf) -> None:
    counting = Counting(native_library().module)  # type: ignore[arg-type]
    rules = [RULES[0], PENALISED, RULES[1], PENALISED]
    _, result = start(driver_with(shelf, counting), rules)
    assert counting.num_calls == 2
    assert tokens_of(result) == tokens_of(start(driver_with(shelf, None), rules)[1])


@pytest.mark.parametrize("options", [*RULES[:4], PENALISED])
def test_drafts_change_no_token(shelf: Shelf, options: dict[str, Any]) -> None:
    """Rows of drafts are sampled as the steps they replace: right guesses are all accepted."""
    sampling = NativeSampling(native_library().module)  # type: ignore[arg-type]
    driver = driver_with(shelf, sampling)
    (request,), result = start(driver, [options])
    answer = tokens_of(result)[0]
    prompt_length = len(request.tokens)
    for _ in range(4):
        request.tokens.append(answer[-1])
        plan = driver.plan((request, 1))
        plan.chunks[0].output_position = len(request.tokens) - prompt_length
        answer += tokens_of(driver.run(plan))[0]
    (again,), result = start(driver, [options])
    assert tokens_of(result)[0] == answer[:1]
    again.tokens.append(answer[0])
    again.tokens += answer[1:4]
    plan = driver.plan((again, 4))
    chunk = plan.chunks[0]
    chunk.output_position = 1
    chunk.end = chunk.start + 1
    chunk.tokens = token_bytes(answer[:1])
    chunk.running_slots = [9]  # the state it starts from stays
    chunk.set_drafts(token_bytes(answer[1:4]))
    assert tokens_of(driver.run(plan))[0] == answer[1:]


def test_a_request_whose_logits_are_not_finite_fails_alone(shelf: Shelf) -> None:
    sampling = NativeSampling(native_library().module)  # type: ignore[arg-type]
    driver = driver_with(shelf, sampling)
    requests, result = start(driver, RULES)
    for request, sampled in zip(requests, tokens_of(result), strict=True):
        request.tokens += sampled
    field = driver.model.layout.recurrent[0].fields[0]
    driver.worker.pools.fields[field.layer, field.name][requests[2].running_slot] = float("nan")
    expected = driver_with(shelf, sampling)
    healthy, result = start(expected, RULES)
    for request, sampled in zip(healthy, tokens_of(result), strict=True):
        request.tokens += sampled
    good = expected.run(expected.plan(*((request, 1) for request in healthy)))
    bad = driver.run(driver.plan(*((request, 1) for request in requests)))
    assert bad.error is not None and str(requests[2].request_id) in bad.error
    wanted = {chunk.request_id: chunk.sampled for chunk in good.chunk_results}
    assert {chunk.request_id for chunk in bad.chunk_results} == set(wanted) - {requests[2].request_id}
    assert all(chunk.sampled == wanted[chunk.request_id] for chunk in bad.chunk_results)


def test_reference_kernels_sample_with_torch(shelf: Shelf) -> None:
    model = shelf.model("kimi_linear", implementation="reference")
    assert model.kernels.sampling is None
    driver = Driver(model, match_unit=16)
    driver.poison()
    _, result = start(driver, RULES)
    assert all(0 <= token < model.vocab_size for sampled in tokens_of(result) for token in sampled)
