"""The real scheduler drives the real worker: answers do not depend on the cache, memory keeps its budget."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.driver import random_tokens
from tests.support.families import FAMILIES, Shelf

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

UNIT = 16
NUM_OUTPUT = 20


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    return shelf.model(request.param)


@dataclass
class Outcome:
    """Per request its tokens; how many were reused in all, and the steps it took."""

    tokens: dict[int, list[int]]
    num_cached_tokens: int
    num_preemptions: int


class Engine:
    """schedule, execute, commit; checks the memory bound after every step."""

    def __init__(self, model: LoadedModel, cache_bytes: int, *, caching: bool, step_tokens: int = 96) -> None:
        geometry = model.geometry(UNIT)
        cache = CacheConfig(cache_bytes, UNIT, caching, checkpoint_interval=64, decode_interval=32)
        self.scheduler = Scheduler(geometry, cache, SchedulerConfig(step_tokens, 8, 2048))
        self.worker = TorchWorker(model, geometry, cache_bytes)
        self.cache_bytes = cache_bytes
        self.tokens: dict[int, list[int]] = {}
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    def run(self, requests: list[Request], *, preempt: random.Random | None = None) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            self.scheduler.add(request)
        steps = 0
        while self.scheduler.has_unfinished_requests:
            steps += 1
            assert steps < 3000, "no progress"
            if preempt is not None and preempt.random() < 0.15 and self.scheduler.running:
                victim = preempt.choice(self.scheduler.running).request_id
                self.scheduler.preempt(victim)
                self.num_preemptions += 1
            result = self.worker.execute(self.scheduler.schedule(float(steps)))
            assert result.error is None
            for update in self.scheduler.commit(result):
                assert update.error is None
                self.tokens[update.request_id] += [token.token_id for token in update.tokens]
                if update.reuse is not None:
                    self.num_cached_tokens += update.reuse.num_cached_tokens
            committed = self.scheduler.cache.memory.committed_bytes
            assert self.worker.mapped_bytes() <= committed <= self.cache_bytes
        assert self.scheduler.audit() == []
        assert self.worker.num_requests <= len(requests)


def conversations(model: LoadedModel, engine: Engine, *, preempt: random.Random | None = None) -> Outcome:
    """Three turns of six conversations over one system prompt; some greedy, some sampled, two alike."""
    system = random_tokens(70, model.vocab_size, seed=1)
    histories = {c: list(system) for c in range(6)}
    answers: dict[int, list[int]] = {}
    for turn in range(3):
        requests = []
        for c, history in histories.items():
            history += random_tokens(23 + 5 * (c % 5), model.vocab_size, seed=100 * turn + c % 5)
            sampling = SamplingParams(
                temperature=0.0 if c % 2 else 1.0,
                seed=c % 5,
                top_p=0.95,
                repetition_penalty=1.2 if c == 2 else 1.0,
            )
            requests.append(Request(10 * turn + c, history, sampling, max_tokens=NUM_OUTPUT))
        engine.run(requests, preempt=preempt)
        for c, history in histories.items():
            answers[10 * turn + c] = engine.tokens[10 * turn + c]
            history += engine.tokens[10 * turn + c]
    return Outcome(answers, engine.num_cached_tokens, engine.num_preemptions)


@pytest.fixture(scope="module")
def without_cache(model: LoadedModel) -> Outcome:
    outcome = conversations(model, Engine(model, 64 << 20, caching=False, step_tokens=512))
    assert outcome.num_cached_tokens == 0
    assert all(len(tokens) == NUM_OUTPUT for tokens in outcome.tokens.values())
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) > 10
    return outcome


@pytest.mark.parametrize(
    ("cache_bytes", "step_tokens", "preempts"),
    [(64 << 20, 96, False), (64 << 20, 17, True), (1 << 20, 64, False), (700 << 10, 96, True)],
    ids=["ample", "small_steps_preempted", "tight", "tighter_preempted"],
)
def test_answers_do_not_depend_on_the_cache(
    model: LoadedModel, without_cache: Outcome, cache_bytes: int, step_tokens: int, preempts: bool
) -> None:
    engine = Engine(model, cache_bytes, caching=True, step_tokens=step_tokens)
    outcome = conversations(model, engine, preempt=random.Random(3) if preempts else None)
    assert outcome.tokens == without_cache.tokens
    assert outcome.num_cached_tokens > 0
    assert outcome.num_preemptions > 0 or not preempts
    if cache_bytes <= 1 << 20:
        assert engine.scheduler.cache.memory.peak_committed_bytes > 0.95 * cache_bytes, (
            "the budget never bound"
        )
    if cache_bytes == 64 << 20 and not preempts:
        # Turns 2 and 3 of six conversations find what the turn before processed, to the unit.
        assert outcome.num_cached_tokens > 6 * (2 * 100 + 130)
