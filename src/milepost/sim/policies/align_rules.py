"""Rules of the `align` policy as pure functions: geometry, chunk ends, retained boundaries, hash chain.

`align` models how vLLM 0.33 caches prefixes of hybrid models (pull request #53614 and its follow-ups):
a state lives in a table column indexed by position, and exists only at chunk ends and at one internal
checkpoint. All sizes are tokens unless a name says otherwise. `docs/upstream.md` maps rules to tests.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from milepost.core.checkpoints import (
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from milepost.core.units import floor_to

WAIT: Final = "wait"
"""What a schedule call answers where the request gets no tokens in this step."""
ChunkEnd: TypeAlias = int | Literal["wait"]
_ROW_FIELDS: Final = (
    *("prompt_tokens", "total_tokens", "hash_block_size", "scheduler_block_size", "dcp", "partial_hits"),
    *("checkpoint_alignment", "drop_eagle_block", "lookahead", "max_tokens_per_step"),
    *("long_prefill_threshold", "junction", "junction_feature"),
)
_AT_LEAST_ONE: Final = ("hash_block_size", "dcp", "max_tokens_per_step", "prefill_lookahead")
_AT_LEAST_ZERO: Final = ("num_hash_lookahead_tokens", "num_scratch_blocks", "retention_interval")
DENSE: Final = None
"""`retention_interval`: keep every state that was written. 0 keeps the boundaries a repeat can use."""


@dataclass(frozen=True, slots=True)
class AlignConfig:
    """Geometry and settings of one engine. Groups: attention, then the draft's own, then the states.

    Attributes:
        hash_block_size: finest unit at which a hit may land.
        mamba_block_size: tokens per state block (one table column).
        attention_block_size: tokens per attention block on one rank.
        draft_attention_block_size: the same for the drafter's layers, if they form a group of their own.
        dcp: ranks over which attention blocks are spread; an attention block holds `dcp` times as much.
        partial_hits: None derives it; False is what a sliding-window draft group causes.
        checkpoint_alignment: grid of the kernel, relative to the query start; None: it cannot export.
        drop_eagle_block: the drafter's KV of the last matched unit is unusable, so it is dropped.
        num_hash_lookahead_tokens: tokens behind a unit that its hash covers (replaces the drop).
        prefill_lookahead: tokens a drafter reads ahead; more than 1 for multi-module MTP.
        num_scratch_blocks: state blocks per request for draft tokens.
        retention_interval: DENSE, 0, or a multiple of the scheduler block.
        junction_feature: end a chunk exactly at a shared prefix and keep that state.
        eagle_flags_all_groups: no group was found to hold draft layers, so all count as eagle groups.
        num_blocks: blocks of the pool, block 0 (null) included; None: unbounded.
    """

    hash_block_size: int
    mamba_block_size: int
    attention_block_size: int
    draft_attention_block_size: int | None = None
    dcp: int = 1
    partial_hits: bool | None = None
    checkpoint_alignment: int | None = None
    drop_eagle_block: bool = False
    num_hash_lookahead_tokens: int = 0
    prefill_lookahead: int = 1
    num_scratch_blocks: int = 0
    retention_interval: int | None = 0
    junction_feature: bool = False
    eagle_flags_all_groups: bool = False
    max_tokens_per_step: int = 16384
    long_prefill_threshold: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        unit, draft = self.hash_block_size, self.draft_attention_block_size
        limits = {"num_blocks": 2, **dict.fromkeys(_AT_LEAST_ONE, 1), **dict.fromkeys(_AT_LEAST_ZERO, 0)}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name, size in (
            ("mamba_block_size", self.mamba_block_size),
            ("attention_block_size", self.attention_block_size * self.dcp),
            ("draft_attention_block_size", unit if draft is None else draft * self.dcp),
        ):
            if size < 1 or size % unit:
                raise ValueError(f"{name} must be a multiple of hash_block_size {unit}")
        if self.drop_eagle_block and self.num_hash_lookahead_tokens:
            raise ValueError("num_hash_lookahead_tokens replaces drop_eagle_block: set one of them")
        if self.retention_interval and self.retention_interval % self.scheduler_block_size:
            raise ValueError(f"retention_interval must be a multiple of {self.scheduler_block_size}")

    @property
    def attention_group_tokens(self) -> tuple[int, ...]:
        """Tokens per block of every attention group, all ranks together."""
        sizes = (self.attention_block_size, self.draft_attention_block_size)
        return tuple(size * self.dcp for size in sizes if size is not None)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Tokens per block of every group, the state group last."""
        return (*self.attention_group_tokens, self.mamba_block_size)

    @property
    def state_group(self) -> int:
        """Index of the state group; attention groups come first."""
        return len(self.attention_group_tokens)

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(self.mamba_block_size, *self.attention_group_tokens)

    @property
    def split_block_size(self) -> int:
        """The block the scheduler cuts chunks at: the smallest of all groups, as upstream takes it."""
        return min(self.mamba_block_size, *self.attention_group_tokens)

    @property
    def has_partial_hits(self) -> bool:
        derived = default_partial_hits(self.hash_block_size, self.mamba_block_size, self.dcp)
        return derived if self.partial_hits is None else self.partial_hits

    @property
    def hit_alignment(self) -> int:
        return self.hash_block_size if self.has_partial_hits else self.scheduler_block_size

    @property
    def is_junction_exact(self) -> bool:
        return self.junction_feature and self.prefill_lookahead == 1

    def holds_draft(self, group: int) -> bool:
        """Whether an attention group contains draft layers; with the drop on it is an eagle group."""
        return self.eagle_flags_all_groups or group == self.state_group - 1

    def checkpoint_position(self, num_tokens: int, unit: int) -> int:
        return get_mamba_prefill_checkpoint_position(
            num_tokens, unit, self.drop_eagle_block, self.num_hash_lookahead_tokens, proof_margin=True
        )

    def hash_chain(self, tokens: Sequence[int], hashes: Sequence[bytes] = ()) -> list[bytes]:
        """Hashes of all complete units; `hashes` are those of a prefix of `tokens`, already known.

        Hash k commits to tokens [0, (k + 1) * hash_block_size + num_hash_lookahead_tokens).
        """
        chain, unit, ahead = list(hashes), self.hash_block_size, self.num_hash_lookahead_tokens
        for begin in range(len(chain) * unit, len(tokens) - ahead - unit + 1, unit):
            covered = array("q", tokens[begin : begin + unit + ahead]).tobytes()
            chain.append(hashlib.sha256((chain[-1] if chain else b"root") + covered).digest())
        return chain

    def exports(self, query_start: int, query_end: int, position: int) -> bool:
        units = (self.hash_block_size, self.mamba_block_size, self.checkpoint_alignment)
        return is_mamba_prefill_checkpoint_valid(query_start, query_end, position, *units)


def default_partial_hits(hash_block_size: int, mamba_block_size: int, dcp: int = 1) -> bool:
    """Whether hits may land inside a state block: the hash block is finer, or as fine under DCP."""
    return hash_block_size < mamba_block_size or (dcp > 1 and hash_block_size <= mamba_block_size)


def replay_boundaries(num_tokens: int, scheduler_block_size: int, drop_eagle_block: bool) -> list[int]:
    """Boundaries that a state group with retention 0 keeps for a prompt, before rounding to the hit unit.

    Ascending. Without the drop a repeat resumes from num_tokens - 1 at most; with it, one scheduler
    block below what a repeat (num_tokens - 1) or an extension (num_tokens) can match.
    """
    if not drop_eagle_block:
        return [max(0, num_tokens - 1)]
    unit = scheduler_block_size
    return sorted({max(0, floor_to(limit, unit) - unit) for limit in (num_tokens - 1, num_tokens)})


def proof_margin(group_block_size: int, hash_block_size: int, fine_lookup: bool) -> int:
    """How far past a candidate a dropping attention group may look for the unit it will throw away."""
    return hash_block_size if fine_lookup and group_block_size > hash_block_size else group_block_size


def mtp_reserve(prefill_lookahead: int, prefill_end: int, query_start: int, wanted_end: int) -> int:
    """Chunk end that leaves a multi-module drafter its lookahead, never below `query_start`.

    A chunk may not end 1 .. prefill_lookahead - 1 tokens before the end of the prefill.
    """
    if 0 < prefill_end - wanted_end < prefill_lookahead:
        return max(query_start, prefill_end - prefill_lookahead)
    return wanted_end


def align_split(
    *,
    start: int,
    prompt_tokens: int,
    total_tokens: int,
    num_budget_tokens: int,
    mamba_block_size: int,
    hash_block_size: int,
    scheduler_block_size: int,
    dcp: int = 1,
    partial_hits: bool | None = None,
    checkpoint_alignment: int | None = None,
    drop_eagle_block: bool = False,
    lookahead: int = 0,
    max_tokens_per_step: int = 16384,
    long_prefill_threshold: int | None = None,
    junction: int | None = None,
    junction_feature: bool = False,
    threshold_binds: bool = True,
) -> int:
    """How many tokens the scheduler gives a request in this step; 0: it waits.

    Args:
        start: tokens computed, hit locally or loaded.
        total_tokens: prompt and outputs; more than `prompt_tokens` after a preemption or in decode.
        num_budget_tokens: what is left of the step's budget.
        partial_hits: None derives it from the block sizes and `dcp`.
        long_prefill_threshold: most tokens of one long prefill per step; None or 0: no limit.
        junction: end of a prefix shared with an earlier request, known from the lookup.
        threshold_binds: False where this is the only request, which the threshold does not cap.
    """
    threshold = long_prefill_threshold or max_tokens_per_step
    num_tokens = min(num_budget_tokens, total_tokens - start, threshold if threshold_binds else total_tokens)
    prefill_end = max(prompt_tokens, total_tokens - 1)
    if start >= prefill_end or num_tokens <= 0:
        return max(0, num_tokens)
    if partial_hits is None:
        partial_hits = default_partial_hits(hash_block_size, mamba_block_size, dcp)
    end = start + num_tokens

    def position(limit: int, unit: int) -> int:
        return get_mamba_prefill_checkpoint_position(
            limit, unit, drop_eagle_block, lookahead, proof_margin=True
        )

    inside = position(prefill_end, hash_block_size if partial_hits else scheduler_block_size)
    internal = end >= prefill_end and is_mamba_prefill_checkpoint_valid(
        start, end, inside, hash_block_size, mamba_block_size, checkpoint_alignment
    )
    if end < prefill_end:
        rounded = floor_to(end, mamba_block_size)
        if rounded > start:
            end = rounded
        elif mamba_block_size <= min(max_tokens_per_step, threshold):
            return 0
    stops = []
    if not internal:
        if start % mamba_block_size:
            stops.append(floor_to(start, mamba_block_size) + mamba_block_size)
        last_cache = position(total_tokens, mamba_block_size)
        stops.append(last_cache)
        tail = position(prompt_tokens, hash_block_size)
        if partial_hits and last_cache < tail < prompt_tokens:
            stops.append(tail)
    if junction is not None and start < junction < end:
        exact = junction_feature and junction <= prompt_tokens
        stops.append(junction if exact else start + floor_to(junction - start, mamba_block_size))
    return min([stop for stop in stops if start < stop < end], default=end) - start


def align_chunk_ends(row: Mapping[str, Any]) -> list[ChunkEnd]:
    """Chunk ends of the prefill in a row of the conformance file, WAIT for an empty step.

    The first steps have `row["budgets"]`, later ones `max_tokens_per_step`. ValueError: it waits for ever.
    """
    arguments = {name: row[name] for name in _ROW_FIELDS if name in row}
    budgets = list(row.get("budgets") or ())
    ends: list[ChunkEnd] = []
    start = row.get("start", 0)
    while start < row["total_tokens"]:
        has_planned_budget = bool(budgets)
        budget = budgets.pop(0) if budgets else row["max_tokens_per_step"]
        num_tokens = align_split(
            start=start, num_budget_tokens=budget, mamba_block_size=row["block_size"], **arguments
        )
        if num_tokens == 0 and not has_planned_budget:
            raise ValueError(f"no progress at {start} with the full budget of {budget} tokens")
        start += num_tokens
        ends.append(start if num_tokens else WAIT)
    return ends
