"""Covering arrays: few rows in which every pair of values of every two factors occurs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

Row = dict[str, Any]
_Pair = tuple[int, int, int, int]
"""(factor, value, factor, value) as indices, the smaller factor first."""


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows that cover all pairs. Greedy and deterministic; not minimal, but close.

    Each row starts with the first pair that is still missing. Every other factor then takes the value
    that covers most missing pairs with what the row already has; of equally good values the one
    used least so far.

    Raises:
        ValueError: a factor without values.
    """
    names = list(factors)
    values = [list(factors[name]) for name in names]
    if not all(values):
        raise ValueError(f"every factor needs a value, got {dict(factors)}")
    if len(names) == 1:
        return [{names[0]: value} for value in values[0]]
    missing: dict[_Pair, None] = {
        (first, a, second, b): None
        for first, second in combinations(range(len(names)), 2)
        for a in range(len(values[first]))
        for b in range(len(values[second]))
    }
    num_used = [[0] * len(choices) for choices in values]
    rows: list[list[int]] = []
    while missing:
        first, a, second, b = next(iter(missing))
        chosen = {first: a, second: b}
        for factor in range(len(names)):
            if factor not in chosen:
                chosen[factor] = _best(factor, chosen, missing, num_used[factor])
        row = [chosen[factor] for factor in range(len(names))]
        for factor, value in enumerate(row):
            num_used[factor][value] += 1
        for first, second in combinations(range(len(names)), 2):
            missing.pop((first, row[first], second, row[second]), None)
        rows.append(row)
    return [{name: values[i][row[i]] for i, name in enumerate(names)} for row in rows]


def _best(factor: int, chosen: Mapping[int, int], missing: Mapping[_Pair, None], num_used: list[int]) -> int:
    def gain(value: int) -> tuple[int, int, int]:
        covered = sum(
            ((factor, value, other, v) if factor < other else (other, v, factor, value)) in missing
            for other, v in chosen.items()
        )
        return covered, -num_used[value], -value

    return max(range(len(num_used)), key=gain)


def random_rows(factors: Mapping[str, Sequence[Any]], rng: Random, count: int) -> list[Row]:
    """`count` rows drawn from the full product, for the pairs and triples a covering array leaves out."""
    return [{name: rng.choice(list(choices)) for name, choices in factors.items()} for _ in range(count)]


def row_id(row: Row) -> str:
    """A test id that names every value."""
    return "-".join(f"{name}={value}" for name, value in row.items())
