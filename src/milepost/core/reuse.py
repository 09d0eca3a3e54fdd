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
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from milepost.core import reasons
from milepost.core.losses import Loss

BINS_PER_OCTAVE = 2
MIN_AGE_LOG2 = -2
NUM_BINS = 44
"""Bins cover ages from a quarter to half a million time units; seconds in the engine."""
MAX_REMEMBERED = 16384
"""Checkpoints whose next use is waited for, given up ones included."""
MAX_TURN_CLASS = 6
REFRESH_EVENTS = 256
"""Observations after which the tables are computed anew."""
PRIOR_WEIGHT = 4.0
PRIOR_HAZARD = 0.03
MAX_HAZARD = 0.9
PRIOR_SETTLING = 60.0
"""Time units before age begins to count in the prior: a second or a minute ago is the same."""
PRIOR_BY_REASON = {
    reasons.MARKER: 2.0,
    reasons.JUNCTION: 1.5,
    reasons.INTERVAL: 0.25,
}
LIVE_SHARE = 0.9
MIN_LIVE_AGE = 60.0
DEFAULT_LIVE_AGE = 300.0
"""Until MIN_LIVE_USES were seen: for so long the caches people know keep what nobody pinned."""
MIN_LIVE_USES = 32
PRIOR_IF_PASSED = 0.25
"""Factor for ends of a turn behind which the conversation went on."""
TURN_ENDS = frozenset({reasons.TAIL, reasons.END, reasons.DECODE, reasons.FINISH})
CONTINUATION_REASONS = TURN_ENDS | {reasons.HISTORY}
"""A hit on one of these continues a conversation; a hit on another merely shares a beginning."""

MAX_CONVERSATIONS = 16384
"""Names of conversations that are remembered."""

ReuseClass = tuple[str, bool, int, int]
"""(reason, something deeper continues it, turns up to MAX_TURN_CLASS, binary digits of its position)."""

EDGES = [2.0 ** (MIN_AGE_LOG2 + index / BINS_PER_OCTAVE) for index in range(NUM_BINS)]
"""Upper edge of every age bin."""


def class_of(reason: str, position: int, turns: int, *, is_passed: bool) -> ReuseClass:
    """Class of a checkpoint at `position` (tokens)."""
    return (reason, is_passed, min(turns, MAX_TURN_CLASS), position.bit_length())


def general_class(reuse_class: ReuseClass) -> ReuseClass:
    """The class without the length of what led to it: what a class with few observations leans on."""
    reason, is_passed, turns, _ = reuse_class
    return (reason, is_passed, turns, 0)


def levels(reuse_class: ReuseClass) -> tuple[ReuseClass, ...]:
    """The classes an observation counts for."""
    general = general_class(reuse_class)
    return (reuse_class,) if general == reuse_class else (reuse_class, general)


def age_bin(age: float) -> int:
    """Index of the bin that holds `age`; the last bin is open."""
    return min(bisect_right(EDGES, age), NUM_BINS - 1)


def prior_hazards(reuse_class: ReuseClass) -> list[float]:
    """Chance of use per bin before anything was seen; grows with the turns that led here."""
    reason, is_passed, turns, _ = reuse_class
    scale = PRIOR_HAZARD * PRIOR_BY_REASON.get(reason, 1.0) * (1.0 + turns) * BINS_PER_OCTAVE
    if is_passed and reason in TURN_ENDS:
        scale *= PRIOR_IF_PASSED
    hazards = []
    lower = 0.0
    for upper in EDGES:
        octaves = math.log2((upper + PRIOR_SETTLING) / (lower + PRIOR_SETTLING))
        hazards.append(min(MAX_HAZARD, scale * octaves))
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


@dataclass(frozen=True, slots=True)
class Wait:
    """A checkpoint, or what was one, that waits for its next use.

    Attributes:
        since: when it was made or last used.
        conversation: whose request made it, if the caller named one.
        num_prompt_tokens: of the longest request that made or used it.
    """

    since: float
    reuse_class: ReuseClass
    conversation: tuple[bytes, str] | None = None
    num_prompt_tokens: int = 0

    def turns_for(self, conversation: tuple[bytes, str] | None, *, is_repeat: bool = False) -> int:
        """Turns that lead to a request of `conversation` that goes on here, even if the checkpoint is gone.
        What another conversation left says nothing about this one: a side request starts anew."""
        reason, _, turns, _ = self.reuse_class
        is_own = self.conversation in (None, conversation)
        if not is_own or reason not in CONTINUATION_REASONS:
            return 0
        return turns + (not is_repeat)


@dataclass(slots=True)
class _ClassCounts:
    """Ended waits: per bin, how many were used in it and how many reached it."""

    used: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    reached: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)


class ReuseModel:
    """Hazards per class, learned from checkpoints that still exist and from those already given up.

    Attributes:
        live_age: a conversation that went on before is expected to go on again for so long: LIVE_SHARE of
            those that went on did so within it.
    """

    __slots__ = ("_classes", "_counts", "_index", "_num_new", "_present", "_waiting", "live_age")

    def __init__(self) -> None:
        self._classes: dict[ReuseClass, ReuseClass] = {}
        """One object per class, for all that wait in it."""
        self._counts: dict[ReuseClass, _ClassCounts] = {}
        self._waiting: OrderedDict[bytes, Wait] = OrderedDict()
        self._present: dict[ReuseClass, list[float]] = {}
        """Per class and bin, how many of those that wait now have passed the bin unused."""
        self._index: dict[ReuseClass, list[float]] = {}
        self._num_new = 0
        self.live_age = DEFAULT_LIVE_AGE

    def created(
        self,
        key: bytes,
        reuse_class: ReuseClass,
        now: float,
        conversation: tuple[bytes, str] | None = None,
        num_prompt_tokens: int = 0,
    ) -> None:
        """A checkpoint begins to wait for its (next) use."""
        reuse_class = self._classes.setdefault(reuse_class, reuse_class)
        self._waiting[key] = Wait(now, reuse_class, conversation, num_prompt_tokens)
        self._waiting.move_to_end(key)
        self._num_new += 1
        if len(self._waiting) > MAX_REMEMBERED:
            _, oldest = self._waiting.popitem(last=False)
            self._end(oldest, now, was_used=False)

    def reclassify(self, key: bytes, reuse_class: ReuseClass) -> None:
        """More is known about what waits at `key`; since when it waits stays."""
        wait = self._waiting.get(key)
        if wait is not None:
            reuse_class = self._classes.setdefault(reuse_class, reuse_class)
            self._waiting[key] = replace(wait, reuse_class=reuse_class)

    def used(self, key: bytes, now: float) -> Wait | None:
        """A prompt reached this boundary, whether or not its checkpoint still existed: the wait that ends
        with it, if there was one."""
        wait = self._waiting.pop(key, None)
        if wait is not None:
            self._end(wait, now, was_used=True)
        return wait

    def turns_before(
        self,
        keys: Sequence[bytes],
        num_prompt_tokens: int,
        conversation: tuple[bytes, str] | None,
        loss: Loss | None,
    ) -> int:
        """Turns that lead to a request of `conversation` with these boundaries: those of the deepest one that
        waits and one more, or one where it goes on at a checkpoint that was refused or given up. The same
        prompt again is no further turn."""
        for units in range(len(keys), 0, -1):
            wait = self._waiting.get(keys[units - 1])
            if wait is not None:
                is_repeat = units == len(keys) and num_prompt_tokens <= wait.num_prompt_tokens
                return wait.turns_for(conversation, is_repeat=is_repeat)
            if loss is not None and loss.units == units and loss.reason in CONTINUATION_REASONS:
                return int(units < len(keys))
        return 0

    def used_deepest(self, keys: Sequence[bytes], now: float) -> None:
        """A prompt with these boundaries came: the deepest wait has ended."""
        for key in reversed(keys):
            if self.used(key, now) is not None:
                return

    def _end(self, wait: Wait, now: float, *, was_used: bool) -> None:
        last = age_bin(now - wait.since)
        for counted in levels(wait.reuse_class):
            counts = self._counts.setdefault(counted, _ClassCounts())
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
            hazards = self._hazards(reuse_class)
            table = self._index[reuse_class] = [keep_index(hazards, first) for first in range(NUM_BINS)]
        return table[age_bin(age)]

    def _refresh(self, now: float) -> None:
        """Waits that have not ended count as having reached their present age (Kaplan-Meier)."""
        present: dict[ReuseClass, list[float]] = {}
        for wait in self._waiting.values():
            bin_index = age_bin(now - wait.since)
            for counted in levels(wait.reuse_class):
                present.setdefault(counted, [0.0] * NUM_BINS)[bin_index] += 1.0
        for bins in present.values():
            reached = 0.0
            for index in range(NUM_BINS - 1, -1, -1):
                bins[index], reached = reached, reached + bins[index]
        self._present = present
        self._index = {}
        self.live_age = self._learned_live_age()

    def _learned_live_age(self) -> float:
        used = [0.0] * NUM_BINS
        for reuse_class, counts in self._counts.items():
            reason, _, turns, _ = reuse_class
            if reason in CONTINUATION_REASONS and turns and reuse_class == general_class(reuse_class):
                used = [total + more for total, more in zip(used, counts.used, strict=True)]
        total = sum(used)
        if total < MIN_LIVE_USES:
            return DEFAULT_LIVE_AGE
        reached = bisect_left(list(accumulate(used)), LIVE_SHARE * total)
        return float(max(MIN_LIVE_AGE, EDGES[reached]))

    def _hazards(self, reuse_class: ReuseClass) -> list[float]:
        """Chance of use per bin: what was counted, and as much of the more general class (or of the prior)
        as PRIOR_WEIGHT observations."""
        general = general_class(reuse_class)
        expected = prior_hazards(reuse_class) if general == reuse_class else self._hazards(general)
        counts = self._counts.get(reuse_class) or _ClassCounts()
        waiting = self._present.get(reuse_class) or [0.0] * NUM_BINS
        return [
            min(MAX_HAZARD, (used + PRIOR_WEIGHT * hazard) / (reached + present + PRIOR_WEIGHT))
            for used, reached, present, hazard in zip(
                counts.used, counts.reached, waiting, expected, strict=True
            )
        ]


class KnownConversations:
    """The conversations that came last, by (domain root, name); least recently used out first."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def is_known(self, conversation: tuple[bytes, str] | None) -> bool:
        return conversation is not None and conversation in self._seen

    def note(self, conversation: tuple[bytes, str] | None) -> None:
        """Remember a conversation, if it has a name."""
        if conversation is None:
            return
        self._seen[conversation] = None
        self._seen.move_to_end(conversation)
        if len(self._seen) > MAX_CONVERSATIONS:
            self._seen.popitem(last=False)
