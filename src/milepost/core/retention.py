"""What to give up first. Pure functions over records; the cache supplies the records.

The unit of retention is the segment: a checkpoint at `position` with the pages back to the
checkpoint below it. A leaf segment is dropped whole; an interior one is merged into its children
(its state is freed, its pages stay). Losing either costs, when the path is asked for again, the
recomputation of position - position_below tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from milepost.core import reasons

Rank = tuple[int, float]
"""Sort key of what is worth keeping: (tier, value)."""
GUESS, ORDINARY, LIVE, PINNED = range(4)
"""Tiers: whatever its value, nothing is given up for something of a lower one."""
LIVE_FLOOR: Rank = (LIVE, -math.inf)
"""What only a request that goes on where an earlier one stopped may give up, or one that could not run
otherwise."""
MAX_PRIORITY = 16


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What retention knows about one candidate.

    Attributes:
        num_saved_tokens: recomputation if it is gone (position - position of the checkpoint below).
        freed_bytes: what giving it up frees: its state, and for a leaf the pages nobody else needs.
        reuse_index: chance of use per time unit it is kept (`reuse.ReuseModel.index`).
        is_pinned: a client pinned it and the pin still holds.
        is_guess: an `interval` checkpoint that was never hit. Nobody asked for it, nothing was learned about
            it, and where it stands says little: it fills memory that nothing else needs.
        is_live: a conversation that went on before goes on here, and its next turn is still to be expected.
        priority: what the client asked for; every step doubles the value.
    """

    num_saved_tokens: int
    freed_bytes: int
    reuse_index: float
    is_pinned: bool = False
    is_guess: bool = False
    is_live: bool = False
    priority: int = 0


def eviction_rank(record: SegmentRecord) -> Rank:
    """Sort key: the smallest goes first. Guesses go before all others, what is pinned goes last, and what
    nobody ever came back to goes before what live conversations resume from."""
    if record.is_pinned:
        tier = PINNED
    elif record.is_guess:
        tier = GUESS
    else:
        tier = LIVE if record.is_live else ORDINARY
    return (tier, segment_value(record))


def segment_value(record: SegmentRecord) -> float:
    """Tokens of recomputation saved per byte and time unit. Larger = keep longer."""
    weight = 2.0 ** max(-MAX_PRIORITY, min(MAX_PRIORITY, record.priority))
    return record.num_saved_tokens * record.reuse_index * weight / max(1, record.freed_bytes)


def export_order(position: int, reason: str) -> tuple[int, int, int]:
    """Sort key of the exports of one chunk: the first ones get memory first. Important reasons come before
    others, deep positions before shallow ones; `interval` ones halve the gaps again and again, so that
    those that find room are evenly spread."""
    coarseness = position & -position if reason == reasons.INTERVAL else 0
    return (reasons.IMPORTANCE[reason], -coarseness, -position)
