"""Cost of the torch-free core: scheduling a full batch, and finding and reserving a long prompt.

    python bench/core.py [--num-requests 256] [--max-tokens 1048576] [--check] [--json FILE]

The worker is replaced by a function that acknowledges everything, outside of the timed sections.
`--check` exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common import (
    REPETITIONS,
    RESULTS,
    calibration_ms,
    console,
    median,
    print_machine,
    print_table,
    times_ms,
    write_json,
)

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.hashing import CacheDomain, KeyChain
from milepost.core.plan import ChunkResult, SampledToken, SamplingParams, StepPlan, StepResult
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.core.units import ceil_div, floor_to

MATCH_UNIT = 32
STEP_BOUND_MS = 1.78
"""A fifth of 8.9 ms, which vLLM 0.33 took for 256 decoding requests on a machine of this kind."""
GROWTH_BOUND = 3.0
"""Cost per token at the largest size over cost per token at the smallest, sixteen times shorter. 1 is
linear, a quadratic step would make it 16. Hashing is linear by construction: what it shows is what
memory and CPU caches of this machine add."""


def geometry() -> CacheGeometry:
    """One attention group, one recurrent group, sizes of a small hybrid model."""
    return CacheGeometry(
        MATCH_UNIT,
        (AttentionGroupSpec("attention", 1152),),
        (RecurrentGroupSpec("recurrent", 200_000),),
    )


def prompt(seed: int, num_tokens: int) -> array[int]:
    """Token ids that differ between seeds from the first one on."""
    return array("I", [(seed * 7919 + index * 104729 + 1) % 100_003 for index in range(num_tokens)])


def acknowledge(plan: StepPlan) -> StepResult:
    """The result of a worker that wrote everything and samples token 7."""
    results = [
        ChunkResult(
            chunk.request_id,
            chunk.end,
            [export.position for export in chunk.exports],
            [SampledToken(7)] * chunk.num_samples,
        )
        for chunk in plan.chunks
    ]
    return StepResult(plan.step_id, results)


# ------------------------------------------------------------------ schedule and commit
def decoding_scheduler(num_requests: int, num_prompt_tokens: int) -> Scheduler:
    """A scheduler whose requests all decode, spread evenly over a match unit."""
    sizes = geometry()
    budget = num_requests * 4 * sizes.request_bytes(num_prompt_tokens + 4096)
    scheduler = Scheduler(
        sizes,
        CacheConfig(cache_bytes=budget, match_unit=MATCH_UNIT),
        SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_model_len=65536),
    )
    sampling = SamplingParams(temperature=0.0)
    for number in range(num_requests):
        tokens = prompt(number, num_prompt_tokens + number % MATCH_UNIT)
        scheduler.add(Request(number, tokens, sampling, max_tokens=60_000))
    for step in range(10 * num_requests):
        plan = scheduler.schedule(float(step))
        scheduler.commit(acknowledge(plan))
        if len(plan.chunks) == num_requests and plan.num_tokens == num_requests:
            return scheduler
    raise RuntimeError("the batch never reached a state in which every request decodes")


def step_times_ms(
    scheduler: Scheduler, num_requests: int, repetitions: int
) -> tuple[list[float], list[float]]:
    """(schedule, commit) milliseconds per step: per repetition the mean over one match unit of steps,
    so that each repetition holds the same number of page and checkpoint boundaries."""
    schedule_ms, commit_ms = [], []
    for _ in range(repetitions):
        spent_schedule = spent_commit = 0.0
        for _ in range(MATCH_UNIT):
            start = time.perf_counter()
            plan = scheduler.schedule(1e6)
            spent_schedule += time.perf_counter() - start
            if len(plan.chunks) != num_requests:
                raise RuntimeError(f"{len(plan.chunks)} of {num_requests} requests in the step")
            result = acknowledge(plan)
            start = time.perf_counter()
            scheduler.commit(result)
            spent_commit += time.perf_counter() - start
        schedule_ms.append(spent_schedule * 1e3 / MATCH_UNIT)
        commit_ms.append(spent_commit * 1e3 / MATCH_UNIT)
    return schedule_ms, commit_ms


@dataclass
class StepCost:
    num_requests: int
    schedule_ms: float
    commit_ms: float
    best_step_ms: float
    median_step_ms: float


def measure_steps(num_requests: int, repetitions: int) -> StepCost:
    scheduler = decoding_scheduler(num_requests, 256)
    # The garbage collector is the interpreter's own and stays on, as in service; objects of the
    # set-up are frozen so that it does not walk them.
    gc.collect()
    gc.freeze()
    schedule_ms, commit_ms = step_times_ms(scheduler, num_requests, repetitions)
    gc.unfreeze()
    violations = scheduler.audit()
    if violations:
        raise RuntimeError(f"the measured run is not sound: {violations[:3]}")
    steps = [a + b for a, b in zip(schedule_ms, commit_ms, strict=True)]
    best = min(range(len(steps)), key=steps.__getitem__)
    return StepCost(num_requests, schedule_ms[best], commit_ms[best], steps[best], median(steps))


# ------------------------------------------------------------------ lookup and reservation
@dataclass
class PromptCost:
    num_tokens: int
    hashing_ms: float
    cold_ms: float
    warm_ms: float


class CachedPrompt:
    """One prompt and a cache that holds nothing of it, or after `fill` all of it up to the last unit."""

    def __init__(self, num_tokens: int) -> None:
        sizes = geometry()
        budget = 3 * sizes.request_bytes(num_tokens)
        self.cache = PrefixCache(sizes, CacheConfig(cache_bytes=budget, match_unit=MATCH_UNIT))
        self.num_tokens = num_tokens
        self.tokens = prompt(0, num_tokens)
        self.chain = self.hash_all()

    def hash_all(self) -> KeyChain:
        chain = KeyChain(self.tokens, CacheDomain(), MATCH_UNIT)
        chain.extend(ceil_div(self.num_tokens, MATCH_UNIT) - 1)
        return chain

    def look_up_and_reserve(self) -> int:
        """Tokens found. What was reserved is given back, so that a repetition finds the same."""
        match = self.cache.match(self.chain, self.num_tokens)
        lease = self.cache.open(match, self.chain, 1.0)
        reservation = self.cache.reserve(lease, self.num_tokens, [], 1.0)
        if reservation is None:
            raise RuntimeError("the budget does not hold the prompt")
        self.cache.rollback(lease, reservation)
        self.cache.release(lease, None, 1.0)
        return match.position

    def fill(self) -> None:
        """As if a request had processed the prompt and kept its `tail` checkpoint."""
        lease = self.cache.open(self.cache.match(self.chain, self.num_tokens), self.chain, 0.0)
        boundary = floor_to(self.num_tokens - 1, MATCH_UNIT)
        reservation = self.cache.reserve(lease, self.num_tokens, [(boundary, "tail")], 0.0)
        if reservation is None:
            raise RuntimeError("the budget does not hold the prompt")
        self.cache.confirm(lease, reservation)
        self.cache.publish(lease, self.num_tokens, [boundary], None, 0.0)
        self.cache.release(lease, None, 0.0)
        if self.look_up_and_reserve() != boundary:
            raise RuntimeError("the second lookup did not hit")


def best_of_each(functions: list[Callable[[], object]], repetitions: int) -> list[float]:
    """Best milliseconds of each function. The sizes take turns, so that a slow moment of the machine
    does not fall on one of them alone."""
    rounds = [[times_ms(function, 1)[0] for function in functions] for _ in range(repetitions)]
    return [min(column) for column in zip(*rounds, strict=True)]


def measure_prompts(sizes: list[int], repetitions: int) -> list[PromptCost]:
    """Milliseconds per prompt: its keys; lookup and reservation if nothing of it is cached; the same if
    all of it is cached up to the last unit."""
    prompts = [CachedPrompt(size) for size in sizes]
    hashing = best_of_each([entry.hash_all for entry in prompts], repetitions)
    cold = best_of_each([entry.look_up_and_reserve for entry in prompts], repetitions)
    for entry in prompts:
        entry.fill()
    warm = best_of_each([entry.look_up_and_reserve for entry in prompts], repetitions)
    return [PromptCost(*values) for values in zip(sizes, hashing, cold, warm, strict=True)]


def growth(costs: list[PromptCost], name: str) -> float:
    """Cost per token at the largest size over cost per token at the smallest."""
    first, last = costs[0], costs[-1]
    return (getattr(last, name) / last.num_tokens) / (getattr(first, name) / first.num_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=1 << 20, help="longest prompt of the second part")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--json", type=Path, default=RESULTS / "core.json")
    options = parser.parse_args()

    before = calibration_ms()
    print_machine(before)
    step = measure_steps(options.num_requests, options.repetitions)
    calibration = min(before, calibration_ms())
    print_table(
        f"Schedule + commit, {step.num_requests} decoding requests, best of {options.repetitions}",
        ["", "ms", "calibration loops"],
        [
            ["schedule", step.schedule_ms, step.schedule_ms / calibration],
            ["commit", step.commit_ms, step.commit_ms / calibration],
            ["step", step.best_step_ms, step.best_step_ms / calibration],
            ["step, median", step.median_step_ms, step.median_step_ms / calibration],
            ["bound", STEP_BOUND_MS, None],
        ],
    )

    sizes = [options.max_tokens >> shift for shift in (4, 3, 2, 1, 0)]
    costs = measure_prompts(sizes, options.repetitions)
    print_table(
        f"One prompt, match unit {MATCH_UNIT}: milliseconds, best of {options.repetitions}",
        ["tokens", "hashing", "lookup + reservation, cold", "lookup + reservation, cached"],
        [[f"{c.num_tokens:,}", c.hashing_ms, c.cold_ms, c.warm_ms] for c in costs],
    )
    ratios = {name: growth(costs, name) for name in ("hashing_ms", "cold_ms", "warm_ms")}
    print_table(
        "Cost per token, largest over smallest prompt (1 = linear)",
        ["hashing", "cold", "cached", "bound"],
        [[f"{ratios['hashing_ms']:.2f}", ratios["cold_ms"], ratios["warm_ms"], GROWTH_BOUND]],
    )
    results = {"step": asdict(step), "prompts": [asdict(c) for c in costs], "growth_per_token": ratios}
    write_json(options.json, "core", calibration, results)

    missed = []
    if step.best_step_ms > STEP_BOUND_MS:
        missed.append(f"a step takes {step.best_step_ms:.2f} ms, bound {STEP_BOUND_MS} ms")
    missed += [
        f"{name} grows {ratio:.2f} per token, bound {GROWTH_BOUND}"
        for name, ratio in ratios.items()
        if ratio > GROWTH_BOUND
    ]
    for line in missed:
        console.print(f"missed: {line}", highlight=False)
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
