"""What to give up first. Pure functions over records; the cache supplies the records.

The unit of retention is the segment: a checkpoint at `position` with the pages back to the
checkpoint below it. A leaf segment is dropped whole; an interior one is merged into its children
(its state is freed, its pages stay). Losing either costs, when the path is asked for again, the
recomputation of position - position_below tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core import reasons

REUSE_HALF_LIFE = 600.0
"""Seconds after which an unused segment is half as likely to be used as a fresh one."""
UNPROVEN_WEIGHT = 0.25
"""A path that was never hit counts this much: a one-off request never outranks a live conversation."""
HEAD_WEIGHT = 1.0
PLACEMENT_WEIGHT = {
    reasons.TAIL: 1.0,
    reasons.END: 1.0,
    reasons.HISTORY: 1.0,
    reasons.MESSAGE: 1.0,
    reasons.MARKER: 2.0,
    reasons.JUNCTION: 1.5,
    reasons.INTERVAL: 0.25,
    reasons.DECODE: 0.25,
    reasons.FINISH: 1.0,
}
"""How likely a later prompt ends or branches at a checkpoint of this reason, relative to a tail."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What retention knows about one candidate.

    Attributes:
        num_saved_tokens: recomputation if it is gone (position - position of the checkpoint below).
        freed_bytes: what giving it up frees.
        last_used: time of the last hit, or of its creation.
        num_hits: hits so far.
        is_leaf: dropped whole rather than merged.
        is_pinned: a client pinned it and the pin still holds.
        priority: what the client asked for; every step doubles the value.
    """

    num_saved_tokens: int
    freed_bytes: int
    last_used: float
    num_hits: int
    reason: str
    is_leaf: bool
    is_pinned: bool = False
    priority: int = 0


MAX_PRIORITY = 16


def eviction_rank(record: SegmentRecord, now: float) -> tuple[bool, float]:
    """Sort key: the smallest goes first; what is pinned goes last."""
    return (record.is_pinned, segment_value(record, now))


def segment_value(record: SegmentRecord, now: float) -> float:
    """Recompute cost saved x expected reuse / bytes freed. Larger = keep longer."""
    age = max(0.0, now - record.last_used)
    recency = 1.0 / (1.0 + age / REUSE_HALF_LIFE)
    proven = UNPROVEN_WEIGHT + min(record.num_hits, 8)
    placement = PLACEMENT_WEIGHT.get(record.reason, 1.0)
    placement *= 2.0 ** max(-MAX_PRIORITY, min(MAX_PRIORITY, record.priority))
    return record.num_saved_tokens * recency * proven * placement / max(1, record.freed_bytes)
