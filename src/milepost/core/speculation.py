"""How many drafts are worth their time. Pure arithmetic over what was measured.

Of the requests that decode in a step, each may carry drafts. A draft brings a token if it and those before
it are accepted, costs what `core.step_cost` has learned, and makes everybody wait for it. Lengths are chosen
for all requests together, so that the step promises the most tokens per second; none if drafts gain too
little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from milepost.core.request import DraftRecord
from milepost.core.step_cost import CostMeter, StepCost, StepShape

FIRST_ACCEPTANCE = 0.6
"""What a drafter that was not seen yet is trusted with."""
TRUST_DRAFTS = 1.5
"""Tested drafts that outweigh what a request's acceptance was before any of its own."""
MAX_EVIDENCE = 40.0
"""Tested drafts that count; older ones are forgotten."""
OPTIMISM = 0.5
"""Standard deviations that are added to an acceptance of which little is known."""
STALENESS = 0.98
"""Weight that tested drafts lose with every decode step behind them."""
USUAL_RATE = 0.01
"""Least weight of one more tested draft in what new requests are trusted with."""
POSITION_RATE = 0.02
"""Weight of one more tested draft in how much better or worse drafts at its position are."""
MIN_PROBE_STEPS, MAX_PROBE_STEPS = 16, 128
"""Decode steps after which a request that does not draft tries one draft again; twice as many after each
try that did not help."""
LONGER_STEPS = 48
"""Steps with drafts after which one more than the best number is tried."""
MIN_GAIN = 1.02
"""Tokens per second drafts must at least multiply, or they are left out."""
_ROUNDS = 20


def expected_tokens(chances: Sequence[float]) -> float:
    """Tokens a step yields on average for a request with drafts.

    Args:
        chances: that all drafts up to this one are accepted, for each draft.
    """
    return 1.0 + sum(chances)


def chances(acceptance: float, scales: Sequence[float], num_drafts: int) -> list[float]:
    """That draft j and all before it are accepted, for `num_drafts` drafts.

    Args:
        acceptance: chance of a first draft.
        scales: how much higher than that the chance at each position is, if those before were accepted.
    """
    result, chance = [], 1.0
    for place in range(num_drafts):
        chance *= min(1.0, acceptance * (scales[place] if place < len(scales) else scales[-1]))
        result.append(chance)
    return result


def best_lengths(chances_of: Sequence[Sequence[float]], num_requests: int, cost: StepCost) -> list[int]:
    """Drafts per request that promise the most tokens per second; zeros if none gain MIN_GAIN.

    Maximises a ratio by Dinkelbach's method (On nonlinear fractional programming, 1967): for a given worth
    of a second, in tokens, each request takes drafts while they are worth their time, up to a depth that
    is worth what depth costs; the worth is then that of the step found, until it stays.

    Args:
        chances_of: see `chances`; one entry per request that may draft, as long as it may be.
        num_requests: that decode in the step, those included.
    """
    plain_seconds = cost.seconds(StepShape(num_requests))
    if plain_seconds <= 0.0:
        return [0] * len(chances_of)
    plain = worth = num_requests / plain_seconds
    best = [0] * len(chances_of)
    for _ in range(_ROUNDS):
        lengths = _lengths_at(chances_of, worth, cost)
        reached = _rate(chances_of, lengths, num_requests, cost)
        if reached <= worth * (1.0 + 1e-12):
            break
        best, worth = lengths, reached
    return best if worth >= MIN_GAIN * plain else [0] * len(chances_of)


def _lengths_at(chances_of: Sequence[Sequence[float]], worth: float, cost: StepCost) -> list[int]:
    """Lengths that gain the most over no drafts, a second being worth so many tokens."""
    per_draft = worth * (cost.draft + cost.drafted)
    replay = worth * cost.replay
    depth_cost = worth * cost.depth
    deepest = max((len(some) for some in chances_of), default=0)
    # Entry d: what drafts bring if nobody makes more than d.
    gains = [0.0] * (deepest + 1)
    bests: list[list[int]] = []
    for some in chances_of:
        value, best_value, best_length = -replay, 0.0, 0
        lengths = [0]
        before = 1.0
        for depth in range(1, deepest + 1):
            if depth <= len(some):
                chance = some[depth - 1]
                value += chance - per_draft + (replay * chance if depth == 1 else replay * (chance - before))
                before = chance
                if value > best_value:
                    best_value, best_length = value, depth
            lengths.append(best_length)
            gains[depth] += best_value
        bests.append(lengths)
    start = worth * cost.start
    depth, most = 0, 0.0
    for tried in range(1, deepest + 1):
        gain = gains[tried] - start - depth_cost * tried
        if gain > most:
            depth, most = tried, gain
    return [lengths[depth] for lengths in bests]


def _rate(
    chances_of: Sequence[Sequence[float]], lengths: Sequence[int], num_requests: int, cost: StepCost
) -> float:
    """Tokens per second of a step."""
    tokens, replays = float(num_requests - len(lengths)), 0.0
    for some, length in zip(chances_of, lengths, strict=True):
        tokens += expected_tokens(some[:length])
        replays += 1.0 - some[length - 1] if length else 0.0
    total = sum(lengths)
    shape = StepShape(num_requests, total, 0, total, max(lengths, default=0))
    return tokens / (cost.seconds(shape) + cost.replay * replays)


def hoped_acceptance(record: DraftRecord) -> float:
    """The acceptance a request may well have, given how little was seen: giving up too soon costs more than
    trying once more."""
    variance = record.acceptance * (1.0 - record.acceptance) + 0.02
    deviation = math.sqrt(variance / (1.0 + TRUST_DRAFTS + record.evidence))
    return min(1.0, record.acceptance + OPTIMISM * deviation)


class FixedLength:
    """Always as many drafts as allowed."""

    def start(self) -> DraftRecord:
        """The record of a request that was not drafted for yet."""
        return DraftRecord(acceptance=FIRST_ACCEPTANCE)

    def begin_step(self, records: Sequence[tuple[DraftRecord, int]], num_decoding: int) -> None:
        """Decide for all requests of a step.

        Args:
            records: of those that may draft, and the most drafts of each.
            num_decoding: requests that decode, those included.
        """

    def choose(self, record: DraftRecord, max_drafts: int) -> int:
        """Drafts of one of these requests."""
        return max_drafts

    def learn(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts, the leading ones were accepted; those behind the next one were not tested."""
        for place in range(min(num_drafts, num_accepted + 1)):
            self._learn_one(record, place, 1.0 if place < num_accepted else 0.0)

    def note_step(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """What a step took does not matter."""

    def _learn_one(self, record: DraftRecord, place: int, outcome: float) -> None:
        record.num_tested_tokens += 1
        record.evidence = min(MAX_EVIDENCE, record.evidence + 1.0)
        record.acceptance += (outcome - record.acceptance) / (record.evidence + TRUST_DRAFTS)


class DraftLengths(FixedLength):
    """Follows the acceptance of every request and the measured cost of steps.

    Args:
        is_own: the worker makes the drafts, and says what that takes.
    """

    def __init__(self, *, is_own: bool = False) -> None:
        self.meter = CostMeter(is_own=is_own)
        self._usual = FIRST_ACCEPTANCE
        self._num_tested = 0
        self._num_accepted = 0
        self._scales: list[float] = [1.0]
        self._steps_since_drafts = 0

    def start(self) -> DraftRecord:
        return DraftRecord(acceptance=self._usual, probe_steps=MIN_PROBE_STEPS)

    def note_step(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        self.meter.observe(shape, seconds, draft_seconds)

    def begin_step(self, records: Sequence[tuple[DraftRecord, int]], num_decoding: int) -> None:
        rooms = [min(room, self._trusted(record)) for record, room in records]
        lengths = best_lengths(
            [
                chances(hoped_acceptance(record), self._scales, room)
                for (record, _), room in zip(records, rooms, strict=True)
            ],
            num_decoding,
            self.meter.cost(),
        )
        is_probing = not any(lengths) and self._steps_since_drafts >= MIN_PROBE_STEPS
        for (record, room), length in zip(records, lengths, strict=True):
            record.evidence *= STALENESS
            record.next_length = length
            if length:
                self._try_longer(record, min(room, self._trusted(record)))
                continue
            record.num_idle_steps += 1
            if room and (is_probing or any(lengths)) and record.num_idle_steps >= record.probe_steps:
                record.next_length = 1
                record.probe_steps = min(MAX_PROBE_STEPS, 2 * record.probe_steps)
                record.num_idle_steps = 0
        drafted = any(record.next_length for record, _ in records)
        self._steps_since_drafts = 0 if drafted else self._steps_since_drafts + 1

    def choose(self, record: DraftRecord, max_drafts: int) -> int:
        return min(record.next_length, max_drafts)

    def _trusted(self, record: DraftRecord) -> int:
        """Most drafts while little is known: a useless drafter is to cost a row, not a row per draft."""
        return 1 + 2 * (record.num_accepted_tokens + self._num_accepted)

    def _try_longer(self, record: DraftRecord, room: int) -> None:
        record.num_idle_steps = 0
        record.probe_steps = MIN_PROBE_STEPS
        record.num_same_steps += 1
        if record.num_same_steps >= LONGER_STEPS and record.next_length < room:
            record.next_length += 1
            record.num_same_steps = 0

    def _learn_one(self, record: DraftRecord, place: int, outcome: float) -> None:
        while len(self._scales) <= place:
            self._scales.append(self._scales[-1])
        scale = self._scales[place]
        expected = min(1.0, record.acceptance * scale)
        error = outcome - expected
        record.num_tested_tokens += 1
        record.evidence = min(MAX_EVIDENCE, record.evidence + 1.0)
        record.acceptance = _share(record.acceptance + error / (record.evidence + TRUST_DRAFTS))
        if place:
            self._scales[place] = min(2.0, max(0.05, scale + POSITION_RATE * error))
        self._num_tested += 1
        self._num_accepted += outcome > 0.0
        rate = max(USUAL_RATE, 1.0 / (self._num_tested + TRUST_DRAFTS))
        self._usual = _share(self._usual + rate * (outcome - self._usual * scale))


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
