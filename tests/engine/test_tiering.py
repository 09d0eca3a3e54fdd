"""Engines over stores: restarts, small memories, several replicas, and stores that misbehave.

The embedded model runs for real, so that equal answers mean equal bytes in the right records.
"""

from __future__ import annotations

import queue
import time
from array import array
from pathlib import Path
from random import Random

import pytest
from tests.engine.engines import collect
from tests.engine.replicas import (
    UNIT,
    Answered,
    Kept,
    bound,
    file_store,
    memory_store,
    replica,
    words,
)

from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain
from milepost.engine.messages import GenerationRequest
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import LoadedModel
from milepost.stores.faulty import Faults, FaultyStore


# ------------------------------------------------------------------ restart
@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 65, 300, 701])
def test_a_restarted_engine_goes_on_where_the_first_had_ended(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, num_tokens: int
) -> None:
    prompt = words(num_tokens, num_tokens)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        answer = first.ask(prompt, 40)
    history = prompt + answer.tokens
    processed = len(history) - 1
    following = history + words(5, 9)
    with replica(model, tokenizer) as cold:
        again, further = cold.ask(prompt, 40), cold.ask(following)
    assert answer.same_as(again)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        resumed = second.ask(following)
        assert resumed.same_as(further)
        assert resumed.load.outcome == "loaded" and resumed.load.tier == "file"
        assert resumed.reuse.num_computed_tokens <= bound(processed, len(following))
        assert resumed.load.num_tokens == resumed.reuse.num_cached_tokens
        branch = second.ask(prompt + words(6, 40))
    with replica(model, tokenizer) as cold:
        assert branch.same_as(cold.ask(prompt + words(6, 40)))


def test_ten_turns_over_ten_restarts(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    history: list[int] = []
    processed = 0
    for turn in range(10):
        history = history + words(turn, 37)
        with replica(model, tokenizer, file_store(tmp_path)) as restarted:
            answer = restarted.ask(history, 21)
        assert answer.reuse.num_computed_tokens <= bound(processed, len(history))
        with replica(model, tokenizer) as cold:
            assert answer.same_as(cold.ask(history, 21))
        history = history + answer.tokens
        processed = len(history) - 1


def test_what_a_restarted_engine_computes_builds_on_what_it_loaded(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 400), 1)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        second.ask(words(1, 400) + words(2, 64), 1)
        second.settle()
        assert second.tiers is not None
        written = second.tiers.counters()[0].written_bytes
    geometry = model.geometry(UNIT)
    num_new_units = 3
    assert written <= num_new_units * (geometry.unit_bytes + geometry.checkpoint_bytes)


def test_another_model_or_numerics_id_reads_nothing(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 200))
    other = "cd" * 32
    with replica(model, tokenizer, file_store(tmp_path, fingerprint=other), fingerprint=other) as second:
        answer = second.ask(words(1, 200))
    assert answer.reuse.num_cached_tokens == 0
    assert answer.load.outcome == "not_found"


def test_a_salt_separates_tenants_in_the_store_too(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    mine, theirs = CacheDomain(b"mine"), CacheDomain(b"theirs")
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 200), domain=mine)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert second.ask(words(1, 200), domain=theirs).reuse.num_cached_tokens == 0
        assert second.ask(words(1, 200)).reuse.num_cached_tokens == 0
        assert second.ask(words(1, 200), domain=mine).reuse.num_cached_tokens == 192


# ------------------------------------------------------------------ small memories
def test_what_memory_evicts_comes_back_from_the_store(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Six conversations in a cache that holds two: after the first round every turn is a hit."""
    geometry = model.geometry(UNIT)
    cache_bytes = 2 * geometry.request_bytes(400) + 4 * geometry.checkpoint_bytes
    with replica(model, tokenizer, file_store(tmp_path), cache_bytes=cache_bytes) as small:
        for _ in range(2):
            for seed in range(6):
                prompt = words(seed, 300)
                answer = small.ask(prompt, 1)
                small.settle()
        assert sum(small.scheduler.cache.counters.evictions.values()) > 5
        for seed in range(6):
            answer = small.ask(words(seed, 300) + [5, 6, 7], 3)
            assert answer.reuse.num_computed_tokens <= bound(300, 303), seed
            with replica(model, tokenizer) as cold:
                assert answer.same_as(cold.ask(words(seed, 300) + [5, 6, 7], 3))
        assert small.scheduler.cache.memory.peak_committed_bytes <= cache_bytes


def test_two_tiers_the_slower_one_promotes(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 200), 1)
    fast = memory_store()
    with replica(model, tokenizer, Kept(fast), file_store(tmp_path)) as second:  # type: ignore[arg-type]
        assert second.ask(words(1, 200), 1).load.tier == "file"
        second.settle()
        assert second.tiers is not None and second.tiers.flush(10)
        assert second.engine.reset_prefix_cache().result(10)
        assert second.ask(words(1, 200), 1).load.tier == "memory"


def test_a_second_replica_reuses_what_the_first_computed(model: LoadedModel, tokenizer: Tokenizer) -> None:
    shared = Kept(memory_store())
    with (
        replica(model, tokenizer, shared) as first,  # type: ignore[arg-type]
        replica(model, tokenizer, shared) as second,  # type: ignore[arg-type]
    ):
        history: list[int] = []
        for turn in range(6):
            history = history + words(turn, 50)
            here, there = (first, second) if turn % 2 else (second, first)
            answer = here.ask(history, 10)
            assert turn == 0 or answer.reuse.num_computed_tokens <= bound(len(history) - 51, len(history))
            here.settle()
            history = history + answer.tokens
            del there


# ------------------------------------------------------------------ stores that misbehave
def damage(path: Path, seed: int) -> int:
    """Flip, cut or empty about half of the stored files."""
    rng, count = Random(seed), 0
    for file in sorted(path.rglob("*")):
        if not file.is_file() or file.stat().st_size < 1000 or rng.random() < 0.5:
            continue
        data = bytearray(file.read_bytes())
        kind = rng.randrange(3)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) if kind == 1 else 0 :]
        file.write_bytes(data)
        count += 1
    return count


@pytest.mark.parametrize("seed", range(4))
def test_damaged_segments_cost_time_only(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, seed: int
) -> None:
    prompts = [words(number, 150 + 40 * number) for number in range(4)]
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        answers = [first.ask(prompt, 8) for prompt in prompts]
    assert damage(tmp_path, seed)
    for _ in range(2):
        with replica(model, tokenizer, file_store(tmp_path)) as second:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert second.ask(prompt, 8).same_as(answer)


EVERY_FAULT = Faults(
    slow=0.1, error=0.1, torn=0.1, bit_flip=0.1, lost=0.1, full=0.1, foreign=0.1, slow_seconds=0.01
)


@pytest.mark.parametrize("seed", range(3))
def test_eight_clients_over_a_store_with_every_fault(
    model: LoadedModel, tokenizer: Tokenizer, seed: int
) -> None:
    rng = Random(seed)
    prompts = [words(rng.randrange(4), rng.randrange(40, 400)) + words(99 + n, n % 5) for n in range(40)]
    with replica(model, tokenizer) as cold:
        wanted = [cold.ask(prompt, 3) for prompt in prompts]
    geometry = model.geometry(UNIT)
    store = FaultyStore(memory_store(), EVERY_FAULT, seed=seed)
    cache_bytes = 5 * geometry.request_bytes(420)
    with replica(model, tokenizer, store, cache_bytes=cache_bytes) as faulty:
        for first in range(0, len(prompts), 8):
            running = [faulty.start(prompt, 3) for prompt in prompts[first : first + 8]]
            answers = [Answered.of(collect(events)[1]) for events in running]
            for answer, expected in zip(answers, wanted[first : first + 8], strict=True):
                assert answer.same_as(expected)


def test_a_store_that_hangs_delays_nobody_longer_than_computing_would(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 300), 1)

    class Hanging(Kept):
        def lookup(self, keys: list[bytes], *, deadline_seconds: float) -> list[None]:
            time.sleep(0.4)
            return [None] * len(keys)

    with replica(model, tokenizer, Hanging(file_store(tmp_path)), always_loads=False) as second:  # type: ignore[arg-type]
        tiering = second.engine.tiering
        assert tiering is not None
        tiering.seconds_per_token = 0.0001
        answer = second.ask(words(1, 300), 1)
        assert answer.load.outcome == "too_late"
        assert answer.load.seconds < 0.3
        assert answer.reuse.num_cached_tokens == 0


def test_loading_that_takes_longer_than_computing_is_not_chosen(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 40), 1)
    with replica(model, tokenizer, file_store(tmp_path), always_loads=False) as second:
        tiering = second.engine.tiering
        assert tiering is not None
        tiering.seconds_per_token = 1e-6
        answer = second.ask(words(1, 40), 1)
    assert answer.load.outcome in ("sooner_computed", "too_late")
    assert answer.reuse.num_cached_tokens == 0


def test_an_aborted_request_leaves_its_load_behind_without_a_trace(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 600), 1)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        for delay in (0.0, 0.0, 0.001, 0.002, 0.004):
            events: queue.SimpleQueue = queue.SimpleQueue()  # type: ignore[type-arg]
            request = GenerationRequest(array("I", words(1, 600)), SamplingParams(temperature=0.0), 1)
            request_id = second.engine.submit(request, events.put)
            time.sleep(delay)
            second.engine.abort(request_id)
        assert second.ask(words(1, 600), 1).reuse.num_cached_tokens >= 576


def test_a_failed_audit_takes_the_path_out_of_the_store(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 200), 1)
        first.settle()
        tiering, scheduler = first.engine.tiering, first.scheduler
        assert tiering is not None and first.tiers is not None
        from milepost.core.request import Request

        request = Request(10_000, words(1, 200), SamplingParams(temperature=0.0), max_tokens=1)

        def condemn() -> int:
            from milepost.core.hashing import KeyChain

            request.chain = KeyChain(request.tokens, request.domain, UNIT)
            request.chain.extend(6)
            return tiering.condemn(request, lambda: scheduler.condemn(request, UNIT))

        assert first.engine._call(condemn).result(10) > 0
        assert first.tiers.flush(10)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert second.ask(words(1, 200), 1).reuse.num_cached_tokens == 0


def test_a_store_gets_a_guess_only_where_its_bytes_stand_for_as_many_pages(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    """A prompt of 2,100 tokens leaves a checkpoint every 64 in memory, but not in the store."""
    coarse = model.geometry(UNIT).default_checkpoint_interval()
    with replica(model, tokenizer, memory_store()) as served:
        served.ask(words(1, 2100), 1)
        served.settle()
        tiering = served.engine.tiering
        assert tiering is not None
        guesses = [n for n in served.scheduler.cache.tree.state_nodes.values() if n.reason == "interval"]
        stored = [n.depth * UNIT for n in guesses if n.key in tiering.saves.known]
        assert len(guesses) > 20 and coarse >= 512
        assert stored == list(range(coarse, 2100, coarse))
