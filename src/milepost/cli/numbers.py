"""Numbers on the command line: the error names the option, what was given and how to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milepost.errors import ConfigError


def whole(
    field: str, *, example: int, least: int | None = None, most: int | None = None
) -> Callable[[Any], int]:
    """Parser of an option that takes a whole number.

    Args:
        field: the option's name with underscores.
        example: a value that makes sense, for the error.
        least, most: bounds, both allowed; None = none here.
    """

    def parse(value: Any) -> int:
        try:
            number = int(str(value))
        except ValueError:
            raise ConfigError(
                field, f"{str(value)!r:.80} is not a whole number; write digits alone, like {example}"
            ) from None
        if (least is not None and number < least) or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ConfigError(field, f"must be {bounds}, not {number}")
        return number

    return parse


def decimal(
    field: str, *, example: float, unit: str = "", least: float | None = None
) -> Callable[[Any], float]:
    """Parser of an option that takes a number with or without a fraction.

    Args:
        field: the option's name with underscores.
        example: a value that makes sense, for the error.
        unit: what is counted, for the error; "" = a plain number.
        least: lower bound, allowed; None = none here.
    """
    kind = f"a number of {unit}" if unit else "a number"

    def parse(value: Any) -> float:
        try:
            number = float(str(value))
        except ValueError:
            raise ConfigError(
                field, f"{str(value)!r:.80} is not {kind}; write it without a unit, like {example:g}"
            ) from None
        if least is not None and number < least:
            raise ConfigError(field, f"must be at least {least:g}, not {number:g}")
        return number

    return parse
