"""The pull request's workload: streams that grow by a fixed amount, with a barrier after each round.

    python bench/growing.py [--model DIR] [--size 100m] [--dtype bfloat16] [--pairs 3]

Eight streams grow from 120k to 164k tokens by 2k a round. A match unit of 128 tokens is compared with one
of a whole state block, 1,536 tokens, where hits can only land on blocks. Once in the simulator at the
sizes of Kimi K3, with a cost model that is arithmetic and not a measurement; once for real, scaled down
forty times (3k to 4.1k by 50; units 4 and 40 instead of 3.2 and 38.4), on a random model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from dataclasses import asdict, dataclass
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
from milepost.runner.worker import TorchWorker
from milepost.sim.cost import CostModel
from milepost.sim.geometries import named_shape
from milepost.sim.replay import ReplayOptions, ReplayRequest, replay

PUBLISHED_TTFT_CHANGE = -0.2557
"""Reported by the pull request: mean time to first token, match unit 128 against none."""

K3_ACTIVE_PARAMETERS = 104e9
K3_ATTENTION_FLOPS_PER_PAIR = 24 * 96 * 2 * (192 + 128)
"""24 MLA layers, 96 heads, expanded form: a multiply and an add per dimension of key and value."""
K3_SUSTAINED_FLOPS = 8 * 1e15
"""Eight accelerators; the ratio does not depend on it."""
K3_STEP_TOKENS = 8192
SCALED_STEP_TOKENS = 208
"""Tokens per step. If a whole round fits one step, all streams end together and the ratio shrinks."""


@dataclass(frozen=True)
class Shape:
    """Sizes in tokens."""

    num_streams: int
    first: int
    last: int
    grow: int


@dataclass
class Outcome:
    """Totals after the first round, in which everything is cold."""

    match_unit: int
    num_prompt_tokens: int
    num_computed_tokens: int
    mean_ttft: float


def stream_tokens(shape: Shape, vocabulary: int) -> list[array[int]]:
    rng = Random(7)
    return [array("I", rng.choices(range(1, vocabulary), k=shape.last)) for _ in range(shape.num_streams)]


def rounds(shape: Shape) -> list[int]:
    return list(range(shape.first, shape.last + 1, shape.grow))


def simulated(shape: Shape, match_unit: int) -> Outcome:
    """Kimi K3 sizes through the real core; rounds are far apart, so that each ends before the next."""
    streams = stream_tokens(shape, 100_000)

    def request(length: int, number: int, stream: array[int]) -> ReplayRequest:
        return ReplayRequest(1e7 * number, length, 1, lambda: stream[:length])

    requests = [request(length, n, s) for n, length in enumerate(rounds(shape)) for s in streams]
    cost = CostModel(
        seconds_per_token=2 * K3_ACTIVE_PARAMETERS / K3_SUSTAINED_FLOPS,
        seconds_per_attended_token=K3_ATTENTION_FLOPS_PER_PAIR / K3_SUSTAINED_FLOPS,
    )
    options = ReplayOptions(step_tokens=K3_STEP_TOKENS, cost=cost)
    result = replay(requests, named_shape("kimi-k3").geometry(match_unit), 1 << 50, options)
    warm = slice(shape.num_streams, None)
    prompt = sum(result.num_prompt_tokens[warm])
    ttft = result.seconds_to_first_token[warm]
    return Outcome(match_unit, prompt, prompt - sum(result.num_cached_tokens[warm]), sum(ttft) / len(ttft))


def measured(model_directory: Path, shape: Shape, match_unit: int, dtype: str, progress: Progress) -> Outcome:
    """The same on a real model, in this process."""
    model = load_model(model_directory, dtype=dtype)
    geometry = model.geometry(match_unit)
    cache_bytes = 4 * shape.num_streams * geometry.request_bytes(shape.last + 1) + (1 << 30)
    scheduler = Scheduler(
        geometry,
        CacheConfig(cache_bytes, match_unit=match_unit, checkpoint_interval=0, decode_interval=0),
        SchedulerConfig(SCALED_STEP_TOKENS, shape.num_streams, shape.last + 2),
    )
    worker = TorchWorker(model, geometry, cache_bytes)
    streams = stream_tokens(shape, model.vocab_size)
    lengths = rounds(shape)
    task = progress.add_task(f"match unit {match_unit}", total=len(lengths))
    outcome = Outcome(match_unit, 0, 0, 0.0)
    ttfts: list[float] = []
    number = 0
    for round_number, length in enumerate(lengths):
        start = time.perf_counter()
        for stream in streams:
            number += 1
            scheduler.add(Request(number, stream[:length], SamplingParams(temperature=0.0), max_tokens=1))
        while scheduler.has_unfinished_requests:
            for update in scheduler.commit(worker.execute(scheduler.schedule(time.perf_counter()))):
                if update.error is not None:
                    raise RuntimeError(update.error)
                if round_number and update.reuse is not None:
                    outcome.num_prompt_tokens += update.reuse.num_prompt_tokens
                    outcome.num_computed_tokens += length - update.reuse.num_cached_tokens
                if round_number and update.tokens:
                    ttfts.append(time.perf_counter() - start)
        progress.advance(task)
    worker.close()
    progress.remove_task(task)
    outcome.mean_ttft = sum(ttfts) / len(ttfts)
    return outcome


def report(title: str, fine: list[Outcome], coarse: list[Outcome], unit: str) -> dict[str, float]:
    tokens = fine[0].num_computed_tokens / coarse[0].num_computed_tokens
    ratios = [f.mean_ttft / c.mean_ttft for f, c in zip(fine, coarse, strict=True)]
    rows: list[list[object]] = [
        [
            f"{outcomes[0].match_unit}",
            outcomes[0].num_prompt_tokens,
            outcomes[0].num_computed_tokens,
            median([o.mean_ttft for o in outcomes]),
        ]
        for outcomes in (fine, coarse)
    ]
    rows.append(["ratio", None, tokens, median(ratios)])
    print_table(title, ["match unit", "prompt tokens", "computed", f"mean first token, {unit}"], rows)
    return {"tokens_ratio": tokens, "ttft_ratio": median(ratios)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model directory; default: a random one")
    parser.add_argument("--size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved runs of the real model")
    parser.add_argument("--units", type=int, nargs=2, default=[4, 40], help="of the real model")
    parser.add_argument("--rounds", type=int, help="only so many rounds of the real model")
    parser.add_argument("--skip-simulated", action="store_true")
    parser.add_argument("--skip-measured", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "growing.json")
    given = parser.parse_args()
    calibration = calibration_ms()
    results: dict[str, object] = {}
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        if not given.skip_simulated:
            shape = Shape(8, 120_000, 164_000, 2_000)
            fine, coarse = simulated(shape, 128), simulated(shape, 1536)
            results["simulated"] = report(
                "Kimi K3 sizes, simulated: 8 streams, 120k to 164k by 2k", [fine], [coarse], "seconds"
            )
            console.print(f"the pull request reports {PUBLISHED_TTFT_CHANGE:+.2%} mean time to first token")
        if not given.skip_measured:
            last = 4_100 if given.rounds is None else min(4_100, 3_000 + 50 * (given.rounds - 1))
            shape = Shape(8, 3_000, last, 50)
            with tempfile.TemporaryDirectory() as scratch:
                directory = given.model or make_size(Path(scratch) / "model", given.size)
                fines, coarses = [], []
                for _ in range(given.pairs):
                    fines.append(measured(directory, shape, given.units[0], given.dtype, progress))
                    coarses.append(measured(directory, shape, given.units[1], given.dtype, progress))
            results["measured"] = report(
                f"random {given.size} model, {given.dtype}: 8 streams, 3,000 to {last:,} by 50, "
                f"{given.pairs} interleaved pairs",
                fines,
                coarses,
                "seconds",
            )
            results["runs"] = [asdict(o) for o in (*fines, *coarses)]
    print_machine(calibration)
    write_json(given.json, "growing", calibration, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
