"""How many drafts are worth their rows. Pure arithmetic over what was measured.

A step takes `fixed + rows * row` seconds. Of n requests that decode, one that adds k drafts pays
k * row for them and gets 1 + a + a^2 + ... + a^k tokens, a being the chance that a draft is accepted if
those before it were. With many rows in a step the fixed part is shared and drafts stop to pay.
"""

from __future__ import annotations

from milepost.core.request import DraftRecord

FIRST_ACCEPTANCE = 0.6
"""What a drafter that was not seen yet is trusted with."""
TRUST_DRAFTS = 1.5
"""Tested drafts that outweigh this trust."""
LEARNING_RATE = 0.05
"""Least weight of one more tested draft in a request's running acceptance."""
FORGETTING = 0.98
"""Weight that measured steps lose with every further one."""
FIXED_ROWS = 8.0
"""Rows that cost as much as the fixed part of a step, until steps of different sizes were measured."""
PROBE_STEPS = 32
"""Steps after which a request that does not draft tries one draft again."""
MIN_GAIN = 1.02
"""Tokens per second drafts must at least multiply, or they are left out."""


class StepCost:
    """Line through (rows, seconds) of the last steps, by least squares with forgetting."""

    __slots__ = ("_rows", "_rows_rows", "_rows_seconds", "_seconds", "_weight")

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * FORGETTING)
        self._weight += 1.0
        self._rows += num_rows
        self._seconds += seconds
        self._rows_rows += num_rows * num_rows
        self._rows_seconds += num_rows * seconds

    def fixed_rows(self) -> float:
        """The fixed part of a step, in rows."""
        if not self._weight:
            return FIXED_ROWS
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - rows * rows
        covariance = self._rows_seconds / self._weight - rows * seconds
        if variance < 0.05 * rows or covariance <= 0.0:
            # All steps had the same size, or noise hides what a row costs.
            return FIXED_ROWS
        per_row = covariance / variance
        return max(0.0, seconds / per_row - rows)


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens a step with `num_drafts` drafts yields on average."""
    total, chance = 1.0, 1.0
    for _ in range(num_drafts):
        chance *= acceptance
        total += chance
    return total


def best_length(acceptance: float, max_drafts: int, num_decoding: int, fixed_rows: float) -> int:
    """Drafts per step that yield the most tokens per second; 0 if none gain MIN_GAIN.

    Args:
        num_decoding: requests that share the step; all are taken to draft alike.
        fixed_rows: the fixed part of a step in rows.
    """
    share = fixed_rows / max(1, num_decoding)
    best, best_rate = 0, MIN_GAIN / (share + 1.0)
    for num_drafts in range(1, max_drafts + 1):
        rate = expected_tokens(acceptance, num_drafts) / (share + 1.0 + num_drafts)
        if rate > best_rate:
            best, best_rate = num_drafts, rate
    return best


class FixedLength:
    """Always as many drafts as allowed."""

    first_acceptance = FIRST_ACCEPTANCE

    def choose(self, record: DraftRecord, max_drafts: int, num_decoding: int) -> int:
        return max_drafts

    def learn(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
        """Every accepted draft counts as one, the first that was not as zero; those behind it were not
        tested."""
        for _ in range(num_accepted):
            _learn(record, 1.0)
        if num_accepted < num_drafts:
            _learn(record, 0.0)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """What a row costs does not matter."""


class DraftLengths(FixedLength):
    """Follows the acceptance of every request and the measured cost of steps."""

    def __init__(self) -> None:
        self.cost = StepCost()

    def note_step(self, num_rows: int, seconds: float) -> None:
        self.cost.observe(num_rows, seconds)

    def choose(self, record: DraftRecord, max_drafts: int, num_decoding: int) -> int:
        """Drafts for the next step of a request. One that should not draft tries again now and then."""
        length = best_length(record.acceptance, max_drafts, num_decoding, self.cost.fixed_rows())
        if length == 0:
            record.num_idle_steps += 1
            if record.num_idle_steps < PROBE_STEPS:
                return 0
            length = 1
        record.num_idle_steps = 0
        return length


def _learn(record: DraftRecord, outcome: float) -> None:
    record.num_tested_tokens += 1
    rate = max(LEARNING_RATE, 1.0 / (TRUST_DRAFTS + record.num_tested_tokens))
    record.acceptance += rate * (outcome - record.acceptance)
