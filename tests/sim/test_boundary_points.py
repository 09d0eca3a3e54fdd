"""Prompts beside and on unit boundaries, disturbed in every step, compared with an engine without a cache.

A case is one prompt of mU - 1, mU or mU + 1 tokens under one geometry and step budget. Something
happens to it in one of its steps; then it is sent again, cut, and continued. Two oracles agree or the
test fails: the fingerprint worker (every row saw its own prefix and nothing else), and the output
tokens of a scheduler without a cache.

A pairwise covering array runs always. `slow` runs random cases at every single step; the seed is
printed, and MILEPOST_FUZZ_SEED repeats it.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from tests.bugs.scene import Scene, Shape, outputs
from tests.support.pairwise import Row, pairwise, random_rows, row_id

from milepost.core.plan import ChunkPlan, StateExport
from milepost.core.request import CacheDomain
from milepost.sim.drafting import DraftingConfig
from milepost.sim.fakes import WorkerFaults
from milepost.sim.spec import Outcome
from milepost.sim.workload import greedy, seeded
from milepost.sim.world import Checks

FACTORS: dict[str, Any] = {
    "unit": (16, 32, 64, 128, 256, 512, 1024),
    "grid": (1, 16, 64, None),
    "offset": (-1, 0, 1),
    "num_units": (1, 2, 3),
    "step": (7, 53, 131, 499, 1501),
    "event": ("abort", "preempt", "evict", "unwritten", "fails before", "torn", "dropped", "stop"),
    "at": ("first", "early", "middle", "last of the prefill", "decode", "end"),
    "company": ("none", "a decoder", "a sibling", "the same prompt"),
    "groups": ((1, 1), (2, 1), (1, 2), (2, 3), (0, 1)),
    "memory": ("ample", "tight"),
    "outputs": (1, 3, 40),
    "drafts": (0, 1, 4, 8),
}
CASES = pairwise(FACTORS)


@dataclass
class Switch:
    """Faults that strike only while `event` names them; `dropped` strikes one request only."""

    event: str = ""
    victim: int = -1

    def faults(self) -> WorkerFaults:
        return WorkerFaults(
            fails_before=lambda: self.event == "fails before",
            fails_torn=lambda: self.event == "torn",
            acknowledges=self._acknowledges,
            drops=self._drops,
        )

    def _acknowledges(self, chunk: ChunkPlan, export: StateExport) -> bool:
        return self.event != "unwritten"

    def _drops(self, chunk: ChunkPlan) -> bool:
        return self.event == "dropped" and chunk.request_id == self.victim


@dataclass
class Trace:
    """Steps of the first request: all of them, and those of its prefill."""

    num_steps: int
    num_prefill_steps: int


class Case:
    """One row of the covering array; `run` plays it with its event in a given step."""

    def __init__(self, row: Row, seed: int) -> None:
        self.row = row
        self.seed = seed
        num_attention, num_recurrent = row["groups"]
        self.shape = Shape(row["unit"], row["grid"], num_attention, num_recurrent, row["step"], 8)
        self.num_tokens = row["num_units"] * row["unit"] + row["offset"]
        self.num_outputs = row["outputs"]

    def budget_bytes(self) -> int:
        units = -(-(self.num_tokens + self.num_outputs + 50) // self.shape.unit) + 1
        if self.row["memory"] == "ample":
            return 1 << 36
        return self.shape.bytes_of(num_units=2 * units, num_states=3)

    def run(self, at: int | None) -> Trace:
        """Play the case; the event happens in step `at` (None = never)."""
        switch = Switch()
        with Scene(
            self.shape,
            seed=self.seed,
            cache_bytes=self.budget_bytes(),
            interval=2 * self.shape.export_grid,
            faults=switch.faults(),
            drafting=DraftingConfig(self.row["drafts"], 0.3, is_ragged=True, seed=self.seed),
        ) as scene:
            prompt = scene.tokens(self.num_tokens)
            sampling = greedy() if self.seed % 2 else seeded(Random(self.seed))
            wanted = ((self.num_tokens // 2, "history"), (self.num_tokens // 3, "message"))
            self._company(scene, prompt)
            first = scene.submit(prompt, self.num_outputs, sampling=sampling, wanted=wanted)
            trace = self._disturb(scene, first, at, switch)
            followers = self._follow_up(scene, prompt, first, sampling)
            if at is None and self.row["memory"] == "ample":
                assert followers[0].num_cached_tokens == self.shape.floor(self.num_tokens - 1)
            self._compare(scene)
        return trace

    def _company(self, scene: Scene, prompt: array) -> None:
        """Who runs beside the disturbed request: nobody, somebody unrelated, or who shares its tokens."""
        kind = self.row["company"]
        if kind == "a decoder":
            scene.submit(scene.tokens(3), 30, domain=CacheDomain(b"other"))
        elif kind == "a sibling":
            scene.submit(prompt[: self.num_tokens // 2 + 1] + scene.tokens(4), 2)
        elif kind == "the same prompt":
            scene.submit(prompt, 2)

    def _disturb(self, scene: Scene, first: Outcome, at: int | None, switch: Switch) -> Trace:
        event = self.row["event"]
        world = scene.world
        step = num_prefill = 0
        switch.victim = first.request_id
        while first.finish_reason is None:
            is_now = step == at
            if is_now and event == "preempt":
                world.preempt(first.request_id)
            if is_now and event == "evict":
                world.evict(3)
            world.schedule()
            if is_now and event == "abort":
                world.abort(first.request_id)
            if is_now and event == "stop":
                world.finish(first.request_id)
            switch.event = event if is_now else ""
            world.execute()
            switch.event = ""
            step += 1
            if not first.output_tokens:
                num_prefill = step
            assert step < 20_000
        return Trace(step, num_prefill + 1)

    def _follow_up(self, scene: Scene, prompt: array, first: Outcome, sampling: Any) -> list[Outcome]:
        """The prompt again, cut at its last boundary, one token around it, continued, and echoed."""
        boundary = self.shape.floor(self.num_tokens)
        prompts = [prompt]
        prompts += [prompt[:length] for length in (boundary - 1, boundary, boundary + 1) if length > 0]
        prompts.append(prompt + first.output_tokens + scene.tokens(1))
        prompts.append(prompt[: self.num_tokens // 2] + scene.tokens(self.shape.unit + 1))
        one_by_one = [scene.send(tokens, self.num_outputs, sampling=sampling) for tokens in prompts]
        at_once = [scene.submit(tokens, 2, sampling=sampling) for tokens in prompts]
        scene.run_until(*at_once)
        return one_by_one

    def _compare(self, scene: Scene) -> None:
        """Every answer is a beginning of what an engine without a cache answers, all of it if it ended
        by itself."""
        cold = Scene(
            self.shape.varied(step_tokens=4096),
            enable_prefix_caching=False,
            checks=Checks(audit=False, contents=False),
        )
        for outcome in scene.world.outcomes.values():
            spec = outcome.spec
            expected = cold.submit(spec.prompt, spec.max_tokens, sampling=spec.sampling, domain=spec.domain)
            cold.run_until(expected)
            answer = outputs(outcome)
            assert answer == outputs(expected)[: len(answer)], self.row
            if outcome.finish_reason == "length":
                assert len(answer) == len(expected.output_tokens)


def step_of(at: str, trace: Trace) -> int:
    last_of_prefill = trace.num_prefill_steps - 1
    return {
        "first": 0,
        "early": last_of_prefill // 4,
        "middle": last_of_prefill // 2,
        "last of the prefill": last_of_prefill,
        "decode": min(trace.num_prefill_steps, trace.num_steps - 1),
        "end": trace.num_steps - 1,
    }[at]


@pytest.mark.parametrize("row", CASES, ids=row_id)
def test_boundaries(row: Row) -> None:
    case = Case(row, seed=len(row_id(row)))
    trace = case.run(None)
    case.run(step_of(row["at"], trace))


def test_the_rows_cover_every_pair() -> None:
    pairs = {(row["unit"], row["event"]) for row in CASES}
    assert len(pairs) == len(FACTORS["unit"]) * len(FACTORS["event"])
    assert len(CASES) < 90


MAX_POINTS = 40
NUM_RANDOM_CASES = 6


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_random_cases_at_every_step(part: int) -> None:
    """Each step of each case once; of long cases every so many steps, from a random first one."""
    given = os.environ.get("MILEPOST_FUZZ_SEED")
    seed = int(given) + part if given else Random().randrange(1 << 32)
    print(f"MILEPOST_FUZZ_SEED={seed - part}")
    rng = Random(seed)
    for number, row in enumerate(random_rows(FACTORS, rng, NUM_RANDOM_CASES)):
        case = Case(row, seed=rng.randrange(1 << 16))
        num_steps = case.run(None).num_steps
        stride = -(-num_steps // MAX_POINTS)
        for at in range(rng.randrange(stride), num_steps, stride):
            try:
                case.run(at)
            except Exception as error:
                error.add_note(f"MILEPOST_FUZZ_SEED={seed - part}, case {number}, step {at}: {row_id(row)}")
                raise
