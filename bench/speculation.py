"""What speculation gains, and what it costs where it cannot gain.

    python bench/speculation.py [MODEL | 100m | 5m] [--error-rates 0 0.2 0.5 1] [--drafts 4] [--tokens 128]

Three tables, one request at a time, answers compared with a run without drafts:

* a scripted drafter: it knows the continuation and is wrong at a rate. "of ideal" divides the speed-up by
  (tokens per step) / (cost of a verifying step), the cost being that of a step where everything is accepted.
  What is missing from 1 is the replay of accepted rows after a rejection, and bookkeeping.
* the same with adaptive lengths, in interleaved pairs with a run without drafts.
* ngram on a forced copy: the answer is made to repeat the prompt, as an edit of a file would.

Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import random
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
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        done = len(tokens) - self.num_prompt_tokens
        return [
            (token + 1) % self.vocab_size if self.rng.random() < self.error_rate else token
            for token in self.answer[done : done + max_drafts]
        ]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


@dataclass
class Run:
    """Tokens of one answer, and the decode steps: seconds and tokens of each."""

    tokens: list[int]
    seconds: list[float]
    emitted: list[int]

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds) / sum(self.emitted)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.emitted) / len(self.emitted)


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
                planner.note_step(plan, seconds)
            new = [token.token_id for update in updates for token in update.tokens]
            run.tokens += new
            if is_decode:
                run.seconds.append(seconds)
                run.emitted.append(len(new))
    finally:
        worker.close()
    return run


def scripted_table(
    model: LoadedModel, prompt: array[int], plain: Run, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """Fixed lengths at every error rate."""
    runs: dict[float, list[Run]] = {}
    plains = []
    is_equal = True
    for _ in range(options.repetitions):
        plains.append(decode(model, prompt, options.tokens))
        for rate in dict.fromkeys([0.0, *options.error_rates]):
            drafter = Scripted(plain.tokens, len(prompt), rate, model.vocab_size)
            run = decode(model, prompt, options.tokens, DraftPlanner(drafter, options.drafts))
            is_equal &= run.tokens == plain.tokens
            runs.setdefault(rate, []).append(run)
    base_step = median([median(run.seconds) for run in plains])
    cost = median([median(run.seconds) for run in runs[0.0]]) / base_step
    rows = []
    for rate, several in runs.items():
        speed_up = median([run.seconds_per_token for run in plains]) / median(
            [run.seconds_per_token for run in several]
        )
        per_step = several[0].tokens_per_step
        rows.append(
            {
                "error_rate": rate,
                "tokens_per_step": per_step,
                "step_cost": cost,
                "speed_up": speed_up,
                "of_ideal": speed_up / (per_step / cost),
            }
        )
    return rows, is_equal


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
            drafter = Scripted(plain.tokens, len(prompt), rate, model.vocab_size)
            planner = DraftPlanner(drafter, options.drafts, DraftLengths())
            run = decode(model, prompt, options.tokens, planner)
            is_equal &= run.tokens == plain.tokens
            ratios.append(base.seconds_per_token / run.seconds_per_token)
        ratios.sort()
        rows.append(
            {"error_rate": rate, "speed_up": median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
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
    scripted, scripted_equal = scripted_table(model, prompt, plain, options)
    adaptive, adaptive_equal = adaptive_table(model, prompt, plain, options)
    copied, copied_equal = copy_table(model, prompt, options)
    show(f"Scripted drafter, {options.drafts} drafts in every step", scripted)
    show("Scripted drafter, adaptive length", adaptive)
    show("ngram on a forced copy", copied)
    results = {"scripted": scripted, "adaptive": adaptive, "copy": copied, "kernels": model.kernels.numerics}
    write_json(options.json, "speculation", calibration, results)
    if not (scripted_equal and adaptive_equal and copied_equal):
        console.print("answers differ from those without drafts")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
