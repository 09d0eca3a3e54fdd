"""Clients that talk for a long time to an engine whose stores misbehave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.engine.engines import collect
from tests.engine.replicas import Answered, Replica

MAX_TOKENS = 900
SAMPLE_SECONDS = 2.0
MAX_UNCHECKED = 25
"""Answers of one client that wait to be compared; it pauses there, or memory would grow with them."""


@dataclass
class SoakReport:
    """What a soak saw.

    Attributes:
        rss_samples: (seconds since the start, resident bytes).
    """

    num_turns: int = 0
    num_loaded: int = 0
    wrong: list[str] = field(default_factory=list)
    rss_samples: list[tuple[float, int]] = field(default_factory=list)
    thread_counts: list[int] = field(default_factory=list)
    file_counts: list[int] = field(default_factory=list)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def slope_per_minute(samples: list[tuple[float, int]]) -> float:
    """Least-squares slope in bytes a minute."""
    n = len(samples)
    mean_x, mean_y = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


class _Client:
    """One client: conversations that grow, are edited, forked, repeated or left in the middle."""

    def __init__(self, served: Replica, seed: int, report: SoakReport, lock: threading.Lock) -> None:
        self._served = served
        self._rng = Random(seed)
        self._report = report
        self._lock = lock
        self._history: list[int] = []
        self.asked: list[tuple[list[int], int, list[int]]] = []

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(300, 2000) for _ in range(count)]

    def turn(self, systems: list[list[int]]) -> None:
        rng = self._rng
        if not self._history or len(self._history) > MAX_TOKENS or rng.random() < 0.1:
            self._history = list(rng.choice(systems))
        elif rng.random() < 0.15:
            del self._history[rng.randrange(len(self._history)) :]
        prompt = self._history + self._words(rng.randrange(1, 80))
        if rng.random() < 0.1:
            self._served.abandon(prompt, rng.random() * 0.05)
        length = rng.randrange(1, 24)
        events = self._served.start(prompt, length)
        answer = Answered.of(collect(events, timeout=120)[1])
        with self._lock:
            self._report.num_turns += 1
            self._report.num_loaded += bool(answer.reuse.load and answer.reuse.load.num_tokens)
        self.asked.append((prompt, length, answer.tokens))
        self._history = prompt + answer.tokens


def soak(
    served: Replica,
    reference: Callable[[list[int], int], list[int]],
    *,
    minutes: float,
    num_clients: int,
    seed: int,
    disturb: Callable[[Random], None],
) -> SoakReport:
    """Run `num_clients` threads for so long; every answer is compared with the reference's.

    Args:
        disturb: called every few seconds.
    """
    report, lock = SoakReport(), threading.Lock()
    rng = Random(seed)
    systems = [[rng.randrange(300, 2000) for _ in range(rng.randrange(40, 300))] for _ in range(4)]
    clients = [_Client(served, seed * 1000 + number, report, lock) for number in range(num_clients)]
    ends_at = time.monotonic() + 60 * minutes
    begun = time.monotonic()

    def run(client: _Client) -> None:
        try:
            while time.monotonic() < ends_at:
                if len(client.asked) < MAX_UNCHECKED:
                    client.turn(systems)
                else:
                    time.sleep(0.01)
        except Exception as error:
            with lock:
                report.wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(SAMPLE_SECONDS)
        disturb(rng)
        for client in clients:
            asked, client.asked = client.asked, []
            for prompt, length, tokens in asked:
                wanted = reference(prompt, length)
                if tokens != wanted:
                    report.wrong.append(f"prompt of {len(prompt)} tokens: {tokens}, alone {wanted}")
        report.rss_samples.append((time.monotonic() - begun, resident_bytes()))
        report.thread_counts.append(threading.active_count())
        report.file_counts.append(open_files())
    return report
