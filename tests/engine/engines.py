"""Engines over the tensor-less worker."""

from __future__ import annotations

import queue
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.engine.byte_worker import ByteWorker, small_geometry
from tests.engine.tiny_tokenizer import SETTINGS, spec
from tests.support.family_geometries import family_geometry

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.scheduler import Scheduler
from milepost.engine.audit import AuditConfig
from milepost.engine.engine import Engine
from milepost.engine.messages import (
    Accepted,
    EngineEvent,
    Failed,
    FinishedRequest,
    GenerationRequest,
    OutputDelta,
    ReuseExplanation,
)
from milepost.engine.observer import Observer
from milepost.engine.tokenizer import Tokenizer


@dataclass
class Recorder:
    """An observer that keeps everything."""

    reuses: list[ReuseExplanation] = field(default_factory=list)
    records: list[FinishedRequest] = field(default_factory=list)
    num_tokens: int = 0

    def admitted(self, reuse: ReuseExplanation) -> None:
        self.reuses.append(reuse)

    def tokens(self, num_tokens: int, first: float | None, later: float | None) -> None:
        assert (first is None) != (later is None)
        self.num_tokens += num_tokens

    def finished(self, record: FinishedRequest) -> None:
        self.records.append(record)


@dataclass
class Bench:
    """An engine and what stands around it."""

    engine: Engine
    worker: ByteWorker
    scheduler: Scheduler
    tokenizer: Tokenizer
    recorder: Recorder

    def request(
        self, prompt: str | list[int], *, max_tokens: int = 16, stop: tuple[str, ...] = (), **options
    ) -> GenerationRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        sampling = options.pop("sampling", None) or SamplingParams(temperature=0.0)
        if not sampling.stop_token_ids:
            sampling.stop_token_ids = list(self.tokenizer.eos_token_ids)
        return GenerationRequest(array("I", ids), sampling, max_tokens, stop, **options)

    def submit(self, request: GenerationRequest) -> tuple[int, queue.SimpleQueue[EngineEvent]]:
        events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        return self.engine.submit(request, events.put), events

    def run(self, request: GenerationRequest) -> tuple[str, list[OutputDelta]]:
        """Text and deltas; a failure is raised."""
        _, events = self.submit(request)
        return collect(events)


def collect(events: queue.SimpleQueue[EngineEvent], timeout: float = 20.0) -> tuple[str, list[OutputDelta]]:
    assert_accepted(events.get(timeout=timeout))
    deltas: list[OutputDelta] = []
    while not deltas or deltas[-1].finish_reason is None:
        event = events.get(timeout=timeout)
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, OutputDelta)
        deltas.append(event)
    return "".join(delta.text for delta in deltas), deltas


def assert_accepted(event: EngineEvent) -> None:
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Accepted)


@contextmanager
def running_engine(
    *,
    cache_bytes: int = 4 << 20,
    match_unit: int = 16,
    caching: bool = True,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
    max_model_len: int = 4096,
    observers: tuple[Observer, ...] = (),
    audit: AuditConfig | None = None,
    max_queued_requests: int | None = None,
    background_share: float = 0.0,
    family: str | None = None,
) -> Iterator[Bench]:
    """A started engine; at the end nothing may be left in core or worker.

    Args:
        family: of models, whose cache sizes count instead of the small ones.
    """
    geometry = small_geometry(match_unit) if family is None else family_geometry(family, match_unit)
    tokenizer = Tokenizer(spec(), SETTINGS)
    worker = ByteWorker(geometry, tokenizer)
    cache = CacheConfig(cache_bytes, match_unit, enable_prefix_caching=caching)
    config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, background_share)
    scheduler = Scheduler(geometry, cache, config)
    recorder = Recorder()
    engine = Engine(
        scheduler,
        worker,
        tokenizer,
        observers=(recorder, *observers),
        audit=audit,
        max_queued_requests=max_queued_requests,
    )
    engine.start()
    try:
        yield Bench(engine, worker, scheduler, tokenizer, recorder)
    finally:
        worker.gate.set()
        engine.close()
        assert worker.closed
