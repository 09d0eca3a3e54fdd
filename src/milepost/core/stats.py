"""Snapshot of the core for exporters, and the audit of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from milepost.core.metrics import CoreStats
from milepost.core.prefix_cache import PrefixCache
from milepost.core.queues import order_key
from milepost.core.request import Request, RequestStatus


def core_stats(cache: PrefixCache, running: Sequence[Request], num_waiting: int) -> CoreStats:
    """Gauges and counters. O(checkpoints)."""
    geometry = cache.geometry
    states_by_reason = Counter(node.reason for node in cache.tree.state_nodes.values())
    num_checkpoints = sum(states_by_reason.values())
    num_attention = geometry.num_attention_groups
    page_bytes = sum(
        cache.memory.num_used(pool) * size for pool, size in enumerate(geometry.page_record_bytes)
    )
    all_state_bytes = sum(
        cache.memory.num_used(num_attention + index) * size
        for index, size in enumerate(geometry.state_record_bytes)
    )
    state_bytes = num_checkpoints * geometry.checkpoint_bytes
    return CoreStats(
        counters=cache.counters,
        num_running=sum(request.is_counted for request in running),
        num_waiting=num_waiting,
        num_checkpoints=num_checkpoints,
        num_units=len(cache.tree),
        states_by_reason=dict(states_by_reason),
        state_bytes=state_bytes,
        running_state_bytes=all_state_bytes - state_bytes,
        page_bytes=page_bytes,
        used_bytes=cache.memory.used_bytes,
        committed_bytes=cache.memory.committed_bytes,
        peak_committed_bytes=cache.memory.peak_committed_bytes,
        budget_bytes=cache.memory.budget_bytes,
        smallest_hit_prompt=cache.match_unit + 1,
    )


def audit_requests(
    requests: Mapping[int, Request], running: Sequence[Request], num_waiting: int
) -> list[str]:
    """Every request waits or runs, and its status says which; empty = sound."""
    problems = []
    for request in requests.values():
        is_running = request in running
        if is_running != (request.lease is not None):
            problems.append(f"request {request.request_id}: lease and running list disagree")
        if is_running == (request.status is not RequestStatus.RUNNING):
            problems.append(f"request {request.request_id}: status {request.status.value} is wrong")
        if request.num_processed > len(request.tokens):
            problems.append(f"request {request.request_id}: processed more tokens than it has")
    if len(running) + num_waiting != len(requests):
        problems.append("a request is neither waiting nor running, or both")
    if list(running) != sorted(running, key=order_key):
        problems.append("running requests are out of order")
    return problems
