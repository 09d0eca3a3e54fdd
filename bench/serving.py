"""A server under load: half of what it can do, all of it, and twice as much.

    python bench/serving.py [MODEL] [--minutes 10] [--max-queued-requests 32] [--max-num-seqs 16]

Starts `milepost serve` as a process of its own and finds its capacity with a closed loop that keeps every
seat taken. Then conversations come in an open loop (Poisson arrivals from a seed, streamed) at 0.5, 1 and
2 times that rate. What is checked, with status 1 if anything fails:

* every answer is whole; the only error is 429, with Retry-After;
* 99 % of the admitted requests have their first token within (Q + R) * s of their admission (the status
  line), where Q is --max-queued-requests, R is --max-num-seqs and s the mean service time, seconds per
  request served: an admitted request has at most Q before it in the queue and R in the seats, and would
  have its turn after all of them were served to the end. s is that of the closed loop for loads below
  capacity, else that of the load itself, in which the server is never idle. The time from sending to
  admission, in which the server's limits do not hold yet, is in the table too;
* between the admission of a request and its first token at most Q + R others end: the same bound,
  whatever the speed of the machine is at that moment;
* resident memory grows by at most 1 MiB a minute (least squares) after the first five minutes of a load,
  or in its second half if it is shorter than ten minutes; less than a minute of samples is not judged;
* afterwards there are no more threads and open files than before, nothing runs or waits, and no running
  state holds a byte.

Memory, threads and files are read from /proc: Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from common import RESULTS, calibration_ms, console, print_machine, print_table, write_json
from open_loop import Clients, Conversations, Outcome, poisson_times
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress, TaskID

START_SECONDS = 300.0
# The client keeps what it saw, and must not stop to look for garbage in it.
COLLECTOR_THRESHOLDS = (50_000, 50, 1000)
SETTLE_SECONDS = 20.0
SAMPLE_SECONDS = 1.0
FIRST_MINUTES_SECONDS = 300.0
SHORTEST_SLOPE_SECONDS = 60.0
MAX_SLOPE_BYTES_PER_MINUTE = 1 << 20
BOUND_QUANTILE = 0.99
IDLE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "milepost:running_state_bytes")
# Without the proxy that the environment may name.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

RssSample = tuple[float, int]
"""Seconds since the load began, resident bytes."""


def is_healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


class ServerProcess:
    """`milepost serve` on a free port; `stop` it."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "milepost", "serve", "--port", "0", *arguments]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self._proc = Path(f"/proc/{self._process.pid}")
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            found = re.search(r"listening on (http://\S+)", self._log.read_text(errors="replace"))
            if found and is_healthy(found[1]):
                return found[1]
            time.sleep(0.1)
        self._process.kill()
        self._process.wait()
        raise SystemExit(f"the server did not start:\n{self._log.read_text(errors='replace')}")

    def rss_bytes(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def num_threads(self) -> int:
        return len(os.listdir(self._proc / "task"))

    def num_files(self) -> int:
        return len(os.listdir(self._proc / "fd"))

    def gauges(self) -> dict[str, float]:
        """Samples of `/metrics` that have no label but those of the model."""
        with DIRECT.open(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not set(sample.labels) - {"model_name", "engine"}
        }

    def stop(self) -> int:
        """Exit status; -9 if it did not end by itself."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(frozen=True)
class Held:
    """What the idle server holds."""

    num_threads: int
    num_files: int
    rss_bytes: int

    @classmethod
    def of(cls, server: ServerProcess) -> Held:
        return cls(server.num_threads(), server.num_files(), server.rss_bytes())


@dataclass(frozen=True)
class LoadResult:
    """One load.

    Attributes:
        factor: load as a multiple of the capacity.
        offered_per_s, served_per_s: requests that came, and that were answered within the time of the load.
        ttft_ms: p50, p95, p99 and max of admitted requests, from the time they were due.
        sent_p99_ms: from the time they were sent: the client shares the machine, and may be late itself.
        admitted_p99_ms: from the time their status was here.
        bound_ms: see `ttft_bound_ms`.
        max_places: Q + R.
        max_ended_before_first: see `most_ended_before_first`.
        max_late_ms: how much later than due the client sent a request.
        hit_rate: cached prompt tokens / prompt tokens of the served requests.
        slope_bytes_per_minute: None if there were too few samples.
    """

    factor: float
    offered_per_s: float
    served_per_s: float
    num_offered: int
    num_served: int
    num_refused: int
    errors: list[str]
    ttft_ms: dict[str, float]
    sent_p99_ms: float
    admitted_p99_ms: float
    service_time_ms: float
    bound_ms: float
    max_places: int
    max_ended_before_first: int
    max_late_ms: float
    hit_rate: float
    slope_bytes_per_minute: float | None
    rss_samples: list[RssSample]

    def failures(self) -> list[str]:
        found = [f"{len(self.errors)} errors, the first: {self.errors[0]}"] if self.errors else []
        if not self.num_served:
            found.append("nothing was served")
        elif self.admitted_p99_ms > self.bound_ms:
            found.append(
                f"p99 of the time to first token is {self.admitted_p99_ms:.0f} ms, "
                f"the bound {self.bound_ms:.0f} ms"
            )
        if self.max_ended_before_first > self.max_places:
            found.append(
                f"{self.max_ended_before_first} requests ended while one waited for its first token, "
                f"in {self.max_places} places"
            )
        slope = self.slope_bytes_per_minute
        if slope is not None and slope > MAX_SLOPE_BYTES_PER_MINUTE:
            found.append(f"resident memory grows by {slope / 2**20:.2f} MiB a minute")
        return [f"at {self.factor}x: {problem}" for problem in found]


def ttft_bound_ms(max_queued_requests: int, max_num_seqs: int, service_time_ms: float) -> float:
    """Time in which everybody who may be before an admitted request is served to the end.

    Args:
        max_queued_requests: Q, those that may wait.
        max_num_seqs: R, those that may run.
        service_time_ms: mean time per served request of a server that is never idle, 1 / its capacity.
    """
    return (max_queued_requests + max_num_seqs) * service_time_ms


def most_ended_before_first(served: Sequence[Outcome]) -> int:
    """The most requests that ended between the admission of another one and its first token."""
    ends = sorted(outcome.ended_at for outcome in served)
    return max(
        (
            bisect.bisect_left(ends, outcome.first_at) - bisect.bisect_right(ends, outcome.admitted_at)
            for outcome in served
            if outcome.first_at is not None and outcome.admitted_at is not None
        ),
        default=0,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def slope_per_minute(samples: Sequence[RssSample], seconds: float) -> float | None:
    """Least-squares slope in bytes a minute, over the part of a load of `seconds` that is judged."""
    begin = min(FIRST_MINUTES_SECONDS, seconds / 2)
    judged = [sample for sample in samples if sample[0] >= begin]
    if len(judged) < 2 or judged[-1][0] - judged[0][0] < SHORTEST_SLOPE_SECONDS - 2 * SAMPLE_SECONDS:
        return None
    mean_at = sum(at for at, _ in judged) / len(judged)
    mean_bytes = sum(rss for _, rss in judged) / len(judged)
    covariance = sum((at - mean_at) * (rss - mean_bytes) for at, rss in judged)
    return 60.0 * covariance / sum((at - mean_at) ** 2 for at, _ in judged)


def summarize(
    factor: float,
    seconds: float,
    begun: float,
    outcomes: Sequence[Outcome],
    samples: list[RssSample],
    capacity_per_s: float,
    options: argparse.Namespace,
) -> LoadResult:
    served = [outcome for outcome in outcomes if outcome.is_served]
    in_time = sum(outcome.ended_at <= begun + seconds for outcome in served)
    # Below capacity the server is idle at times, and the load says nothing about the service time.
    rate = capacity_per_s if factor < 1 else in_time / seconds
    service_time_ms = 1e3 / rate if rate else float("inf")
    ttfts = [outcome.ttft_ms for outcome in served]
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in served)
    return LoadResult(
        factor=factor,
        offered_per_s=len(outcomes) / seconds,
        served_per_s=in_time / seconds,
        num_offered=len(outcomes),
        num_served=len(served),
        num_refused=sum(outcome.is_refused for outcome in outcomes),
        errors=[outcome.error for outcome in outcomes if outcome.error is not None],
        ttft_ms={
            "p50": quantile(ttfts, 0.5),
            "p95": quantile(ttfts, 0.95),
            "p99": quantile(ttfts, BOUND_QUANTILE),
            "max": quantile(ttfts, 1.0),
        },
        sent_p99_ms=quantile([outcome.sent_ttft_ms for outcome in served], BOUND_QUANTILE),
        admitted_p99_ms=quantile([outcome.admitted_ttft_ms for outcome in served], BOUND_QUANTILE),
        service_time_ms=service_time_ms,
        bound_ms=ttft_bound_ms(options.max_queued_requests, options.max_num_seqs, service_time_ms),
        max_places=options.max_queued_requests + options.max_num_seqs,
        max_ended_before_first=most_ended_before_first(served),
        max_late_ms=max(((o.sent_at - o.due_at) * 1e3 for o in outcomes), default=0.0),
        hit_rate=sum(outcome.num_cached_tokens for outcome in served) / max(1, num_prompt_tokens),
        slope_bytes_per_minute=slope_per_minute(samples, seconds),
        rss_samples=samples,
    )


class Display:
    """A bar over the seconds of all phases, with what the clients got so far."""

    def __init__(self, progress: Progress, total_seconds: float) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("", total=total_seconds)
        self._before = 0.0
        self._begun = time.perf_counter()
        self._seconds = 0.0
        self._counts: dict[str, int] = {}
        self._name = ""

    def phase(self, name: str, seconds: float) -> None:
        self._before += self._seconds
        self._name, self._seconds, self._begun, self._counts = name, seconds, time.perf_counter(), {}

    def count(self, outcome: Outcome) -> None:
        kind = (
            {200: "served", 429: "refused"}.get(outcome.status, "failed") if not outcome.error else "failed"
        )
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def refresh(self) -> None:
        passed = min(self._seconds, time.perf_counter() - self._begun)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._counts.items()))
        self._progress.update(
            self._task, completed=self._before + passed, description=f"{self._name}: {counts or 'begins'}"
        )


async def sample_rss(server: ServerProcess, display: Display, samples: list[RssSample]) -> None:
    """Until cancelled."""
    begun = time.perf_counter()
    while True:
        samples.append((time.perf_counter() - begun, server.rss_bytes()))
        display.refresh()
        await asyncio.sleep(SAMPLE_SECONDS)


@contextlib.asynccontextmanager
async def sampled(server: ServerProcess, display: Display) -> Any:
    """List of samples that grows while the block runs."""
    samples: list[RssSample] = []
    task = asyncio.create_task(sample_rss(server, display, samples))
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def settle(server: ServerProcess, at_most: Held | None = None) -> Held:
    """What the server holds when nothing is open any more, and no more than `at_most` if it comes to that."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        gauges = server.gauges()
        held = Held.of(server)
        is_idle = not any(gauges[name] for name in IDLE_GAUGES)
        is_small = at_most is None or (
            held.num_threads <= at_most.num_threads and held.num_files <= at_most.num_files
        )
        if (is_idle and is_small) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)


async def measure(
    server: ServerProcess, options: argparse.Namespace, display: Display
) -> tuple[float, Held, list[LoadResult]]:
    """Capacity in requests per second, what the server held before the loads, and the loads."""
    conversations = Conversations(options.conversations, options.turns, options.user_words, options.seed)
    num_places = options.max_num_seqs + options.max_queued_requests
    clients = Clients(server.url, conversations, options.answer_tokens)
    # Every place taken once: what the server makes on first use (threads, buffers, the cache) is there.
    display.phase("warm-up", options.capacity_seconds)
    async with sampled(server, display):
        warm = await clients.closed_loop(num_places, options.capacity_seconds, display.count)
    display.phase("capacity", options.capacity_seconds)
    num_clients = min(2 * options.max_num_seqs, num_places)
    begun = time.perf_counter()
    async with sampled(server, display):
        outcomes = await clients.closed_loop(num_clients, options.capacity_seconds, display.count)
    errors = [outcome.error for outcome in warm + outcomes if outcome.error is not None]
    if errors:
        raise SystemExit(f"{len(errors)} errors before the loads, the first: {errors[0]}")
    in_time = [o for o in outcomes if o.is_served and o.ended_at <= begun + options.capacity_seconds]
    if not in_time:
        raise SystemExit("no request ended while the capacity was measured: --capacity-seconds is too short")
    capacity_per_s = len(in_time) / options.capacity_seconds
    await clients.close()
    before = await settle(server)

    results = []
    for number, factor in enumerate(options.loads):
        seconds = 60.0 * options.minutes
        times = poisson_times(factor * capacity_per_s, seconds, options.seed + 1 + number)
        display.phase(f"load {factor}x", seconds)
        clients = Clients(server.url, conversations, options.answer_tokens)
        async with sampled(server, display) as samples:
            begun = time.perf_counter()
            outcomes = await clients.open_loop(times, display.count)
        await clients.close()
        results.append(summarize(factor, seconds, begun, outcomes, samples, capacity_per_s, options))
    return capacity_per_s, before, results


def leaks(before: Held, after: Held, gauges: dict[str, float]) -> list[str]:
    """What is left of requests that are gone."""
    found = [f"{name} is {gauges[name]:.0f} at the end" for name in IDLE_GAUGES if gauges[name]]
    for what, first, last in (
        ("threads", before.num_threads, after.num_threads),
        ("open files", before.num_files, after.num_files),
    ):
        if last > first:
            found.append(f"{last} {what} at the end, {first} before")
    return found


def report(
    capacity_per_s: float, results: list[LoadResult], before: Held, after: Held, options: argparse.Namespace
) -> None:
    print_table(
        f"capacity {capacity_per_s:.1f} requests/s; {options.minutes:g} minutes each; bound = "
        f"({options.max_queued_requests} queued + {options.max_num_seqs} running) x mean service time",
        (
            "load", "offered /s", "served /s", "429", "errors", "TTFT p50 ms", "p95 ms", "p99 ms", "max ms",
            "sent p99", "admitted p99", "bound ms", "ended before", "hit rate", "RSS MiB", "MiB/min",
        ),  # fmt: skip
        [
            (
                f"{result.factor}x", result.offered_per_s, result.served_per_s, result.num_refused,
                len(result.errors), *(result.ttft_ms[name] for name in ("p50", "p95", "p99", "max")),
                result.sent_p99_ms, result.admitted_p99_ms, result.bound_ms, result.max_ended_before_first,
                result.hit_rate, result.rss_samples[-1][1] / 2**20,
                "" if result.slope_bytes_per_minute is None
                else f"{result.slope_bytes_per_minute / 2**20:+.2f}",
            )
            for result in results
        ],
    )  # fmt: skip
    print_table(
        "the idle server",
        ("", "threads", "open files", "RSS MiB"),
        [
            (name, held.num_threads, held.num_files, held.rss_bytes / 2**20)
            for name, held in (("before the loads", before), ("after them", after))
        ],
    )
    late_ms = max(result.max_late_ms for result in results)
    console.print(f"the client sent each request within {late_ms:.0f} ms of its time", highlight=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--capacity-seconds", type=float, default=30.0)
    parser.add_argument("--max-queued-requests", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--cache-bytes", default="96MiB", help="small, so that it is full when loads begin")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--user-words", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if not Path("/proc/self/statm").exists():
        raise SystemExit("bench/serving.py reads memory, threads and files from /proc, which is not here")
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    calibration = calibration_ms()
    arguments = [
        *([options.model] if options.model else []),
        *("--max-queued-requests", str(options.max_queued_requests)),
        *("--max-num-seqs", str(options.max_num_seqs), "--cache-bytes", options.cache_bytes),
    ]
    total = 2 * options.capacity_seconds + 60.0 * options.minutes * len(options.loads)
    with tempfile.TemporaryDirectory() as scratch:
        server = ServerProcess(arguments, Path(scratch) / "server.log")
        try:
            with Progress(console=console) as progress:
                capacity_per_s, before, results = uvloop.run(
                    measure(server, options, Display(progress, total))
                )
            after = uvloop.run(settle(server, before))
            gauges = server.gauges()
        finally:
            status = server.stop()
    failures = [failure for result in results for failure in result.failures()]
    failures += leaks(before, after, gauges)
    if status != 0:
        failures.append(f"the server ended with status {status} after SIGTERM")
    print_machine(calibration)
    report(capacity_per_s, results, before, after, options)
    document = {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "capacity_per_s": capacity_per_s,
        "loads": [asdict(result) for result in results],
        "before": asdict(before),
        "after": asdict(after),
        "idle_gauges": {name: gauges[name] for name in IDLE_GAUGES},
        "failures": failures,
    }
    write_json(options.json, "serving", calibration, document)
    for failure in failures:
        console.print(f"[red]{failure}[/red]", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
