"""Scores of prompt tokens on the real worker: what generation says about the same tokens, however cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.driver import random_tokens
from tests.support.families import Shelf

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams, ScoredToken
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models.loading import LoadedModel
from milepost.runner import worker as worker_module
from milepost.runner.sampler import score
from milepost.runner.worker import TorchWorker

UNIT = 16
BOUND = 2e-4
FAMILIES = ["kimi_linear", "qwen3_next"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any, shelf: Shelf) -> LoadedModel:
    return shelf.model(request.param, dtype="float32")


class Serving:
    """A scheduler over a worker, one request at a time."""

    def __init__(self, model: LoadedModel, step_tokens: int) -> None:
        geometry = model.geometry(UNIT)
        self.scheduler = Scheduler(
            geometry, CacheConfig(8 << 20, UNIT, decode_interval=0), SchedulerConfig(step_tokens, 4, 1024)
        )
        self.worker = TorchWorker(model, geometry, 8 << 20)
        self.num_asked = 0

    def ask(self, prompt: list[int], max_tokens: int, **options: Any) -> tuple[list[Any], list[ScoredToken]]:
        self.num_asked += 1
        sampling = SamplingParams(temperature=0.0, num_logprobs=3)
        self.scheduler.add(Request(self.num_asked, prompt, sampling, max_tokens=max_tokens, **options))
        tokens: list[Any] = []
        scores: list[ScoredToken] = []
        while self.scheduler.has_unfinished_requests:
            plan = self.scheduler.schedule(0.0)
            result = self.worker.execute(plan)
            assert result.error is None
            for update in self.scheduler.commit(result):
                tokens += update.tokens
                scores += update.scores
        return tokens, scores


def test_scores_are_what_generation_said(model: LoadedModel) -> None:
    """Generated tokens, sent as a prompt, get the log-probabilities they had when they were sampled."""
    serving = Serving(model, 512)
    prompt = random_tokens(40, model.vocab_size, seed=4)
    tokens, none = serving.ask(prompt, 30)
    assert none == []
    generated = [token.token_id for token in tokens]
    _, scores = serving.ask([*prompt, *generated], 1, prompt_logprobs=3)
    assert [s.token_id for s in scores] == [*prompt, *generated][1:]
    for token, scored in zip(tokens, scores[39:], strict=True):
        assert scored.rank == 1 and token.logprob == pytest.approx(scored.logprob, abs=BOUND)
        assert [i for i, _ in scored.top_logprobs] == [i for i, _ in token.top_logprobs]
        ours, theirs = ([value for _, value in item.top_logprobs] for item in (scored, token))
        assert ours == pytest.approx(theirs, abs=BOUND)


@pytest.mark.parametrize("step_tokens", [1, 7, 33, 512])
def test_scores_do_not_depend_on_how_the_prompt_is_cut(
    model: LoadedModel, step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(70, model.vocab_size, seed=9)
    _, expected = Serving(model, 512).ask(prompt, 1, prompt_logprobs=2)
    monkeypatch.setattr(worker_module, "SCORED_LOGIT_BYTES", 4 * model.vocab_size * 5)  # blocks of 5 rows
    _, scores = Serving(model, step_tokens).ask(prompt, 1, prompt_logprobs=2)
    assert [s.token_id for s in scores] == prompt[1:]
    for ours, theirs in zip(scores, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=BOUND)
        assert ours.rank == theirs.rank


def test_scored_prompts_are_cached_and_scored_again_from_the_start(model: LoadedModel) -> None:
    serving = Serving(model, 64)
    prompt = random_tokens(70, model.vocab_size, seed=3)
    _, first = serving.ask(prompt, 1, prompt_logprobs=0)
    _, again = serving.ask(prompt, 1, prompt_logprobs=0)
    assert [s.logprob for s in again] == pytest.approx([s.logprob for s in first], abs=BOUND)
    assert serving.scheduler.cache.counters.num_hit_tokens == 0
    serving.ask(prompt, 1)
    assert serving.scheduler.cache.counters.num_hit_tokens == 64


def test_one_block_of_logits_is_held(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(model, 512)
    monkeypatch.setattr(worker_module, "SCORED_LOGIT_BYTES", 4 * model.vocab_size * 8)
    rows: list[int] = []
    logits = model.decoder.logits
    monkeypatch.setattr(model.decoder, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    serving.ask(random_tokens(70, model.vocab_size, seed=1), 1, prompt_logprobs=0)
    assert sum(rows) == 69 + 1 and max(rows) == 8


def test_ranks_and_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    first, second = score(logits, [0, 3], 2)
    assert first.rank == 3 and [i for i, _ in first.top_logprobs] == [1, 2]
    assert second.rank == 1 and [i for i, _ in second.top_logprobs] == [0, 1]
    assert first.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[0]))
    assert [s.top_logprobs for s in score(logits, [1, 1], 0)] == [[], []]
    assert len(score(logits, [1, 1], 99)[0].top_logprobs) == 4
