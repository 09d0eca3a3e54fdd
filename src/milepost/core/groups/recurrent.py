"""Recurrent groups: a state exists at single positions and cannot be rewound."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.core.tree import NO_RECORD, Node


class RecurrentGroup:
    """States of one recurrent group.

    Args:
        index: position among the recurrent groups.
        pool: index of its pool.
    """

    __slots__ = ("index", "name", "pool")

    def __init__(self, index: int, name: str, pool: int) -> None:
        self.index = index
        self.name = name
        self.pool = pool

    def deepest(self, path: Sequence[Node], limit: int) -> int:
        """Largest k <= limit for which a state at unit boundary k exists; 0 = none."""
        index = self.index
        for units in range(min(limit, len(path)), 0, -1):
            states = path[units - 1].states
            if states is not None and states[index] != NO_RECORD:
                return units
        return 0
