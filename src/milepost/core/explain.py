"""Why a request reused what it did: reason code, limiting group, first divergence."""

from __future__ import annotations

from itertools import islice

from milepost.core import reasons
from milepost.core.coordinator import Match
from milepost.core.hashing import KeyChain, tokens_from_bytes
from milepost.core.metrics import CacheCounters
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request, ReuseReport
from milepost.core.tree import Node

MAX_COMPARED_CHILDREN = 64
"""Paths compared to name a divergence; the newest ones, since they are what a user has in mind."""


def reuse_report(
    cache: PrefixCache,
    match: Match,
    chain: KeyChain,
    num_prompt_tokens: int,
    *,
    uses_cache: bool = True,
    is_scored: bool = False,
) -> ReuseReport:
    """Explain a match. Looks at paths of the request's own domain only.

    Args:
        is_scored: log-probabilities of prompt tokens are asked for, which ended the look-up.
    """
    unit = cache.match_unit
    is_enabled = cache.config.enable_prefix_caching and uses_cache
    divergence = first_divergence(cache, match, chain) if is_enabled else None
    reason = _reason(match, divergence) if is_enabled else reasons.DISABLED
    if is_enabled and is_scored and num_prompt_tokens > unit:
        reason = reasons.PROMPT_LOGPROBS
    lost = max(0, match.hit.attention_units - match.units) * unit
    evicted = 0 if match.loss is None else (match.loss.units - match.units) * unit
    return ReuseReport(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=min(match.position, num_prompt_tokens - 1),
        num_matched_tokens={name: units * unit for name, units in match.hit.units_by_group.items()},
        num_tokens_lost_to_missing_state=lost,
        limiting_group=match.hit.limiting_group,
        reason=reason,
        divergence_position=divergence,
        num_tokens_lost_to_eviction=evicted,
        eviction=None if match.loss is None else (match.loss.cause, match.loss.reason),
    )


def explain_start(cache: PrefixCache, match: Match, request: Request) -> None:
    """Put the report of its first admission on a request, and count it."""
    request.reuse = reuse_report(
        cache, match, request.known_chain, request.num_prompt_tokens,
        uses_cache=request.uses_cache, is_scored=request.is_scored,
    )  # fmt: skip
    if request.is_counted:
        count_query(cache.counters, request.reuse)


def count_query(counters: CacheCounters, report: ReuseReport) -> None:
    """Add an admitted request to the counters of hits and misses."""
    num_missed_tokens = report.num_prompt_tokens - report.num_cached_tokens
    counters.num_queried_tokens += report.num_prompt_tokens
    counters.num_hit_tokens += report.num_cached_tokens
    counters.num_missed_tokens += num_missed_tokens
    counters.misses_by_reason[report.reason] += 1
    counters.missed_tokens_by_reason[report.reason] += num_missed_tokens
    counters.num_lost_tokens += report.num_tokens_lost_to_missing_state
    if report.eviction is not None:
        counters.tokens_lost_to_eviction[report.eviction] += report.num_tokens_lost_to_eviction


def _reason(match: Match, divergence: int | None) -> str:
    hit = match.hit
    if match.limit_units == 0:
        return reasons.TOO_SHORT
    if hit.units == match.limit_units:
        return reasons.HIT
    if match.is_media_bound:
        return reasons.MEDIA_SPLIT
    if hit.attention_units > hit.units:
        return reasons.NO_STATE
    if any(units > hit.units for units in hit.units_by_group.values()):
        return reasons.NO_PAGES
    if not match.path:
        return reasons.COLD
    return reasons.PATH_ENDS if divergence is None else reasons.DIVERGED


def first_divergence(cache: PrefixCache, match: Match, chain: KeyChain) -> int | None:
    """First token position at which the sequence differs from the nearest cached path.

    Tokens of media items differ where the items do. None if no cached path goes on where the matched
    one ends, or if the sequence ends inside one.
    """
    unit = cache.match_unit
    node: Node | None = match.path[-1] if match.path else cache.tree.roots.get(chain.root)
    if node is None:
        return None
    start = node.depth * unit
    mine = chain.tokens[start : start + unit]
    is_whole = len(mine) == unit
    if is_whole and chain.extend(node.depth + 1)[node.depth] in node.children:
        return None
    longest = -1
    for child in islice(reversed(node.children.values()), MAX_COMPARED_CHILDREN):
        theirs = tokens_from_bytes(child.tokens)
        common = 0
        while common < len(mine) and mine[common] == theirs[common]:
            common += 1
        if common == len(mine):
            if not is_whole:
                return None
            common = min((max(0, s.start - start) for s in chain.media if s.end > start), default=0)
        longest = max(longest, min(common, unit - 1))
    return start + longest if longest >= 0 else None
