"""How many drafts are worth their rows."""

from __future__ import annotations

from random import Random

import pytest

from milepost.core.request import DraftRecord
from milepost.core.speculation import (
    FIXED_ROWS,
    PROBE_STEPS,
    DraftLengths,
    FixedLength,
    StepCost,
    best_length,
    expected_tokens,
)


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 8) == 1.0


def test_expected_tokens_is_what_happens() -> None:
    rng = Random(3)
    total = 0
    for _ in range(20_000):
        total += 1
        for _ in range(4):
            if rng.random() > 0.7:
                break
            total += 1
    assert total / 20_000 == pytest.approx(expected_tokens(0.7, 4), rel=0.02)


def test_a_lone_request_drafts_much_and_a_full_batch_nothing() -> None:
    assert best_length(0.9, 8, 1, 8.0) >= 6
    assert best_length(0.9, 8, 8, 8.0) < best_length(0.9, 8, 1, 8.0)
    assert best_length(0.9, 8, 64, 8.0) == 0
    assert best_length(1.0, 8, 1000, 0.0) == 0


def test_useless_drafts_are_left_out_and_perfect_ones_taken() -> None:
    assert best_length(0.0, 8, 1, 8.0) == 0
    assert best_length(1.0, 8, 1, 8.0) == 8
    assert best_length(1.0, 0, 1, 8.0) == 0


@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("num_decoding", [1, 2, 5, 20])
def test_no_other_length_is_faster(acceptance: float, num_decoding: int) -> None:
    def rate(length: int) -> float:
        return num_decoding * expected_tokens(acceptance, length) / (6.0 + num_decoding * (1 + length))

    best = best_length(acceptance, 8, num_decoding, 6.0)
    assert rate(best) >= rate(0)
    if best:
        assert rate(best) == pytest.approx(max(rate(length) for length in range(9)))
    else:
        assert max(rate(length) for length in range(9)) <= 1.03 * rate(0)


def test_the_cost_of_a_row_is_found_in_steps_of_several_sizes() -> None:
    cost, rng = StepCost(), Random(1)
    assert cost.fixed_rows() == FIXED_ROWS
    for _ in range(200):
        rows = rng.choice((1, 3, 5, 9))
        cost.observe(rows, (0.012 + 0.002 * rows) * rng.uniform(0.95, 1.05))
    assert cost.fixed_rows() == pytest.approx(6.0, rel=0.25)


def test_equal_steps_say_nothing_about_rows() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(4, 0.01)
    assert cost.fixed_rows() == FIXED_ROWS


def test_a_useless_drafter_is_given_up_soon_and_tried_again() -> None:
    lengths = DraftLengths()
    record = DraftRecord(acceptance=lengths.first_acceptance)
    chosen = []
    for _ in range(12 + 4 * PROBE_STEPS):
        length = lengths.choose(record, 4, 1)
        chosen.append(length)
        if length:
            lengths.learn(record, length, 0)
    assert chosen[0] > 0
    assert not any(chosen[12:20])
    assert 3 <= sum(chosen[12:]) <= 4
    for _ in range(20):
        lengths.learn(record, 1, 1)
    assert lengths.choose(record, 4, 1) == 4


def test_drafts_behind_a_rejected_one_say_nothing() -> None:
    one, many = DraftRecord(acceptance=0.6), DraftRecord(acceptance=0.6)
    FixedLength().learn(one, 2, 1)
    FixedLength().learn(many, 8, 1)
    assert one == many
    assert one.num_tested_tokens == 2
