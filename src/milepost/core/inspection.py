"""What the cache holds and would do next, as plain data for people who look. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest, nsmallest

from milepost.core.admission import what_holds
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request, RequestStatus
from milepost.core.siblings import Siblings
from milepost.core.transfers import Transfers
from milepost.core.tree import Node

MAX_RANKED = 2048
"""Checkpoints whose value is computed for one look; the least recently used ones if there are more."""


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint.

    Attributes:
        key: hex of the first 8 bytes of its chain key.
        parent_key: of the nearest checkpoint below it on its path; "" at the root.
        start: position of that one.
        position: tokens its state has read.
        segment_bytes: its state, and the pages back to `start`.
        age_seconds: since it was made or hit last.
        is_in_use: a request stands on it or behind it.
        is_pinned: a client asked to keep it, and the time is not over.
    """

    key: str
    parent_key: str
    start: int
    position: int
    reason: str
    segment_bytes: int
    age_seconds: float
    num_hits: int
    is_in_use: bool
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class RequestView:
    """One unfinished request.

    Attributes:
        waits_for: "" while it runs; "load" (a store), "sibling" (who computes a shared prefix), or "turn".
        num_computed_tokens: of its prompt, so far.
    """

    request_id: int
    status: str
    waits_for: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """Attributes:
    checkpoints: the most recently used ones and those they stand on, by path.
    num_checkpoints: how many there are.
    next_evictions: what would go first if room were needed now, in that order.
    """

    checkpoints: list[CheckpointView]
    num_checkpoints: int
    next_evictions: list[CheckpointView]


def view_cache(cache: PrefixCache, now: float, *, limit: int, num_evictions: int = 5) -> CacheView:
    """At most about `limit` checkpoints. O(checkpoints + units of the segments shown)."""
    nodes = cache.tree.state_nodes
    newest = nlargest(limit, nodes.values(), key=lambda node: node.last_used)
    shown = {node.key: node for node in newest}
    pending = list(newest)
    while pending and len(shown) < 2 * limit:
        below = cache.tree.ancestor_with_state(pending.pop())
        if below is not None and below.key not in shown:
            shown[below.key] = below
            pending.append(below)
    views = [_view(cache, node, now) for node in shown.values()]
    views.sort(key=lambda view: (view.position, view.key))
    return CacheView(views, len(nodes), next_evictions(cache, now, num_evictions))


def next_evictions(cache: PrefixCache, now: float, count: int) -> list[CheckpointView]:
    """The checkpoints that are worth least now, least first; those in use cannot go."""
    free = [node for node in cache.tree.state_nodes.values() if not node.pins]
    candidates = nsmallest(MAX_RANKED, free, key=lambda node: node.last_used)
    worst = nsmallest(count, candidates, key=lambda node: cache.evictor.rank(node, now))
    return [_view(cache, node, now) for node in worst]


def _view(cache: PrefixCache, node: Node, now: float) -> CheckpointView:
    below = cache.tree.ancestor_with_state(node)
    first = below.depth if below is not None else 0
    return CheckpointView(
        key=node.key[:8].hex(),
        parent_key=below.key[:8].hex() if below is not None else "",
        start=first * cache.match_unit,
        position=node.depth * cache.match_unit,
        reason=node.reason,
        segment_bytes=cache.checkpoint_bytes + (node.depth - first) * cache.unit_bytes,
        age_seconds=max(0.0, now - node.last_used),
        num_hits=node.num_hits,
        is_in_use=node.num_users > 0,
        is_pinned=node.pinned_until > now,
    )


def view_requests(
    requests: Mapping[int, Request], siblings: Siblings, transfers: Transfers, *, limit: int
) -> list[RequestView]:
    """Unfinished requests in order of arrival, at most `limit`; audits are left out."""
    views: list[RequestView] = []
    for request in requests.values():
        if len(views) == limit:
            break
        if not request.is_counted:
            continue
        cached = request.reuse.num_cached_tokens if request.reuse is not None else 0
        is_running = request.status is RequestStatus.RUNNING
        processed = min(request.num_processed, request.num_prompt_tokens)
        views.append(
            RequestView(
                request_id=request.request_id,
                status=request.status.value,
                waits_for="" if is_running else what_holds(transfers, siblings, None, request) or "turn",
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=cached,
                num_computed_tokens=max(0, processed - cached),
                num_output_tokens=request.num_output_tokens,
            )
        )
    return views
