"""Scenarios of drafters that read hidden states, with real tensors: hits change no answer and no draft."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.conversations import UNIT, Engine  # noqa: E402
from tests.support.draft_checkpoints import load_with_drafts  # noqa: E402
from tests.support.driver import random_tokens  # noqa: E402

from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.core.request import Request  # noqa: E402
from milepost.models.loading import LoadedModel  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)
CACHE_BYTES = 256 << 20


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def model(request: Any, tmp_path_factory: Any) -> LoadedModel:
    path = tmp_path_factory.mktemp("model")
    return load_with_drafts(path, request.param, 3, num_modules=1, context=0.1)


def engine(model: LoadedModel, num_drafts: int, *, is_caching: bool = True) -> Engine:
    return Engine(
        model,
        cache_bytes=CACHE_BYTES,
        step_tokens=512,
        max_model_len=8192,
        num_drafts=num_drafts,
        is_caching=is_caching,
    )


def ask(served: Engine, number: int, prompt: list[int], max_tokens: int = 20) -> list[int]:
    served.run([Request(number, prompt, GREEDY, max_tokens=max_tokens)], None)
    return served.tokens[number]


def first_drafts(served: Engine, prompt: list[int]) -> tuple[int, ...]:
    """What was drafted behind the first generated token."""
    length = len(prompt) + 1
    return next(
        made.drafts
        for made in served.proposed
        if len(made.tokens) == length and made.tokens[:-1] == tuple(prompt)
    )


def test_clients_with_a_drafter_share_a_long_prefix(model: LoadedModel) -> None:
    """A, B (with 1,600 tokens more) and A again, twice."""
    shared = random_tokens(4410, model.vocab_size, seed=1)
    prompts = {
        name: shared + random_tokens(more, model.vocab_size, seed=more)
        for name, more in (("a", 30), ("b", 1600))
    }
    cold, warm = engine(model, 3, is_caching=False), engine(model, 3)
    expected = {name: ask(cold, number, prompt) for number, (name, prompt) in enumerate(prompts.items())}
    for number, name in enumerate("abaaba"):
        assert ask(warm, number, prompts[name]) == expected[name]
        assert number == 0 or warm.cached[number] >= 4410 - 64  # the interval of checkpoints
        assert first_drafts(warm, prompts[name]) == first_drafts(cold, prompts[name])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_question_behind_a_prompt_that_was_read(model: LoadedModel, num_drafts: int) -> None:
    prompt = random_tokens(3000, model.vocab_size, seed=2)
    following = prompt + random_tokens(25, model.vocab_size, seed=3)
    cold = engine(model, 0, is_caching=False)
    served = engine(model, num_drafts)
    for number, tokens in enumerate((prompt, following)):
        assert ask(served, number, tokens) == ask(cold, number, tokens)
    assert served.cached[1] >= 3000 - UNIT


def test_drafting_goes_on_from_a_state_behind_rejected_drafts(model: LoadedModel) -> None:
    """The state at a boundary that was crossed by a chunk of which some drafts were rejected."""
    served, cold = engine(model, 3), engine(model, 3, is_caching=False)
    prompt = random_tokens(40, model.vocab_size, seed=4)
    said = ask(served, 1, prompt, 60)
    boundary = next(
        position
        for made in served.proposed
        for position in range(len(made.tokens), len(made.tokens) + made.num_accepted + 1)
        if position % UNIT == 0 and position >= 64 and 0 < made.num_accepted < len(made.drafts)
    )
    text = prompt + said
    branch = [*text[:boundary], (text[boundary] + 1) % model.vocab_size, 7]
    assert ask(served, 2, branch, 30) == ask(cold, 2, branch, 30)
    assert served.cached[2] == boundary
    assert first_drafts(served, branch) == first_drafts(cold, branch)
