"""The covering-array generator covers, stays small, and repeats itself."""

from __future__ import annotations

from itertools import combinations, product
from math import prod
from random import Random

import pytest
from tests.support.pairwise import pairwise, random_rows, row_id

CASES = [
    {"a": [1, 2]},
    {"a": [1, 2], "b": "xyz"},
    {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3], "d": [1, 2, 3]},
    {
        "unit": range(7),
        "grid": range(4),
        "offset": range(3),
        "count": range(3),
        "steps": range(5),
        "act": range(9),
    },
    {f"f{i}": [0, 1] for i in range(12)},
]


@pytest.mark.parametrize("factors", CASES, ids=lambda factors: str(len(factors)))
def test_every_pair_occurs(factors: dict) -> None:
    rows = pairwise(factors)
    for first, second in combinations(factors, 2):
        seen = {(row[first], row[second]) for row in rows}
        assert seen == set(product(factors[first], factors[second]))
    for name, values in factors.items():
        assert {row[name] for row in rows} == set(values)


@pytest.mark.parametrize("factors", CASES[2:], ids=lambda factors: str(len(factors)))
def test_few_rows(factors: dict) -> None:
    sizes = sorted((len(values) for values in factors.values()), reverse=True)
    lower_bound = sizes[0] * sizes[1]
    rows = pairwise(factors)
    assert lower_bound <= len(rows) <= 2 * lower_bound + 4
    assert len(rows) < prod(sizes)


def test_it_is_deterministic() -> None:
    assert pairwise(CASES[3]) == pairwise(CASES[3])
    assert random_rows(CASES[3], Random(5), 20) == random_rows(CASES[3], Random(5), 20)


def test_random_rows_draw_from_every_factor() -> None:
    rows = random_rows(CASES[3], Random(1), 300)
    assert len(rows) == 300
    for name, values in CASES[3].items():
        assert {row[name] for row in rows} == set(values)


def test_row_ids_name_every_value() -> None:
    assert row_id({"unit": 16, "grid": None}) == "unit=16-grid=None"


def test_a_factor_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="every factor needs a value"):
        pairwise({"a": [1], "b": []})
