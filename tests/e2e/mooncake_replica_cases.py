"""What the deaths of a shared pool cost. Run by test_mooncake_replicas.py, in a network of its own."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from tests.e2e.pooled import Conversation, Generate, Pool, PooledReplica, replicas
from tests.engine.replicas import replica

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import load_model

pytestmark = pytest.mark.service

KIND = os.environ.get("MILEPOST_STORE_KIND") or "mooncake"
MOST_HELD_SECONDS = 1.0
"""A pool whose master is dead may hold a request back so long; measured are 2 ms on an idle machine."""
MOST_FAILED_READ_SECONDS = 6.0
"""A read of a dead owner's memory, while the master still lists it; measured are 2 s."""
SHARED_AGAIN_SECONDS = 40.0


@pytest.fixture(scope="module")
def generate() -> Iterator[Generate]:
    with replica(load_model(EMBEDDED_MODEL), Tokenizer.from_directory(EMBEDDED_MODEL)) as uninterrupted:
        yield lambda prompt, length: uninterrupted.ask(prompt, length).tokens


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool.start(KIND, tmp_path)
    yield made
    made.server.kill()


def test_a_replica_reuses_what_the_other_computed(pool: Pool, tmp_path: Path, generate: Generate) -> None:
    with replicas(pool, tmp_path, ["32MiB", "32MiB"]) as pair:
        conversations = [Conversation(generate, Random(seed)) for seed in range(3)]
        for number in range(5):
            for index, conversation in enumerate(conversations):
                here = pair[(number + index) % 2]
                turn = conversation.turn(here, 100 if number == 0 else 40)
                here.settle()
                if number == 0:
                    assert turn.told.load == "not_found", turn
                    continue
                # The last turn was the other one's: it had to come from the pool.
                assert turn.told.load == "loaded", turn
                assert turn.told.num_loaded_tokens > 0, turn
                assert turn.is_within_bound, turn
        for here in pair:
            assert here.metric("milepost:unsaved_checkpoints_total") == 0
            for fault in ("corrupt", "foreign", "error", "timeout", "full"):
                assert here.metric("milepost:store_segments_total", outcome=fault) == 0, fault


def test_the_death_of_the_master(pool: Pool, tmp_path: Path, generate: Generate) -> None:
    with replicas(pool, tmp_path, ["32MiB", "32MiB"]) as pair:
        conversations = grown(pair, generate, range(10, 14))
        lonely = Conversation(generate, Random(14))
        lonely.turn(pair[0], 100)
        pair[0].settle()
        with ThreadPoolExecutor(1) as asking:
            # In the middle of an answer, with saves and lookups behind it.
            answering = asking.submit(conversations[0].turn, pair[0], 40, 40)
            time.sleep(0.03)
            pool.server.kill()
            answering.result()
        for number in range(3):
            for index, conversation in enumerate(conversations):
                # Not the one they asked last, which computed what is now out of reach.
                turn = conversation.turn(pair[(index + number + 1) % 2], 16, 8)
                assert turn.told.load != "loaded" and turn.told.num_loaded_tokens == 0, turn
                assert turn.told.held_seconds < MOST_HELD_SECONDS, turn
        for here in pair:
            here.settle()  # given up, not waiting for ever
        pool.server.start()
        until_shared(pair[0], pair[1], generate)
        until_shared(pair[1], pair[0], generate)
        for index, conversation in enumerate(conversations):
            turns = []
            for number in range(3):
                here = pair[(index + number + 1) % 2]
                turns.append(conversation.turn(here, 16, 8))
                here.settle()
            assert all(turn.is_within_bound for turn in turns[1:]), turns
        # One replica has it in memory and believes that the pool has it too: the other one computes it once,
        # and saves it for all.
        for number in range(4):
            turn = lonely.turn(pair[number % 2], 16, 8)
            pair[number % 2].settle()
            assert turn.is_within_bound or number == 1, (number, turn)


def test_the_death_of_an_owner(pool: Pool, tmp_path: Path, generate: Generate) -> None:
    with replicas(pool, tmp_path, ["32MiB", "32MiB"]) as pair:
        conversations = grown(pair, generate, range(20, 24))
        pair[0].end()
        survivor = pair[1]
        for _ in range(3):
            for conversation in conversations:
                turn = conversation.turn(survivor, 16, 8)
                assert turn.told.held_seconds < MOST_FAILED_READ_SECONDS, turn
                if turn.told.load != "loaded":
                    assert turn.told.num_loaded_tokens == 0, turn
        # From the second turn on it needs nobody.
        for conversation in conversations:
            assert conversation.turn(survivor, 16, 8).is_within_bound
        survivor.settle()
        pair[0] = PooledReplica(pool, tmp_path / "again.log", "32MiB")
        until_shared(survivor, pair[0], generate)
        until_shared(pair[0], survivor, generate)
        for here in pair:
            assert here.metric("milepost:store_segments_total", outcome="corrupt") == 0


def test_a_killed_replica_finds_the_pool_again(pool: Pool, tmp_path: Path, generate: Generate) -> None:
    """It gives the pool no memory, so what it computed is in that of the other one."""
    with replicas(pool, tmp_path, ["32MiB", "0"]) as pair:
        conversations = grown(pair, generate, range(30, 33))
        pair[1].end()
        pair[1] = PooledReplica(pool, tmp_path / "again.log", "0")
        for conversation in conversations:
            turn = conversation.turn(pair[1])
            assert turn.told.load == "loaded", turn
            assert turn.told.num_cached_tokens == turn.told.num_loaded_tokens, turn
            assert turn.is_within_bound, turn


def grown(pair: list[PooledReplica], generate: Generate, seeds: range) -> list[Conversation]:
    """Conversations of two turns, one at each replica, that are saved."""
    conversations = [Conversation(generate, Random(seed)) for seed in seeds]
    for index, conversation in enumerate(conversations):
        for number in range(2):
            here = pair[(number + index) % 2]
            assert conversation.turn(here, 100 if number == 0 else 40).is_within_bound
            here.settle()
    return conversations


_seeds = itertools.count(1000)


def until_shared(first: PooledReplica, second: PooledReplica, generate: Generate) -> None:
    """Ask new conversations until one comes from the first to the second through the pool."""
    begin = time.monotonic()
    while True:
        conversation = Conversation(generate, Random(next(_seeds)))
        conversation.turn(first, 60, 4)
        first.settle()
        turn = conversation.turn(second, 8, 4)
        if turn.told.load == "loaded":
            assert turn.is_within_bound, turn
            return
        assert turn.told.num_cached_tokens == 0, turn
        assert time.monotonic() < begin + SHARED_AGAIN_SECONDS, turn
        time.sleep(0.2)
