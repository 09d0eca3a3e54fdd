"""Milepost beside upstream's `align` policy, request by request, at shares of each one's working set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from milepost.core.units import ceil_div
from milepost.sim.geometries import ModelShape
from milepost.sim.policies.align import AlignPolicy
from milepost.sim.policies.replays import align_block_tokens, align_config, replay_align
from milepost.sim.replay import ReplayOptions, ReplayRequest, ReplayResult, replay

UNBOUNDED_BYTES = 1 << 50
ALL_OUTPUTS = 1 << 30
SHARES = (1.0, 0.75, 0.5, 0.25)
"""1.0 stands for an unbounded cache."""


class Below(NamedTuple):
    """A request that reused less than under `align`.

    Attributes:
        num_cached_tokens: what Milepost reused; num_align_tokens: what `align` did.
        cause: "move:reason" of the eviction, or refusal, that took what was deeper; "" = there was none.
    """

    label: str
    num_cached_tokens: int
    num_align_tokens: int
    cause: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload at one share of the working set.

    Attributes:
        share: of the bytes (Milepost, without `interval` checkpoints) or blocks (align) that the unbounded
            run came to hold.
        below: every request where Milepost reused less.
    """

    workload: str
    share: float
    num_requests: int
    num_prompt_tokens: int
    milepost: ReplayResult
    align: ReplayResult
    below: list[Below] = field(default_factory=list)


def compare(
    workload: str,
    requests: Sequence[ReplayRequest],
    shape: ModelShape,
    match_unit: int,
    step_tokens: int,
    shares: Sequence[float] = SHARES,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Comparison]:
    """Run both policies at equal step budgets.

    Args:
        on_progress: called with (runs done, all runs).
    """
    geometry = shape.geometry(match_unit)
    options = ReplayOptions(max_output_tokens=ALL_OUTPUTS, step_tokens=step_tokens)
    largest = max(geometry.request_bytes(r.num_prompt_tokens + r.num_output_tokens + 1) for r in requests)
    # `interval` checkpoints fill what memory there is: they are no part of what a workload needs.
    needed = replace(options, checkpoint_interval=0)
    working_bytes = replay(requests, geometry, UNBOUNDED_BYTES, needed).peak_committed_bytes
    block_tokens = align_block_tokens(shape, match_unit)
    smallest_pool = 4 + max(
        ceil_div(r.num_prompt_tokens + r.num_output_tokens, block_tokens) for r in requests
    )
    working_blocks = _align_working_blocks(requests, shape, match_unit, step_tokens)
    comparisons = []
    for number, share in enumerate(shares):
        cache_bytes, num_blocks = UNBOUNDED_BYTES, None
        if share < 1.0:
            cache_bytes = max(round(share * working_bytes), largest + geometry.checkpoint_bytes)
            num_blocks = max(round(share * working_blocks), smallest_pool)
        ours = replay(requests, geometry, cache_bytes, options)
        policy = AlignPolicy(align_config(shape, match_unit, step_tokens, num_blocks))
        theirs = replay_align(requests, policy, cache_bytes, max_output_tokens=ALL_OUTPUTS)
        comparisons.append(_compared(workload, share, requests, ours, theirs))
        if on_progress is not None:
            on_progress(number + 1, len(shares))
    return comparisons


def _compared(
    workload: str, share: float, requests: Sequence[ReplayRequest], ours: ReplayResult, theirs: ReplayResult
) -> Comparison:
    below = [
        Below(request.label, mine, yours, cause)
        for request, mine, yours, cause in zip(
            requests, ours.num_cached_tokens, theirs.num_cached_tokens, ours.losses, strict=True
        )
        if mine < yours
    ]
    total = sum(request.num_prompt_tokens for request in requests)
    return Comparison(workload, share, len(requests), total, ours, theirs, below)


def _align_working_blocks(
    requests: Sequence[ReplayRequest], shape: ModelShape, match_unit: int, step_tokens: int
) -> int:
    """Blocks that hold an entry after a run with an unbounded pool, and the null block."""
    policy = AlignPolicy(align_config(shape, match_unit, step_tokens))
    replay_align(requests, policy, UNBOUNDED_BYTES, max_output_tokens=ALL_OUTPUTS)
    pool = policy.manager.pool
    return len({pool.lookup(key) for key in pool.keys()}) + 1


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown table, one row a workload and share."""
    lines = [
        "| workload | cache | requests | prompt tokens | Milepost reused | align reused | requests below | "
        "Milepost passes | align passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in comparisons:
        cache = "unbounded" if entry.share >= 1.0 else f"{100 * entry.share:.0f} %"
        lines.append(
            f"| {entry.workload} | {cache} | {entry.num_requests} | {entry.num_prompt_tokens} | "
            f"{100 * entry.milepost.hit_rate():.2f} % | {100 * entry.align.hit_rate():.2f} % | "
            f"{len(entry.below)} | {entry.milepost.num_passes} | {entry.align.num_passes} |"
        )
    return "\n".join(lines) + "\n"
