"""A very long prompt through scheduler and worker: what a token costs at which position, and memory.

    python bench/long_context.py [--tokens 131072] [--threads 1] [--minutes 0]

One cold prefill of the embedded model in steps of at most 512 tokens, the time of attention taken apart from
the rest. Attention reads every earlier token, so that its share grows with the position; all other
layers must cost the same from the first to the last token. Then the prompt is asked for again with a few
more tokens: they are all that is computed. CPU time of the process; resident memory against the budget.

The model was trained on far shorter texts: this measures cost and memory, not what it answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from common import RESULTS, calibration_ms, console, print_machine, print_table, write_json
from rich.progress import Progress

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.kernels.api import Kernels, select_kernels
from milepost.kernels.native_library import native_library
from milepost.models import load_model
from milepost.runner.worker import TorchWorker

EMBEDDED = Path(__file__).resolve().parent.parent / "src" / "milepost" / "assets" / "milepost-tiny"
STEP_TOKENS = 512
NUM_PARTS = 8
NUM_ANSWER_TOKENS = 4
NUM_NEW_TOKENS = 40
SPARE_CHECKPOINTS = 64
"""Room for checkpoints, so that their number is bounded by the budget and not by the prompt."""


@dataclass
class Part:
    """Tokens [start, end) of the prompt. CPU milliseconds per token."""

    start: int
    end: int = 0
    attention_ms: float = 0.0
    other_ms: float = 0.0
    rss_bytes: int = 0


class Attention:
    """Kernels that add up the CPU time of attention."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, kernels: Kernels) -> Kernels:
        return dataclasses.replace(
            kernels,
            attend_latents=self._timed(kernels.attend_latents),
            gqa_mixer=self._timed(kernels.gqa_mixer),
        )

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            result = function(*arguments)
            self.seconds += time.process_time() - start
            return result

        return run


def rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Run:
    """One model under one budget."""

    def __init__(self, num_tokens: int, dtype: str) -> None:
        self.attention = Attention()
        model = load_model(EMBEDDED, dtype=dtype, kernels=self.attention.timed(select_kernels()))
        geometry = model.geometry(32)
        max_tokens = num_tokens + NUM_NEW_TOKENS + 2 * NUM_ANSWER_TOKENS
        self.cache_bytes = geometry.request_bytes(max_tokens) + SPARE_CHECKPOINTS * geometry.checkpoint_bytes
        cache = CacheConfig(self.cache_bytes, 32)
        self.scheduler = Scheduler(geometry, cache, SchedulerConfig(STEP_TOKENS, 4, max_tokens))
        self.worker = TorchWorker(model, geometry, self.cache_bytes)
        self.rss_before = rss_bytes()
        rng = Random(5)
        self.tokens = array("I", rng.choices(range(16, model.vocab_size), k=max_tokens))
        self._steps = 0

    def ask(self, request_id: int, num_tokens: int, after_step: Callable[[int, float], bool]) -> int:
        """Runs a request; `after_step(position, CPU seconds)` may end it. The tokens it reused."""
        request = Request(
            request_id,
            self.tokens[:num_tokens],
            SamplingParams(temperature=0.0),
            max_tokens=NUM_ANSWER_TOKENS,
        )
        num_cached = 0
        self.scheduler.add(request)
        while self.scheduler.has_unfinished_requests:
            start = time.process_time()
            self._steps += 1
            result = self.worker.execute(self.scheduler.schedule(float(self._steps)))
            if result.error is not None:
                raise RuntimeError(result.error)
            for update in self.scheduler.commit(result):
                num_cached += update.reuse.num_cached_tokens if update.reuse is not None else 0
            if not after_step(request.num_processed, time.process_time() - start):
                self.scheduler.abort(request_id)
        return num_cached


def prefill(run: Run, num_tokens: int, seconds_left: float, progress: Progress) -> list[Part]:
    """Parts of equal length; fewer of them if time runs out (`seconds_left` 0 = no limit)."""
    task = progress.add_task(f"{num_tokens:,} tokens", total=num_tokens)
    deadline = time.monotonic() + seconds_left
    part_tokens = -(-num_tokens // NUM_PARTS)
    parts = [Part(0)]
    spent = run.attention.seconds

    def after_step(position: int, seconds: float) -> bool:
        nonlocal spent
        part = parts[-1]
        if position > num_tokens:
            return True
        attention, spent = run.attention.seconds - spent, run.attention.seconds
        part.attention_ms += 1e3 * attention
        part.other_ms += 1e3 * (seconds - attention)
        part.end, part.rss_bytes = position, rss_bytes()
        progress.update(task, completed=position)
        if position >= part.start + part_tokens and position < num_tokens:
            parts.append(Part(position))
        return not seconds_left or time.monotonic() < deadline

    run.ask(1, num_tokens, after_step)
    parts = [part for part in parts if part.end]
    for part in parts:
        part.attention_ms /= part.end - part.start
        part.other_ms /= part.end - part.start
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of the native kernels")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0 = run to the end")
    parser.add_argument("--json", type=Path, default=RESULTS / "long_context.json")
    given = parser.parse_args()
    calibration = calibration_ms()
    library = native_library().module
    if library is not None:
        library.set_num_threads(given.threads)
    run = Run(given.tokens, given.dtype)
    started = time.monotonic()
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        parts = prefill(run, given.tokens, 60 * given.minutes, progress)
    wall_seconds = time.monotonic() - started
    print_table(
        f"Cold prefill of {given.tokens:,} tokens, {given.dtype}, threads: {given.threads}, CPU ms a token",
        ["tokens", "attention", "everything else", "resident MB"],
        [[f"{p.start:,}-{p.end:,}", p.attention_ms, p.other_ms, p.rss_bytes / 1e6] for p in parts],
    )
    result: dict[str, Any] = {
        "num_tokens": given.tokens,
        "num_processed": parts[-1].end,
        "wall_seconds": wall_seconds,
        "cache_bytes": run.cache_bytes,
        "mapped_bytes": run.worker.mapped_bytes(),
        "rss_before_bytes": run.rss_before,
        "parts": [dataclasses.asdict(part) for part in parts],
    }
    console.print(
        f"{parts[-1].end:,} tokens in {wall_seconds:,.0f} s; resident {parts[-1].rss_bytes / 1e6:,.0f} MB, "
        f"{run.rss_before / 1e6:,.0f} MB of them before; cache budget {run.cache_bytes / 1e6:,.0f} MB",
        soft_wrap=True,
    )
    if parts[-1].end == given.tokens:
        start = time.process_time()
        num_asked = given.tokens + NUM_NEW_TOKENS
        result["num_cached"] = run.ask(2, num_asked, lambda position, seconds: True)
        result["num_computed"] = num_asked - result["num_cached"]
        result["again_cpu_seconds"] = time.process_time() - start
        console.print(
            f"asked again with {NUM_NEW_TOKENS} more: {result['num_cached']:,} tokens reused, "
            f"{result['num_computed']} computed, {result['again_cpu_seconds']:.2f} s of CPU time"
        )
    print_machine(calibration)
    write_json(given.json, "long_context", calibration, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
