"""What a decode step costs, from steps that were measured."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.step_cost import (
    FIXED_ROWS,
    NUM_SHAPES,
    PASS_ROWS,
    REPLAY_ROWS,
    CostMeter,
    LinearFit,
    StepCost,
    StepShape,
    solve,
)

TRUE = StepCost(step=6e-3, request=1e-3, draft=4e-4, replay=8e-4, start=3e-4, depth=1.5e-3, drafted=5e-5)


def shape(rng: Random) -> StepShape:
    requests = rng.randrange(1, 5)
    depth = rng.randrange(5)
    drafts = sum(rng.randrange(depth + 1) for _ in range(requests - 1)) + depth
    return StepShape(requests, drafts, rng.randrange(requests + 1) if drafts else 0, drafts, depth)


def draft_seconds(cost: StepCost, step: StepShape) -> float:
    if not step.num_own_drafts:
        return 0.0
    return cost.start + cost.depth * step.depth + cost.drafted * step.num_own_drafts


def measure(meter: CostMeter, cost: StepCost, steps: int, rng: Random, noise: float = 0.0) -> None:
    for _ in range(steps):
        step = shape(rng)
        factor = 1.0 + noise * (2.0 * rng.random() - 1.0)
        meter.observe(step, factor * cost.seconds(step), factor * draft_seconds(cost, step))


def predicted(meter: CostMeter, cost: StepCost, rng: Random) -> list[float]:
    """Predicted over true seconds, of shapes that may not have been seen."""
    return [meter.cost().seconds(step) / cost.seconds(step) for step in (shape(rng) for _ in range(40))]


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = StepCost(10.0, 2.0, 1.0, 0.5, 3.0, 4.0, 0.25)
    assert cost.seconds(StepShape(3)) == 16.0
    assert cost.seconds(StepShape(3, 5, 2)) == 22.0
    assert cost.seconds(StepShape(3, 5, 2, 5, 2)) == 22.0 + 3.0 + 8.0 + 1.25


def test_costs_are_found_in_steps_of_several_shapes() -> None:
    meter = CostMeter(is_own=True)
    measure(meter, TRUE, 300, Random(1))
    assert all(abs(ratio - 1.0) < 0.02 for ratio in predicted(meter, TRUE, Random(2)))


@pytest.mark.parametrize("seed", range(5))
def test_noise_averages_out(seed: int) -> None:
    meter = CostMeter(is_own=True)
    measure(meter, TRUE, 400, Random(seed), noise=0.2)
    assert all(abs(ratio - 1.0) < 0.12 for ratio in predicted(meter, TRUE, Random(2)))


def test_steps_that_something_held_up_do_not_count() -> None:
    calm, disturbed = CostMeter(is_own=True), CostMeter(is_own=True)
    rng = Random(4)
    for _ in range(400):
        step = StepShape(1, drafts := rng.randrange(3), 0, drafts, drafts)
        seconds, drafting = TRUE.seconds(step), draft_seconds(TRUE, step)
        calm.observe(step, seconds, drafting)
        factor = 50.0 if rng.random() < 0.1 else 1.0
        disturbed.observe(step, factor * seconds, factor * drafting)
    for drafts in range(5):
        step = StepShape(1, drafts, 0, drafts, drafts)
        assert disturbed.cost().seconds(step) == pytest.approx(calm.cost().seconds(step), rel=0.05)


def test_what_was_not_measured_is_assumed() -> None:
    meter = CostMeter(is_own=True)
    assert meter.cost() == StepCost(FIXED_ROWS, 1.0, 1.0, REPLAY_ROWS, 0.0, PASS_ROWS, 0.0)
    for _ in range(50):
        meter.observe(StepShape(2), 0.02, 0.0)
    cost = meter.cost()
    assert cost.seconds(StepShape(2)) == pytest.approx(0.02)
    assert cost.step == pytest.approx(FIXED_ROWS * cost.draft)
    assert cost.request == pytest.approx(cost.draft)
    assert cost.replay == pytest.approx(REPLAY_ROWS * cost.draft)
    assert cost.depth == pytest.approx(PASS_ROWS * cost.draft)


def test_a_dear_step_is_known_when_it_was_seen_twice() -> None:
    """Once, and something else may have held it up: a first step is often slow."""
    meter = CostMeter(is_own=True)
    drafting = StepShape(1, 2, 0, 2, 2)
    for _ in range(20):
        meter.observe(StepShape(1), 0.010, 0.0)
    before = meter.cost().seconds(drafting)
    meter.observe(drafting, 0.090, 0.018)
    assert meter.cost().seconds(drafting) < 0.040
    meter.observe(drafting, 0.060, 0.018)
    assert meter.cost().seconds(drafting) == pytest.approx(0.060, rel=0.05)
    assert before < 0.020


def test_drafts_of_others_are_part_of_what_drafts_cost() -> None:
    meter = CostMeter(is_own=False)
    for drafts in range(5):
        for _ in range(8):
            meter.observe(StepShape(1, drafts), 0.01 + 0.002 * drafts, 0.0)
    cost = meter.cost()
    assert (cost.start, cost.depth, cost.drafted) == (0.0, 0.0, 0.0)
    assert cost.draft == pytest.approx(0.002, rel=0.05)


def test_a_change_is_followed() -> None:
    meter = CostMeter(is_own=True)
    measure(meter, TRUE, 300, Random(5))
    slower = StepCost(*(value * factor for value, factor in zip(
        (TRUE.step, TRUE.request, TRUE.draft, TRUE.replay, TRUE.start, TRUE.depth, TRUE.drafted),
        (1.0, 2.0, 5.0, 1.0, 1.0, 4.0, 1.0), strict=True)))  # fmt: skip
    measure(meter, slower, 600, Random(6))
    assert predicted(meter, slower, Random(2)) == pytest.approx([1.0] * 40, rel=0.05)


def test_what_was_measured_long_ago_gives_way_to_what_is_seen_now() -> None:
    """Drafts were dear once. Trying one now and then is enough to see that they no longer are."""
    meter = CostMeter(is_own=False)
    for _ in range(10):
        meter.observe(StepShape(1), 0.010, 0.0)
        meter.observe(StepShape(1, 4), 0.100, 0.0)
    for _ in range(8):
        for _ in range(100):
            meter.observe(StepShape(1), 0.010, 0.0)
        meter.observe(StepShape(1, 1), 0.0105, 0.0)
    assert meter.cost().seconds(StepShape(1, 4)) < 0.025
    assert meter.cost().seconds(StepShape(1, 1)) < 0.0135


def test_what_nobody_measured_since_stays_known() -> None:
    """A request that always drafts still knows what it would take not to."""
    meter = CostMeter(is_own=False)
    for _ in range(10):
        meter.observe(StepShape(1), 0.010, 0.0)
    for number in range(2000):
        meter.observe(StepShape(1, 4, number % 2), 0.012 + 0.001 * (number % 2), 0.0)
    assert meter.cost().seconds(StepShape(1)) == pytest.approx(0.010, rel=0.1)


def test_no_cost_is_negative() -> None:
    meter = CostMeter(is_own=True)
    for _ in range(30):
        meter.observe(StepShape(1), 0.010, 0.0)
        meter.observe(StepShape(1, 4, 1, 4, 4), 0.006, 0.001)
        meter.observe(StepShape(1, 1, 0, 1, 1), 0.009, 0.002)
    cost = meter.cost()
    assert min(cost.step, cost.request, cost.draft, cost.replay, cost.start, cost.depth, cost.drafted) >= 0.0


def test_a_clock_that_stands_still_leaves_what_is_assumed() -> None:
    meter = CostMeter(is_own=False)
    for _ in range(10):
        meter.observe(StepShape(1, 2), 0.0, 0.0)
    assert meter.cost() == StepCost()


def test_only_so_many_shapes_are_remembered() -> None:
    fit = LinearFit(2, [])
    for number in range(3 * NUM_SHAPES):
        fit.observe((1, number), 1.0 + number)
        fit.observe((1, 0), 1.0)
    assert len(fit._shapes) == NUM_SHAPES
    assert (1, 0) in fit._shapes
    assert fit.coefficients() == pytest.approx((1.0, 1.0), rel=1e-6)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=6))
def test_normal_equations_are_solved(rows: list[list[float]]) -> None:
    """A^T A x = A^T b with b = A (1, -2, 3): the residual is zero whether or not x is unique."""
    right = [row[0] - 2.0 * row[1] + 3.0 * row[2] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    vector = [sum(row[i] * value for row, value in zip(rows, right, strict=True)) for i in range(3)]
    found = solve([list(row) for row in matrix], list(vector))
    scale = max(1.0, max(abs(value) for value in vector))
    for i in range(3):
        assert sum(matrix[i][j] * found[j] for j in range(3)) == pytest.approx(vector[i], abs=2e-3 * scale)
