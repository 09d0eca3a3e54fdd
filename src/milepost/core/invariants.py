"""Audit of the whole cache: conservation, ownership, tree links. Each clause has a test that breaks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from milepost.core.lease import Lease
from milepost.core.tree import NO_RECORD, Node

if TYPE_CHECKING:
    from milepost.core.prefix_cache import PrefixCache


def audit_cache(
    cache: PrefixCache, leases: Sequence[Lease], restores: Sequence[Lease] = (), pinned: Sequence[Node] = ()
) -> list[str]:
    """Every violated invariant, given all leases in force: of requests, and of loads in progress (which
    need no state to go on from); and the nodes that are pinned without a lease."""
    problems = cache.memory.audit()
    everything = [*leases, *restores]
    problems += _audit_tree(cache)
    problems += _audit_pins(cache, everything, pinned)
    problems += _audit_tables(cache, everything)
    problems += _audit_states(cache, leases)
    problems += _audit_ownership(cache, everything)
    counters = cache.counters
    if counters.num_queried_tokens != counters.num_hit_tokens + counters.num_missed_tokens:
        problems.append("queried tokens differ from hits + misses")
    return problems


def _audit_tree(cache: PrefixCache) -> list[str]:
    problems = []
    tree = cache.tree
    for key, node in tree.index.items():
        parent = node.parent
        if node.key != key or parent is None:
            problems.append(f"{node} is indexed under a wrong key or has no parent")
            continue
        if parent.children.get(key) is not node:
            problems.append(f"{node} is not a child of its parent")
        if node.depth != parent.depth + 1:
            problems.append(f"{node} is at a wrong depth")
        if not parent.is_root and tree.index.get(parent.key) is not parent:
            problems.append(f"the parent of {node} was removed")
        if any(page == NO_RECORD for page in node.pages):
            problems.append(f"{node} lacks pages")
        if (node.states is not None) != (key in tree.state_nodes):
            problems.append(f"{node} and the list of checkpoints disagree")
        is_stranded = not node.children and node.states is None
        if is_stranded != (key in tree.stranded):
            problems.append(f"{node} and the list of stranded leaves disagree")
    for listed in (*tree.state_nodes.values(), *tree.stranded.values()):
        if tree.index.get(listed.key) is not listed:
            problems.append(f"{listed} is listed but not in the tree")
    num_linked = sum(len(n.children) for n in (*tree.index.values(), *tree.roots.values()))
    if num_linked != len(tree.index):
        problems.append(f"{num_linked} children but {len(tree.index)} nodes")
    for root in tree.roots.values():
        if not root.children and not root.pins:
            problems.append("the root of an unused domain was not forgotten")
    return problems


def _audit_pins(cache: PrefixCache, leases: Sequence[Lease], pinned: Sequence[Node]) -> list[str]:
    wanted = Counter(id(lease.tip) for lease in leases)
    wanted.update(id(node) for node in pinned)
    problems = []
    for node in (*cache.tree.index.values(), *cache.tree.roots.values()):
        if node.pins != wanted[id(node)]:
            problems.append(f"{node} should have {wanted[id(node)]} pins")
        if node.num_users != node.pins + sum(child.num_users > 0 for child in node.children.values()):
            problems.append(f"{node} counts its users wrongly")
    num_in_use = sum(node.num_users > 0 for node in cache.tree.index.values())
    if num_in_use != cache.tree.num_units_in_use:
        problems.append(f"{num_in_use} units are in use, {cache.tree.num_units_in_use} are counted")
    for lease in leases:
        tip = lease.tip
        known = cache.tree.roots.get(tip.key) if tip.is_root else cache.tree.index.get(tip.key)
        if known is not tip:
            problems.append(f"the tip {tip} of a lease is not in the tree")
    return problems


def _audit_tables(cache: PrefixCache, leases: Sequence[Lease]) -> list[str]:
    problems = []
    for lease in leases:
        path = []
        node = lease.tip
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        for group, table in enumerate(lease.page_tables):
            if len(table) < len(path):
                problems.append(f"a page table is shorter than the published path at {lease.tip}")
            shared = [n.pages[group] for n in path]
            if table[: len(path)] != shared:
                problems.append(f"a page table differs from the published path at {lease.tip}")
    return problems


def _audit_states(cache: PrefixCache, leases: Sequence[Lease]) -> list[str]:
    problems = []
    for lease in leases:
        if lease.running is None and cache.recurrent and lease.tip.states is None and not lease.tip.is_root:
            problems.append(f"a lease has no state to go on from at {lease.tip}")
    return problems


def _audit_ownership(cache: PrefixCache, leases: Sequence[Lease]) -> list[str]:
    """Every record in use has exactly one owner."""
    owners: list[Counter[int]] = [Counter() for _ in cache.geometry.pool_record_bytes]
    checkpoint_pools, running_pools = cache.geometry.checkpoint_pools, cache.geometry.running_pools
    for node in cache.tree.index.values():
        for pool, page in enumerate(node.pages):
            owners[pool][page] += 1
        for pool, slot in zip(checkpoint_pools, node.states or (), strict=False):
            owners[pool][slot] += 1
    for lease in leases:
        for pool, table in enumerate(lease.page_tables):
            owners[pool].update(table[lease.tip.depth :])
        for slots, _ in lease.exports.values():
            for pool, slot in zip(checkpoint_pools, slots, strict=True):
                owners[pool][slot] += 1
        for running in (lease.running, lease.previous):
            for pool, slot in zip(running_pools, running or (), strict=False):
                owners[pool][slot] += 1
    problems = []
    for pool, counts in enumerate(owners):
        used = cache.memory.used_ids(pool)
        doubled = sorted(record for record, count in counts.items() if count > 1)
        if doubled:
            problems.append(f"pool {pool}: records {doubled[:8]} have several owners")
        leaked = sorted(used - set(counts))
        if leaked:
            problems.append(f"pool {pool}: records {leaked[:8]} are in use but owned by nobody")
        freed = sorted(set(counts) - used)
        if freed:
            problems.append(f"pool {pool}: records {freed[:8]} are owned but free")
    return problems
