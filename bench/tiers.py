"""Where a prefix comes from and what it costs: time to first token cold, and as a hit in every tier.

    python bench/tiers.py [MODEL | 100m | 5m] [--lengths 1024 4096 16384] [--store redis://127.0.0.1:6379/0]
        [--store "mooncake://127.0.0.1:50051?bytes=4GiB"]

A prompt is served cold, then again from the cache's own memory, then from each store alone (the cache is
emptied before): host memory, a folder, another replica that has computed it, and those that are named. Every
way is repeated with fresh prompts, all ways in turn. The last line of the request is new, so that a hit still
computes a few tokens. The second table compares the time of decode steps with a store being written to and
without. Ratios are within one run; the answers of all ways must be the same.

Exits with 1 if an answer differs, or if a store was used although computing would have been sooner.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import (
    RESULTS,
    calibration_ms,
    console,
    median,
    print_machine,
    print_table,
    write_json,
)
from make_model import SIZES, make_size
from rich.progress import Progress

from milepost.core.plan import SamplingParams
from milepost.engine.messages import Accepted, Failed, GenerationRequest, OutputDelta, ReuseExplanation
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.engine.stores import StoreOptions

NUM_NEW_TOKENS = 8
TIMEOUT_SECONDS = 600.0
COLD, MEMORY = "cold", "cache"


@dataclass(frozen=True)
class Asked:
    """One request: time to first token, answer, reuse, and the times between tokens."""

    ttft_ms: float
    tokens: list[int]
    reuse: ReuseExplanation
    gaps_ms: list[float]


def ask(model: ServingModel, prompt: array[int], max_tokens: int = 2) -> Asked:
    events: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
    request = GenerationRequest(prompt, SamplingParams(temperature=0.0, stop_token_ids=[]), max_tokens)
    begun = time.perf_counter()
    model.engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
    tokens: list[int] = []
    times: list[float] = []
    reuse = None
    while True:
        at, event = events.get(timeout=TIMEOUT_SECONDS)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Accepted):
            continue
        assert isinstance(event, OutputDelta)
        reuse = event.reuse or reuse
        times.extend([at] * len(event.tokens))
        tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            break
    assert reuse is not None
    gaps = [(later - earlier) * 1e3 for earlier, later in zip(times, times[1:], strict=False)]
    return Asked((times[0] - begun) * 1e3, tokens, reuse, gaps)


def empty_cache(model: ServingModel) -> None:
    """Wait for saves, then drop what memory holds."""
    tiering = model.engine.tiering
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while tiering is not None and tiering.num_pending_saves:
        assert time.monotonic() < deadline, "saves do not end"
        time.sleep(0.002)
    while not model.engine.reset_prefix_cache().result(TIMEOUT_SECONDS):
        time.sleep(0.002)


def load(path: Path, stores: tuple[str, ...], cache_bytes: int, max_len: int) -> ServingModel:
    options = ServingOptions(
        cache_bytes=cache_bytes, max_model_len=max_len, stores=StoreOptions(kv_stores=stores)
    )
    model = load_serving_model(path, options)
    model.engine.start()
    return model


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def peer(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Sequence[int]], None]]]:
    """Another replica, a process: its address as a store, and a way to let it compute a prompt."""
    port, kv_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "milepost", "serve", str(path), "--port", str(port), "--serve-kv",
        f"127.0.0.1:{kv_port}?bytes=1GiB", "--cache-bytes", str(options.cache_bytes),
        "--max-model-len", str(max(options.lengths) + 64), "--served-model-name", "peer",
    ]  # fmt: skip
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_SECONDS, trust_env=False) as client,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        def compute(prompt: Sequence[int]) -> None:
            body = {"model": "peer", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
            client.post("/v1/completions", json=body).raise_for_status()

        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not is_ready():
                assert process.poll() is None and time.monotonic() < deadline, "the peer does not start"
                time.sleep(0.2)
            yield f"peer://127.0.0.1:{kv_port}?max_segment=1GiB", compute
        finally:
            process.send_signal(signal.SIGTERM)


def time_tier(
    path: Path,
    address: str,
    lengths: list[int],
    repetitions: int,
    options: argparse.Namespace,
    bar: Any,
    prepare: Callable[[Sequence[int]], None] = lambda prompt: None,
) -> list[dict[str, Any]]:
    """Cold, cache and one store, in turn, for every length.

    Args:
        prepare: puts a prompt into a store that is not written to.
    """
    model = load(path, (address,), options.cache_bytes, max(lengths) + 64)
    rng = random.Random(1)
    rows = []
    try:
        tier = model.engine.tiering.tier_counters()[0].name if model.engine.tiering else ""
        ask(model, array("I", [rng.randrange(300, 2000) for _ in range(64)]))
        for length in lengths:
            times: dict[str, list[float]] = {COLD: [], MEMORY: [], tier: []}
            loads: list[str] = []
            num_loaded = 0
            for _ in range(repetitions):
                prefix = [rng.randrange(300, 2000) for _ in range(length - NUM_NEW_TOKENS)]
                prompt = array("I", prefix + [rng.randrange(300, 2000) for _ in range(NUM_NEW_TOKENS)])
                cold = ask(model, prompt)
                memory = ask(model, prompt)
                empty_cache(model)
                prepare(prompt)
                loaded = ask(model, prompt)
                empty_cache(model)
                assert cold.tokens == memory.tokens == loaded.tokens, "answers differ"
                assert not cold.reuse.num_cached_tokens and memory.reuse.num_cached_tokens
                for name, asked in ((COLD, cold), (MEMORY, memory), (tier, loaded)):
                    times[name].append(asked.ttft_ms)
                loads.append(loaded.reuse.load.outcome if loaded.reuse.load else "")
                num_loaded = loaded.reuse.num_cached_tokens
                bar.advance(1)
            base = median(times[COLD])
            rows.append(
                {
                    "tier": tier,
                    "length": length,
                    "cold_ms": base,
                    "cache_ms": median(times[MEMORY]),
                    "tier_ms": median(times[tier]),
                    "cache_ratio": median(times[MEMORY]) / base,
                    "tier_ratio": median(times[tier]) / base,
                    "loaded_tokens": num_loaded,
                    "outcomes": ", ".join(sorted(set(loads))),
                }
            )
    finally:
        model.close()
    return rows


def time_steps(path: Path, address: str, num_tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """p50 and p99 of the time between tokens of one answer, with a store and without, interleaved."""
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    rng = random.Random(2)
    models = {
        "without": load(path, (), options.cache_bytes, num_tokens + 256),
        "with": load(path, (address,), options.cache_bytes, num_tokens + 256),
    }
    try:
        for _ in range(3):
            prompt = array("I", [rng.randrange(300, 2000) for _ in range(128)])
            for name, model in models.items():
                gaps[name].extend(ask(model, prompt, num_tokens).gaps_ms[1:])
    finally:
        for model in models.values():
            model.close()

    def quantile(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))]

    return {
        f"{name}_p{round(100 * share)}_ms": quantile(values, share)
        for name, values in gaps.items()
        for share in (0.5, 0.99)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="100m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--cache-bytes", type=int, default=2 << 30)
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="another store to measure, like redis://",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "tiers.json")
    options = parser.parse_args()
    calibration = calibration_ms()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(options.model)
        if options.model in SIZES:
            path = Path(scratch) / "model"
            make_size(path, options.model)
        addresses = ["memory://?bytes=4GiB", f"file://{scratch}/segments?bytes=8GiB", *options.store]
        rows: list[dict[str, Any]] = []
        total = (len(addresses) + 1) * len(options.lengths) * options.repetitions
        with Progress(console=console) as progress:
            bar = progress.add_task("prompts", total=total)
            rest = options.lengths, options.repetitions, options, _Bar(progress, bar)
            for address in addresses:
                rows += time_tier(path, address, *rest)
            with peer(path, options) as (address, compute):
                rows += time_tier(path, address, *rest, compute)
        steps = time_steps(path, f"file://{scratch}/steps?bytes=8GiB", options.step_tokens, options)
    print_machine(calibration)
    print_table(
        "time to first token, median; ratios to cold in the same run",
        (
            "tier",
            "tokens",
            "cold ms",
            "cache ms",
            "tier ms",
            "cache / cold",
            "tier / cold",
            "loaded",
            "outcome",
        ),
        [tuple(row.values()) for row in rows],
    )
    ratio = steps["with_p99_ms"] / steps["without_p99_ms"]
    print_table(
        "time between tokens of one answer, a file tier behind it",
        ("", "p50 ms", "p99 ms"),
        [(name, steps[f"{name}_p50_ms"], steps[f"{name}_p99_ms"]) for name in ("without", "with")]
        + [("ratio", steps["with_p50_ms"] / steps["without_p50_ms"], ratio)],
    )
    write_json(options.json, "tiers", calibration, {"first_token": rows, "steps": steps})
    losing = [row for row in rows if row["outcomes"] == "loaded" and row["tier_ratio"] > 1.1]
    for row in losing:
        console.print(
            f"[red]{row['tier']} at {row['length']} tokens was loaded, and slower than computing[/red]"
        )
    return 1 if losing else 0


class _Bar:
    """One task of a progress display."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)


if __name__ == "__main__":
    sys.exit(main())
