"""Rounding, against its definition by search, over every small case."""

from __future__ import annotations

import pytest

from milepost.core.units import ceil_div, ceil_to, exact_div, floor_div, floor_to, is_multiple

CASES = [(value, unit) for value in range(0, 70) for unit in range(1, 20)]


def test_rounding_down_finds_the_largest_multiple() -> None:
    for value, unit in CASES:
        multiples = [unit * k for k in range(71) if unit * k <= value]
        assert floor_to(value, unit) == max(multiples)
        assert floor_div(value, unit) == len(multiples) - 1


def test_rounding_up_finds_the_smallest_multiple() -> None:
    for value, unit in CASES:
        smallest = min(unit * k for k in range(71) if unit * k >= value)
        assert ceil_to(value, unit) == smallest
        assert ceil_div(value, unit) == next(k for k in range(71) if unit * k >= value)


def test_multiples_and_exact_division() -> None:
    for value, unit in CASES:
        on_grid = value in {unit * k for k in range(71)}
        assert is_multiple(value, unit) is on_grid
        if on_grid:
            assert exact_div(value, unit) * unit == value
        else:
            with pytest.raises(ValueError, match=f"{value} is not a multiple of {unit}"):
                exact_div(value, unit)


def test_large_values_stay_exact() -> None:
    big = (1 << 62) + 5
    assert (floor_to(big, 32), ceil_to(big, 32)) == ((1 << 62), (1 << 62) + 32)
    assert ceil_div(big, 32) == floor_div(big, 32) + 1
