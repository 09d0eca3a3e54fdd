"""Nothing is visible before the step that wrote it is over; slots, groups and grids are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.bugs.scene import SHAPES, SMALL_STATE_BYTES, Scene, Shape, outputs

from milepost.core.geometry import RecurrentGroupSpec
from milepost.core.plan import ZERO_STATE, ChunkPlan, StateExport, StepPlan
from milepost.sim.fakes import FailAt, WorkerFaults
from milepost.sim.spec import Outcome
from milepost.sim.world import Checks

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
half_of_the_shapes = pytest.mark.parametrize("shape", SHAPES[::2], ids=str)


def chunk_of(plan: StepPlan, outcome: Outcome) -> ChunkPlan:
    chunks = [chunk for chunk in plan.chunks if chunk.request_id == outcome.request_id]
    assert len(chunks) == 1
    return chunks[0]


# --- B13: published when scheduled, aborted before it was computed ---------------------------


@shapes
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_of_a_scheduled_chunk_publishes_only_what_ran(shape: Shape, num_steps: int) -> None:
    """Abort between schedule and execute. Whether or not the step then runs, a retry sees what
    finished steps wrote: all of it, and nothing else."""
    with Scene(shape) as scene:
        prompt = scene.tokens(5 * max(shape.unit, shape.step_tokens))
        first = scene.submit(prompt)
        for _ in range(num_steps):
            scene.world.step()
        finished = scene.request(first).num_processed
        chunk = chunk_of(scene.world.schedule(), first)
        assert chunk.start == finished
        scene.world.abort(first.request_id)
        assert scene.hit(prompt) <= finished
        retry = scene.submit(prompt, max_tokens=3)
        assert scene.hit(prompt) <= finished
        scene.world.execute()
        assert first.finish_reason == "abort"
        scene.run_until(retry)
        assert retry.num_cached_tokens == shape.floor(chunk.end)


def failing_step(kind: str, at: int) -> WorkerFaults:
    if kind == "before":
        return WorkerFaults(fails_before=FailAt(at))
    if kind == "torn":
        return WorkerFaults(fails_torn=FailAt(at))
    drops = FailAt(at)
    return WorkerFaults(drops=lambda chunk: drops())


@half_of_the_shapes
@pytest.mark.parametrize("kind", ["before", "torn", "dropped"])
def test_a_step_that_fails_publishes_nothing(shape: Shape, kind: str) -> None:
    """The step after the second never happens; the retry resumes from the second at most, and is right."""
    with Scene(shape, faults=failing_step(kind, 3)) as scene:
        prompt = scene.tokens(4 * max(shape.unit, shape.step_tokens))
        first = scene.submit(prompt)
        scene.world.step()
        scene.world.step()
        finished = scene.request(first).num_processed
        scene.world.schedule()
        retry = scene.submit(prompt, max_tokens=shape.unit + 1)
        scene.world.execute()
        assert first.finish_reason == "error"
        assert first.error
        scene.run_until(retry)
        assert (retry.num_cached_tokens or 0) <= finished
        assert retry.finish_reason == "length"
        assert scene.send(prompt).num_cached_tokens == shape.floor(len(prompt) - 1)


@pytest.mark.parametrize("step_tokens", [512, 500, 100, 4096])
@pytest.mark.parametrize("unit", [16, 64])
@pytest.mark.parametrize("num_retries", [1, 4])
def test_long_prompts_aborted_and_retried_over_and_over(
    unit: int, step_tokens: int, num_retries: int
) -> None:
    """Every retry is aborted one step later than the one before; none computes a finished token again."""
    shape = Shape(unit=unit, step_tokens=step_tokens)
    with Scene(shape) as scene:
        prompt = scene.tokens(4096)
        reached = 0
        for retry in range(num_retries):
            outcome = scene.submit(prompt)
            for _ in range(retry + 1):
                if outcome.finish_reason is None:
                    scene.world.step()
            if outcome.finish_reason is None:
                reached = scene.request(outcome).num_processed
                scene.world.schedule()
                scene.world.abort(outcome.request_id)
                scene.world.execute()
            assert scene.hit(prompt) >= shape.floor(min(reached, len(prompt) - 1))
        last = scene.send(prompt, max_tokens=2)
        assert last.num_cached_tokens is not None
        assert last.num_cached_tokens >= shape.floor(min(reached, len(prompt) - 1))


# --- B14: a slot shows its previous tenant ----------------------------------------------------


@shapes
def test_a_request_without_a_hit_starts_from_zero_in_used_slots(shape: Shape) -> None:
    """Fill every slot and page with other prefixes, free them, and look at the commands of a cold
    request that gets the same records."""
    units = 6
    budget = shape.bytes_of(num_units=2 * units, num_states=3)
    with Scene(shape, cache_bytes=budget) as scene:
        for _ in range(3):
            scene.send(scene.tokens(units * shape.unit - 1), max_tokens=2)
        tenants = [set(slots) for slots in scene.world.worker.slots.values()]
        assert all(tenants)
        scene.world.reset()
        cold = scene.submit(scene.tokens(units * shape.unit - 1), max_tokens=2)
        plan = scene.world.schedule()
        chunk = chunk_of(plan, cold)
        assert chunk.start == 0
        assert chunk.initial_slots == [ZERO_STATE] * shape.num_recurrent
        for group, slot in enumerate(chunk.running_slots):
            assert slot in tenants[group], "the slot should have had a tenant"
        scene.run_until(cold)
        assert cold.num_cached_tokens == 0


# --- B15: a hit on what the same step registers -----------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("shared_units", [1, 3])
@pytest.mark.parametrize("num_siblings", [2, 5])
def test_siblings_in_one_batch_compute_the_shared_prefix_once(
    shape: Shape, shared_units: int, num_siblings: int
) -> None:
    with Scene(shape) as scene:
        shared = scene.tokens(shared_units * shape.unit)
        tails = [1 + 7 * index for index in range(num_siblings)]
        siblings = [scene.submit(shared + scene.tokens(tail), max_tokens=2) for tail in tails]
        scene.run_until(*siblings)
        assert siblings[0].num_cached_tokens == 0
        for sibling in siblings[1:]:
            assert sibling.num_cached_tokens == len(shared)
        computed = sum(outcome.num_computed_tokens for outcome in siblings)
        assert computed == len(shared) + sum(tails) + num_siblings


@shapes
def test_waiting_siblings_do_not_hold_up_unrelated_requests(shape: Shape) -> None:
    """Two siblings wait for the first; a request behind them starts in the same step as ever."""
    roomy = shape.varied(step_tokens=max(shape.step_tokens, 64), max_num_seqs=64)
    with Scene(roomy) as scene:
        shared = scene.tokens(4 * roomy.step_tokens)
        leader = scene.submit(shared[: roomy.step_tokens // 2] + scene.tokens(1))
        siblings = [scene.submit(shared + scene.tokens(3)) for _ in range(3)]
        stranger = scene.submit(scene.tokens(5))
        plan = scene.world.schedule()
        ids = [chunk.request_id for chunk in plan.chunks]
        assert leader.request_id in ids
        if sum(chunk.end - chunk.start for chunk in plan.chunks) < roomy.step_tokens:
            assert stranger.request_id in ids
        scene.run_until(stranger)
        assert any(sibling.finish_reason is None for sibling in siblings)
        scene.run_until(leader, *siblings)


@half_of_the_shapes
@pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
def test_a_sibling_takes_over_when_its_leader_goes(shape: Shape, end: str) -> None:
    faults = WorkerFaults(drops=(drop := FailAt(2)) and (lambda chunk: drop())) if end == "fail" else None
    with Scene(shape, faults=faults) as scene:
        shared = scene.tokens(4 * max(shape.unit, shape.step_tokens))
        leader = scene.submit(shared + scene.tokens(2))
        follower = scene.submit(shared + scene.tokens(5), max_tokens=3)
        scene.world.step()
        if end == "abort":
            scene.world.abort(leader.request_id)
        elif end == "preempt":
            scene.world.preempt(leader.request_id)
        scene.run_until(leader, follower)
        assert follower.finish_reason == "length"
        rows = leader.num_computed_tokens + follower.num_computed_tokens
        lost = shape.step_tokens + shape.unit
        assert rows <= len(shared) + 2 + 5 + 3 + (lost if end == "fail" else shape.unit)


@shapes
@pytest.mark.parametrize("num_siblings", [2, 4])
def test_the_sibling_that_starts_first_leads(shape: Shape, num_siblings: int) -> None:
    """Siblings wait for a place; each that arrives has a higher priority than those before it. The one
    that starts first computes the shared part, the others reuse it."""
    with Scene(shape.varied(max_num_seqs=4)) as scene:
        busy = [scene.submit(scene.tokens(3), max_tokens=6, priority=-9) for _ in range(4)]
        while not busy[-1].output_tokens:
            scene.world.step()
        shared = scene.tokens(3 * shape.unit)
        siblings = [
            scene.submit(shared + scene.tokens(1 + index), priority=-index) for index in range(num_siblings)
        ]
        scene.run_until(*busy, *siblings)
        assert siblings[-1].num_cached_tokens == 0
        for sibling in siblings[:-1]:
            assert sibling.num_cached_tokens == len(shared)


# --- B16: the attention hit is kept when the state misses -------------------------------------


@shapes
@pytest.mark.parametrize("units", [1, 4, 8])
def test_pages_without_any_state_are_no_hit(shape: Shape, units: int) -> None:
    """Attention is cached up to a boundary whose states are all gone: the request starts at 0, says so,
    and leaves pages and a state that serve the next one."""
    with Scene(shape) as scene:
        shared = scene.tokens(units * shape.unit)
        scene.send(shared + scene.tokens(shape.unit + 3), wanted=((len(shared), "message"),))
        full = scene.world.outcomes[0].spec.prompt
        scene.free_interior_states(full)
        probe = shared + scene.tokens(5)
        match = scene.lookup(probe)
        assert match.hit.attention_units == units
        assert match.position == 0
        outcome = scene.submit(probe, max_tokens=shape.unit)
        plan = scene.world.schedule()
        chunk = chunk_of(plan, outcome)
        assert chunk.start == 0
        assert chunk.initial_slots == [ZERO_STATE] * shape.num_recurrent
        report = scene.request(outcome).reuse
        assert report.num_cached_tokens == 0
        assert report.num_tokens_lost_to_missing_state == len(shared)
        assert report.reason == "no_state"
        assert report.limiting_group.startswith("recurrent")
        scene.run_until(outcome)
        assert scene.hit(shared + scene.tokens(9)) == len(shared)


@shapes
def test_a_state_bound_by_the_path_limit_is_a_shorter_hit(shape: Shape) -> None:
    """`max_states_per_path=1` merges every state but the newest: pages stay, older boundaries do not hit."""
    with Scene(shape, max_states_per_path=1) as scene:
        prompt = scene.tokens(6 * shape.unit + 3)
        wanted = tuple((units * shape.unit, "marker") for units in (1, 2, 4))
        scene.send(prompt, wanted=wanted)
        assert scene.state_positions(prompt) == [6 * shape.unit]
        for units in (1, 2, 4):
            probe = prompt[: units * shape.unit] + scene.tokens(4)
            assert scene.hit(probe) == 0
            assert scene.lookup(probe).hit.attention_units == units
        branch = scene.send(prompt[: 4 * shape.unit] + scene.tokens(4), max_tokens=2)
        assert branch.num_cached_tokens == 0
        assert scene.send(prompt).num_cached_tokens == 6 * shape.unit


# --- B19: groups with equal specs -------------------------------------------------------------


@pytest.mark.parametrize("num_recurrent", [2, 3])
@pytest.mark.parametrize("num_attention", [1, 2])
@pytest.mark.parametrize("skew", [1, 4])
def test_groups_with_equal_specs_have_their_own_records(
    num_recurrent: int, num_attention: int, skew: int
) -> None:
    """Records of one group are held back so that ids differ between groups. A hit then reads, exports
    and decodes with each group's own ids."""
    shape = Shape(num_recurrent=num_recurrent, num_attention=num_attention, step_tokens=40)
    with Scene(shape, checks=Checks(audit=False)) as scene:
        memory = scene.scheduler.cache.memory
        held = []
        for pool in range(num_attention + num_recurrent):
            for _ in range(skew * pool):
                held.append((pool, memory.acquire(pool)))
        prompt = scene.tokens(5 * shape.unit + 3)
        scene.send(prompt)
        again = scene.submit(prompt + scene.tokens(20), max_tokens=2 * shape.unit)
        chunk = chunk_of(scene.world.schedule(), again)
        assert chunk.start == 5 * shape.unit
        for ids in (chunk.initial_slots, chunk.running_slots):
            assert len(set(ids)) == num_recurrent
        tables = scene.request(again).lease.page_tables
        assert len({table[0] for table in tables}) == num_attention
        scene.run_until(again)
        for pool, record in held:
            memory.release(pool, record)


# --- B21: export grid and match unit are two numbers ------------------------------------------


@pytest.mark.parametrize("unit", [16, 48, 64, 128])
@pytest.mark.parametrize("grid", [1, 16, 64, 96, 256])
@pytest.mark.parametrize("step_tokens", [4096, 300, 129])
def test_every_export_names_its_own_position(unit: int, grid: int, step_tokens: int) -> None:
    """The kernel exports every `grid` tokens, hits land every `unit`: each state is at the position it
    is filed under, and lies on both grids when it comes from inside a chunk."""
    shape = Shape(unit=unit, grid=grid, step_tokens=step_tokens)
    with Scene(shape, interval=2 * unit) as scene:
        prompt = scene.tokens(24 * unit + unit // 2)
        required = tuple((units * unit, "history") for units in (5, 7, 18, 22, 23))
        outcome = scene.submit(prompt, wanted=required)
        exported = []
        while outcome.finish_reason is None:
            plan = scene.world.schedule()
            for chunk in plan.chunks:
                for export in chunk.exports:
                    assert export.position == chunk.start + export.offset
                    assert export.position % unit == 0
                    assert export.position % grid == 0
                    exported.append(export.position)
            scene.world.execute()
        positions = scene.state_positions(prompt)
        assert set(exported) <= set(positions)
        assert {position for position, _ in required} <= set(positions)
        assert shape.floor(len(prompt) - 1) in positions
        for position in positions[::2]:
            resumed = scene.send(prompt[:position] + scene.tokens(3), max_tokens=2)
            assert resumed.num_cached_tokens == position


@pytest.mark.parametrize(
    ("grids", "common"), [((64, 96), 192), ((1, 64), 64), ((16, 24, 36), 144), ((64, None), None)]
)
def test_groups_with_different_grids_export_on_the_common_one(
    grids: tuple[int | None, ...], common: int | None
) -> None:
    specs = tuple(RecurrentGroupSpec(f"group {i}", SMALL_STATE_BYTES, grid) for i, grid in enumerate(grids))
    shape = Shape(step_tokens=1000)
    geometry = replace(shape.geometry, recurrent=specs)
    assert geometry.checkpoint_alignment == common
    with Scene(shape, geometry=geometry, interval=48) as scene:
        prompt = scene.tokens(615)
        scene.submit(prompt)
        while scene.world.is_busy:
            for chunk in scene.world.schedule().chunks:
                for export in chunk.exports:
                    assert common is not None
                    assert export.position % common == 0
            scene.world.execute()
        assert scene.send(prompt, max_tokens=2).num_cached_tokens == 608


# --- B22, B23: only written states can be found -----------------------------------------------


@half_of_the_shapes
def test_a_second_pass_over_thirty_prompts_reuses_and_answers_the_same(shape: Shape) -> None:
    """B22: the slot that is tracked is the slot that was written."""
    with Scene(shape) as scene:
        system = scene.tokens(2 * shape.unit + 5)
        prompts = [system + scene.tokens(shape.unit + 3 * index) for index in range(30)]
        passes = []
        for _ in range(2):
            batch = [scene.submit(prompt, max_tokens=3) for prompt in prompts]
            scene.run_until(*batch)
            passes.append(batch)
        for first, second in zip(*passes, strict=True):
            assert outputs(first) == outputs(second)
            assert second.num_cached_tokens == shape.floor(second.num_prompt_tokens - 1)


def refuse_nth(numbers: set[int]) -> tuple[Callable[[ChunkPlan, StateExport], bool], set[int]]:
    """Leaves chosen exports unwritten; also returns the set their positions are put into."""
    count = 0
    lost: set[int] = set()

    def acknowledges(chunk: ChunkPlan, export: StateExport) -> bool:
        nonlocal count
        count += 1
        if count in numbers:
            lost.add(export.position)
            return False
        return True

    return acknowledges, lost


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.grid is not None], ids=str)
@pytest.mark.parametrize("numbers", [{1}, {2, 3}, set(range(1, 100)), set()], ids=len)
def test_a_state_whose_write_was_dropped_is_never_found(shape: Shape, numbers: set[int]) -> None:
    """B23: one request decodes, another is prefilled in the same steps, some of its exports are not
    written. A third extends it: it resumes from the deepest state that was written."""
    acknowledges, lost = refuse_nth(numbers)
    roomy = shape.varied(step_tokens=max(shape.step_tokens, 2 * shape.unit), max_num_seqs=64)
    with Scene(roomy, faults=WorkerFaults(acknowledges=acknowledges)) as scene:
        first = scene.submit(scene.tokens(shape.unit - 1), max_tokens=400)
        while not first.output_tokens:
            scene.world.step()
        prompt = scene.tokens(300 if shape.unit < 32 else 6 * shape.unit + 12)
        wanted = tuple((position, "marker") for position in range(shape.unit, len(prompt), 4 * shape.unit))
        second = scene.submit(prompt, max_tokens=1, wanted=wanted)
        scene.run_until(second)
        assert first.finish_reason is None, "the step should have been mixed"
        scene.world.abort(first.request_id)
        written = scene.state_positions(prompt)
        tail = roomy.floor(len(prompt) - 1)
        counted = sum(n for (why, _), n in scene.counters.refusals.items() if why == "not_written")
        assert counted == len(lost)
        assert not lost & set(written)
        assert (tail in written) == (tail not in lost)
        third = scene.send(prompt + scene.tokens(10), max_tokens=3)
        assert third.num_cached_tokens == max(written, default=0)
        scene.world.worker.faults = WorkerFaults()
        scene.send(prompt + scene.tokens(10))
        assert scene.send(prompt + scene.tokens(10)).num_cached_tokens == tail


# --- B08, B09: the running column at every boundary -------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_decode_crosses_boundaries_in_recycled_records(shape: Shape, offset: int) -> None:
    """Prompts that end beside or on a boundary, decoded over three more, in records that others used.
    Before each row is computed its page and running slots are there."""
    budget = shape.bytes_of(num_units=12, num_states=4)
    with Scene(shape, cache_bytes=budget) as scene:
        for _ in range(4):
            scene.send(scene.tokens(5 * shape.unit), max_tokens=2)
        prompt = scene.tokens(2 * shape.unit + offset)
        outcome = scene.submit(prompt, max_tokens=3 * shape.unit)
        ends = []
        while outcome.finish_reason is None:
            plan = scene.world.schedule()
            chunk = chunk_of(plan, outcome)
            ends.append(chunk.end)
            lease = scene.request(outcome).lease
            assert lease.num_units == -(-chunk.end // shape.unit)
            assert all(slot >= 0 for slot in chunk.running_slots)
            scene.world.execute()
        assert ends[-1] == len(prompt) + 3 * shape.unit - 1
        assert len(outcome.output_tokens) == 3 * shape.unit


@shapes
def test_the_next_tokens_of_all_requests_fit_before_a_step_begins(shape: Shape) -> None:
    """B09 without drafts: many requests stand right before a boundary when memory for only some of
    the next pages is left. Nobody reads or writes outside of its table; all answers are right."""
    concurrency = 4
    budget = shape.bytes_of(num_units=2 * concurrency + 1, num_states=concurrency)
    roomy = shape.varied(max_num_seqs=64)
    with Scene(roomy, cache_bytes=budget) as scene:
        batch = [
            scene.submit(scene.tokens(shape.unit - 1), max_tokens=shape.unit + 2) for _ in range(concurrency)
        ]
        scene.run_until(*batch)
        assert all(len(outcome.output_tokens) == shape.unit + 2 for outcome in batch)
