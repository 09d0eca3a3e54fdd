"""Speculation in the simulated world: nothing a request gets or leaves behind depends on drafts.

Also: the harness bites. Bugs of the kinds that speculation over recurrent states is known for, patched
into the real code or into the worker, are found.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core import outcome, scheduler
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.lease import Lease
from milepost.core.plan import (
    COUPLED,
    GREEDY,
    PROBABILISTIC,
    ChunkPlan,
    ChunkResult,
    SamplingParams,
    StepPlan,
    StepResult,
)
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.sim.drafting import SAMPLINGS as SAMPLINGS_OF_DRAFTS
from milepost.sim.drafting import DraftingConfig
from milepost.sim.fingerprint import FingerprintError, FingerprintWorker
from milepost.sim.model import FingerprintModel
from milepost.sim.spec import RequestSpec
from milepost.sim.swarm import ACTIONS, PROMPTS, Swarm, SwarmConfig, draw_geometry
from milepost.sim.world import Checks, SimulationError, World

UNIT = 4
LENGTHS = (UNIT - 1, UNIT, UNIT + 1, 2 * UNIT - 1, 2 * UNIT, 2 * UNIT + 1)
RATES = {"perfect": 0.0, "mediocre": 0.4, "adversarial": 1.0}


def make_world(
    drafting: DraftingConfig, *, grid: int | None = 1, num_recurrent: int = 2, step_tokens: int = 64
) -> World:
    geometry = CacheGeometry(
        match_unit=UNIT,
        attention=(AttentionGroupSpec("attention", 700), AttentionGroupSpec("other", 300)),
        recurrent=tuple(RecurrentGroupSpec(f"recurrent {i}", 4096, grid) for i in range(num_recurrent)),
    )
    return World(
        geometry,
        CacheConfig(1 << 26, match_unit=UNIT, checkpoint_interval=0, decode_interval=0),
        SchedulerConfig(step_tokens, 8, 4096),
        model=FingerprintModel(vocab_size=5),
        drafting=drafting,
    )


@dataclass
class Session:
    """What a few requests got, and what later ones could reuse."""

    answers: list[list[int]]
    cached: list[int]


def play(world: World, sampling: SamplingParams, *, num_outputs: int = 3 * UNIT + 1) -> Session:
    """Prompts around boundaries, three at a time; then each with its answer cut everywhere, and continued."""
    session = Session([], [])
    prompts = [array("I", [100 * i + j for j in range(length)]) for i, length in enumerate(LENGTHS)]
    for first in range(0, len(prompts), 3):
        ids = [
            world.add(RequestSpec(prompt, max_tokens=num_outputs - index, sampling=sampling))
            for index, prompt in enumerate(prompts[first : first + 3])
        ]
        world.drain()
        session.answers += [list(world.outcomes[request_id].output_tokens) for request_id in ids]
    for prompt, answer in zip(prompts, tuple(session.answers), strict=True):
        whole = prompt + array("I", answer)
        for tokens in (whole, whole + array("I", [7]), whole[:-1], whole[: len(prompt) + UNIT + 1]):
            request_id = world.add(RequestSpec(tokens, max_tokens=2, sampling=sampling))
            world.drain()
            cached = world.outcomes[request_id].num_cached_tokens
            assert cached is not None
            session.cached.append(cached)
            session.answers.append(list(world.outcomes[request_id].output_tokens))
    return session


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(seed=3),
    "stops": SamplingParams(seed=4, stop_token_ids=[1], min_tokens=3),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("grid", [1, 2, 3, None])
@pytest.mark.parametrize("rate", RATES)
def test_answers_and_hit_lengths_do_not_depend_on_drafts(rate: str, grid: int | None, name: str) -> None:
    plain = play(make_world(DraftingConfig(), grid=grid), SAMPLINGS[name])
    for num_drafts in range(9):
        is_ragged, is_own = num_drafts % 3 == 2, num_drafts % 2 == 0
        drafting = DraftingConfig(num_drafts, RATES[rate], is_ragged=is_ragged, is_own=is_own)
        world = make_world(drafting, grid=grid)
        assert play(world, SAMPLINGS[name]) == plain, num_drafts
        counters = world.scheduler.cache.counters
        assert (counters.num_draft_tokens > 0) == (num_drafts > 0)
        if rate == "perfect":
            assert counters.num_accepted_draft_tokens == counters.num_draft_tokens
        if rate == "adversarial":
            assert counters.num_accepted_draft_tokens == 0


@pytest.mark.parametrize("num_recurrent", [0, 1])
def test_models_with_few_recurrent_groups(num_recurrent: int) -> None:
    plain = play(make_world(DraftingConfig(), num_recurrent=num_recurrent), SAMPLINGS["sampled"])
    drafted = play(make_world(DraftingConfig(6, 0.2), num_recurrent=num_recurrent), SAMPLINGS["sampled"])
    assert drafted == plain


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_it_does_not_matter_who_drafts(name: str, grid: int) -> None:
    """A worker that drafts, sometimes less than it was asked for, is counted by what it made."""
    counted = []
    for is_own in (False, True):
        world = make_world(DraftingConfig(7, 0.3, is_ragged=True, is_own=is_own), grid=grid)
        made = 0
        execute = world.worker.execute

        def counting(plan: StepPlan) -> StepResult:
            nonlocal made
            made += sum(chunk.num_drafts for chunk in plan.chunks)
            assert not any(chunk.num_own_drafts for chunk in plan.chunks)
            return execute(plan)  # noqa: B023

        world.worker.execute = counting  # type: ignore[method-assign]
        session = play(world, SAMPLINGS[name])
        counters = world.scheduler.cache.counters
        assert counters.num_draft_tokens == made > counters.num_accepted_draft_tokens > 0
        counted.append(session)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("is_own", [False, True])
def test_plans_differ_by_how_drafts_are_drawn_in_one_field(is_own: bool) -> None:
    """Nothing in the core depends on it: it is carried to a worker that drafts."""
    made: dict[str, list[StepPlan]] = {}
    for sampling in SAMPLINGS_OF_DRAFTS:
        world = make_world(DraftingConfig(5, 0.3, is_ragged=True, is_own=is_own, sampling=sampling))
        plans = made[sampling] = []
        schedule = world.scheduler.schedule

        def keep(now: float) -> StepPlan:
            plans.append(schedule(now))  # noqa: B023
            return plans[-1]  # noqa: B023

        world.scheduler.schedule = keep  # type: ignore[method-assign]
        play(world, SAMPLINGS["sampled"])
        chunks = [chunk for plan in plans for chunk in plan.chunks]
        assert {c.draft_sampling for c in chunks if c.num_own_drafts} == ({sampling} if is_own else set())
        assert {c.draft_sampling for c in chunks if not c.num_own_drafts} == {GREEDY}
        assert sum(c.num_drafts for c in chunks) > 50
        for chunk in chunks:
            chunk.draft_sampling = GREEDY
    assert made[COUPLED] == made[GREEDY] == made[PROBABILISTIC]


def test_a_plan_that_asks_for_other_drafts_is_found() -> None:
    world = make_world(DraftingConfig(5, 0.0, is_own=True, sampling=COUPLED))
    assert world.scheduler.drafts is not None
    world.scheduler.drafts.draft_sampling = GREEDY
    with pytest.raises(FingerprintError, match="as 'greedy', configured is 'coupled'"):
        play(world, SAMPLINGS["sampled"])


def test_a_perfect_drafter_saves_steps_and_crosses_boundaries() -> None:
    """One pass of 1 + 8 rows crosses two boundaries of 4 tokens and leaves a checkpoint at each."""
    plain, drafted = make_world(DraftingConfig()), make_world(DraftingConfig(8, 0.0))
    for world in (plain, drafted):
        world.add(RequestSpec(array("I", range(9)), max_tokens=37, sampling=SAMPLINGS["greedy"]))
        world.drain()
    assert plain.num_steps - drafted.num_steps == 36 - 4
    decode = [w.scheduler.cache.counters.checkpoints_by_reason["decode"] for w in (plain, drafted)]
    assert decode[0] == decode[1] > 6


def test_drafts_take_no_rows_from_others() -> None:
    """Beside a long prefill, drafts use at most half of what the decoding requests leave."""
    world = make_world(DraftingConfig(8, 0.0), step_tokens=9)
    world.add(RequestSpec(array("I", range(3)), max_tokens=60, sampling=SAMPLINGS["greedy"]))
    world.step()
    world.add(RequestSpec(array("I", range(50, 150)), max_tokens=2, sampling=SAMPLINGS["greedy"]))
    for _ in range(8):
        plan = world.schedule()
        assert plan.num_tokens <= 9
        rows = {chunk.request_id: chunk.last_row_end - chunk.start for chunk in plan.chunks}
        assert rows[0] <= 5
        assert rows[1] >= 4
        world.execute()
    world.drain()


def test_a_full_cache_shortens_drafts_and_preempts_nobody() -> None:
    geometry = make_world(DraftingConfig()).geometry
    world = World(
        geometry,
        CacheConfig(geometry.request_bytes(9 * UNIT), match_unit=UNIT, checkpoint_interval=0),
        SchedulerConfig(64, 8, 8 * UNIT),
        drafting=DraftingConfig(6, 0.0),
    )
    request_id = world.add(RequestSpec(array("I", range(5)), max_tokens=7 * UNIT - 5))
    world.drain()
    assert len(world.outcomes[request_id].output_tokens) == 7 * UNIT - 5
    assert world.scheduler.cache.counters.num_preemptions == 0


# -- planted bugs ----------------------------------------------------------------------------------


def unaccepted_tokens_published(patch: pytest.MonkeyPatch) -> None:
    """Units are published up to the last row of the pass, accepted or not."""
    settle = outcome.settle_chunk

    def settle_rows(
        cache: PrefixCache, request: Request, chunk: ChunkPlan, result: ChunkResult | None, *rest: Any
    ) -> Any:
        if result is not None and chunk.num_drafts and request.lease is not None:
            num_tokens = len(request.tokens)
            request.tokens.frombytes(chunk.draft_tokens)
            exports = [export.position for export in chunk.exports]
            cache.publish(request.lease, chunk.last_row_end, exports, None, 0.0)
            del request.tokens[num_tokens:]
        return settle(cache, request, chunk, result, *rest)

    patch.setattr(scheduler, "settle_chunk", settle_rows)


def checkpoint_while_a_rollback_is_pending(patch: pytest.MonkeyPatch) -> None:
    """Where the accepted tokens end on a boundary, the state is kept before the rejected rows are undone."""
    wrong_state(slice(None), only_on_boundaries=True)(patch)


def wrong_state(groups: slice, *, only_on_boundaries: bool = False) -> Callable[[pytest.MonkeyPatch], None]:
    """The running state also holds the rejected rows, in some groups."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        write = FingerprintWorker._write

        def write_rows(
            self: FingerprintWorker, chunk: ChunkPlan, starts: dict[int, int]
        ) -> ChunkResult | None:
            result = write(self, chunk, starts)
            is_hit = result is not None and result.end < chunk.last_row_end
            if result is not None and is_hit and not (only_on_boundaries and result.end % self.match_unit):
                path = self._truth[chunk.request_id].path[chunk.end : chunk.end + 1]
                self.tree.extend(path, array("I", chunk.draft_tokens))
                pools = self.geometry.running_pools
                for pool, slot in list(zip(pools, chunk.running_slots, strict=True))[groups]:
                    self._set_slot(pool, slot, path[-1])
            return result

        patch.setattr(FingerprintWorker, "_write", write_rows)

    return plant


def state_after_a_padded_row(patch: pytest.MonkeyPatch) -> None:
    """Chunks of a step are padded to the longest one, and the state has read the padding."""
    write = FingerprintWorker._write

    def write_padded(self: FingerprintWorker, chunk: ChunkPlan, starts: dict[int, int]) -> ChunkResult | None:
        result = write(self, chunk, starts)
        if result is not None and chunk.num_samples and not chunk.num_drafts and len(starts) > 1:
            path = self._truth[chunk.request_id].path[chunk.end : chunk.end + 1]
            self.tree.extend(path, array("I", [0]))
            for pool, slot in zip(self.geometry.running_pools, chunk.running_slots, strict=True):
                self._set_slot(pool, slot, path[-1])
        return result

    patch.setattr(FingerprintWorker, "_write", write_padded)


def state_written_in_place(patch: pytest.MonkeyPatch) -> None:
    """Verification writes the slot it starts from."""
    patch.setattr("milepost.core.drafts._part", lambda cache, lease, reservation, now: True)


def slot_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The slot the verified chunk started from is not given back."""

    take = Lease.take_reserved

    def forget(self: Lease) -> tuple[list[list[int]], list[int] | None]:
        self.previous = None
        return take(self)

    patch.setattr(Lease, "take_reserved", forget)


def drafts_accepted_unseen(patch: pytest.MonkeyPatch) -> None:
    """The worker accepts every draft, whatever it sampled there."""
    write = FingerprintWorker._write

    def write_everything(
        self: FingerprintWorker, chunk: ChunkPlan, starts: dict[int, int]
    ) -> ChunkResult | None:
        result = write(self, chunk, starts)
        if result is not None and chunk.num_drafts:
            last = result.sampled[-1]
            drafts = [replace(last, token_id=token) for token in array("I", chunk.draft_tokens)]
            result.sampled = [*drafts, last]
            result.end = chunk.last_row_end
        return result

    patch.setattr(FingerprintWorker, "_write", write_everything)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "unaccepted tokens published": unaccepted_tokens_published,
    "a checkpoint while a rollback is pending": checkpoint_while_a_rollback_is_pending,
    "the state holds rejected rows": wrong_state(slice(None)),
    "one group rewound and not the other": wrong_state(slice(1, None)),
    "the state after a padded row": state_after_a_padded_row,
    "verified in place": state_written_in_place,
    "the slot before is leaked": slot_left_behind,
    "drafts accepted unseen": drafts_accepted_unseen,
}
FINDINGS = (FingerprintError, SimulationError, ValueError)


def run(seed: int) -> Swarm:
    rng = Random(seed)
    geometry = draw_geometry(rng)
    while (
        len(geometry.recurrent) != 2
        or not geometry.attention
        or geometry.checkpoint_alignment != 1
        or geometry.match_unit < 3
    ):
        geometry = draw_geometry(rng)
    unit = geometry.match_unit
    max_len = 18 * unit
    config = SwarmConfig(
        geometry,
        CacheConfig(
            round(geometry.request_bytes(max_len) * rng.choice((2.0, 6.0))),
            match_unit=unit,
            decode_interval=2 * unit,
        ),
        SchedulerConfig(48, 4, max_len),
        actions={**dict.fromkeys(ACTIONS, 0.2), "step": 8.0, "add": 2.0, "reset": 0.01},
        prompts=dict.fromkeys(PROMPTS, 1.0),
        drafting=DraftingConfig(rng.randrange(2, 9), error_rate=0.4, seed=seed, is_own=seed % 2 == 1),
    )
    swarm = Swarm(rng, config, Checks())
    swarm.run(1500)
    return swarm


@pytest.mark.parametrize("seed", range(6))
def test_the_code_as_it_is_is_clean(seed: int) -> None:
    counters = run(seed).world.scheduler.cache.counters
    assert counters.num_drafts > 20
    assert 0 < counters.num_accepted_draft_tokens < counters.num_draft_tokens


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("seed", range(6))
def test_planted_bugs_are_found(bug: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(FINDINGS):
        run(seed)
