"""What stores of whole objects have in common: reading with suspicion, and counting what was found."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.outcomes import Outcomes
from milepost.stores.port import Buffer, SegmentHeader, StoredSegment, Unanswered
from milepost.stores.segment_format import (
    CorruptSegmentError,
    ForeignSegmentError,
    Head,
    Identity,
    SegmentError,
    check_expected,
    decode,
    decode_head,
)

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
_MAX_WARNINGS = 10


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer in time."""


class Deadline:
    """A point in time that a call must not pass."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end


class ObjectStore(ABC):
    """Base of stores that keep one object per segment.

    Args:
        name: of the tier.
        identity: whose segments these are; others are foreign.
        clock: monotonic seconds.
    """

    takes_saves = True
    expected_call_seconds = 0.0005
    expected_load_bytes_per_second = 1e9
    """Believed until they were measured."""

    def __init__(self, name: str, identity: Identity, clock: Clock) -> None:
        self.name = name
        self.identity = identity
        self.outcomes = Outcomes()
        self._clock = clock
        self._logged: set[str] = set()
        self._num_corrupt = 0

    @property
    def known_usage(self) -> tuple[int, int] | None:
        """(bytes used, bound in bytes) as far as this process knows without asking anybody; None if it
        does not."""
        return None

    def _late(self, operation: str, num_keys: int) -> list[Unanswered]:
        """In place of what there was no time for; counted."""
        self.outcomes.add(operation, oc.TIMEOUT, num_keys)
        return [Unanswered(oc.TIMEOUT)] * num_keys

    def _read_header(
        self, operation: str, key: bytes, data: Buffer | None, object_bytes: int | None
    ) -> SegmentHeader | None:
        """The header in `data`, the beginning of the object of `key`; None and counted if it is not that."""
        head = self._read_head(operation, key, data, object_bytes)
        return None if head is None else head.header

    def _read_head(
        self, operation: str, key: bytes, data: Buffer | None, object_bytes: int | None
    ) -> Head | None:
        if data is None:
            return None
        try:
            head = decode_head(data, object_bytes=object_bytes)
            check_expected(head.header, key, self.identity)
        except SegmentError as error:
            self._refuse(operation, key, error)
            return None
        return head

    def _read_segment(self, key: bytes, data: Buffer | None) -> StoredSegment | None:
        """The segment in `data`, the whole object of `key`; None and counted if it is not that."""
        if data is None:
            return None
        try:
            segment = decode(data)
            check_expected(segment.header, key, self.identity)
        except SegmentError as error:
            self._refuse(oc.LOAD, key, error)
            return None
        return segment

    def _refuse(self, operation: str, key: bytes, error: SegmentError) -> None:
        if isinstance(error, ForeignSegmentError):
            self.outcomes.add(operation, oc.FOREIGN)
            self._log_once(f"segments that are not for this model are taken as misses: {error}")
            return
        self.outcomes.add(operation, oc.CORRUPT)
        self._num_corrupt += 1
        level = logging.WARNING if self._num_corrupt <= _MAX_WARNINGS else logging.DEBUG
        logger.log(level, "%s: %s is corrupt and taken as a miss: %s", self.name, key.hex()[:16], error)
        if isinstance(error, CorruptSegmentError):
            self._discard(key)

    def _log_once(self, reason: str) -> None:
        """Once per reason, and not for ever more reasons: a whole store may be of another version."""
        if reason not in self._logged and len(self._logged) < _MAX_WARNINGS:
            self._logged.add(reason)
            logger.warning("%s: %s", self.name, reason)

    def followers(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[bytes]:
        children: dict[bytes, list[bytes]] = {}
        for key, parent_key in self._links(Deadline(deadline_seconds, self._clock)):
            if parent_key:
                children.setdefault(parent_key, []).append(key)
        found: dict[bytes, None] = {}
        left = list(keys)
        while left:
            for key in children.pop(left.pop(), ()):
                found[key] = None
                left.append(key)
        return [key for key in found if key not in set(keys)]

    def _links(self, deadline: Deadline) -> Iterable[tuple[bytes, bytes]]:
        """(key, parent key) of every segment of this identity; nothing if they cannot be listed.

        Raises:
            StoreError: not in time, or the store failed.
        """
        return ()

    @abstractmethod
    def _discard(self, key: bytes) -> None:
        """Forget the corrupt object of `key`, if that is quickly done."""


def keeps_existing(existing: SegmentHeader, new: SegmentHeader, has: Callable[[bytes], bool]) -> bool:
    """Whether the object in the store serves as well as the new one with the same key.

    Equal keys mean equal tokens and an equal state, but the pages may reach back to another position. An
    object whose parent is gone could not be used; the new one may have its parent here.

    Args:
        has: whether the store has an object with this key.
    """
    return existing.start in (0, new.start) or has(existing.parent_key)
