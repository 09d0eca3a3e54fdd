"""Milepost's checkpoints under another order of retention, as a yardstick for its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from milepost.core import reasons
from milepost.core.eviction import Evictor, is_guess
from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.retention import Rank, SegmentRecord
from milepost.core.tree import Node


class LruEvictor(Evictor):
    """Gives up the checkpoint that was used longest ago, whatever it costs or saves."""

    def _record(self, node: Node, now: float, below: int | None = None) -> SegmentRecord:
        return SegmentRecord(1, 1, reuse_index=node.last_used, is_guess=is_guess(node))

    def export_worth(
        self, lease: Lease, made: Mapping[int, tuple[list[int], str]], position: int, reason: str, now: float
    ) -> Rank:
        """The newest there is."""
        return (0 if reason == reasons.INTERVAL else 1, math.inf)


def use_lru_retention(cache: PrefixCache) -> None:
    """Replace the evictor of a cache that holds nothing yet.

    Raises:
        ValueError: something is cached already.
    """
    if len(cache.tree):
        raise ValueError("the cache is in use")
    cache.evictor = LruEvictor(cache.tree, cache.memory, cache.geometry, cache.counters)
