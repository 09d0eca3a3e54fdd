"""What leaves memory and comes back gives the bits of a cold run, in every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.replicas import UNIT, Kept, bound, file_store, memory_store, replica
from tests.support.driver import random_tokens
from tests.support.families import LAYOUTS, Shelf

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.kernels.native_library import native_library
from milepost.models.loading import LoadedModel

if native_library().module is None:
    pytest.skip(f"no native kernels: {native_library().reason}", allow_module_level=True)


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    return shelf.model(request.param, dtype="bfloat16")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBEDDED_MODEL)


def tokens_of(model: LoadedModel, seed: int, count: int) -> list[int]:
    return random_tokens(count, model.vocab_size, seed)


@pytest.mark.parametrize("num_tokens", [UNIT + 1, 300])
def test_a_restarted_replica_goes_on(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, num_tokens: int
) -> None:
    prompt = tokens_of(model, num_tokens, num_tokens)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        answer = first.ask(prompt, 12)
    following = prompt + answer.tokens + tokens_of(model, 5, 9)
    branch = prompt + tokens_of(model, 6, 40)
    with replica(model, tokenizer) as cold:
        expected = [cold.ask(tokens) for tokens in (following, branch)]
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        resumed = second.ask(following)
        assert resumed.same_as(expected[0])
        assert resumed.load.outcome == "loaded" and resumed.reuse.num_cached_tokens > 0
        assert resumed.reuse.num_computed_tokens <= bound(len(prompt) + 11, len(following))
        assert second.ask(branch).same_as(expected[1])


def test_replicas_share_and_small_memories_get_it_back(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store = memory_store()
    geometry = model.geometry(UNIT)
    small = geometry.request_bytes(300) + 2 * geometry.checkpoint_bytes
    prompts = [tokens_of(model, seed, 200 + seed) for seed in range(4)]
    with replica(model, tokenizer) as cold:
        expected = [cold.ask(prompt) for prompt in prompts]
    with replica(model, tokenizer, Kept(store)) as first:  # type: ignore[arg-type]
        for prompt, known in zip(prompts, expected, strict=True):
            assert first.ask(prompt).same_as(known)
        first.settle()
    with replica(model, tokenizer, Kept(store), cache_bytes=small, max_num_seqs=1) as second:  # type: ignore[arg-type]
        for _ in range(2):
            for prompt, known in zip(prompts, expected, strict=True):
                answer = second.ask(prompt)
                assert answer.same_as(known)
                assert answer.reuse.num_computed_tokens <= UNIT
        assert sum(second.scheduler.stats().counters.evictions.values()) > 0
