"""Yardstick policies over the requests of a replay, in the same form of result as Milepost's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

from milepost.core.hashing import token_bytes
from milepost.core.units import ceil_div, ceil_to, floor_div
from milepost.sim.geometries import ModelShape
from milepost.sim.policies.align import WAIT, AlignConfig, AlignPolicy
from milepost.sim.policies.blocks import replay_lru, replay_optimal
from milepost.sim.policies.bound import reuse_bound
from milepost.sim.replay import ReplayRequest, ReplayResult

Progress = Callable[[int, int], None] | None


def block_ids(requests: Sequence[ReplayRequest], block_tokens: int) -> list[tuple[int, ...]]:
    """Per request one id for each block of its prompt, the last one possibly partial; equal ids mean
    equal prefixes. A trace's own ids are used if they are for blocks of this size."""
    ids: list[tuple[int, ...]] = []
    numbers: dict[bytes, int] = {}
    for request in requests:
        if request.block_ids and request.block_tokens == block_tokens:
            ids.append(request.block_ids)
            continue
        data = token_bytes(request.tokens())
        chain = b""
        found: list[int] = []
        for start in range(0, len(data), 4 * block_tokens):
            chain = sha256(chain + data[start : start + 4 * block_tokens]).digest()
            found.append(numbers.setdefault(chain, len(numbers)))
        ids.append(tuple(found))
    return ids


def replay_blocks(
    policy: str, requests: Sequence[ReplayRequest], shape: ModelShape, block_tokens: int, cache_bytes: int
) -> ReplayResult:
    """`lru` or `optimal` over blocks of KV. States cost nothing, which no engine can have."""
    prompts = [request.num_prompt_tokens for request in requests]
    pairs = list(zip(prompts, block_ids(requests, block_tokens), strict=True))
    capacity = floor_div(cache_bytes, shape.kv_bytes_per_token * block_tokens)
    run = (replay_lru if policy == "lru" else replay_optimal)(pairs, block_tokens, capacity)
    result = ReplayResult(policy, cache_bytes, prompts, run.num_hit_tokens)
    result.num_computed_tokens = sum(prompts) - sum(run.num_hit_tokens)
    return result


def replay_clairvoyant(
    requests: Sequence[ReplayRequest],
    shape: ModelShape,
    block_tokens: int,
    cache_bytes: int,
    on_progress: Progress = None,
) -> tuple[ReplayResult, float]:
    """A schedule that knows the future and pays for its states, made for the second half of the
    requests; and the share of that half's tokens that no policy can exceed."""
    prompts = [request.num_prompt_tokens for request in requests]
    half = floor_div(len(requests), 2)
    geometry = shape.geometry(block_tokens)
    bound = reuse_bound(
        list(zip(prompts, block_ids(requests, block_tokens), strict=True)),
        block_tokens,
        page_bytes=geometry.unit_bytes,
        state_bytes=geometry.checkpoint_bytes,
        cache_bytes=cache_bytes,
        measured_from=half,
        on_progress=on_progress,
    )
    result = ReplayResult("clairvoyant", cache_bytes, prompts, bound.per_request)
    result.num_computed_tokens = sum(prompts) - bound.reached
    return result, bound.upper / max(1, sum(prompts[half:]))


def align_block_tokens(shape: ModelShape, match_unit: int) -> int:
    """Tokens per block of upstream's common pool: so many that one layer's KV is as large as its state."""
    return ceil_to(ceil_div(shape.layer_state_bytes, shape.layer_kv_bytes_per_token), match_unit)


def align_num_blocks(shape: ModelShape, match_unit: int, cache_bytes: int) -> int:
    """Blocks of upstream's pool that fit a budget, the null block included."""
    block_bytes = shape.kv_bytes_per_token * align_block_tokens(shape, match_unit)
    return max(2, floor_div(cache_bytes, block_bytes))


def align_config(
    shape: ModelShape, match_unit: int, step_tokens: int, num_blocks: int | None = None
) -> AlignConfig:
    """Upstream's settings for this shape. A state counts as one block, which favours the policy where
    a state of all layers is larger than a block.

    Args:
        num_blocks: None = unbounded.
    """
    block_tokens = align_block_tokens(shape, match_unit)
    return AlignConfig(
        hash_block_size=match_unit,
        mamba_block_size=block_tokens,
        attention_block_size=block_tokens,
        checkpoint_alignment=match_unit,
        junction_feature=True,
        max_tokens_per_step=step_tokens,
        num_blocks=num_blocks,
    )


def replay_align(
    requests: Sequence[ReplayRequest],
    policy: AlignPolicy,
    cache_bytes: int,
    *,
    max_output_tokens: int,
    on_progress: Progress = None,
) -> ReplayResult:
    """Upstream's `align` policy, one request after the other. What cannot be placed counts as computed."""
    result = ReplayResult("align", cache_bytes)
    for number, request in enumerate(requests):
        if on_progress is not None and number % 16 == 0:
            on_progress(number, len(requests))
        result.num_prompt_tokens.append(request.num_prompt_tokens)
        result.num_cached_tokens.append(_serve_align(policy, number, request, max_output_tokens, result))
    return result


def _serve_align(
    policy: AlignPolicy, number: int, request: ReplayRequest, max_output_tokens: int, result: ReplayResult
) -> int:
    """Run one request to its end; returns the tokens it reused."""
    policy.admit(number, request.tokens())
    outputs = list(request.outputs[: max(0, max_output_tokens - 1)])
    reused: int | None = None
    end, num_tokens = 0, request.num_prompt_tokens
    for steps in range(1, num_tokens + max_output_tokens + 2):
        if end == num_tokens and not outputs:
            break
        if end == num_tokens:
            policy.append(number, [outputs.pop(0)])
            num_tokens += 1
        ended = policy.schedule(number, policy.config.max_tokens_per_step)
        if ended == WAIT:
            result.num_refused += 1
            result.num_computed_tokens += num_tokens - end
            break
        end = int(ended)
        started = policy.request(number).scheduled_start
        reused = started if reused is None else reused
        result.num_passes += 1
        result.num_computed_tokens += end - started
        policy.commit(number)
        if request.abort_after_steps is not None and steps >= request.abort_after_steps:
            break
    policy.finish(number)
    return reused or 0
