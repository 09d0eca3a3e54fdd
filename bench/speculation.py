"""What speculation gains, and what it costs where it cannot gain.

    python bench/speculation.py [MODEL | 100m | 5m] [--error-rates 0 0.2 0.5 1] [--drafts 4] [--tokens 128]

Three tables, one request at a time, answers compared with a run without drafts:

* a scripted drafter: it knows the continuation and is wrong at a rate; --draft-ms makes it take so long per
  draft. "of ideal" divides the speed-up by (tokens per step) / (verification + draft cost), both in steps
  without drafts: the cost of a step in which everything is accepted, measured in the same round, and the
  measured time of the drafter. What is missing from 1 is the replay after a rejection, and bookkeeping.
* the same with adaptive lengths, in interleaved pairs with a run without drafts: the mean ratio and its 95 %
  interval (Student's t).
* ngram on a forced copy: the answer is made to repeat the prompt, as an edit of a file would.

Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, calibration_ms, console, median, print_machine, print_table, write_json
from make_model import SIZES, make_size

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.drafts import DraftPlanner
from milepost.core.plan import ChunkPlan, SamplingParams
from milepost.core.ports import Drafter
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.core.speculation import DraftLengths
from milepost.engine.ngram import NgramDrafter
from milepost.models.loading import LoadedModel, load_model
from milepost.runner.worker import TorchWorker

UNIT = 32


@dataclass
class Scripted:
    """Knows the answer and is wrong at a rate."""

    answer: Sequence[int]
    num_prompt_tokens: int
    error_rate: float
    vocab_size: int
    seconds_per_draft: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    seconds: float = 0.0

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        begun = time.perf_counter()
        done = len(tokens) - self.num_prompt_tokens
        drafts = [
            (token + 1) % self.vocab_size if self.rng.random() < self.error_rate else token
            for token in self.answer[done : done + max_drafts]
        ]
        # A drafter computes: it does not sleep.
        while time.perf_counter() - begun < self.seconds_per_draft * len(drafts):
            pass
        self.seconds += time.perf_counter() - begun
        return drafts

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


@dataclass
class Run:
    """Tokens of one answer, and the decode steps: seconds and tokens of each."""

    tokens: list[int]
    seconds: list[float]
    emitted: list[int]
    draft_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds) / sum(self.emitted)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.emitted) / len(self.emitted)

    @property
    def seconds_per_step(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def draft_seconds_per_step(self) -> float:
        return self.draft_seconds / len(self.seconds)


def force(chunk: ChunkPlan, forced: Sequence[int], vocab_size: int) -> None:
    """Let each row sample one token only."""
    width = -(-vocab_size // 32) * 4
    rows = bytearray(width * (1 + chunk.num_drafts))
    for place in range(1 + chunk.num_drafts):
        token = forced[chunk.output_position + place]
        rows[place * width + token // 8] |= 1 << token % 8
    chunk.allowed_tokens = bytes(rows)


def decode(
    model: LoadedModel,
    prompt: array[int],
    num_tokens: int,
    planner: DraftPlanner | None = None,
    forced: Sequence[int] | None = None,
) -> Run:
    """One answer, greedy; the prefill is not timed."""
    geometry = model.geometry(UNIT)
    scheduler = Scheduler(
        geometry, CacheConfig(1 << 28, UNIT), SchedulerConfig(512, 8, len(prompt) + num_tokens + 64), planner
    )
    worker = TorchWorker(model, geometry, 1 << 28)
    scheduler.add(Request(1, prompt, SamplingParams(temperature=0.0), max_tokens=num_tokens))
    run = Run([], [], [])
    try:
        while scheduler.has_unfinished_requests:
            begun = time.perf_counter()
            plan = scheduler.schedule(begun)
            is_decode = bool(plan.chunks) and plan.chunks[0].start >= len(prompt)
            for chunk in plan.chunks:
                if forced is not None and chunk.num_samples:
                    force(chunk, forced, model.vocab_size)
            result = worker.execute(plan)
            updates = scheduler.commit(result)
            seconds = time.perf_counter() - begun
            if planner is not None:
                planner.note_step(plan, result, seconds)
            new = [token.token_id for update in updates for token in update.tokens]
            run.tokens += new
            if is_decode:
                run.seconds.append(seconds)
                run.emitted.append(len(new))
    finally:
        worker.close()
    if planner is not None and isinstance(planner.drafter, Scripted):
        run.draft_seconds = planner.drafter.seconds
    return run


def scripted(
    model: LoadedModel, plain: Run, prompt: array[int], rate: float, options: argparse.Namespace
) -> Scripted:
    return Scripted(plain.tokens, len(prompt), rate, model.vocab_size, options.draft_ms / 1e3)


def scripted_table(
    model: LoadedModel, prompt: array[int], plain: Run, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """Fixed lengths at every error rate."""
    runs: dict[float, list[Run]] = {}
    plains = []
    is_equal = True
    decode(
        model,
        prompt,
        options.tokens,
        DraftPlanner(scripted(model, plain, prompt, 0.5, options), options.drafts),
    )
    for _ in range(options.repetitions):
        plains.append(decode(model, prompt, options.tokens))
        for rate in dict.fromkeys([0.0, *options.error_rates]):
            drafter = scripted(model, plain, prompt, rate, options)
            run = decode(model, prompt, options.tokens, DraftPlanner(drafter, options.drafts))
            is_equal &= run.tokens == plain.tokens
            runs.setdefault(rate, []).append(run)
    rows = []
    for rate, several in runs.items():
        verifying, drafting, speed_ups, shares = [], [], [], []
        for base, perfect, run in zip(plains, runs[0.0], several, strict=True):
            step = base.seconds_per_step
            drafting.append(run.draft_seconds_per_step / step)
            verifying.append((perfect.seconds_per_step - perfect.draft_seconds_per_step) / step)
            speed_ups.append(base.seconds_per_token / run.seconds_per_token)
            shares.append(speed_ups[-1] * (verifying[-1] + drafting[-1]) / run.tokens_per_step)
        rows.append(
            {
                "error_rate": rate,
                "tokens_per_step": several[0].tokens_per_step,
                "verification_cost": median(verifying),
                "draft_cost": median(drafting),
                "speed_up": median(speed_ups),
                "of_ideal": median(shares),
            }
        )
    return rows, is_equal


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean."""
    quantiles = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
    degrees = len(values) - 1
    if degrees < 1:
        return values[0], values[0]
    quantile = quantiles[degrees - 1] if degrees <= len(quantiles) else 2.2
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def adaptive_table(
    model: LoadedModel, prompt: array[int], plain: Run, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """Adaptive lengths against no drafts, in pairs."""
    rows = []
    is_equal = True
    for rate in options.error_rates:
        ratios = []
        for _ in range(options.repetitions):
            base = decode(model, prompt, options.tokens)
            drafter = scripted(model, plain, prompt, rate, options)
            planner = DraftPlanner(drafter, options.drafts, DraftLengths())
            run = decode(model, prompt, options.tokens, planner)
            is_equal &= run.tokens == plain.tokens
            ratios.append(base.seconds_per_token / run.seconds_per_token)
        low, high = interval(ratios)
        rows.append(
            {
                "error_rate": rate,
                "speed_up": statistics.mean(ratios),
                "interval_low": low,
                "interval_high": high,
                "pairs": len(ratios),
            }
        )
    return rows, is_equal


def copy_table(
    model: LoadedModel, prompt: array[int], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """ngram where the answer repeats the prompt."""
    start = prompt + prompt[:4]
    forced = [prompt[(4 + at) % len(prompt)] for at in range(options.tokens + options.drafts + 1)]
    ratios, run = [], None
    is_equal = True
    for _ in range(options.repetitions):
        base = decode(model, start, options.tokens, forced=forced)
        drafter: Drafter = NgramDrafter(2, 5)
        run = decode(
            model, start, options.tokens, DraftPlanner(drafter, options.drafts, DraftLengths()), forced
        )
        is_equal &= run.tokens == base.tokens
        ratios.append(base.seconds_per_token / run.seconds_per_token)
    assert run is not None
    return [{"speed_up": median(ratios), "tokens_per_step": run.tokens_per_step}], is_equal


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print_table(title, list(rows[0]), [list(row.values()) for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="100m", help="directory, or a size: " + ", ".join(SIZES))
    parser.add_argument("--error-rates", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.5, 1.0])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument(
        "--draft-ms", type=float, default=0.0, help="time the scripted drafter takes per draft"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "speculation.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sized = options.model in SIZES
        model = load_model(make_size(Path(folder) / options.model, options.model) if sized else options.model)
        return measure(model, options)


def measure(model: LoadedModel, options: argparse.Namespace) -> int:
    calibration = calibration_ms()
    print_machine(calibration)
    rng = random.Random(3)
    prompt = array("I", [rng.randrange(model.vocab_size) for _ in range(options.prompt_tokens)])
    plain = decode(model, prompt, options.tokens)
    fixed, fixed_equal = scripted_table(model, prompt, plain, options)
    adaptive, adaptive_equal = adaptive_table(model, prompt, plain, options)
    copied, copied_equal = copy_table(model, prompt, options)
    show(f"Scripted drafter, {options.drafts} drafts in every step", fixed)
    show("Scripted drafter, adaptive length", adaptive)
    show("ngram on a forced copy", copied)
    results = {"scripted": fixed, "adaptive": adaptive, "copy": copied, "kernels": model.kernels.numerics}
    write_json(options.json, "speculation", calibration, results)
    if not (fixed_equal and adaptive_equal and copied_equal):
        console.print("answers differ from those without drafts")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
