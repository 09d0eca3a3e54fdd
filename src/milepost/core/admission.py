"""Whether a request may start: it must not force those that run to give up their memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.coordinator import Match
from milepost.core.geometry import CacheGeometry
from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.core.siblings import Siblings
from milepost.core.transfers import Transfers
from milepost.core.tree import Node
from milepost.core.units import ceil_div
from milepost.errors import ConfigError

MIN_REQUEST_TOKENS = 2
"""One prompt token and one generated token."""
LOAD = "load"
SIBLING = "sibling"


def what_holds(transfers: Transfers, siblings: Siblings, known: set[int] | None, request: Request) -> str:
    """Why a waiting request may not run yet: LOAD (a store is read for it), SIBLING (another one computes
    its prefix), or "". `known` collects those found to wait, see `Siblings.awaited_boundary`."""
    if transfers.is_held(request.request_id):
        if known is not None:
            known.add(request.request_id)
        return LOAD
    return SIBLING if siblings.awaited_boundary(request, known) else ""


def largest_request_tokens(geometry: CacheGeometry, cache: CacheConfig, config: SchedulerConfig) -> int:
    """Longest request (prompt and output) this budget can serve, at most `max_model_len`.

    Raises:
        ConfigError: not even a request of two tokens fits.
    """
    tokens = min(config.max_model_len, geometry.max_tokens_for(cache.cache_bytes))
    if tokens < MIN_REQUEST_TOKENS:
        needed = geometry.request_bytes(MIN_REQUEST_TOKENS)
        raise ConfigError(
            "cache_bytes",
            f"{cache.cache_bytes} bytes cannot hold one request: pages of one match unit "
            f"({geometry.unit_bytes} bytes) and its states ({geometry.request_state_bytes} bytes) "
            f"need {needed}. Raise --cache-bytes",
        )
    return tokens


def worst_case_bytes(cache: PrefixCache, num_tokens: int, num_units_held: int, *, has_running: bool) -> int:
    """Bytes still to be taken until `num_tokens` + 1 tokens are processed."""
    units = max(0, ceil_div(num_tokens + 1, cache.match_unit) - num_units_held)
    states = 0 if has_running else 1
    return units * cache.unit_bytes + states * cache.running_bytes


def in_use_bytes(
    cache: PrefixCache, leases: Iterable[Lease], path: Sequence[Node] = (), pinned: Iterable[Node] = ()
) -> int:
    """Bytes no eviction can free: what `leases`, which are all in force, hold, the nodes of `path`,
    and the nodes somebody else has `pinned`. O(leases + units of `path` that are not in use)."""
    units = cache.tree.num_units_in_use
    for node in reversed(path):
        if node.num_users:
            break
        units += 1
    tips = {id(node): node for node in (*path[-1:], *pinned)}
    num_running = num_checkpoints = 0
    for lease in leases:
        tips[id(lease.tip)] = lease.tip
        num_running += (lease.running is not None) + (lease.previous is not None)
        num_checkpoints += len(lease.exports)
        units += max(0, lease.num_units - lease.tip.depth)
    num_checkpoints += sum(tip.states is not None for tip in tips.values())
    states = num_running * cache.running_bytes + num_checkpoints * cache.checkpoint_bytes
    return units * cache.unit_bytes + states


def fits(
    cache: PrefixCache, request: Request, match: Match, running: Sequence[Request], transfers: Transfers
) -> bool:
    """Whether `request` can be admitted beside `running` without preempting one of them soon.

    Counts what each still needs to finish its prefill and its next token, and what loads and saves
    hold. An idle engine admits anything, since `add` refused what does not fit alone.
    """
    if not running:
        return True
    needed = worst_case_bytes(cache, request.num_tokens, match.units, has_running=False)
    leases: list[Lease] = []
    for other in running:
        lease = other.lease
        if lease is None:
            continue
        leases.append(lease)
        needed += worst_case_bytes(
            cache, other.num_tokens, lease.num_units, has_running=lease.running is not None
        )
    if needed <= cache.memory.free_bytes:
        return True
    leases.extend(transfers.leases())
    in_use = in_use_bytes(cache, leases, match.path[: match.units], transfers.pinned())
    return in_use + needed <= cache.memory.budget_bytes
