"""Scenarios that need real records: what a slot or a page held before must not show, at any value."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.driver import random_tokens  # noqa: E402
from tests.support.families import FAMILIES  # noqa: E402

from milepost.config import CacheConfig, SchedulerConfig  # noqa: E402
from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.core.request import Request  # noqa: E402
from milepost.core.scheduler import Scheduler  # noqa: E402
from milepost.runner.worker import TorchWorker  # noqa: E402

UNIT = 16
NUM_OUTPUT = 6


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: Any, shelf: Any) -> Any:
    return shelf.model(request.param)


class Engine:
    """Scheduler and worker over pools that may be filled with a pattern first."""

    def __init__(
        self, model: Any, fill: str = "zeros", *, cache_bytes: int = 2 << 20, step_tokens: int = 40
    ) -> None:
        self.vocab_size = model.vocab_size
        geometry = model.geometry(UNIT)
        cache = CacheConfig(cache_bytes, UNIT, checkpoint_interval=0, decode_interval=32)
        self.scheduler = Scheduler(geometry, cache, SchedulerConfig(step_tokens, 4, 1024))
        self.worker = TorchWorker(model, geometry, cache_bytes)
        self.num_requests = 0
        generator = torch.Generator().manual_seed(3)
        for view in self.worker.pools.fields.values():
            if fill == "nan":
                view.fill_(float("nan"))
            elif fill == "huge":
                view.fill_(3e38)
            elif fill == "noise":
                view.copy_(torch.randn(view.shape, generator=generator) * 50.0)

    def run(self, prompts: list[list[int]], **options: Any) -> list[tuple[int, list[int]]]:
        """(cached tokens, answer) of prompts that run side by side."""
        cached: dict[int, int] = {}
        answers: dict[int, list[int]] = {}
        for prompt in prompts:
            request_id = self.num_requests
            self.num_requests += 1
            answers[request_id] = []
            sampling = SamplingParams(temperature=0.0)
            self.scheduler.add(Request(request_id, prompt, sampling, max_tokens=NUM_OUTPUT, **options))
        while self.scheduler.has_unfinished_requests:
            result = self.worker.execute(self.scheduler.schedule(0.0))
            assert result.error is None
            for update in self.scheduler.commit(result):
                assert update.error is None
                answers[update.request_id] += [token.token_id for token in update.tokens]
                if update.reuse is not None:
                    cached[update.request_id] = update.reuse.num_cached_tokens
        assert self.scheduler.audit() == []
        return [(cached[request_id], answers[request_id]) for request_id in answers]


def prompts_of(vocab_size: int, *lengths: int) -> list[list[int]]:
    return [random_tokens(length, vocab_size, seed=length) for length in lengths]


@pytest.mark.parametrize("fill", ["nan", "huge", "noise"])
def test_a_cold_request_does_not_see_the_previous_tenant(model: Any, fill: str) -> None:
    """B14: prompts that end beside, on and behind a unit boundary, in pools full of garbage."""
    prompts = prompts_of(model.vocab_size, 1, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 5)
    clean, dirty = Engine(model), Engine(model, fill)
    for engine in (clean, dirty):
        assert len({tuple(answer) for _, answer in engine.run(prompts)}) > 1
    assert clean.run(prompts) == dirty.run(prompts)


def test_slots_change_hands_under_pressure(model: Any) -> None:
    """B14 and B08: a pool so small that every record has had several tenants; decode crosses boundaries."""
    prompts = prompts_of(model.vocab_size, 61, 62, 63, 64, 65, 47, 48, 49, 33)
    roomy = Engine(model, cache_bytes=4 << 20, step_tokens=512)
    geometry = model.geometry(UNIT)
    tight = Engine(model, "nan", cache_bytes=geometry.request_bytes(5 * UNIT) + 3 * geometry.checkpoint_bytes)
    expected = [roomy.run([prompt])[0][1] for prompt in prompts]
    for _ in range(2):
        assert [tight.run([prompt])[0][1] for prompt in prompts] == expected
    assert sum(tight.scheduler.stats().counters.evictions.values()) > len(prompts)


@pytest.mark.parametrize("num_units", [1, 4])
def test_a_remainder_of_one_row_answers_like_a_cold_run(model: Any, num_units: int) -> None:
    """B27: a full hit at mU of mU + 1 tokens."""
    prompt = random_tokens(num_units * UNIT + 1, model.vocab_size, seed=num_units)
    engine = Engine(model, "nan", step_tokens=512)
    (first,) = engine.run([prompt])
    (again,) = engine.run([prompt])
    assert (first[0], again[0]) == (0, num_units * UNIT)
    assert first[1] == again[1]


@pytest.mark.parametrize("history", ["chats before", "chats beside", "other steps"])
def test_the_answer_does_not_depend_on_the_history_of_the_server(model: Any, history: str) -> None:
    """B34: states that come from other chunk boundaries, pages that others wrote."""
    prompt = random_tokens(5 * UNIT + 7, model.vocab_size, seed=77)
    ((_, expected),) = Engine(model, step_tokens=512).run([prompt])
    engine = Engine(model, "nan", step_tokens=23 if history == "other steps" else 40)
    cuts = (3, UNIT, 2 * UNIT - 1, 3 * UNIT + 1, 5 * UNIT)
    chats = [prompt[:cut] + random_tokens(9, model.vocab_size, seed=cut) for cut in cuts]
    if history == "chats beside":
        assert engine.run([*chats, prompt])[-1][1] == expected
    else:
        engine.run(chats)
        cached, answer = engine.run([prompt])[0]
        assert cached > 0
        assert answer == expected


def test_regenerate_after_an_answer_restores_the_state_of_the_prompt(model: Any) -> None:
    """B32 with tensors: the running state moved on by an answer, the next request starts before it."""
    prompt = random_tokens(3 * UNIT + 4, model.vocab_size, seed=5)
    engine = Engine(model, "noise")
    (first,) = engine.run([prompt])
    (again,) = engine.run([prompt])
    trimmed = prompt + first[1][:2]
    ((cached, rest),) = engine.run([trimmed])
    assert again == (3 * UNIT, first[1])
    assert cached == 3 * UNIT
    assert rest[: NUM_OUTPUT - 2] == first[1][2:]
