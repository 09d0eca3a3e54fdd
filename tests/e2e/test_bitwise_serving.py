"""Promise P2 through everything that serves: scheduler, engine, stores and audit, in every family of models.

A case asks for a prompt and lets it decode, in steps of one size, beside other requests; the conversation
then goes on, in the same process or, over a store, in another one. Tokens and log-probabilities of the second
answer must be those of an engine that never reuses anything, bit for bit, and an audit of the hit must
find the same bits. `test_bitwise.py` does the same below the scheduler, with every instruction set.
"""

from __future__ import annotations

import queue
import random
import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engine.replicas import UNIT, Answered, Kept, Replica, bound, file_store, memory_store, replica
from tests.support.driver import random_tokens
from tests.support.families import FAMILIES, Shelf
from tests.support.pairwise import pairwise, random_rows, row_id

from milepost.core.hashing import KeyChain
from milepost.core.request import CacheDomain
from milepost.engine.audit import AuditConfig
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.kernels.native_library import native_library
from milepost.models.loading import LoadedModel, load_model

library = native_library().module
if library is None:
    pytest.skip(f"no native kernels: {native_library().reason}", allow_module_level=True)

TINY = "milepost-tiny"
CACHE_BYTES = 24 << 20
NUM_NEXT = 4
"""Tokens of the second answer."""
FACTORS: dict[str, list[Any]] = {
    "model": [TINY, *sorted(FAMILIES)],
    "num_prompt_tokens": [33, 75, 140],
    "step_tokens": [1, 13, 64, 512],
    "num_generated": [1, 3, 34],
    "follows": ["again", "goes_on", "branches"],
    "neighbours": [0, 3],
    "tier": ["memory", "host", "file"],
    "dtype": ["float32", "bfloat16"],
    "threads": [1, 2],
}
CASES = pairwise(FACTORS)

Case = dict[str, Any]
Fault = Callable[[Replica, list[int]], None]
"""Something wrong with what is cached of a prompt."""


class World:
    """Models, and what an engine without a cache answers."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._models: dict[tuple[str, str], LoadedModel] = {}
        self._cold: dict[tuple[str, str, tuple[int, ...], int], Answered] = {}
        self.tokenizer = Tokenizer.from_directory(EMBEDDED_MODEL)

    def model(self, case: Case) -> LoadedModel:
        name, dtype = key = case["model"], case["dtype"]
        if key not in self._models:
            embedded = name == TINY
            self._models[key] = (
                load_model(EMBEDDED_MODEL, dtype=dtype) if embedded else self._shelf.model(name, dtype=dtype)
            )
        return self._models[key]

    def cold(self, case: Case, prompt: list[int], num_tokens: int) -> Answered:
        """One thread, one step for the whole prompt, nothing kept."""
        key = (case["model"], case["dtype"], tuple(prompt), num_tokens)
        if key not in self._cold:
            library.set_num_threads(1)
            with replica(
                self.model(case),
                self.tokenizer,
                caching=False,
                max_num_batched_tokens=512,
                cache_bytes=CACHE_BYTES,
            ) as engine:
                self._cold[key] = engine.ask(prompt, num_tokens)
            assert self._cold[key].reuse.num_cached_tokens == 0
        return self._cold[key]


@pytest.fixture(scope="module")
def world(shelf: Shelf) -> World:
    return World(shelf)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threads = library.num_threads()
    yield
    library.set_num_threads(threads)


def following(case: Case, prompt: list[int], answer: list[int], vocab_size: int, seed: int) -> list[int]:
    """The prompt of the second request."""
    new = random_tokens(21, vocab_size, seed + 1000)
    if case["follows"] == "again":
        return prompt
    if case["follows"] == "goes_on":
        return prompt + answer + new
    return prompt[: branch_position(prompt)] + new


def branch_position(prompt: list[int]) -> int:
    return len(prompt) * 3 // 4


def wait_for_audits(engine: Replica, num_hits: int) -> None:
    deadline = time.monotonic() + 120
    while sum(engine.engine.audits().by_result().values()) < num_hits:
        assert time.monotonic() < deadline, engine.engine.audits()
        time.sleep(0.002)
    counts = engine.engine.audits()
    assert counts.num_equal == num_hits, counts


def hits(events: queue.SimpleQueue[Any]) -> bool:
    """Waits for the end of an answer; whether it reused anything."""
    has_hit = False
    while True:
        event = events.get(timeout=120)
        has_hit |= bool(getattr(event, "reuse", None) and event.reuse.num_cached_tokens)
        if getattr(event, "finish_reason", None) is not None:
            return has_hit


def check(world: World, case: Case, seed: int, folder: Path, fault: Fault | None = None) -> int:
    """Runs a case; the number of tokens the second request reused."""
    model = world.model(case)
    rng = random.Random(seed)
    # Somewhere within a unit, so that hits fall on any boundary at any distance from the end.
    prompt = random_tokens(case["num_prompt_tokens"] + rng.randrange(UNIT), model.vocab_size, seed)
    # Others on the same steps; the ones behind share a part of the prompt, so that they hit as well.
    others = [
        prompt[: 20 * number] + random_tokens(40 + 9 * number, model.vocab_size, seed + number)
        for number in range(case["neighbours"])
    ]
    expected_first = world.cold(case, prompt, case["num_generated"])
    follower = following(case, prompt, expected_first.tokens, model.vocab_size, seed)
    expected = world.cold(case, follower, NUM_NEXT)
    library.set_num_threads(case["threads"])

    options: dict[str, Any] = {
        "max_num_batched_tokens": case["step_tokens"],
        "cache_bytes": CACHE_BYTES,
        "audit": AuditConfig(1.0, 0.0),
    }
    store = {"memory": lambda: None, "host": memory_store, "file": lambda: file_store(folder)}[case["tier"]]()
    stores = [] if store is None else [Kept(store)]
    with ExitStack() as stack:
        engine = stack.enter_context(replica(model, world.tokenizer, *stores, **options))
        waiting = [engine.start(other, 12) for other in others]
        wanted = [(branch_position(prompt), "message")]
        first = engine.ask(prompt, case["num_generated"], wanted=wanted)
        assert first.same_as(expected_first)
        num_hits = sum(map(hits, waiting)) + (first.reuse.num_cached_tokens > 0)
        if store is not None:
            num_hits = 0
            engine.settle()
            engine = stack.enter_context(replica(model, world.tokenizer, *stores, **options))
        if fault is not None:
            fault(engine, follower)
        waiting = [engine.start(other + [7], 12) for other in others[:1]]
        second = engine.ask(follower, NUM_NEXT)
        assert second.same_as(expected), "another answer"
        num_hits += second.reuse.num_cached_tokens > 0
        shared = {
            "again": len(prompt),
            "goes_on": len(prompt) + case["num_generated"] - 1,
            "branches": branch_position(prompt),
        }[case["follows"]]
        assert second.reuse.num_computed_tokens <= bound(shared, len(follower))
        num_hits += sum(map(hits, waiting))
        wait_for_audits(engine, num_hits)
        if store is not None and not waiting:
            # A neighbour may begin like it, and load what both need first.
            assert second.reuse.num_cached_tokens == 0 or second.load.outcome == "loaded"
    return second.reuse.num_cached_tokens


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_a_conversation_goes_on_with_the_bits_of_a_cold_run(world: World, case: Case, tmp_path: Path) -> None:
    num_reused = check(world, case, CASES.index(case) % 3, tmp_path)
    assert num_reused > 0 or case["num_prompt_tokens"] * 3 // 4 < UNIT


@pytest.mark.slow
def test_a_random_remainder(world: World, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    deadline = time.monotonic() + 30
    num_done = 0
    while time.monotonic() < deadline:
        [case] = random_rows(FACTORS, rng, 1)
        case |= {"num_prompt_tokens": rng.randrange(2, 300), "step_tokens": rng.randrange(1, 513)}
        folder = tmp_path / str(num_done)
        folder.mkdir()
        try:
            check(world, case, rng.randrange(1 << 20), folder)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {num_done}: {row_id(case)}: {error}") from error
        num_done += 1
    print(f"{num_done} cases")
    assert num_done > 3


def flip(record: Any, byte: int) -> None:
    record[byte] = int(record[byte]) ^ 0x10


def flip_state(engine: Replica, prompt: list[int]) -> None:
    """One bit of one value of the state the prompt will start from."""
    unit = (len(prompt) - 1) // UNIT
    chain = KeyChain(array("I", prompt), CacheDomain(), UNIT)
    while (node := engine.scheduler.cache.node_at(chain, unit * UNIT)) is None or node.states is None:
        unit -= 1
    pool = engine.worker.pools.checkpoint_pool(0)
    flip(pool._bytes.view(pool.num_records, pool.record_bytes)[node.states[0]], 4098)


def flip_page(engine: Replica, prompt: list[int]) -> None:
    """One bit of the first token's first entry."""
    node = engine.scheduler.cache.node_at(KeyChain(array("I", prompt), CacheDomain(), UNIT), UNIT)
    assert node is not None
    pool = engine.worker.pools.attention_pool(0)
    flip(pool._bytes.view(pool.num_records, pool.record_bytes)[node.pages[0]], 2)


@pytest.mark.parametrize("fault", [flip_state, flip_page])
@pytest.mark.parametrize("name", [TINY, "kimi_linear", "qwen3_5"])
def test_one_wrong_bit_is_noticed(world: World, name: str, fault: Fault, tmp_path: Path) -> None:
    case = {name: values[0] for name, values in FACTORS.items()}
    case |= {"model": name, "num_prompt_tokens": 140, "step_tokens": 64}
    assert check(world, case, 5, tmp_path) > 0
    with pytest.raises(AssertionError, match="another answer|num_mismatch=1"):
        check(world, case, 5, tmp_path, fault)


def test_the_covering_array_is_small() -> None:
    assert len(CASES) <= 60
