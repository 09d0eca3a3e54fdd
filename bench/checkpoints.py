"""What a checkpoint inside a prefill costs: exports every 64 tokens against none, and against cutting.

    python bench/checkpoints.py [--pairs 9] [--tokens 8192] [--sizes embedded 100m] [--dtype bfloat16]

Three ways to get through one prompt, in steps of at most 512 tokens: no checkpoint on the way; a state
exported every 64 tokens from inside the steps; and steps cut to 64 tokens, which is how engines without
internal checkpoints leave a state every 64 tokens. CPU time of the process, interleaved runs; ratios are
taken pair by pair. The bound is the order statistic that exceeds the median with 95 % confidence.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from common import RESULTS, calibration_ms, console, median, print_machine, print_table, write_json
from make_model import SIZES, make_size
from rich.progress import Progress

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models import load_model
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

EVERY = 64
STEP_TOKENS = 512
EXPORT_BOUND = 1.05
EMBEDDED = Path(__file__).resolve().parent.parent / "src" / "milepost" / "assets" / "milepost-tiny"
WAYS = {"no checkpoint": (0, STEP_TOKENS), "exports": (EVERY, STEP_TOKENS), "cut": (0, EVERY)}


@dataclass
class Times:
    """CPU seconds of each run, by way."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    num_exports: int = 0

    def ratios(self, way: str, baseline: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[way], self.seconds[baseline], strict=True)]


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """Order statistic that is at least the median with this confidence (binomial, one-sided).

    Raises:
        ValueError: too few values for the confidence.
    """
    ordered = sorted(values)
    below = 0.0
    for index, value in enumerate(ordered):
        below += math.comb(len(ordered), index)
        if below / 2 ** len(ordered) >= confidence:
            return value
    raise ValueError(f"{len(ordered)} values cannot bound a median with confidence {confidence}")


def prefill_seconds(
    model: LoadedModel, prompt: array[int], interval: int, step_tokens: int
) -> tuple[float, int]:
    """CPU seconds of one cold prefill, and the states exported from inside its steps."""
    geometry = model.geometry(EVERY)
    cache_bytes = (
        4 * geometry.request_bytes(len(prompt) + 1) + 2 * len(prompt) // EVERY * geometry.checkpoint_bytes
    )
    scheduler = Scheduler(
        geometry,
        CacheConfig(cache_bytes, match_unit=EVERY, checkpoint_interval=interval, decode_interval=0),
        SchedulerConfig(step_tokens, 1, len(prompt) + 1),
    )
    worker = TorchWorker(model, geometry, cache_bytes)
    scheduler.add(Request(1, prompt, SamplingParams(temperature=0.0), max_tokens=1))
    num_exports = 0
    start = time.process_time()
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule(0.0)
        num_exports += sum(len(chunk.exports) for chunk in plan.chunks)
        for update in scheduler.commit(worker.execute(plan)):
            if update.error is not None:
                raise RuntimeError(update.error)
    seconds = time.process_time() - start
    worker.close()
    return seconds, num_exports


def measure(model: LoadedModel, num_tokens: int, num_pairs: int, progress: Progress, title: str) -> Times:
    rng = Random(3)
    prompt = array("I", rng.choices(range(1, model.vocab_size), k=num_tokens))
    times = Times()
    task = progress.add_task(title, total=(num_pairs + 1) * len(WAYS))
    for repetition in range(num_pairs + 1):
        for way, (interval, step_tokens) in WAYS.items():
            seconds, num_exports = prefill_seconds(model, prompt, interval, step_tokens)
            progress.advance(task)
            if repetition:  # the first round warms up
                times.seconds[way].append(seconds)
                times.num_exports = max(times.num_exports, num_exports)
    progress.remove_task(task)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--sizes", nargs="+", choices=["embedded", *sorted(SIZES)], default=["embedded", "100m"]
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an export costs more than 5 %%")
    parser.add_argument("--json", type=Path, default=RESULTS / "checkpoints.json")
    given = parser.parse_args()
    calibration = calibration_ms()
    rows: list[list[object]] = []
    results = {}
    is_met = True
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(transient=True, console=console, disable=not console.is_terminal) as progress,
    ):
        for size in given.sizes:
            directory = EMBEDDED if size == "embedded" else make_size(Path(scratch) / size, size)
            model = load_model(directory, dtype=given.dtype)
            times = measure(model, given.tokens, given.pairs, progress, size)
            exports = times.ratios("exports", "no checkpoint")
            bound = upper_bound(exports)
            is_met &= bound <= EXPORT_BOUND
            rows.append(
                [
                    size, times.num_exports, median(times.seconds["no checkpoint"]), median(exports), bound,
                    median(times.ratios("cut", "no checkpoint")), median(times.ratios("cut", "exports")),
                ]
            )  # fmt: skip
            results[size] = times.seconds
    print_table(
        f"One cold prefill of {given.tokens:,} tokens, {given.dtype}, "
        f"{given.pairs} interleaved runs, CPU time",
        ["model", "exports", "none, s", "exports / none", "95 % bound", "cut / none", "cut / exports"],
        rows,
    )
    print_machine(calibration)
    write_json(given.json, "checkpoints", calibration, results)
    return 0 if is_met or not given.check else 1


if __name__ == "__main__":
    sys.exit(main())
