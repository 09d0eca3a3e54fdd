"""A server with `--persist` that is killed at random moments, and an observer of its folder.

The observer reads the folder right after a kill, as anybody could: a segment is durable if its file has its
name. Together with the segments it builds on, it must be a hit after the restart.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.e2e.processes import KilledServer, Served

from milepost.core.hashing import CacheDomain, KeyChain
from milepost.stores.folder import LEDGER_NAME
from milepost.stores.segment_format import decode_head

UNIT = 32
Generate = Callable[[list[int], int], list[int]]
"""Prompt, number of tokens -> the answer of an engine that never stopped."""


def durable_positions(folder: Path) -> dict[bytes, int]:
    """Chain key -> position of every segment that can be used from the folder alone."""
    headers = {}
    for file in folder.rglob("*"):
        if len(file.name) == 64 and file.is_file() and len(file.parent.name) == 2:
            data = file.read_bytes()
            header = decode_head(data, object_bytes=len(data)).header
            headers[header.key] = header
    usable: dict[bytes, int] = {}
    for header in sorted(headers.values(), key=lambda h: h.position):
        if header.start == 0 or header.parent_key in usable:
            usable[header.key] = header.position
    return usable


def deepest_hit(prompt: list[int], usable: dict[bytes, int]) -> int:
    """Tokens of `prompt` that a lookup must find among the usable segments."""
    limit = (len(prompt) - 1) // UNIT
    keys = KeyChain(array("I", prompt), CacheDomain(), UNIT).extend(limit)
    return max((usable[key] for key in keys[:limit] if key in usable), default=0)


def folder_bytes(folder: Path) -> int:
    """What the budget is about: segments, finished or not. The ledger's one block comes on top."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != LEDGER_NAME]
    return sum(file.stat().st_blocks * 512 for file in files)


@dataclass
class Report:
    """What a run of kills saw."""

    num_kills: int = 0
    num_turns: int = 0
    num_resumed: int = 0
    num_resumed_tokens: int = 0
    most_bytes: int = 0
    lengths: list[int] = field(default_factory=list)


def run_kills(
    folder: Path, log: Path, generate: Generate, *, num_kills: int, budget_bytes: int, seed: int
) -> Report:
    """Serve conversations, kill at random moments, restart, go on. Everything is asserted on the way."""
    rng, report = Random(seed), Report()
    arguments = [
        "--prefix-match-unit", str(UNIT), "--persist", str(folder), "--persist-bytes", str(budget_bytes),
        "--kv-load-policy", "always", "--cache-bytes", "64MiB",
    ]  # fmt: skip
    conversations: list[list[int]] = [[] for _ in range(3)]
    systems = [[rng.randrange(300, 2000) for _ in range(100)] for _ in range(2)]
    server = Served(arguments, log)
    timer = kill_later(server, rng)
    usable: dict[bytes, int] = {}
    fresh = set(range(3))
    prompts: list[list[int] | None] = [None] * 3
    try:
        # A slow machine is killed before much is durable: there it goes on for longer.
        enough = num_kills // 3
        while report.num_kills < num_kills or (
            report.num_resumed < enough and report.num_kills < 4 * num_kills
        ):
            which = rng.randrange(3)
            if len(conversations[which]) > 1500 or not conversations[which]:
                conversations[which] = list(rng.choice(systems))
                prompts[which] = None
            prompt = prompts[which]
            if prompt is None:
                extra = [rng.randrange(300, 2000) for _ in range(rng.randrange(10, 90))]
                prompt = prompts[which] = conversations[which] + extra
            length = rng.randrange(1, 40)
            try:
                answer, cached = server.complete(prompt, length)
            except KilledServer:
                timer.join()
                server.end()
                report.num_kills += 1
                usable = durable_positions(folder)
                report.most_bytes = max(report.most_bytes, folder_bytes(folder))
                assert folder_bytes(folder) <= budget_bytes
                server = Served(arguments, log)
                fresh = set(range(3))
                timer = kill_later(server, rng)
                continue
            assert answer == generate(prompt, length), (report, which, len(prompt))
            if which in fresh:
                wanted = deepest_hit(prompt, usable)
                # In a full folder others may have taken its place since.
                is_roomy = report.most_bytes < budget_bytes // 2
                assert cached >= wanted or not is_roomy, (report, cached, wanted)
                report.num_resumed += wanted > 0
                report.num_resumed_tokens += cached
                fresh.discard(which)
            report.num_turns += 1
            report.lengths.append(len(prompt))
            conversations[which] = prompt + answer
            prompts[which] = None
    finally:
        timer.cancel()
        server.end()
    return report


def kill_later(server: Served, rng: Random) -> threading.Timer:
    """Send SIGKILL after a random time, from a moment to a few turns."""
    timer = threading.Timer(10 ** rng.uniform(-2.5, 0.2), server.kill)
    timer.daemon = True
    timer.start()
    return timer
