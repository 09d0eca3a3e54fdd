"""Stores between replicas and restarts: what other engines got wrong there."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tests.engine.engines import collect
from tests.engine.replicas import UNIT, Answered, Kept, bound, file_store, memory_store, replica, words

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBEDDED_MODEL)


# --- B36: slow corruption with split prefill and decode ----------------------------------------


def split_requests(model: LoadedModel, tokenizer: Tokenizer, num_requests: int, seed: int) -> None:
    """One replica prefills, another one decodes what the first left in a shared store; every answer is
    compared with one that was computed alone."""
    rng = Random(seed)
    shared = Kept(memory_store(64 << 20))
    geometry = model.geometry(UNIT)
    cache_bytes = 6 * geometry.request_bytes(500)
    roots = [words(number, 250) for number in range(5)]
    with (
        replica(model, tokenizer, shared, cache_bytes=cache_bytes) as prefill,  # type: ignore[arg-type]
        replica(model, tokenizer, shared, cache_bytes=cache_bytes) as decode,  # type: ignore[arg-type]
        replica(model, tokenizer, cache_bytes=cache_bytes) as alone,
    ):
        num_loaded = 0
        for first in range(0, num_requests, 4):
            prompts = [
                rng.choice(roots)[: rng.randrange(1, 250)] + words(1000 + first + n, rng.randrange(60))
                for n in range(4)
            ]
            prompts = [prompt or [5] for prompt in prompts]
            for events in [prefill.start(prompt, 1) for prompt in prompts]:
                collect(events)
            prefill.settle()
            lengths = [rng.randrange(1, 6) for _ in prompts]
            running = [decode.start(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
            for events, prompt, length in zip(running, prompts, lengths, strict=True):
                answer = Answered.of(collect(events)[1])
                assert answer.same_as(alone.ask(prompt, length))
                num_loaded += bool(answer.reuse.load and answer.reuse.load.num_tokens)
        assert num_loaded > num_requests // 3


def test_requests_through_a_split_of_prefill_and_decode(model: LoadedModel, tokenizer: Tokenizer) -> None:
    split_requests(model, tokenizer, 60, seed=1)


@pytest.mark.slow
def test_five_hundred_requests_through_the_split(model: LoadedModel, tokenizer: Tokenizer) -> None:
    split_requests(model, tokenizer, 500, seed=2)


# --- B49: the store has an entry where the lookup asks -----------------------------------------


@pytest.mark.parametrize("num_tokens", [UNIT, UNIT + 1, 8 * UNIT - 1, 8 * UNIT, 8 * UNIT + 1])
def test_what_was_stored_is_found_when_the_same_prompt_comes_again(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, num_tokens: int
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as served:
        served.ask(words(1, num_tokens), 1)
        served.settle()
        assert served.engine.reset_prefix_cache().result(10)
        again = served.ask(words(1, num_tokens), 1)
    assert again.reuse.num_cached_tokens == (num_tokens - 1) // UNIT * UNIT


# --- B58: the restore succeeds, the reuse is zero ----------------------------------------------


@pytest.mark.parametrize("num_tokens", [40, 333, 1200])
def test_after_a_restart_an_append_of_eight_tokens_costs_no_more_than_a_unit(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, num_tokens: int
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as before:
        answer = before.ask(words(1, num_tokens), 30)
    history = words(1, num_tokens) + answer.tokens
    with replica(model, tokenizer, file_store(tmp_path)) as after:
        resumed = after.ask(history + words(2, 8), 1)
    assert resumed.reuse.num_computed_tokens <= bound(len(history) - 1, len(history) + 8) <= UNIT + 8
