"""Where checkpoints were given up or refused, so that a lookup can say what that cost.

The cache forgets a prefix it gives up. This list remembers its key and why it went: a prompt that
comes by later would have been served from there. Together with the hit that gives what a cache of any
size would have reused, and the difference is what the budget costs (`num_tokens_lost_to_eviction`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from milepost.core.hashing import KeyChain

MAX_REMEMBERED = 16384
"""Boundaries that are remembered; beyond that the oldest ones are forgotten, and cost nothing any more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a lookup would have found further on.

    Attributes:
        units: where it was, units.
        cause: why it is not there: move of an eviction, or code of a refusal.
        reason: why it was made, or wanted.
    """

    units: int
    cause: str
    reason: str


class LostCheckpoints:
    """Boundaries that could be resumed from, or should have been, and cannot; oldest out first.

    Attributes:
        num_forgotten: those that were too many.
    """

    __slots__ = ("_pairs", "_why", "num_forgotten")

    def __init__(self) -> None:
        self.num_forgotten = 0
        self._why: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        """One object per cause and reason, for all boundaries."""

    def __len__(self) -> int:
        return len(self._why)

    def __contains__(self, key: bytes) -> bool:
        return key in self._why

    def remember(self, key: bytes, cause: str, reason: str) -> None:
        """The boundary with this chain key can no longer be resumed from, or never could."""
        why = (cause, reason)
        self._why[key] = self._pairs.setdefault(why, why)
        self._why.move_to_end(key)
        if len(self._why) > MAX_REMEMBERED:
            self._why.popitem(last=False)
            self.num_forgotten += 1

    def forget(self, key: bytes) -> None:
        """The boundary can be resumed from (again)."""
        self._why.pop(key, None)

    def forget_all_but(self, in_use: Container[bytes]) -> None:
        """The caller emptied the cache on purpose: what is not `in_use` is not missed."""
        self._why = OrderedDict((key, why) for key, why in self._why.items() if key in in_use)

    def beyond(self, chain: KeyChain, units: int, limit: int) -> Loss | None:
        """The deepest loss at units < k <= limit of `chain`, where a hit may end. O(limit - units)."""
        if not self._why:
            return None
        keys = chain.extend(limit)
        for deeper in range(limit, units, -1):
            why = self._why.get(keys[deeper - 1])
            if why is not None and chain.unsplit_units(deeper) == deeper:
                return Loss(deeper, *why)
        return None
