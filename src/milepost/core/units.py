"""The only integer divisions the core uses.

Every quantity has one name that carries its unit (`num_..._tokens`, `..._units`, `..._bytes`, `position`);
`//` and `%` stay in this module, so that a reader sees which way a number was rounded.
"""

from __future__ import annotations


def floor_to(value: int, unit: int) -> int:
    """Largest multiple of `unit` that is <= `value`."""
    return value - value % unit


def ceil_to(value: int, unit: int) -> int:
    """Smallest multiple of `unit` that is >= `value`."""
    return -(-value // unit) * unit


def floor_div(value: int, unit: int) -> int:
    """How many whole units fit into `value`."""
    return value // unit


def ceil_div(value: int, unit: int) -> int:
    """How many units are needed to hold `value`."""
    return -(-value // unit)


def exact_div(value: int, unit: int) -> int:
    """`value / unit`, which must have no remainder.

    Raises:
        ValueError: if `value` is not a multiple of `unit`.
    """
    quotient, remainder = divmod(value, unit)
    if remainder:
        raise ValueError(f"{value} is not a multiple of {unit}")
    return quotient


def is_multiple(value: int, unit: int) -> bool:
    """Whether `value` lies on the grid of `unit`."""
    return value % unit == 0
