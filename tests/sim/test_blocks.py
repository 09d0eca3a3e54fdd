"""Block policies against brute force on small cases and independent figures on a public trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from milepost.sim.geometries import named_shape
from milepost.sim.policies.blocks import replay_lru, replay_optimal
from milepost.sim.trace import read_trace

TRACE = Path(__file__).resolve().parents[1] / "data" / "mooncake" / "conversation_trace.jsonl.xz"
BLOCK = 512


def random_requests(rng: Random, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Paths in a small tree; block ids name whole prefixes."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(count):
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 4)))
        blocks = tuple(ids.setdefault(path[: k + 1], len(ids)) for k in range(len(path)))
        requests.append((10 * len(blocks), blocks))
    return requests


def best_possible(requests: Sequence[tuple[int, tuple[int, ...]]], capacity: int) -> int:
    """Most hit blocks over all ways to choose what stays after each request. Exponential."""

    @cache
    def search(index: int, cached: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        blocks = requests[index][1]
        hits = 0
        while hits < len(blocks) and blocks[hits] in cached:
            hits += 1
        available = sorted(cached | set(blocks))
        keep = min(capacity, len(available))
        return hits + max(search(index + 1, frozenset(kept)) for kept in combinations(available, keep))

    return search(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_optimal_is_optimal(seed: int) -> None:
    rng = Random(seed)
    requests = random_requests(rng, 8)
    capacity = rng.randrange(1, 5)
    found = sum(replay_optimal(requests, 10, capacity).num_hit_tokens)
    assert found == 10 * best_possible(requests, capacity)


@pytest.mark.parametrize("seed", range(20))
def test_lru_against_a_list(seed: int) -> None:
    rng = Random(seed)
    requests = random_requests(rng, 60)
    capacity = rng.randrange(1, 8)
    order: list[int] = []
    expected = []
    for _, blocks in requests:
        hits = 0
        while hits < len(blocks) and blocks[hits] in order:
            hits += 1
        expected.append(10 * hits)
        for block in blocks:
            if block in order:
                order.remove(block)
            order.append(block)
            order = order[-capacity:]
    assert replay_lru(requests, 10, capacity).num_hit_tokens == expected


@pytest.mark.parametrize(
    ("gib", "lru", "optimal"),
    [(8, 4.6, 15.5), (64, 11.0, 36.1), (512, 37.2, 39.8)],
)
def test_independent_figures(gib: int, lru: float, optimal: float) -> None:
    """kvcache-simulator 0.1.3 on the conversation trace, Kimi K3, block 512, measured over the second
    half of the requests: within one point for LRU, and for the offline optimum too."""
    requests = [(row.num_input_tokens, row.block_ids) for row in read_trace(TRACE)]
    capacity = (gib << 30) // (named_shape("kimi-k3").kv_bytes_per_token * BLOCK)
    half = len(requests) // 2
    prompt_tokens = sum(tokens for tokens, _ in requests[half:])
    for replay_policy, figure in ((replay_lru, lru), (replay_optimal, optimal)):
        hits = replay_policy(requests, BLOCK, capacity).num_hit_tokens
        assert 100 * sum(hits[half:]) / prompt_tokens == pytest.approx(figure, abs=0.2)


def test_a_prompt_shorter_than_its_blocks_counts_its_own_tokens() -> None:
    assert replay_lru([(7, (0,)), (7, (0,))], 10, 4).num_hit_tokens == [0, 7]
    assert replay_optimal([(7, (0,)), (7, (0,))], 10, 4).num_hit_tokens == [0, 7]
