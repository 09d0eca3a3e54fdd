"""What operations on named conversations are asked for, and what they answer. Plain data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from milepost.core.hashing import CacheDomain
from milepost.engine.messages import LoadNote


@dataclass(frozen=True, slots=True)
class Meant:
    """Which prompt an operation is about: the tokens, or a name that stands for some.

    Attributes:
        names: where names are kept, if that is not `domain`: callers who share a cache may have names of
            their own.
        public_tokens: of `tokens`, those at the head that are no part of the conversation itself (system
            prompt, tools); None where that is not known.
    """

    domain: CacheDomain
    name: str | None = None
    tokens: array[int] | None = None
    public_tokens: int | None = None
    names: CacheDomain | None = None

    @property
    def names_domain(self) -> CacheDomain:
        return self.domain if self.names is None else self.names


@dataclass(frozen=True, slots=True)
class Saved:
    """Attributes:
    tokens_by_store: how far a load from each store alone gets.
    cached_tokens: the deepest checkpoint in the cache.
    num_segments, num_bytes: what a load from the store that reaches farthest would bring.
    """

    name: str
    tokens_by_store: dict[str, int]
    cached_tokens: int
    num_segments: int
    num_bytes: int

    @property
    def saved_tokens(self) -> int:
        return max(self.tokens_by_store.values(), default=0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Attributes:
    cached_tokens: the deepest checkpoint in the cache now.
    note: outcome "cached", or one of `load_outcomes.LOOKUP_OUTCOMES`.
    """

    cached_tokens: int
    note: LoadNote


@dataclass(frozen=True, slots=True)
class Removed:
    """Attributes:
    num_tokens: of the prompt, whole units.
    num_kept_tokens: those at its head that others need as well.
    kept_for: names among these others.
    num_checkpoints: dropped from the cache.
    num_segments: removed from the store that had most of them.
    """

    num_tokens: int
    num_kept_tokens: int
    kept_for: list[str]
    num_checkpoints: int
    num_segments: int
