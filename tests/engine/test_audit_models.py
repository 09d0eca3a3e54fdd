"""Audits over the real worker: bytes of a state or a page go wrong, and are found. Every family of models,
and the embedded one, whose logits have a meaning."""

from __future__ import annotations

import logging
import queue
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.engine.engines import collect
from tests.support.driver import random_tokens
from tests.support.families import FAMILIES, Shelf

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.hashing import KeyChain
from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain
from milepost.core.scheduler import Scheduler
from milepost.core.tree import Node
from milepost.engine.audit import AuditConfig, AuditCounts, logit_bound
from milepost.engine.blocking import answer
from milepost.engine.engine import Engine
from milepost.engine.messages import GenerationRequest
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.kernels.api import select_kernels
from milepost.kernels.native_library import native_library
from milepost.models.loading import LoadedModel, load_model
from milepost.runner.worker import TorchWorker

UNIT = 32
TEXT = (Path(__file__).resolve().parents[1] / "data" / "the_tempest.txt").read_text(encoding="utf-8")
IMPLEMENTATIONS = ["reference", *(["native"] if native_library().module is not None else [])]
TOKENIZER = Tokenizer.from_directory(EMBEDDED_MODEL)
EMBEDDED = "milepost-tiny"
PROMPTS = {EMBEDDED: TOKENIZER.encode(TEXT[3000:4200])}
PROMPTS |= {name: random_tokens(len(PROMPTS[EMBEDDED]), 131, seed=8) for name in FAMILIES}
# The plain-torch kernels of a family, and its native ones in bf16, where most could go wrong.
CASES = [
    (EMBEDDED, implementation, dtype)
    for implementation in IMPLEMENTATIONS
    for dtype in ("float32", "bfloat16")
]
CASES += [
    (name, implementation, "bfloat16" if implementation == "native" else "float32")
    for name in sorted(FAMILIES)
    for implementation in IMPLEMENTATIONS
]


def model_of(shelf: Shelf, name: str, implementation: str, dtype: str) -> LoadedModel:
    if name == EMBEDDED:
        return load_model(EMBEDDED_MODEL, dtype=dtype, kernels=select_kernels(implementation))
    return shelf.model(name, implementation=implementation, dtype=dtype)


class Server:
    """An engine with a model, all hits audited."""

    def __init__(self, model: LoadedModel, bound: float, rate: float = 1.0) -> None:
        geometry = model.geometry(UNIT)
        self.scheduler = Scheduler(geometry, CacheConfig(64 << 20, UNIT), SchedulerConfig(256, 8, 4096))
        self.worker = TorchWorker(model, geometry, 64 << 20)
        audit = AuditConfig(rate, bound)
        self.engine = Engine(self.scheduler, self.worker, TOKENIZER, audit=audit)
        self.num_audits = 0

    def ask(self, prompt: list[int], **options) -> tuple[list[int], int]:
        """Generated ids, and prompt tokens that were reused."""
        sampling = SamplingParams(temperature=0.0)
        deltas = list(answer(self.engine, GenerationRequest(array("I", prompt), sampling, 8, **options)))
        reuse = next(delta.reuse for delta in deltas if delta.reuse is not None)
        self.num_audits += reuse.num_cached_tokens > 0
        return [token_id for delta in deltas for token_id in delta.token_ids], reuse.num_cached_tokens

    def audited(self) -> AuditCounts:
        """Once all hits so far are audited."""
        deadline = time.monotonic() + 30
        while True:
            counts = self.engine.audits()
            num_judged = sum(counts.by_result().values())
            if num_judged >= self.num_audits and not self.scheduler.has_unfinished_requests:
                assert num_judged == self.num_audits
                return counts
            assert time.monotonic() < deadline, counts
            time.sleep(0.005)

    def node(self, prompt: list[int], position: int) -> Node:
        node = self.scheduler.cache.node_at(KeyChain(array("I", prompt), CacheDomain(), UNIT), position)
        assert node is not None
        return node

    def spoil_state(self, prompt: list[int], position: int) -> None:
        """Overwrite the recurrent state at `position`, without telling anybody."""
        slots = self.node(prompt, position).states
        assert slots is not None
        pool = self.worker.pools.checkpoint_pool(0)
        record = pool._bytes.view(pool.num_records, pool.record_bytes)[slots[0]]
        record[: pool.record_bytes // 4] = 0

    def spoil_pages(self, prompt: list[int], first: int, end: int) -> None:
        """The same for the attention pages of some units."""
        pool = self.worker.pools.attention_pool(0)
        for unit in range(first, end):
            page = self.node(prompt, (unit + 1) * UNIT).pages[0]
            pool._bytes.view(pool.num_records, pool.record_bytes)[page] = 0


Case = tuple[str, str, str]


def bound_of(case: Case) -> float:
    _, implementation, dtype = case
    return logit_bound(implementation == "native", dtype)


@contextmanager
def serving(shelf: Shelf, case: Case, rate: float = 1.0) -> Iterator[Server]:
    server = Server(model_of(shelf, *case), bound_of(case), rate)
    server.engine.start()
    try:
        yield server
    finally:
        server.engine.close()


every_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@every_case
def test_sound_hits_pass(case: Case, shelf: Shelf) -> None:
    """Repetitions, shorter and longer prompts, other tails: bits with native kernels, else the bound."""
    text = PROMPTS[case[0]]
    with serving(shelf, case) as server:
        server.ask(text[:200], wanted=[(70, "message"), (140, "marker")])
        for prompt in (text[:200], text[:330], text[:333], text[:150] + text[300:350], text[:97]):
            assert server.ask(prompt)[1] >= 64
        counts = server.audited()
        assert counts.num_mismatch == counts.num_dropped == 0
        if case[1] == "native":
            assert counts == AuditCounts(num_equal=5)
        assert counts.max_difference <= bound_of(case)


@every_case
@pytest.mark.parametrize("where", ["state", "page"])
def test_spoiled_bytes_are_found_and_cured(case: Case, where: str, shelf: Shelf, caplog) -> None:
    prompt = PROMPTS[case[0]]
    with serving(shelf, case) as server:
        right, _ = server.ask(prompt)
        reusable = (len(prompt) - 1) // UNIT * UNIT
        if where == "state":
            server.spoil_state(prompt, reusable)
        else:
            server.spoil_pages(prompt, 2, reusable // UNIT)
        with caplog.at_level(logging.INFO):
            _, num_cached = server.ask(prompt, label="victim")
            assert num_cached == reusable
            counts = server.audited()
        assert counts.num_mismatch == 1
        assert counts.max_difference > bound_of(case)
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1 and "audit=mismatch request=victim" in errors[0]
        assert server.ask(prompt) == (right, 0), "computed again from the first token, and right"
        assert server.ask(prompt) == (right, reusable), "and kept again"
        assert server.audited().num_mismatch == 1


REFERENCE = [(name, "reference", "float32") for name in (EMBEDDED, *sorted(FAMILIES))]


@pytest.mark.parametrize("case", REFERENCE, ids="-".join)
def test_rate_zero_audits_nothing_even_when_it_would_find_something(case: Case, shelf: Shelf) -> None:
    prompt = PROMPTS[case[0]]
    with serving(shelf, case, rate=0.0) as server:
        server.ask(prompt)
        server.spoil_state(prompt, (len(prompt) - 1) // UNIT * UNIT)
        server.ask(prompt)
        time.sleep(0.02)
        assert server.engine.audits() == AuditCounts()


@pytest.mark.parametrize("case", REFERENCE, ids="-".join)
def test_everything_is_free_after_audits(case: Case, shelf: Shelf) -> None:
    prompt = PROMPTS[case[0]]
    with serving(shelf, case) as server:
        events = queue.SimpleQueue()
        for _ in range(3):
            server.ask(prompt)
        server.audited()
        server.engine.submit(
            GenerationRequest(array("I", prompt), SamplingParams(temperature=0.0), 1), events.put
        )
        collect(events)
        deadline = time.monotonic() + 20
        while server.worker.num_requests or server.scheduler.has_unfinished_requests:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert server.scheduler.audit() == []
        assert server.scheduler.stats().running_state_bytes == 0
        assert server.engine.reset_prefix_cache().result(10)
        assert server.scheduler.stats().used_bytes == 0
