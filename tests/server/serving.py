"""A real server on a loopback port, over the tensor-less worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from tests.engine import kimi_tokenizers
from tests.engine.byte_worker import ByteWorker, small_geometry
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, write_model_directory

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.scheduler import Scheduler
from milepost.engine.audit import AuditConfig
from milepost.engine.chat import ChatRenderer
from milepost.engine.engine import Engine
from milepost.engine.output_parser import OutputFormat
from milepost.engine.serving import SeedSource, ServingModel
from milepost.engine.tokenizer import Tokenizer
from milepost.server.app import EngineDied, Server, bind
from milepost.server.options import ServerOptions

HTTP = httpx.Client(timeout=60, trust_env=False, verify=False)
"""Shared: making a client costs more than a request."""
MATCH_UNIT = 16
MAX_MODEL_LEN = 2048


@dataclass
class Running:
    """A server and everything behind it."""

    url: str
    model: ServingModel
    worker: ByteWorker
    scheduler: Scheduler
    server: Server

    def num_open(self) -> int:
        """HTTP requests that are being answered."""
        return self.server._state.num_open

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: object) -> httpx.Response:
        return HTTP.post(f"{self.url}{path}", json=body)

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(f"{self.url}{path}")

    def metrics(self) -> dict[str, float]:
        """Sample name with labels other than model and engine -> value."""
        values = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                listed = ",".join(f"{key}={value}" for key, value in labels.items())
                values[f"{sample.name}{{{listed}}}" if labels else sample.name] = sample.value
        return values

    def wait_idle(self) -> None:
        """Until core and worker hold nothing for any request; then the core must be sound."""
        deadline = time.monotonic() + 20
        while self.scheduler.has_unfinished_requests or self.worker.live:
            assert time.monotonic() < deadline, "requests are left in core or worker"
            time.sleep(0.005)
        stats = self.model.engine.fresh_stats().result(10)
        assert stats.num_running == stats.num_waiting == 0
        assert stats.running_state_bytes == 0
        assert self.scheduler.audit() == []


def serving_model(
    directory: Path,
    *,
    cache_bytes: int,
    caching: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    seed: int | None = None,
    audit: AuditConfig | None = None,
    max_queued_requests: int | None = None,
    max_num_seqs: int = 32,
    **cache_options: Any,
) -> tuple[ServingModel, ByteWorker, Scheduler]:
    geometry = small_geometry(MATCH_UNIT)
    tokenizer = Tokenizer.from_directory(directory)
    chat = ChatRenderer.from_directory(directory, tokenizer)
    worker = ByteWorker(geometry, tokenizer)
    cache = CacheConfig(cache_bytes, MATCH_UNIT, enable_prefix_caching=caching, **cache_options)
    config = SchedulerConfig(128, max_num_seqs, max_model_len)
    scheduler = Scheduler(geometry, cache, config)
    model = ServingModel(
        name="tiny",
        engine=Engine(scheduler, worker, tokenizer, audit=audit, max_queued_requests=max_queued_requests),
        tokenizer=tokenizer,
        chat=chat,
        output_format=OutputFormat.choose(tokenizer, chat.template_source),
        geometry=geometry,
        cache=cache,
        scheduler=config,
        max_model_len=scheduler.max_model_len,
        vocab_size=tokenizer.vocab_size,
        seeds=SeedSource(seed),
        audit=audit or AuditConfig(),
    )
    return model, worker, scheduler


@contextmanager
def running_server(
    directory: Path,
    *,
    cache_bytes: int = 32 << 20,
    template: str | None = KIMI_TEMPLATE,
    family: str | None = None,
    server_options: ServerOptions | None = None,
    **options,
) -> Iterator[Running]:
    """Serves from a thread of this process until the block ends.

    `family`: a Kimi family with its built-in template, instead of `template`.
    """
    if family is None:
        write_model_directory(directory, template=template)
    else:
        kimi_tokenizers.write_directory(directory, family)
    model, worker, scheduler = serving_model(directory, cache_bytes=cache_bytes, **options)
    listening = threading.Event()
    address: list[str] = []

    def on_listening(url: str) -> None:
        address.append(url)
        listening.set()

    server = Server(lambda: model, bind(port=0), on_listening, server_options)

    def serve() -> None:
        with suppress(EngineDied):
            server.serve_until_stopped()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert listening.wait(20), "the server did not start"
    try:
        yield Running(address[0], model, worker, scheduler, server)
    finally:
        worker.gate.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
        assert worker.closed, "the worker was not closed"
