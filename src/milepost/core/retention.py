"""What to give up first. Pure functions over records; the cache supplies the records.

The unit of retention is the segment: a checkpoint at `position` with the pages back to the
checkpoint below it. A leaf segment is dropped whole; an interior one is merged into its children
(its state is freed, its pages stay). Losing either costs, when the path is asked for again, the
recomputation of position - position_below tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PRIORITY = 16


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What retention knows about one candidate.

    Attributes:
        num_saved_tokens: recomputation if it is gone (position - position of the checkpoint below).
        freed_bytes: what giving it up frees: its state, and for a leaf the pages nobody else needs.
        reuse_index: chance of use per time unit it is kept (`reuse.ReuseModel.index`).
        is_pinned: a client pinned it and the pin still holds.
        priority: what the client asked for; every step doubles the value.
    """

    num_saved_tokens: int
    freed_bytes: int
    reuse_index: float
    is_pinned: bool = False
    priority: int = 0


def eviction_rank(record: SegmentRecord) -> tuple[bool, float]:
    """Sort key: the smallest goes first; what is pinned goes last."""
    return (record.is_pinned, segment_value(record))


def segment_value(record: SegmentRecord) -> float:
    """Tokens of recomputation saved per byte and time unit. Larger = keep longer."""
    weight = 2.0 ** max(-MAX_PRIORITY, min(MAX_PRIORITY, record.priority))
    return record.num_saved_tokens * record.reuse_index * weight / max(1, record.freed_bytes)
