"""Everything a failed operation must leave as it was, as plain values that compare by ==."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.tree import Node


def _node(node: Node) -> tuple[Any, ...]:
    return (
        node.depth,
        node.parent.key if node.parent is not None else None,
        sorted(node.children),
        list(node.pages),
        list(node.states) if node.states is not None else None,
        node.reason,
        node.pins,
        node.last_used,
        node.num_hits,
        node.conversation,
    )


def _lease(lease: Lease) -> tuple[Any, ...]:
    return (
        lease.tip.key,
        [list(table) for table in lease.page_tables],
        list(lease.running) if lease.running is not None else None,
        list(lease.replaced),
        dict(lease.exports),
        [node.key for node in lease.decode_nodes],
    )


def snapshot(cache: PrefixCache, leases: Sequence[Lease] = ()) -> dict[str, Any]:
    """Tree, records in use, leases and published checkpoints. Free records may stay resident."""
    pools = range(len(cache.geometry.pool_record_bytes))
    return {
        "nodes": {key: _node(node) for key, node in cache.tree.index.items()},
        "roots": {key: _node(node) for key, node in cache.tree.roots.items()},
        "checkpoints": list(cache.tree.state_nodes),
        "stranded": set(cache.tree.stranded),
        "used": [cache.memory.used_ids(pool) for pool in pools],
        "used_bytes": cache.memory.used_bytes,
        "leases": [_lease(lease) for lease in leases],
    }
