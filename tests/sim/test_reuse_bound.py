"""The bound of reuse with paid states: never below what anybody reaches, and near it."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from milepost.core.geometry import ALLOCATION_QUANTUM_BYTES as RECORD
from milepost.sim.geometries import ModelShape
from milepost.sim.policies.blocks import replay_optimal
from milepost.sim.policies.bound import ReuseOption, reuse_bound, reuse_options
from milepost.sim.replay import ReplayOptions, ReplayRequest, replay

Requests = list[tuple[int, tuple[int, ...]]]


def random_requests(rng: Random, count: int, depth: int = 5) -> Requests:
    """Paths in a small tree, 10 tokens a block and one token behind them."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(count):
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, depth)))
        blocks = tuple(ids.setdefault(path[: k + 1], len(ids)) for k in range(len(path)))
        requests.append((10 * len(blocks) + 1, blocks))
    return requests


def test_options_follow_the_last_use() -> None:
    requests = [(21, (0, 1)), (31, (0, 1, 2)), (20, (0, 1)), (31, (0, 1, 2))]
    assert reuse_options(requests, 10) == [
        ReuseOption(1, (0, 0)),
        ReuseOption(2, (1,)),  # its last token is never reused, so neither is its second block
        ReuseOption(3, (2, 1, 1)),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_sides_of_the_bound(seed: int) -> None:
    rng = Random(seed)
    requests = random_requests(rng, 60)
    everything = sum(10 * len(option.last_used) for option in reuse_options(requests, 10))
    for budget in (3, 8, 20, 10_000):
        found = reuse_bound(requests, 10, page_bytes=1, state_bytes=2, cache_bytes=budget, num_rounds=80)
        assert 0 <= found.reached <= found.upper + 1e-6 and found.upper <= everything + 1e-6
    assert found.reached == everything == pytest.approx(found.upper)


@pytest.mark.parametrize("seed", range(12))
def test_free_states_give_the_block_optimum(seed: int) -> None:
    """With states for nothing the bound lies above Belady's cache, which it allows one request more:
    what a running request uses is not counted."""
    rng = Random(100 + seed)
    requests = random_requests(rng, 60)
    for blocks in (2, 5, 9):
        optimal = sum(replay_optimal(requests, 10, blocks).num_hit_tokens)
        bound = reuse_bound(requests, 10, page_bytes=1, state_bytes=0, cache_bytes=blocks, num_rounds=80)
        assert optimal <= bound.upper + 1e-6


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("records", [8, 14, 40])
def test_nobody_passes_the_bound(seed: int, records: int) -> None:
    """The real core, with records of one size, at the same budget."""
    rng = Random(200 + seed)
    requests = random_requests(rng, 80)
    shape = ModelShape(1, 2 * RECORD, 1, 2 * RECORD)
    prompts = [
        ReplayRequest(
            float(number),
            tokens,
            1,
            tokens=lambda b=blocks: array("I", [i for i in b for _ in range(10)] + [99_999]),
        )
        for number, (tokens, blocks) in enumerate(requests)
    ]
    result = replay(prompts, shape.geometry(10), records * RECORD, ReplayOptions(checkpoint_interval=10))
    bound = reuse_bound(
        requests, 10, page_bytes=RECORD, state_bytes=2 * RECORD, cache_bytes=records * RECORD, num_rounds=80
    )
    assert sum(result.num_cached_tokens) <= bound.upper + 1e-6


def test_measured_from_counts_later_requests_only() -> None:
    requests = [(11, (0,)), (11, (0,)), (11, (0,)), (11, (0,))]
    sizes = {"page_bytes": 1, "state_bytes": 1, "cache_bytes": 100}
    assert reuse_bound(requests, 10, **sizes).reached == 30
    assert reuse_bound(requests, 10, measured_from=2, **sizes).reached == 20
