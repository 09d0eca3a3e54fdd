"""What a decode step costs, learned from steps that were measured. Pure arithmetic.

A step takes

    step + request * requests + draft * drafts + replay * replays    for everything but drafting
    start + depth * deepest + drafted * drafts                        for drafting, where the worker drafts

seconds. The coefficients come from least squares over what steps of each shape took lately.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FIXED_ROWS = 8.0
"""Rows that cost as much as the fixed part of a step, until steps of different shapes were measured."""
REPLAY_ROWS = 0.5
"""Rows that cost as much as starting again behind a rejected draft, until it was measured."""
PASS_ROWS = 1.0
"""Rows that cost as much as a drafter's pass for one draft, until it was measured."""
NUM_KEPT = 7
"""Measured times of one shape that are kept; their lower median counts."""
TRUSTED_TIMES = 8.0
"""Measured times beyond which a shape does not gain weight."""
FORGETTING = 0.97
"""Weight that all shapes lose with every measured step, so that what is seen now wins where they disagree."""
LEAST_WEIGHT = 0.05
"""They do not lose more: what a step without drafts took is known as long as nobody knows better."""
NUM_SHAPES = 64
"""Shapes that are remembered."""
TIE_WEIGHT = 5e-4
"""Of an equation that holds until measurements say otherwise; one measured time has weight 1."""
DOUBT = 2.0
"""The first time of a shape counts only with a second one if it is so many times what was expected."""
EARLY_TIMES, REFIT_TIMES = 32, 8
"""After the first of so many measured times, coefficients are fitted anew only every few."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a decode step consisted of.

    Attributes:
        num_requests: that decoded.
        num_drafts: that were verified, over all requests.
        num_replays: requests some of whose drafts were rejected.
        num_own_drafts: drafts that the worker made, over all requests; 0 = it did not draft.
        depth: most drafts that it made for one request.
    """

    num_requests: int
    num_drafts: int = 0
    num_replays: int = 0
    num_own_drafts: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The coefficients, none negative, all in the same unit of time.

    Attributes:
        step: of a step, whatever is in it.
        request: of each request that decodes.
        draft: of each draft that is verified.
        replay: of each request with a rejected draft.
        start: of drafting at all.
        depth: of each draft of the request with the most drafts: they are made one after the other.
        drafted: of each draft that the worker makes.
    """

    step: float = FIXED_ROWS
    request: float = 1.0
    draft: float = 1.0
    replay: float = REPLAY_ROWS
    start: float = 0.0
    depth: float = 0.0
    drafted: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Of a whole step."""
        seconds = (
            self.step
            + self.request * shape.num_requests
            + self.draft * shape.num_drafts
            + self.replay * shape.num_replays
        )
        if shape.num_own_drafts:
            seconds += self.start + self.depth * shape.depth + self.drafted * shape.num_own_drafts
        return seconds


@dataclass(slots=True)
class _Shape:
    """Measured times of steps with the same features."""

    seconds: list[float]
    num_times: int
    last: int
    is_doubted: bool

    def weight(self, now: int) -> float:
        if self.is_doubted:
            return 0.0
        fresh = min(float(self.num_times), TRUSTED_TIMES)
        return float(max(LEAST_WEIGHT, fresh * FORGETTING ** (now - self.last)))

    def typical(self) -> float:
        """Lower median: a step that something else held up says nothing about its shape."""
        return statistics.median_low(self.seconds)


class LinearFit:
    """Seconds as a sum of coefficients times features, none of them negative.

    Args:
        ties: equations (sum of entries times coefficients = 0) that hold where measurements are silent.
    """

    def __init__(self, num_features: int, ties: Sequence[Sequence[float]]) -> None:
        self._num_features = num_features
        self._ties = [tuple(tie) for tie in ties]
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._num_times = 0
        self._fitted: tuple[float, ...] = (0.0,) * num_features
        self._num_unfitted = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._shapes

    def observe(self, features: tuple[int, ...], seconds: float) -> None:
        """A step took so long."""
        self._num_times += 1
        self._num_unfitted += 1
        shape = self._shapes.get(features)
        if shape is None:
            if len(self._shapes) >= NUM_SHAPES:
                del self._shapes[min(self._shapes, key=lambda known: self._shapes[known].last)]
            expected = sum(a * b for a, b in zip(self.coefficients(), features, strict=True))
            shape = self._shapes[features] = _Shape([], 0, 0, 0.0 < DOUBT * expected < seconds)
        else:
            shape.is_doubted = False
        shape.seconds = [*shape.seconds[-NUM_KEPT + 1 :], seconds]
        shape.num_times += 1
        shape.last = self._num_times

    def coefficients(self) -> tuple[float, ...]:
        """One per feature; zeros if nothing was measured."""
        if self._num_unfitted and (self._num_times <= EARLY_TIMES or self._num_unfitted >= REFIT_TIMES):
            self._fitted = self._fit()
            self._num_unfitted = 0
        return self._fitted

    def _fit(self) -> tuple[float, ...]:
        used = list(range(self._num_features))
        solution = dict.fromkeys(used, 0.0)
        while used and self._shapes:
            values = solve(*self._equations(used))
            lowest = min(values, default=0.0)
            if lowest >= 0.0:
                solution.update(zip(used, values, strict=True))
                break
            used.pop(values.index(lowest))
        return tuple(solution[feature] for feature in range(self._num_features))

    def _equations(self, used: Sequence[int]) -> tuple[list[list[float]], list[float]]:
        """Normal equations in the features that are used."""
        size = len(used)
        matrix = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        rows: list[tuple[float, Sequence[float], float]] = [(TIE_WEIGHT, tie, 0.0) for tie in self._ties]
        for features, shape in self._shapes.items():
            weight = shape.weight(self._num_times)
            if weight:
                rows.append((weight, features, shape.typical()))
        for weight, row, seconds in rows:
            picked = [row[feature] for feature in used]
            for i in range(size):
                scaled = weight * picked[i]
                right[i] += scaled * seconds
                for j in range(size):
                    matrix[i][j] += scaled * picked[j]
        return matrix, right


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a symmetric, positive semidefinite system; a direction without any weight gets zero.

    By elimination with the largest diagonal entry left as pivot; changes its arguments.
    """
    size = len(right)
    scale = max((matrix[i][i] for i in range(size)), default=0.0)
    order: list[int] = []
    left = set(range(size))
    while left:
        pivot = max(sorted(left), key=lambda i: matrix[i][i])
        if matrix[pivot][pivot] <= 1e-12 * scale:
            break
        left.remove(pivot)
        order.append(pivot)
        for i in left:
            factor = matrix[i][pivot] / matrix[pivot][pivot]
            right[i] -= factor * right[pivot]
            for j in left:
                matrix[i][j] -= factor * matrix[pivot][j]
    solution = [0.0] * size
    for at in reversed(range(len(order))):
        pivot = order[at]
        known = sum(matrix[pivot][j] * solution[j] for j in order[at + 1 :])
        solution[pivot] = (right[pivot] - known) / matrix[pivot][pivot]
    return solution


class CostMeter:
    """Learns `StepCost` from measured decode steps.

    Args:
        is_own: the worker makes the drafts; else what making them costs is part of what each of them costs.
    """

    def __init__(self, *, is_own: bool) -> None:
        ties = [(1.0, 0.0, -FIXED_ROWS, 0.0), (0.0, 1.0, -1.0, 0.0), (0.0, 0.0, -REPLAY_ROWS, 1.0)]
        self._steps = LinearFit(4, ties)
        self._drafts = LinearFit(3, [(1.0, -0.5, 0.0), (0.0, -0.1, 1.0)])
        self._is_own = is_own
        self._cost: StepCost | None = None

    def observe(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """A step that only decoded.

        Args:
            seconds: of the whole step.
            draft_seconds: what making drafts took of it.
        """
        self._cost = None
        rest = max(0.0, seconds - draft_seconds)
        self._steps.observe((1, shape.num_requests, shape.num_drafts, shape.num_replays), rest)
        if shape.num_own_drafts:
            self._drafts.observe((1, shape.depth, shape.num_own_drafts), draft_seconds)

    def cost(self) -> StepCost:
        """As far as it is known; before anything was measured, in rows instead of seconds. Where the worker
        does not draft, drafting costs nothing of its own."""
        if self._cost is None:
            self._cost = self._learned()
        return self._cost

    def _learned(self) -> StepCost:
        step = self._steps.coefficients()
        if not any(step):
            step = (FIXED_ROWS, 1.0, 1.0, REPLAY_ROWS)
        if not self._is_own:
            return StepCost(*step)
        drafts = self._drafts.coefficients()
        if self._drafts.is_empty:
            drafts = (0.0, PASS_ROWS * step[2], 0.0)
        return StepCost(*step, *drafts)
