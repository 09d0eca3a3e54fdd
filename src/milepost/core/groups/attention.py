"""Full-attention groups: pages grow with every token and can be cut at any unit."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.core.tree import NO_RECORD, Node


class AttentionGroup:
    """Pages of one attention group.

    Args:
        index: position among the attention groups, which is also its pool.
    """

    __slots__ = ("index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name

    def longest(self, path: Sequence[Node], limit: int) -> int:
        """Units [0, k) of `path`, k <= limit, whose pages all exist. O(k)."""
        index = self.index
        for units in range(min(limit, len(path))):
            if path[units].pages[index] == NO_RECORD:
                return units
        return min(limit, len(path))
