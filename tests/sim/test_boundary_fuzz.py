"""Prompts at mU - 1, mU and mU + 1 under every kind of disturbance, against a cold run.

CI runs a pairwise covering array over the factors below: any two values of any two factors meet in
some case. The long run adds random combinations; its seed is printed.
"""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.sim.fakes import FailAt
from milepost.sim.model import TrueSequence
from milepost.sim.spec import RequestSpec
from milepost.sim.workload import greedy, random_tokens, seeded
from milepost.sim.world import World

FACTORS: dict[str, tuple[Any, ...]] = {
    "unit": (16, 17, 32, 100, 128, 1024),
    "alignment": (1, 16, 64, None),
    "step_tokens": (7, 61, "unit - 1", "unit + 1", "3 unit + 5", 100_000),
    "num_units": (1, 2, 5),
    "offset": (-1, 0, 1),
    "answer": (1, 2, "unit", "unit + 1"),
    "disturbance": (
        "none",
        "abort",
        "finish",
        "preempt",
        "evict",
        "before",
        "torn",
        "unacknowledged",
        "dropped",
    ),
    "moment": (1, 2, 4, 9),
    "later": ("resend", "echo + 1", "echo + unit", "cut 1", "cut unit", "fork in the middle", "sibling"),
    "groups": ((1, 1), (2, 1), (1, 2), (0, 1), (1, 0), (0, 2)),
    "room": (1.0, 2.3, 1000.0),
}


@dataclass(frozen=True)
class Case:
    """One value of every factor, in the order of `FACTORS`."""

    values: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        return self.values[list(FACTORS).index(name)]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(FACTORS, self.values, strict=True))


def covering_array(rng: Random, candidates: int = 40) -> list[Case]:
    """Greedy: the candidate that covers most of the pairs still missing is taken, until none is missing.
    Every candidate starts from a missing pair, so each one covers something."""
    names = list(FACTORS)
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(names)), 2)
        for a in FACTORS[names[i]]
        for b in FACTORS[names[j]]
    }
    cases = []
    while missing:
        ordered = sorted(missing, key=repr)
        best: tuple[int, tuple[Any, ...]] = (0, ())
        for _ in range(candidates):
            i, a, j, b = rng.choice(ordered)
            values = [rng.choice(FACTORS[name]) for name in names]
            values[i], values[j] = a, b
            best = max(best, (len(pairs_of(values) & missing), tuple(values)), key=lambda entry: entry[0])
        cases.append(Case(best[1]))
        missing -= pairs_of(best[1])
    return cases


def pairs_of(values: Any) -> set[tuple[int, Any, int, Any]]:
    return {(i, values[i], j, values[j]) for i, j in combinations(range(len(values)), 2)}


def tokens_of(value: int | str, unit: int) -> int:
    sizes = {"unit": unit, "unit - 1": unit - 1, "unit + 1": unit + 1, "3 unit + 5": 3 * unit + 5}
    return value if isinstance(value, int) else sizes[value]


def make_world(case: Case, max_len: int) -> World:
    num_attention, num_recurrent = case.groups
    geometry = CacheGeometry(
        match_unit=case.unit,
        attention=tuple(AttentionGroupSpec(f"attention {i}", 40 + 70 * i) for i in range(num_attention)),
        recurrent=tuple(
            RecurrentGroupSpec(f"recurrent {i}", 5000 + 9000 * i, case.alignment)
            for i in range(num_recurrent)
        ),
    )
    return World(
        geometry,
        CacheConfig(
            round(case.room * geometry.request_bytes(max_len)),
            match_unit=case.unit,
            decode_interval=case.unit,
        ),
        SchedulerConfig(tokens_of(case.step_tokens, case.unit), 3, max_len),
    )


def later_prompt(case: Case, prompt: array[int], echoed: array[int]) -> array[int]:
    rng = Random(99)
    if case.later == "echo + 1":
        return echoed + random_tokens(rng, 1)
    if case.later == "echo + unit":
        return echoed + random_tokens(rng, case.unit)
    if case.later in ("cut 1", "cut unit"):
        return prompt[: max(1, len(prompt) - (1 if case.later == "cut 1" else case.unit))]
    if case.later == "fork in the middle":
        return prompt[: len(prompt) // 2] + random_tokens(rng, case.unit + 1)
    return prompt[:]


def disturb(one: World, case: Case, request_id: int) -> None:
    """What happens before step `case.moment`; faults strike in that step."""
    if request_id in one.running and case.disturbance in ("abort", "finish", "preempt"):
        getattr(one, case.disturbance)(request_id)
    elif case.disturbance == "evict":
        one.evict(100)


def arm(one: World, case: Case) -> None:
    fails = FailAt(case.moment)
    faults = one.worker.faults
    if case.disturbance == "before":
        faults.fails_before = fails
    elif case.disturbance == "torn":
        faults.fails_torn = fails
    elif case.disturbance == "unacknowledged":
        faults.acknowledges = lambda chunk, export: not fails()
    elif case.disturbance == "dropped":
        faults.drops = lambda chunk: fails()


def run_case(case: Case) -> World:
    """A request, disturbed once; then a later one and a resend. The world checks answers, contents,
    invariants and the bound after every action."""
    unit = case.unit
    length = max(1, case.num_units * unit + case.offset)
    answer = tokens_of(case.answer, unit)
    rng = Random(length)
    prompt = random_tokens(rng, length)
    sampling = greedy() if length % 2 else seeded(rng)
    one = make_world(case, 2 * (length + answer + 2 * unit))
    arm(one, case)
    wanted = ((length // 2, "message"), (max(0, length - 2), "history"))
    first = one.add(RequestSpec(prompt, answer, sampling, wanted))
    if case.later == "sibling":
        one.add(RequestSpec(prompt[: 1 + length // 2] + random_tokens(rng, unit), answer, sampling))
    for step in range(1, case.moment + 1):
        is_last = step == case.moment
        if is_last and step % 2:
            disturb(one, case, first)
        one.schedule()
        if is_last and not step % 2:
            disturb(one, case, first)
        one.execute()
    one.drain()
    cold = TrueSequence(one.worker.model, prompt, sampling, one.worker.tree.root(()))
    echoed = prompt + array("I", cold.outputs(answer))
    for later in (later_prompt(case, prompt, echoed), prompt):
        one.add(RequestSpec(later, 2, sampling))
        one.drain()
    assert all(outcome.finish_reason is not None for outcome in one.outcomes.values())
    return one


CASES = covering_array(Random(5))


def test_the_array_covers_every_pair() -> None:
    covered = set().union(*(pairs_of(case.values) for case in CASES))
    wanted = sum(len(a) * len(b) for a, b in combinations(FACTORS.values(), 2))
    assert len(covered) == wanted
    assert len(CASES) < 2 * 9 * 7


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairwise(case: Case) -> None:
    run_case(case)


@pytest.mark.slow
def test_random_combinations() -> None:
    seed = int(os.environ.get("MILEPOST_SEED") or time.time())
    print(f"\nboundary fuzz: MILEPOST_SEED={seed}")
    rng = Random(seed)
    for _ in range(1500):
        case = Case(tuple(rng.choice(values) for values in FACTORS.values()))
        try:
            run_case(case)
        except Exception as error:
            error.add_note(f"MILEPOST_SEED={seed}: {case}")
            raise
