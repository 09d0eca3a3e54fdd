"""Milepost's checkpoints under another order of retention, as a yardstick for its own."""

from __future__ import annotations

from milepost.core.eviction import Evictor
from milepost.core.prefix_cache import PrefixCache
from milepost.core.retention import SegmentRecord
from milepost.core.tree import Node


class LruEvictor(Evictor):
    """Gives up the checkpoint that was used longest ago, whatever it costs or saves."""

    def _record(self, node: Node, now: float) -> SegmentRecord:
        return SegmentRecord(num_saved_tokens=1, freed_bytes=1, reuse_index=node.last_used)


def use_lru_retention(cache: PrefixCache) -> None:
    """Replace the evictor of a cache that holds nothing yet.

    Raises:
        ValueError: something is cached already.
    """
    if len(cache.tree):
        raise ValueError("the cache is in use")
    cache.evictor = LruEvictor(cache.tree, cache.memory, cache.geometry, cache.counters)
