"""What a cache that never loses anything would have reused, kept beside the real one.

The book hears from the tree which boundaries could be resumed from, sees which exports were asked for,
and never forgets one of them. Two laws follow, both equalities:

* at each lookup: tokens reused + tokens the core says an eviction or refusal cost = tokens reused if
  nothing had ever been evicted or refused;
* after each action: checkpoints made - checkpoints that the counters call evicted = checkpoints there;
  the same for units, and for exports asked for, kept and refused.

With promise P1 on the left side of the first law, what a small cache recomputes beyond the bound is what
its eviction counters explain, request by request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from milepost.core import losses, reasons
from milepost.core.coordinator import Match
from milepost.core.hashing import KeyChain
from milepost.core.lease import Lease, Reservation
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import ReuseReport
from milepost.core.tree import Node, PrefixTree

PAGES_ONLY = "stranded"
"""The one move that takes no checkpoint away."""
NO_SLOT_FREED = "reclaim"


def is_overflowing(cache: PrefixCache) -> bool:
    """The core remembers a bounded number of losses; beyond that it explains less than there is."""
    return cache.evictor.losses.num_forgotten > 0


class LossBook:
    """Watches one cache from its first moment on.

    Attributes:
        num_lookups: lookups for which the first law was checked.
        num_lost_tokens: of these, tokens lost to evictions and refusals.
        reported: (cause, reason) -> the same tokens, by the reports of counted requests.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._resumable: set[bytes] = set()
        self._reasons: dict[bytes, str] = {}
        self._lost_reasons: dict[bytes, str] = {}
        self._made: Counter[str] = Counter()
        self._gone: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._num_units_gone = 0
        self._asked: dict[int, list[tuple[int, str]]] = {}
        self._problems: list[str] = []
        self.num_lookups = 0
        self.num_lost_tokens = 0
        self.reported: Counter[tuple[str, str]] = Counter()
        cache.tree.listeners.append(self)
        _watch_units(cache.tree, self)
        cache.match = self._match  # type: ignore[method-assign]
        cache.reserve = self._reserve  # type: ignore[method-assign]
        cache.confirm = self._confirm  # type: ignore[method-assign]
        cache.publish = self._publish  # type: ignore[method-assign]
        cache.reset = self._reset  # type: ignore[method-assign]

    # -- what the tree tells -------------------------------------------------------------------

    def checkpoint_added(self, node: Node) -> None:
        self._resumable.add(node.key)
        self._reasons[node.key] = node.reason
        self._made[node.reason] += 1

    def checkpoint_removed(self, node: Node) -> None:
        reason = self._reasons.pop(node.key)
        self._lost_reasons[node.key] = reason
        self._gone[reason] += 1

    def path_ended(self, node: Node) -> None:
        """Says nothing about what is there."""

    def unit_added(self, key: bytes) -> None:
        """Without recurrent layers pages are all that a hit needs."""
        if not self._cache.recurrent:
            self._resumable.add(key)

    def unit_removed(self) -> None:
        self._num_units_gone += 1

    # -- what is asked of the cache ------------------------------------------------------------

    def _match(self, chain: KeyChain, num_tokens: int) -> Match:
        cache = self._cache
        match = PrefixCache.match(cache, chain, num_tokens)
        if not cache.config.enable_prefix_caching or is_overflowing(cache):
            return match
        keys = chain.extend(match.limit_units)
        reachable = (
            units
            for units in range(match.limit_units, 0, -1)
            if keys[units - 1] in self._resumable and chain.unsplit_units(units) == units
        )
        ideal = next(reachable, 0)
        explained = match.units if match.loss is None else match.loss.units
        self.num_lookups += 1
        self.num_lost_tokens += (explained - match.units) * cache.match_unit
        if explained != ideal:
            self._problems.append(
                f"{match.units} units are reused and {explained - match.units} called lost, "
                f"but {ideal} were once to be had"
            )
        elif match.loss is not None:
            self._check_cause(match.loss, keys[ideal - 1])
        return match

    def _check_cause(self, loss: losses.Loss, key: bytes) -> None:
        counters = self._cache.counters
        named = (loss.cause, loss.reason)
        if self._cache.recurrent and self._lost_reasons.get(key) != loss.reason:
            self._problems.append(f"a lost {self._lost_reasons.get(key)} checkpoint is called {named}")
        if self._cache.recurrent and not (counters.evictions[named] or counters.refusals[named]):
            self._problems.append(f"no eviction and no refusal was counted for {named}")

    def _reserve(
        self,
        lease: Lease,
        end: int,
        exports: Sequence[tuple[int, str]],
        now: float,
        end_reason: str | None = None,
    ) -> Reservation | None:
        asked = self._asked[id(lease)] = list(exports)
        if self._cache.is_end_exported(lease, end):
            asked.append((end, end_reason or reasons.INTERVAL))
        return PrefixCache.reserve(self._cache, lease, end, exports, now, end_reason)

    def _confirm(self, lease: Lease, reservation: Reservation) -> None:
        for position, reason in self._asked.pop(id(lease), []):
            if position not in reservation.exports:
                self._refuse(lease, position, reasons.REFUSED_NO_MEMORY, reason)
        PrefixCache.confirm(self._cache, lease, reservation)

    def _publish(
        self, lease: Lease, end: int, exported: Iterable[int], end_reason: str | None, now: float
    ) -> None:
        written = set(exported)
        for position, (_, reason) in lease.exports.items():
            is_beyond_drafts = position > end and reason == reasons.DECODE
            if (position not in written or not lease.is_caching) and not is_beyond_drafts:
                self._refuse(lease, position, reasons.REFUSED_NOT_WRITTEN, reason)
        PrefixCache.publish(self._cache, lease, end, written, end_reason, now)

    def _refuse(self, lease: Lease, position: int, why: str, reason: str) -> None:
        self._refused[why, reason] += 1
        units = position // self._cache.match_unit
        key = lease.chain.extend(units)[units - 1]
        if lease.is_caching and key not in self._reasons:
            self._resumable.add(key)
            self._lost_reasons[key] = reason

    def _reset(self) -> bool:
        is_empty = PrefixCache.reset(self._cache)
        self._resumable &= self._cache.tree.index.keys()
        return is_empty

    # -- what must hold ------------------------------------------------------------------------

    def report(self, reuse: ReuseReport) -> None:
        """A counted request told its client what it lost."""
        if reuse.eviction is not None:
            self.reported[reuse.eviction] += reuse.num_tokens_lost_to_eviction

    def problems(self) -> list[str]:
        """Every difference between what happened and what the counters say. Empty = sound."""
        problems, self._problems = self._problems, []
        cache, counters = self._cache, self._cache.counters
        evicted: Counter[str] = Counter()
        num_freed = 0
        for (move, reason), count in counters.evictions.items():
            if move != PAGES_ONLY:
                evicted[reason] += count
                num_freed += count if move != NO_SLOT_FREED else 0
        refused = {
            key: count
            for key, count in counters.refusals.items()
            if key[0] in (reasons.REFUSED_NO_MEMORY, reasons.REFUSED_NOT_WRITTEN)
        }
        freed_bytes = num_freed * cache.checkpoint_bytes + self._num_units_gone * cache.unit_bytes
        laws: tuple[tuple[str, object, object], ...] = (
            ("checkpoints made", self._made, counters.checkpoints_by_reason),
            ("checkpoints evicted", self._gone, evicted),
            ("exports refused", self._refused, refused),
            ("tokens evicted", self._num_units_gone * cache.match_unit, counters.num_evicted_tokens),
            ("bytes evicted", freed_bytes, counters.evicted_bytes),
        )
        return problems + [
            f"{name}: {seen}, counted are {counted}" for name, seen, counted in laws if seen != counted
        ]

    def totals_problems(self) -> list[str]:
        """The same for the sum over requests, once nobody waits for a report."""
        counted = self._cache.counters.tokens_lost_to_eviction
        if self.reported == counted:
            return []
        return [f"requests report {self.reported} as lost to evictions, counted are {counted}"]


def _watch_units(tree: PrefixTree, book: LossBook) -> None:
    """Tell `book` of every unit that comes or goes: listeners of the tree hear of checkpoints only."""

    class WatchedTree(PrefixTree):
        __slots__ = ()

        def add(self, parent: Node, key: bytes, tokens: bytes, pages: list[int], now: float) -> Node:
            book.unit_added(key)
            return super().add(parent, key, tokens, pages, now)

        def remove_leaf(self, node: Node) -> list[int]:
            book.unit_removed()
            return super().remove_leaf(node)

    tree.__class__ = WatchedTree
