"""Messages from other threads to the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """Work for the engine thread; `if_dead` runs instead when the engine ends first."""

    apply: Callable[[], None]
    if_dead: Callable[[], None]


def nothing() -> None:
    """An abort that comes too late."""
