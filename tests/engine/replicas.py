"""Engines with the embedded model over stores, for tests of restarts and of several replicas."""

from __future__ import annotations

import queue
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.engine.engines import collect

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.scheduler import Scheduler
from milepost.engine.audit import AuditConfig
from milepost.engine.engine import Engine
from milepost.engine.messages import GenerationRequest, LoadNote, OutputDelta, ReuseExplanation
from milepost.engine.segments import SegmentCodec
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker
from milepost.stores.file import FileStore
from milepost.stores.memory import MemoryStore
from milepost.stores.port import SegmentStore
from milepost.stores.segment_format import Identity
from milepost.stores.tiers import Tiers

UNIT = 32
FINGERPRINT = "ab" * 32
ROOMY = 256 << 20


@dataclass
class Replica:
    """An engine over some stores."""

    engine: Engine
    scheduler: Scheduler
    tiers: Tiers | None
    worker: TorchWorker

    def start(self, prompt: list[int], max_tokens: int = 4, **options: object) -> queue.SimpleQueue:  # type: ignore[type-arg]
        events: queue.SimpleQueue = queue.SimpleQueue()  # type: ignore[type-arg]
        sampling = SamplingParams(temperature=0.0, num_logprobs=2)
        self.engine.submit(GenerationRequest(array("I", prompt), sampling, max_tokens, **options), events.put)  # type: ignore[arg-type]
        return events

    def ask(self, prompt: list[int], max_tokens: int = 4, **options: object) -> Answered:
        return Answered.of(collect(self.start(prompt, max_tokens, **options), timeout=120)[1])

    def abandon(self, prompt: list[int], seconds: float) -> None:
        """Ask for a long answer and leave after a moment."""
        request = GenerationRequest(array("I", prompt), SamplingParams(temperature=0.0), 64)
        request_id = self.engine.submit(request, lambda event: None)
        time.sleep(seconds)
        self.engine.abort(request_id)

    def settle(self) -> None:
        """Wait until everything that was computed is saved."""
        tiering = self.engine.tiering
        assert tiering is not None
        deadline = time.monotonic() + 20
        while tiering.num_pending_saves:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@dataclass
class Answered:
    tokens: list[int]
    logprobs: list[float | None]
    reuse: ReuseExplanation

    @staticmethod
    def of(deltas: list[OutputDelta]) -> Answered:
        tokens = [token for delta in deltas for token in delta.tokens]
        reuse = next(delta.reuse for delta in deltas if delta.reuse is not None)
        return Answered([t.token_id for t in tokens], [t.logprob for t in tokens], reuse)

    @property
    def load(self) -> LoadNote:
        assert self.reuse.load is not None
        return self.reuse.load

    def same_as(self, other: Answered) -> bool:
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


@contextmanager
def replica(
    model: LoadedModel,
    tokenizer: Tokenizer,
    *stores: SegmentStore,
    cache_bytes: int = ROOMY,
    max_num_seqs: int = 8,
    fingerprint: str = FINGERPRINT,
    caching: bool = True,
    max_num_batched_tokens: int = 256,
    audit: AuditConfig | None = None,
    always_loads: bool = True,
    max_load_seconds: float | None = None,
) -> Iterator[Replica]:
    geometry = model.geometry(UNIT)
    config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len=4096)
    scheduler = Scheduler(geometry, CacheConfig(cache_bytes, UNIT, caching), config)
    worker = TorchWorker(model, geometry, cache_bytes)
    engine = Engine(scheduler, worker, tokenizer, audit=audit)
    tiers = Tiers(stores) if stores else None
    if tiers is not None:
        codec = SegmentCodec(geometry, worker.pools, fingerprint, time.time)
        engine.use_tiers(tiers, codec, always_loads=always_loads, max_load_seconds=max_load_seconds)
    engine.start()
    try:
        yield Replica(engine, scheduler, tiers, worker)
    finally:
        engine.close()
        assert engine.failure is None
        assert scheduler.audit() == []
        assert not list(scheduler.transfers.leases())
        assert not scheduler.transfers.pinned()


def file_store(path: Path, budget_bytes: int = 1 << 30, fingerprint: str = FINGERPRINT) -> FileStore:
    return FileStore(path, Identity(fingerprint), budget_bytes=budget_bytes)


def memory_store(budget_bytes: int = 1 << 30) -> MemoryStore:
    return MemoryStore(Identity(FINGERPRINT), budget_bytes=budget_bytes)


class Kept:
    """A store that outlives the engine that closes it."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> None:
        pass


def words(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(300, 2000) for _ in range(count)]


def bound(num_processed_before: int, num_tokens: int) -> int:
    return UNIT - 1 + max(1, num_tokens - num_processed_before)
