"""Replicas that share one pool, and conversations that wander between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.processes import Served
from tests.stores.services import Server, start_mooncake, start_redis

UNIT = 32
SETTLE_SECONDS = 20.0
Generate = Callable[[list[int], int], list[int]]
"""Prompt, number of tokens -> the answer of an engine that never stopped."""


@dataclass
class Pool:
    """Attributes:
    kind: mooncake or redis.
    server: the master of the pool, or the whole pool.
    """

    kind: str
    server: Server

    @staticmethod
    def start(kind: str, folder: Path) -> Pool:
        if kind == "redis":
            return Pool(kind, start_redis(folder))
        return Pool(kind, start_mooncake(folder, "--client_ttl=3"))

    def address(self, owned_bytes: str) -> str:
        """For a replica that gives so much memory to the pool; in Redis nobody does."""
        if self.kind == "redis":
            return f"redis://127.0.0.1:{self.server.port}/0?bytes=64MiB"
        return f"mooncake://127.0.0.1:{self.server.port}?bytes={owned_bytes}&buffer=32MiB"


@dataclass(frozen=True)
class Told:
    """What a response says.

    Attributes:
        load: outcome of the stores; "" if nothing was missing.
        held_seconds: how long the request was held back for them.
    """

    tokens: list[int]
    num_cached_tokens: int
    load: str
    num_loaded_tokens: int
    held_seconds: float
    seconds: float


class AskedReplica(Served):
    """One process that is asked for prompts given as tokens."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        super().__init__(["--prefix-match-unit", str(UNIT), "--cache-bytes", "64MiB", *arguments], log)

    def ask(self, prompt: list[int], max_tokens: int) -> Told:
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        begin = time.monotonic()
        answer = self.client.post(f"{self.url}/v1/completions", json=body)
        seconds = time.monotonic() - begin
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        load = content["milepost"]["reuse"].get("load") or {"outcome": "", "tokens": 0, "seconds": 0.0}
        return Told(
            content["choices"][0]["token_ids"],
            content["usage"]["prompt_tokens_details"]["cached_tokens"],
            load["outcome"],
            load["tokens"],
            load["seconds"],
            seconds,
        )

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name with these labels."""
        answer = self.client.get(f"{self.url}/metrics")
        assert answer.status_code == 200, answer.text
        samples = [
            sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(samples)

    def settle(self) -> None:
        """Wait until everything that was computed is saved or given up."""
        end = time.monotonic() + SETTLE_SECONDS
        num_idle = 0
        while num_idle < 3:
            pending = self.metric("milepost:pending_saves") + self.metric("milepost:store_pending_bytes")
            num_idle = 0 if pending else num_idle + 1
            assert time.monotonic() < end, f"{pending} still to be saved"
            time.sleep(0.01)


class PooledReplica(AskedReplica):
    """One process over the pool."""

    def __init__(self, pool: Pool, log: Path, owned_bytes: str = "32MiB") -> None:
        self.pool = pool
        super().__init__(["--kv-load-policy", "always", "--kv-store", pool.address(owned_bytes)], log)


@contextmanager
def replicas(pool: Pool, folder: Path, owned_bytes: Sequence[str]) -> Iterator[list[PooledReplica]]:
    """One replica for each number, started side by side. The list may be changed; all in it are ended."""
    running: list[PooledReplica] = []
    try:
        with ThreadPoolExecutor() as starting:
            futures = [
                starting.submit(PooledReplica, pool, folder / f"replica-{number}.log", each)
                for number, each in enumerate(owned_bytes)
            ]
        running += [future.result() for future in futures if future.exception() is None]
        for future in futures:
            future.result()
        yield running
    finally:
        for each in running:
            each.end()


@dataclass
class Conversation:
    """Turns of one user, checked against an engine that was never interrupted.

    Attributes:
        history: prompts and answers so far; all but the last token were computed by somebody.
    """

    generate: Generate
    rng: Random
    history: list[int] = field(default_factory=list)

    def turn(self, replica: AskedReplica, num_new_tokens: int = 40, max_tokens: int = 12) -> Turn:
        prompt = self.history + [self.rng.randrange(300, 2000) for _ in range(num_new_tokens)]
        told = replica.ask(prompt, max_tokens)
        assert told.tokens == self.generate(prompt, max_tokens), (len(prompt), told)
        turn = Turn(told, len(prompt), max(0, len(self.history) - 1))
        self.history = prompt + told.tokens
        return turn


@dataclass(frozen=True)
class Turn:
    """Attributes:
    num_processed_before: tokens of the prompt that somebody had computed.
    """

    told: Told
    num_prompt_tokens: int
    num_processed_before: int

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.told.num_cached_tokens

    @property
    def is_within_bound(self) -> bool:
        """Nothing was computed twice, but for what does not fill a unit."""
        num_new_tokens = max(1, self.num_prompt_tokens - self.num_processed_before)
        return self.num_computed_tokens <= UNIT - 1 + num_new_tokens
