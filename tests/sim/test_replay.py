"""Replays: the same core as in the world, without contents; yardstick policies on the same requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.scheduler import Scheduler
from milepost.errors import ConfigError
from milepost.sim.compare import compare, table
from milepost.sim.cost import CostModel
from milepost.sim.generate import WORKLOADS, generate
from milepost.sim.geometries import SHAPES, ModelShape, named_shape
from milepost.sim.policies.align import AlignPolicy
from milepost.sim.policies.replays import (
    align_block_tokens,
    align_config,
    align_num_blocks,
    block_ids,
    replay_align,
    replay_blocks,
)
from milepost.sim.policies.retention import use_lru_retention
from milepost.sim.replay import ReplayOptions, ReplayRequest, from_trace, replay
from milepost.sim.trace import read_trace
from milepost.sim.workload import random_tokens

TRACE = Path(__file__).resolve().parents[1] / "data" / "mooncake" / "conversation_trace.jsonl.xz"
SMALL = ModelShape(64, 4096, 64, 4096)
AMPLE = 1 << 40


def requests_of(*prompts: tuple[float, int, int]) -> list[ReplayRequest]:
    """(timestamp, seed of the tokens, length): equal seeds share their beginning."""
    return [
        ReplayRequest(when, length, 1, tokens=lambda s=seed, n=length: random_tokens(Random(s), n))
        for when, seed, length in prompts
    ]


def test_sizes_of_named_models() -> None:
    """facts: Kimi K3 has 69 KDA layers of 6,512,640 bytes and 27,648 bytes of KV per token."""
    k3, small = named_shape("kimi-k3"), named_shape("kimi-linear-48b")
    assert (k3.state_bytes, k3.kv_bytes_per_token) == (69 * 6_512_640, 27_648)
    assert (small.state_bytes, small.kv_bytes_per_token) == (43_417_600, 8_064)
    assert k3.geometry(512).state_bytes == k3.state_bytes
    with pytest.raises(ConfigError, match="kimi-k3, kimi-linear-48b"):
        named_shape("kimi")
    assert set(SHAPES) == {"kimi-k3", "kimi-linear-48b"}


def test_an_instant_replay_counts_hits_and_passes() -> None:
    requests = requests_of((0.0, 1, 100), (1.0, 2, 50), (2.0, 1, 130), (3.0, 1, 100))
    result = replay(requests, SMALL.geometry(10), AMPLE, ReplayOptions(step_tokens=64, checkpoint_interval=0))
    assert result.num_cached_tokens == [0, 0, 100, 90]
    assert result.num_computed_tokens == 100 + 50 + 30 + 10
    assert result.num_passes == 2 + 1 + 1 + 1
    assert result.hit_rate() == 190 / 380 and result.second_half_hit_rate == 190 / 230
    assert not any(result.seconds_to_first_token)


def test_time_makes_requests_queue() -> None:
    requests = requests_of((0.0, 1, 100), (0.5, 2, 100))
    options = ReplayOptions(step_tokens=100, cost=CostModel(seconds_per_token=0.01))
    result = replay(requests, SMALL.geometry(10), AMPLE, options)
    assert result.seconds_to_first_token == pytest.approx([1.0, 1.5])


def test_a_prompt_that_cannot_fit_counts_as_computed() -> None:
    geometry = SMALL.geometry(10)
    result = replay(requests_of((0.0, 1, 20), (1.0, 2, 500)), geometry, geometry.request_bytes(40))
    assert (result.num_refused, result.num_computed_tokens) == (1, 520)
    with pytest.raises(ConfigError, match="cache_bytes"):
        replay(requests_of((0.0, 1, 20)), geometry, 100)


def test_progress_ends_at_all() -> None:
    seen: list[tuple[int, int]] = []
    replay(
        requests_of(*[(0.0, 1, 9)] * 130), SMALL.geometry(4), AMPLE, on_progress=lambda *at: seen.append(at)
    )
    assert seen == [(0, 130), (64, 130), (128, 130), (130, 130)]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_are_a_function_of_their_seed(name: str) -> None:
    first, again, other = generate(name, 3), generate(name, 3), generate(name, 4)
    assert [(r.timestamp, r.tokens(), list(r.outputs)) for r in first] == [
        (r.timestamp, r.tokens(), list(r.outputs)) for r in again
    ]
    assert [r.tokens() for r in first] != [r.tokens() for r in other]
    assert all(a.timestamp <= b.timestamp for a, b in zip(first, first[1:], strict=False))


def test_unknown_workload() -> None:
    with pytest.raises(ConfigError, match="agents, completions, fork, growing, multiturn"):
        generate("chats", 0)


def test_a_workload_replays_its_answers() -> None:
    """Each turn of a chat reuses the turn before, its answer included, down to the match unit."""
    requests = generate("multiturn", 1)
    options = ReplayOptions(max_output_tokens=1 << 30, step_tokens=512)
    result = replay(requests, SMALL.geometry(16), AMPLE, options)
    last: dict[str, int] = {}
    for request, cached in zip(requests, result.num_cached_tokens, strict=True):
        processed = last.get(str(request.conversation), 0)
        assert cached >= processed - processed % 16
        last[str(request.conversation)] = request.num_prompt_tokens + len(request.outputs) - 1


def test_lru_retention_forgets_the_oldest() -> None:
    """Three prompts take turns in a cache for two of them: LRU never hits."""
    geometry = SMALL.geometry(10)
    turns = requests_of(*[(float(n), n % 3, 100) for n in range(12)])
    room = geometry.request_bytes(101) + geometry.request_bytes(90) + geometry.checkpoint_bytes
    result = replay(turns, geometry, room, ReplayOptions(lru_retention=True, checkpoint_interval=0))
    assert result.policy == "milepost-lru" and sum(result.num_cached_tokens) == 0
    cache = Scheduler(geometry, CacheConfig(AMPLE, match_unit=10, decode_interval=0), SchedulerConfig()).cache
    use_lru_retention(cache)
    root = cache.tree.root(b"r", 0.0)
    cache.tree.add(root, b"k", b"", [0], 0.0)
    with pytest.raises(ValueError, match="in use"):
        use_lru_retention(cache)


def test_block_ids_from_tokens_and_from_a_trace() -> None:
    requests = requests_of((0.0, 1, 25), (0.0, 1, 31), (0.0, 2, 10))
    first, longer, other = block_ids(requests, 10)
    assert first[:2] == longer[:2] and first[2] != longer[2]
    assert len(longer) == 4 and not set(other) & set(longer)
    (row, *_) = read_trace(TRACE, 1)
    (from_row,) = block_ids(from_trace([row]), 512)
    assert from_row == row.block_ids
    assert len(block_ids(from_trace([row]), 256)[0]) == -(-row.num_input_tokens // 256)


def test_block_policies_bound_what_an_engine_reaches() -> None:
    """With states free and the future known, nobody does better at equal bytes."""
    requests = generate("fork", 2)
    for cache_bytes in (1 << 29, 1 << 31):
        shape = named_shape("kimi-linear-48b")
        ours = replay(requests, shape.geometry(32), cache_bytes, ReplayOptions(max_output_tokens=99))
        best = replay_blocks("optimal", requests, shape, 32, cache_bytes)
        lru = replay_blocks("lru", requests, shape, 32, cache_bytes)
        assert sum(ours.num_cached_tokens) <= sum(best.num_cached_tokens)
        assert sum(lru.num_cached_tokens) <= sum(best.num_cached_tokens)


def test_align_sizes() -> None:
    shape = named_shape("kimi-linear-48b")
    assert align_block_tokens(shape, 32) == 1888  # ceil(2,170,880 / 1,152) rounded up to 32
    assert align_num_blocks(shape, 32, 10 * 1888 * 8064) == 10
    assert align_num_blocks(shape, 32, 1) == 2


def test_align_replay_counts_like_ours() -> None:
    requests = requests_of((0.0, 1, 100), (1.0, 1, 130))
    shape = ModelShape(64, 640, 64, 640)
    policy = AlignPolicy(align_config(shape, 10, 64))
    result = replay_align(requests, policy, AMPLE, max_output_tokens=1)
    assert result.num_cached_tokens[0] == 0 and result.num_cached_tokens[1] > 0
    assert result.num_computed_tokens == 230 - sum(result.num_cached_tokens)
    tight = AlignPolicy(align_config(shape, 10, 64, num_blocks=3))
    refused = replay_align(requests, tight, 1, max_output_tokens=1)
    assert refused.num_refused == 2 and refused.num_computed_tokens == 230


def test_comparison_lists_every_loss() -> None:
    requests = generate("multiturn", 5)[:20]
    found = compare("multiturn", requests, named_shape("kimi-linear-48b"), 32, 2048, shares=(1.0, 0.5))
    assert [entry.share for entry in found] == [1.0, 0.5]
    for entry in found:
        pairs = zip(entry.milepost.num_cached_tokens, entry.align.num_cached_tokens, strict=True)
        assert len(entry.below) == sum(ours < theirs for ours, theirs in pairs)
        assert entry.milepost.num_passes <= entry.align.num_passes
    lines = table(found).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| multiturn | unbounded | 20 |")


@pytest.mark.slow
def test_beside_align() -> None:
    """Unbounded: no request reuses less than under upstream's rules. At 75, 50 and 25 % of the working
    set: more in total, and at most one request in a hundred below. Never more passes."""
    below: Counter[float] = Counter()
    num_requests = 0
    for seed in range(3):
        for name in ("multiturn", "fork", "agents"):
            requests = generate(name, seed, 2)
            num_requests += len(requests)
            for entry in compare(name, requests, named_shape("kimi-linear-48b"), 32, 2048):
                assert sum(entry.milepost.num_cached_tokens) >= sum(entry.align.num_cached_tokens)
                assert entry.milepost.num_passes <= entry.align.num_passes
                below[entry.share] += len(entry.below)
                assert all(request.cause for request in entry.below), "an eviction or refusal explains each"
    print(f"\nrequests below align, of {num_requests} each: {dict(below)}")
    assert below[1.0] == 0
    assert max(below.values()) <= 0.01 * num_requests
