"""Checkpoints with another layout than running states: other pools, no state that changes hands."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from tests.core.harness import RECORD_BYTES, Harness, make_cache, make_chain, make_geometry, numbered
from tests.core.snapshot import snapshot

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core import reasons
from milepost.core.admission import in_use_bytes
from milepost.core.drafts import DraftPlanner
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.memory import Memory
from milepost.core.scheduler import Scheduler
from milepost.errors import ConfigError
from milepost.sim.drafting import DraftingConfig
from milepost.sim.model import FingerprintModel
from milepost.sim.spec import RequestSpec
from milepost.sim.world import World

UNIT = 4


def apart(num_recurrent: int = 1, alignment: int | None = 1) -> CacheGeometry:
    """A page is one record of 4 KiB, a checkpoint two, a running state four."""
    geometry = make_geometry(UNIT, num_recurrent=num_recurrent, alignment=alignment)
    specs = tuple(
        dataclasses.replace(spec, state_bytes=4 * RECORD_BYTES, checkpoint_bytes=2 * RECORD_BYTES - 5)
        for spec in geometry.recurrent
    )
    return dataclasses.replace(geometry, recurrent=specs)


def test_sizes_and_pools() -> None:
    geometry = apart(num_recurrent=2)
    assert geometry.keeps_states_apart
    assert geometry.pool_record_bytes == tuple(RECORD_BYTES * n for n in (1, 2, 2, 4, 4))
    assert (list(geometry.checkpoint_pools), list(geometry.running_pools)) == ([1, 2], [3, 4])
    assert geometry.segment_record_bytes == geometry.pool_record_bytes[:3]
    assert (geometry.checkpoint_bytes, geometry.running_bytes) == (4 * RECORD_BYTES, 8 * RECORD_BYTES)
    assert (geometry.kept_state_bytes, geometry.state_bytes) == (4 * RECORD_BYTES - 10, 8 * RECORD_BYTES)
    # A request starts from a checkpoint that it cannot run in place of.
    assert geometry.request_bytes(5) == (2 + 4 + 8) * RECORD_BYTES
    assert geometry.max_tokens_for(14 * RECORD_BYTES) == 8


def test_one_group_that_is_kept_apart_gives_all_of_them_pools_of_their_own() -> None:
    groups = (RecurrentGroupSpec("a", 9000), RecurrentGroupSpec("b", 9000, checkpoint_bytes=100))
    geometry = CacheGeometry(UNIT, (), groups)
    assert geometry.pool_record_bytes == (12288, 4096, 12288, 12288)


def test_without_another_layout_there_is_one_pool() -> None:
    geometry = make_geometry(UNIT, num_recurrent=2)
    assert not geometry.keeps_states_apart
    assert list(geometry.checkpoint_pools) == list(geometry.running_pools) == [1, 2]
    assert geometry.request_state_bytes == geometry.running_bytes == geometry.checkpoint_bytes


def test_checkpoints_of_no_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_bytes"):
        CacheGeometry(UNIT, (), (RecurrentGroupSpec("a", 8, checkpoint_bytes=0),))


def test_the_default_interval_weighs_what_is_kept() -> None:
    def interval(kept_bytes: int | None) -> int:
        group = RecurrentGroupSpec("r", 4_000_000, checkpoint_bytes=kept_bytes)
        return CacheGeometry(16, (AttentionGroupSpec("a", 1000),), (group,)).default_checkpoint_interval()

    assert (interval(None), interval(2_000_000)) == (4000, 2000)


# ------------------------------------------------------------------ the facade
def test_a_chunk_that_ends_on_a_boundary_exports_its_end_and_runs_on() -> None:
    cache = make_cache(geometry=apart())
    lease = cache.open(cache.no_match(), make_chain(numbered(14)), 0.0)
    for end, wanted, reason in ((8, reasons.MESSAGE, reasons.MESSAGE), (12, None, reasons.INTERVAL)):
        reservation = cache.reserve(lease, end, (), 0.0, wanted)
        assert reservation is not None and set(reservation.exports) == {end}
        cache.confirm(lease, reservation)
        running = lease.running
        cache.publish(lease, end, [end], wanted, 0.0)
        assert lease.running == running, "it goes on where it ran, nothing was rounded"
        assert (lease.tip.depth * UNIT, lease.tip.reason) == (end, reason)
        assert not cache.keep_running(lease, reasons.FINISH, 0.0)
        assert cache.audit([lease]) == []
    reservation = cache.reserve(lease, 14, (), 0.0)
    assert reservation is not None and not reservation.exports and not reservation.starts_from_checkpoint
    cache.confirm(lease, reservation)
    cache.publish(lease, 14, [], None, 0.0)
    cache.release(lease, 14, 0.0)
    assert [cache.memory.num_used(pool) for pool in range(3)] == [3, 2, 0]


def test_an_end_that_was_not_written_is_no_checkpoint() -> None:
    cache = make_cache(geometry=apart())
    lease = cache.open(cache.no_match(), make_chain(numbered(9)), 0.0)
    reservation = cache.reserve(lease, 8, (), 0.0, reasons.TAIL)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, 8, [], reasons.TAIL, 0.0)
    assert lease.tip.depth == 2 and lease.tip.states is None
    assert cache.counters.refusals[reasons.REFUSED_NOT_WRITTEN, reasons.TAIL] == 1
    cache.release(lease, 8, 0.0)
    assert cache.memory.num_used(1) == 0


def test_a_hit_starts_from_a_checkpoint_and_says_so() -> None:
    harness = Harness(geometry=apart())
    harness.serve(numbered(9))
    second = harness.add(numbered(8) + [1, 2])
    (chunk,) = harness.schedule().chunks
    assert chunk.request_id == second and chunk.start == 8 and chunk.starts_from_checkpoint
    harness.run()
    third = harness.add(numbered(20, 1))
    (chunk,) = harness.schedule().chunks
    assert chunk.request_id == third and chunk.start == 0 and not chunk.starts_from_checkpoint
    harness.run()


@pytest.mark.parametrize("num_recurrent", [1, 2])
def test_reserve_leaves_nothing_behind_whichever_record_is_missing(num_recurrent: int) -> None:
    """Fail the n-th acquire of a chunk that exports inside and at its end."""
    for failing in itertools.count():
        cache = make_cache(geometry=apart(num_recurrent))
        lease = cache.open(cache.no_match(), make_chain(numbered(12)), 0.0)
        lease.lineage = 1  # else what fails once is tried again
        before = snapshot(cache)
        acquire, numbers = Memory.acquire, itertools.count()

        def fails(
            memory: Memory, pool: int, acquire: Any = acquire, numbers: Any = numbers, n: int = failing
        ) -> int | None:
            return None if next(numbers) == n else acquire(memory, pool)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memory, "acquire", fails)
            reservation = cache.reserve(lease, 12, [(8, reasons.MESSAGE)], 0.0, reasons.END)
        if reservation is None:
            assert snapshot(cache) == before
            assert failing < 3 + num_recurrent
            continue
        cache.confirm(lease, reservation)
        assert cache.audit([lease]) == []
        assert in_use_bytes(cache, [lease]) == cache.memory.used_bytes
        if not reservation.refused:
            assert set(reservation.exports) == {8, 12} and failing >= 3 + 3 * num_recurrent
            return
        assert len(reservation.refused) == 1


# ------------------------------------------------------------------ memory
def test_one_request_fits_a_budget_of_its_own_size_whatever_it_starts_from() -> None:
    geometry = apart()
    num_tokens = 6 * UNIT
    records = geometry.request_bytes(num_tokens) // RECORD_BYTES
    harness = Harness(geometry=geometry, num_records=records, budget=7, max_model_len=num_tokens)
    prompt = numbered(4 * UNIT + 1)
    for seed in range(4):
        # Each starts from what the one before left, or from nothing, with no byte to spare.
        harness.serve(prompt + [seed, seed], max_tokens=3)
        harness.serve(numbered(5 * UNIT, seed + 5), max_tokens=2)
    assert len(harness.ended) == 8
    assert all(update.finish_reason == "length" for update in harness.ended.values())
    smaller = CacheConfig(geometry.request_bytes(2) - 1, UNIT, decode_interval=0)
    with pytest.raises(ConfigError, match="cannot hold one request"):
        Scheduler(geometry, smaller, SchedulerConfig(64, 4, 64))


def test_smaller_checkpoints_keep_more_prefixes() -> None:
    def kept(geometry: CacheGeometry) -> int:
        harness = Harness(geometry=geometry, num_records=60, max_model_len=64)
        for seed in range(20):
            harness.serve(numbered(9, seed))
        return sum(len(harness.checkpoints(numbered(9, seed))) > 0 for seed in range(20))

    same = dataclasses.replace(
        apart(), recurrent=(dataclasses.replace(apart().recurrent[0], checkpoint_bytes=None),)
    )
    assert kept(apart()) > 1.4 * kept(same)


# ------------------------------------------------------------------ speculation
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_drafts_cross_boundaries_and_leave_what_decoding_leaves(rate: float) -> None:
    """Answers and checkpoints are those of runs without drafts; wrong guesses leave no trace."""

    def served(drafting: DraftingConfig) -> tuple[list[list[int]], list[tuple[bytes, str]], World]:
        cache = CacheConfig(4000 * RECORD_BYTES, UNIT, checkpoint_interval=0, decode_interval=UNIT)
        world = World(
            apart(),
            cache,
            SchedulerConfig(32, 4, 256),
            model=FingerprintModel(50),
            drafting=drafting,
        )
        answers: list[list[int]] = []
        world.on_end = lambda outcome: answers.append(list(outcome.output_tokens))
        for seed in range(3):
            world.add(RequestSpec(make_chain(numbered(6 + seed, seed)).tokens, 30, _greedy()))
            world.drain()
        nodes = world.scheduler.cache.tree.state_nodes
        return answers, sorted((key, node.reason) for key, node in nodes.items()), world

    plain = served(DraftingConfig())
    drafted = served(DraftingConfig(num_draft_tokens=6, error_rate=rate))
    assert drafted[0] == plain[0] and drafted[1] == plain[1]
    counters = drafted[2].scheduler.cache.counters
    assert counters.num_draft_tokens > 50
    assert (counters.num_accepted_draft_tokens == counters.num_draft_tokens) == (rate == 0.0)


def _greedy() -> Any:
    from milepost.core.plan import SamplingParams

    return SamplingParams(temperature=0.0)


def test_drafts_stop_short_of_a_boundary_without_room_for_its_state() -> None:
    harness = Harness(geometry=apart())

    class Five:
        def propose(self, request_id: int, tokens: Any, max_drafts: int) -> list[int]:
            return [1] * max_drafts

        def forget(self, request_id: int) -> None:
            pass

    harness.scheduler.drafts = DraftPlanner(Five(), 5)
    request_id = harness.add(numbered(5), max_tokens=12)
    harness.step()
    harness.cache.take_slots = lambda now, may_evict: None  # type: ignore[method-assign,misc]
    (chunk,) = harness.schedule().chunks
    assert chunk.request_id == request_id and chunk.start == 5
    assert chunk.last_row_end == 7, "not up to 8, where the next chunk ends"
    harness.execute()


def test_worlds_with_states_kept_apart_keep_every_promise() -> None:
    """Swarm runs, every one of them kept apart, small budgets and faults included."""
    from milepost.sim.swarm import Swarm, draw_config

    num_checked = done = seed = 0
    while done < 3000:
        rng = random.Random(seed)
        config = draw_config(rng)
        specs = tuple(
            dataclasses.replace(spec, checkpoint_bytes=rng.choice((1, 3000, spec.state_bytes + 5000)))
            for spec in config.geometry.recurrent
        )
        geometry = dataclasses.replace(config.geometry, recurrent=specs)
        needed = geometry.request_bytes(config.scheduler.max_model_len)
        cache = dataclasses.replace(config.cache, cache_bytes=max(config.cache.cache_bytes, needed))
        swarm = Swarm(rng, dataclasses.replace(config, geometry=geometry, cache=cache))
        swarm.run(100)
        done += swarm.world.num_actions
        num_checked += swarm.world.promises.num_reached
        seed += 1
    assert num_checked > 20
