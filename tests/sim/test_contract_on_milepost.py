"""What the manager scenarios of the conformance file come to on Milepost's own scheduler and cache.

Milepost has no drop, no columns and no limit of one checkpoint per pass, so the outcome to hold is:
at least upstream's hit, a hit the match unit alone decides, and nothing kept that was not written
(the world compares every published state with what the worker really holds, after every action).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from tests.conformance import params, rows

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.hashing import CacheDomain, KeyChain
from milepost.sim.spec import RequestSpec
from milepost.sim.workload import greedy
from milepost.sim.world import World

EXCEPTED = {
    "94": "an external load into a state column; loads of segments are tested with the stores",
    "95a": "null columns and exact block ids of offers; Milepost has slots",
    "95b": "null columns and exact block ids of offers; Milepost has slots",
}
Scenario = Callable[[], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(*row_ids: str) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        for row_id in row_ids:
            assert row_id not in SCENARIOS
            SCENARIOS[row_id] = function
        return function

    return register


def test_every_row_has_a_scenario_or_a_reason() -> None:
    ids = {row["id"] for row in rows("manager")}
    assert set(SCENARIOS) | set(EXCEPTED) == ids
    assert not set(SCENARIOS) & set(EXCEPTED)


@pytest.mark.parametrize("row", [p for p in params("manager") if p.id not in EXCEPTED])
def test_outcome(row: dict[str, str]) -> None:
    SCENARIOS[row["id"]]()


def make(unit: int, alignment: int | None, *, step_tokens: int = 16384, recurrent: bool = True) -> World:
    states = (RecurrentGroupSpec("kda", 4096, alignment),) if recurrent else ()
    return World(
        CacheGeometry(unit, (AttentionGroupSpec("full", 64),), states),
        CacheConfig(1 << 40, match_unit=unit, checkpoint_interval=0, decode_interval=0),
        SchedulerConfig(step_tokens, max_model_len=1 << 20),
    )


def prompt(num_tokens: int, *, seed: int = 0, head: Sequence[int] = ()) -> array[int]:
    return array("I", [*head, *(1_000_000 * (seed + 1) + i for i in range(num_tokens - len(head)))])


def send(world: World, tokens: array[int]) -> int:
    """Run one request to its end; how many tokens it reused."""
    request_id = world.add(RequestSpec(tokens, 1, greedy()))
    world.drain()
    cached = world.outcomes[request_id].num_cached_tokens
    assert cached is not None
    return cached


def kept(world: World, tokens: array[int]) -> list[int]:
    """Positions of the prompt whose state a lookup can find."""
    cache, unit = world.scheduler.cache, world.geometry.match_unit
    chain = KeyChain(tokens, CacheDomain(), unit)
    nodes = [cache.node_at(chain, position) for position in range(unit, len(tokens) + 1, unit)]
    return [node.depth * unit for node in nodes if node is not None and node.states is not None]


def replay_and_extension(num_tokens: int, unit: int, alignment: int | None) -> tuple[int, int]:
    """Hits of the same prompt, and of a longer one, each against a cache that saw the prompt once."""
    hits = []
    for longer in (0, 500):
        world = make(unit, alignment)
        tokens = prompt(num_tokens)
        assert send(world, tokens) == 0
        hits.append(send(world, prompt(num_tokens + longer, head=tokens, seed=7)))
    return hits[0], hits[1]


@scenario("77")
def checkpoint_inside_one_pass() -> None:
    assert replay_and_extension(120, 16, 16) == (112, 112)
    world = make(16, 16)
    tokens = prompt(120)
    send(world, tokens)
    assert kept(world, tokens) == [112]
    assert next(iter(world.outcomes.values())).num_passes == 1


@scenario("78")
def the_same_boundary_without_a_drop() -> None:
    """Upstream keys 64 because its lookup drops a unit; here 96 is the state at 96, and is hit."""
    assert replay_and_extension(104, 32, 16) == (96, 96)
    world = make(32, 16)
    tokens = prompt(104)
    send(world, tokens)
    assert kept(world, tokens) == [96]


@scenario("81a", "81b")
def a_prompt_in_two_chunks_keeps_its_tail_only() -> None:
    world = make(16, 16, step_tokens=128)
    tokens = prompt(240)
    world.add(RequestSpec(tokens, 1, greedy()))
    world.step()
    assert kept(world, tokens) == []  # neither 112 nor the chunk end
    world.drain()
    assert 112 not in kept(world, tokens) and 224 in kept(world, tokens)
    assert send(world, tokens) == 224


@scenario("82a", "82b")
def the_junction_is_exported_exactly_and_nothing_else_of_the_chunk() -> None:
    """Upstream has one position per pass and loses the junction; here it is one export of several."""
    world = make(16, 16, step_tokens=128)
    shared = prompt(96)
    send(world, prompt(150, head=shared, seed=5))
    tokens = prompt(240, head=shared)
    world.add(RequestSpec(tokens, 1, greedy()))
    world.step()
    assert kept(world, tokens) == [96]
    world.drain()
    assert 112 not in kept(world, tokens)
    assert send(world, prompt(240, head=shared, seed=9)) == 96


@scenario("83a", "83b")
def a_tail_off_the_kernel_grid_becomes_a_chunk_end() -> None:
    assert replay_and_extension(14, 2, 16) == (12, 14)
    world = make(2, 16)
    tokens = prompt(14)
    send(world, tokens)
    assert 8 not in kept(world, tokens) and 12 in kept(world, tokens)
    assert next(iter(world.outcomes.values())).num_passes == 2


@scenario("84")
def a_sibling_never_reads_what_is_still_being_written() -> None:
    for alignment in (None, 1):
        world = make(2, alignment, step_tokens=6)
        tokens = prompt(7)
        owner = world.add(RequestSpec(tokens, 1, greedy()))
        world.step()
        world.schedule()  # the owner's continuation is in flight
        sibling = world.add(RequestSpec(tokens, 1, greedy()))
        world.drain()
        assert world.outcomes[owner].num_cached_tokens == 0
        assert world.outcomes[sibling].num_cached_tokens == 6
        assert send(world, tokens) == 6


@scenario("86a", "86b")
def a_prompt_of_8000() -> None:
    assert replay_and_extension(8000, 1536, 16) == (7680, 7680)


@scenario("87a", "87b")
def a_prompt_of_whole_units() -> None:
    assert replay_and_extension(7680, 1536, 16) == (6144, 7680)


@scenario("90a", "90b")
def no_checkpoint_backend_means_a_stop_at_the_tail() -> None:
    assert replay_and_extension(15000, 128, None) == (14976, 14976)


@scenario("91")
def a_sibling_leaves_the_junction_for_the_third() -> None:
    for unit, junction in ((1536, 4608), (128, 4992)):
        world = make(unit, 16)
        producer = prompt(8000)
        send(world, producer)
        hits = [send(world, prompt(8000, head=producer[:5000], seed=seed)) for seed in (2, 3)]
        assert hits == [0, junction]


@scenario("92a", "92b")
def attention_alone() -> None:
    """Upstream's drop makes 8 matched tokens 6, and 6 matched tokens 4."""
    for num_tokens, upstream, expected in ((8, 6, 8), (7, 4, 6)):
        world = make(2, None, recurrent=False)
        tokens = prompt(num_tokens)
        send(world, tokens)
        hit = send(world, prompt(20, head=tokens, seed=3))
        assert hit == expected >= upstream


@scenario("93")
def a_hit_inside_a_block() -> None:
    for alignment in (None, 1, 16):
        world = make(2, alignment)
        tokens = prompt(8)
        send(world, tokens)
        assert send(world, tokens) == 6
        assert send(world, prompt(30, head=tokens[:7], seed=4)) == 6


@scenario("96")
def the_third_sibling_resumes_at_the_junction() -> None:
    """Upstream resumes at 12. On a grid of 16 a junction at 24 moves down to 16, being optional."""
    for alignment, expected in ((None, 24), (1, 24), (8, 24), (16, 16)):
        world = make(4, alignment)
        shared = prompt(24)
        hits = [send(world, prompt(40, head=shared, seed=seed)) for seed in (1, 2, 3)]
        assert hits == [0, 0, expected]


@scenario("97")
def a_longer_sibling() -> None:
    """Upstream hits 1536; the prompt is a multiple of the unit, so that its end is kept as well."""
    assert replay_and_extension(1600, 64, 16) == (1536, 1600)
    assert replay_and_extension(1610, 64, 16) == (1600, 1600)


@scenario("99")
def whole_units_without_a_checkpoint_backend() -> None:
    for units in range(1, 6):
        assert replay_and_extension(1536 * units, 1536, None) == (1536 * (units - 1), 1536 * units)


@scenario("100a", "100b")
def whole_units_sent_twice() -> None:
    for alignment in (None, 16, 64):
        assert replay_and_extension(32, 16, alignment) == (16, 32)
        assert replay_and_extension(48, 16, alignment) == (32, 48)
