"""What exactness costs: cold prefills of a model with latent attention in the modes of `--exactness`.

    python bench/exactness.py [--tokens 2048 8192] [--pairs 5] [--size 100m]

`exact` reads latents with absorbed queries everywhere, `prompt` expands keys and values for the rows of a
prompt, `off` for steps long enough to gain by it. CPU time, interleaved runs in one process, ratios taken
run by run. Other attention computes the same in all modes: there exactness costs nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random

from common import RESULTS, calibration_ms, console, median, print_machine, print_table, write_json
from make_model import EMBEDDED, SIZES, make_size
from rich.progress import Progress

from milepost.config import EXACT, EXACTNESS_MODES, CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models import load_model
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

STEP_TOKENS = 512
UNIT = 32


def prefill_seconds(model: LoadedModel, prompt: array[int]) -> float:
    """CPU time of one cold prompt through scheduler and worker, in steps of at most 512 tokens."""
    geometry = model.geometry(UNIT)
    cache_bytes = geometry.request_bytes(len(prompt) + 8) + 32 * geometry.checkpoint_bytes
    scheduler = Scheduler(
        geometry, CacheConfig(cache_bytes, UNIT), SchedulerConfig(STEP_TOKENS, 4, len(prompt) + 8)
    )
    worker = TorchWorker(model, geometry, cache_bytes)
    scheduler.add(Request(1, prompt, SamplingParams(temperature=0.0), max_tokens=1))
    seconds = 0.0
    steps = 0
    while scheduler.has_unfinished_requests:
        steps += 1
        plan = scheduler.schedule(float(steps))
        start = time.process_time()
        result = worker.execute(plan)
        seconds += time.process_time() - start
        scheduler.commit(result)
    worker.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", default="100m", choices=["embedded", *sorted(SIZES)])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, default=RESULTS / "exactness.json")
    given = parser.parse_args()
    calibration = calibration_ms()
    rows: list[list[object]] = []
    results: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(transient=True, console=console, disable=not console.is_terminal) as progress,
    ):
        directory = EMBEDDED if given.size == "embedded" else make_size(Path(scratch) / "model", given.size)
        models = {mode: load_model(directory, dtype=given.dtype, exactness=mode) for mode in EXACTNESS_MODES}
        for num_tokens in given.tokens:
            rng = Random(3)
            prompt = array("I", rng.choices(range(1, models[EXACT].vocab_size), k=num_tokens))
            seconds: dict[str, list[float]] = {mode: [] for mode in models}
            task = progress.add_task(f"{num_tokens:,} tokens", total=given.pairs * len(models))
            prefill_seconds(models[EXACT], prompt[:STEP_TOKENS])
            for _ in range(given.pairs):
                for mode, model in models.items():
                    seconds[mode].append(prefill_seconds(model, prompt))
                    progress.advance(task)
            results[str(num_tokens)] = seconds

            def ratio(mode: str, times: dict[str, list[float]] = seconds) -> float:
                return median([a / b for a, b in zip(times[EXACT], times[mode], strict=True)])

            rows.append([f"{num_tokens:,}", median(seconds[EXACT]), *map(ratio, EXACTNESS_MODES[1:])])
    print_table(
        f"Cold prefill, {given.size}, {given.dtype}, {given.pairs} interleaved runs, CPU time",
        ["tokens", "exact, s", *(f"exact / {mode}" for mode in EXACTNESS_MODES[1:])],
        rows,
    )
    print_machine(calibration)
    write_json(given.json, "exactness", calibration, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
