"""Learns how long checkpoints wait for their next use, and what keeping one is worth.

For every class of checkpoints (why it exists, whether something deeper continues it, how many turns
led to it) it counts, per age on a logarithmic scale, how many were used at that age and how many
had survived unused until then. From these hazards follows an index: the best ratio, over all
horizons, of the chance of being used to the expected time it has to be kept for that (the Gittins
index of a job that ends by being used). What was not observed yet follows a prior under which the
index falls with age, so that the order starts out as least-recently-used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

from milepost.core import reasons

BINS_PER_OCTAVE = 2
MIN_AGE_LOG2 = -2
NUM_BINS = 44
"""Bins cover ages from a quarter to half a million time units; seconds in the engine."""
MAX_REMEMBERED = 16384
"""Checkpoints whose next use is waited for, given up ones included."""
MAX_TURN_CLASS = 4
REFRESH_EVENTS = 256
"""Observations after which the tables are computed anew."""
PRIOR_WEIGHT = 4.0
PRIOR_HAZARD = 0.03
PRIOR_SETTLING = 60.0
"""Time units before age begins to count in the prior: a second or a minute ago is the same."""
PRIOR_BY_REASON = {
    reasons.MARKER: 2.0,
    reasons.JUNCTION: 1.5,
    reasons.INTERVAL: 0.25,
    reasons.DECODE: 0.25,
}

MAX_CONVERSATIONS = 16384
"""Names of conversations that are remembered."""

ReuseClass = tuple[str, bool, int]
"""(reason, something deeper continues it, turns up to MAX_TURN_CLASS)"""

EDGES = [2.0 ** (MIN_AGE_LOG2 + index / BINS_PER_OCTAVE) for index in range(NUM_BINS)]
"""Upper edge of every age bin."""


def age_bin(age: float) -> int:
    """Index of the bin that holds `age`; the last bin is open."""
    return min(bisect_right(EDGES, age), NUM_BINS - 1)


def prior_hazards(reuse_class: ReuseClass) -> list[float]:
    """Chance of use per bin before anything was seen; grows with the turns that led here."""
    reason, _, turns = reuse_class
    scale = PRIOR_HAZARD * PRIOR_BY_REASON.get(reason, 1.0) * (1.0 + turns) * BINS_PER_OCTAVE
    hazards = []
    lower = 0.0
    for upper in EDGES:
        octaves = math.log2((upper + PRIOR_SETTLING) / (lower + PRIOR_SETTLING))
        hazards.append(min(0.9, scale * octaves))
        lower = upper
    return hazards


def keep_index(hazards: list[float], first_bin: int) -> float:
    """Largest P(used within a horizon) / E(time kept) over the horizons that start at `first_bin`."""
    survival, chance, kept, best = 1.0, 0.0, 0.0, 0.0
    for index in range(first_bin, NUM_BINS):
        width = EDGES[index] - (EDGES[index - 1] if index else 0.0)
        hazard = hazards[index]
        kept += survival * width * (1.0 - 0.5 * hazard)
        chance += survival * hazard
        survival *= 1.0 - hazard
        best = max(best, chance / kept)
    return best


@dataclass(slots=True)
class _ClassCounts:
    """Ended waits: per bin, how many were used in it and how many reached it."""

    used: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    reached: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)


class ReuseModel:
    """Hazards per class, learned from checkpoints that still exist and from those already given up."""

    __slots__ = ("_counts", "_index", "_num_new", "_waiting")

    def __init__(self) -> None:
        self._counts: dict[ReuseClass, _ClassCounts] = {}
        self._waiting: OrderedDict[bytes, tuple[float, ReuseClass]] = OrderedDict()
        self._index: dict[ReuseClass, list[float]] = {}
        self._num_new = 0

    def created(self, key: bytes, reuse_class: ReuseClass, now: float) -> None:
        """A checkpoint begins to wait for its (next) use."""
        self._waiting[key] = (now, reuse_class)
        self._waiting.move_to_end(key)
        self._num_new += 1
        if len(self._waiting) > MAX_REMEMBERED:
            _, (since, oldest_class) = self._waiting.popitem(last=False)
            self._end(oldest_class, now - since, was_used=False)

    def is_waiting(self, key: bytes) -> bool:
        return key in self._waiting

    def used(self, key: bytes, now: float) -> None:
        """A prompt reached this boundary, whether or not its checkpoint still existed."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            since, reuse_class = entry
            self._end(reuse_class, now - since, was_used=True)

    def _end(self, reuse_class: ReuseClass, age: float, *, was_used: bool) -> None:
        counts = self._counts.setdefault(reuse_class, _ClassCounts())
        last = age_bin(age)
        for index in range(last + was_used):
            counts.reached[index] += 1.0
        if was_used:
            counts.used[last] += 1.0
        self._num_new += 1

    def index(self, reuse_class: ReuseClass, age: float, now: float) -> float:
        """What keeping a checkpoint of this class and age is worth, per time unit it is kept.

        Amortised O(1): the tables are made anew once the observations since are REFRESH_EVENTS and an
        eighth of those that are waited for.
        """
        if self._num_new >= max(REFRESH_EVENTS, len(self._waiting) >> 3):
            self._num_new = 0
            self._refresh(now)
        table = self._index.get(reuse_class)
        if table is None:
            table = self._index[reuse_class] = _index_table(reuse_class, _ClassCounts(), [0.0] * NUM_BINS)
        return table[age_bin(age)]

    def _refresh(self, now: float) -> None:
        """Waits that have not ended count as having reached their present age (Kaplan-Meier)."""
        present: dict[ReuseClass, list[float]] = {}
        for since, reuse_class in self._waiting.values():
            bins = present.setdefault(reuse_class, [0.0] * (NUM_BINS + 1))
            bins[age_bin(now - since)] += 1.0
        for reuse_class in {**self._counts, **present}:
            bins = present.get(reuse_class, [0.0] * (NUM_BINS + 1))
            reached = 0.0
            still_waiting = [0.0] * NUM_BINS
            for index in range(NUM_BINS - 1, -1, -1):
                reached += bins[index + 1]
                still_waiting[index] = reached
            counts = self._counts.get(reuse_class, _ClassCounts())
            self._index[reuse_class] = _index_table(reuse_class, counts, still_waiting)


def _index_table(reuse_class: ReuseClass, counts: _ClassCounts, still_waiting: list[float]) -> list[float]:
    hazards = [
        (used + PRIOR_WEIGHT * prior) / (reached + waiting + PRIOR_WEIGHT)
        for used, reached, waiting, prior in zip(
            counts.used, counts.reached, still_waiting, prior_hazards(reuse_class), strict=True
        )
    ]
    return [keep_index(hazards, first) for first in range(NUM_BINS)]


class KnownConversations:
    """The conversations that came last, by (domain root, name); least recently used out first."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def note(self, conversation: tuple[bytes, str]) -> bool:
        """Remember a conversation; whether it was remembered already."""
        is_known = conversation in self._seen
        self._seen[conversation] = None
        self._seen.move_to_end(conversation)
        if len(self._seen) > MAX_CONVERSATIONS:
            self._seen.popitem(last=False)
        return is_known
