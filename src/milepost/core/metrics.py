"""Plain counters of the core. Every number is stated once, here; exporters only read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

TIME_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Seconds: upper ends of the classes of `TimeCounts`; the last class has none."""


@dataclass(slots=True)
class TimeCounts:
    """How many times were how long.

    Attributes:
        counts: by class of `TIME_BOUNDS`, one more for what is longer.
        sum_seconds: of all.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))
    sum_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS, seconds)] += 1
        self.sum_seconds += seconds


@dataclass(slots=True)
class CacheCounters:
    """Monotonic counters.

    Attributes:
        num_queried_tokens: prompt tokens of admitted requests; equals hits + misses, always.
        num_hit_tokens: of these, tokens that were not computed.
        num_missed_tokens: of these, tokens that were computed.
        misses_by_reason: requests by the reason code of their reuse report.
        missed_tokens_by_reason: `num_missed_tokens` by the same reason.
        num_lost_tokens: tokens whose pages every attention group had, but no state was there.
        tokens_lost_to_eviction: (move or refusal, checkpoint reason) -> prompt tokens computed because
            the checkpoint that would have served them was evicted or refused. With `num_hit_tokens`,
            what a cache of any size would have reused of what this one saw.
        checkpoints_by_reason: checkpoints published.
        evictions: (move, checkpoint reason) -> count; moves: "drop", "merge", "thin", "reclaim" (a
            request goes on in the slot), "condemned" (an audit failed), "forgotten" (a caller asked for
            it), "stranded" (pages only).
        evicted_bytes: bytes freed by evictions.
        num_restored_checkpoints: checkpoints that came from a store (counted by reason as well).
        lifetimes: of checkpoints that made room for others, from when they were made; guesses aside.
        idle_times: of the same, from when they were made or used last.
        reuse_gaps: between two uses of a place of the cache.
        refusals: (why, checkpoint reason) -> count of checkpoints that were wanted and not kept.
        num_drafts: chunks with drafts that were verified.
        num_draft_tokens: their drafts; num_accepted_draft_tokens: those that were accepted.
        accepted_drafts_by_position: place in its draft (from 0) -> accepted drafts there.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0
    misses_by_reason: Counter[str] = field(default_factory=Counter)
    missed_tokens_by_reason: Counter[str] = field(default_factory=Counter)
    num_lost_tokens: int = 0
    tokens_lost_to_eviction: Counter[tuple[str, str]] = field(default_factory=Counter)
    checkpoints_by_reason: Counter[str] = field(default_factory=Counter)
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    evicted_bytes: int = 0
    num_evicted_tokens: int = 0
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_steps: int = 0
    num_sibling_waits: int = 0
    num_restored_checkpoints: int = 0
    lifetimes: TimeCounts = field(default_factory=TimeCounts)
    idle_times: TimeCounts = field(default_factory=TimeCounts)
    reuse_gaps: TimeCounts = field(default_factory=TimeCounts)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_drafts_by_position: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class CoreStats:
    """A snapshot: counters and gauges.

    Attributes:
        states_by_reason: checkpoints that exist now.
        state_bytes: bytes of checkpoints; running_state_bytes: bytes of running slots.
        page_bytes: bytes of pages in use.
        committed_bytes: resident bytes of all pools, at most `budget_bytes`.
        smallest_hit_prompt: shortest prompt (tokens) whose repetition can hit.
    """

    counters: CacheCounters
    num_running: int
    num_waiting: int
    num_checkpoints: int
    num_units: int
    states_by_reason: dict[str, int]
    state_bytes: int
    running_state_bytes: int
    page_bytes: int
    used_bytes: int
    committed_bytes: int
    peak_committed_bytes: int
    budget_bytes: int
    smallest_hit_prompt: int
