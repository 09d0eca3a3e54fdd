"""A store that cannot hurt: calls have an end, faults are misses, and a dead store is left alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from milepost.errors import InvariantError
from milepost.stores import outcomes as oc
from milepost.stores.buffers import owned_copy
from milepost.stores.lanes import Lane
from milepost.stores.meter import Meter
from milepost.stores.objects import Clock, Deadline
from milepost.stores.outcomes import Outcomes
from milepost.stores.port import Loaded, LookedUp, SegmentStore, StoredSegment, Unanswered

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
_SHARE_OF_DEADLINE = 0.9


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Attributes:
    failures_to_open: errors and timeouts in a row after which the store is left alone.
    open_seconds: for how long at first; doubled after each probe that fails too.
    max_open_seconds: the longest.
    patience_seconds: a timeout after a shorter deadline says nothing about the store: the caller was in
        a hurry.
    num_threads: calls at once; those that hang keep theirs.
    """

    failures_to_open: int = 3
    open_seconds: float = 2.0
    max_open_seconds: float = 60.0
    patience_seconds: float = 0.25
    num_threads: int = 4


class Breaker:
    """Closed: calls pass. Open: none does. Half open: one does, to find out. Thread-safe."""

    def __init__(self, options: GuardOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._open_seconds = options.open_seconds
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._open_until is not None

    def admits(self) -> bool:
        """Whether a call may be made now; its outcome must be told."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeeded(self) -> bool:
        """Whether this closed it."""
        with self._lock:
            closed = self._open_until is not None
            self._num_failures, self._probing, self._open_until = 0, False, None
            self._open_seconds = self._options.open_seconds
            return closed

    def undecided(self) -> None:
        """The call said nothing about the store."""
        with self._lock:
            self._probing = False

    def failed(self) -> bool:
        """Whether this opened it."""
        with self._lock:
            self._num_failures += 1
            was_open = self._open_until is not None
            if was_open and self._probing:
                self._open_seconds = min(2 * self._open_seconds, self._options.max_open_seconds)
            elif was_open or self._num_failures < self._options.failures_to_open:
                return False
            self._probing = False
            self._open_until = self._clock() + self._open_seconds
            return not was_open


class GuardedStore:
    """The port over any store; never raises for what the store does.

    Calls run on threads of the tier. One that is not back at its deadline is abandoned and its late result
    dropped; after some failures in a row calls are refused at once for a while.

    Args:
        forbidden_threads: threads that must never wait for a store, such as the engine's; a call from one of
            them is a bug and raises InvariantError. Not their numbers, which later threads may have again.
    """

    def __init__(
        self,
        store: SegmentStore,
        options: GuardOptions | None = None,
        *,
        clock: Clock = time.monotonic,
        forbidden_threads: Collection[threading.Thread] = frozenset(),
    ) -> None:
        self.store = store
        self.name = store.name
        self.takes_saves: bool = getattr(store, "takes_saves", True)
        self.options = options or GuardOptions()
        self.breaker = Breaker(self.options, clock)
        self.meter = Meter(
            call_seconds=getattr(store, "expected_call_seconds", 0.002),
            load_bytes_per_second=getattr(store, "expected_load_bytes_per_second", 5e8),
        )
        # Stores count what they find in objects; the guard adds what it sees from outside.
        self.outcomes: Outcomes = getattr(store, "outcomes", None) or Outcomes()
        self._clock = clock
        self._forbidden_threads = forbidden_threads
        self._lane = Lane(f"store-{store.name}", self.options.num_threads)

    # ------------------------------------------------------------ the port

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        def lookup(seconds: float) -> list[LookedUp]:
            return self.store.lookup(keys, deadline_seconds=seconds)

        found = self._call(oc.LOOKUP, len(keys), deadline_seconds, lookup)
        return self._answers(oc.LOOKUP, found, len(keys))

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        def load(seconds: float) -> list[Loaded]:
            return self.store.load(keys, deadline_seconds=seconds)

        loaded = self._call(oc.LOAD, len(keys), deadline_seconds, load, _loaded_bytes)
        return self._answers(oc.LOAD, loaded, len(keys))

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        # An abandoned save still reads its payload, which the caller may change once this returns.
        owned = [replace(segment, payload=(owned_copy(segment.payload),)) for segment in segments]
        return self.save_in_place(owned, deadline_seconds=deadline_seconds, released=lambda: None)

    def save_in_place(
        self,
        segments: Sequence[StoredSegment],
        *,
        deadline_seconds: float,
        released: Callable[[], None],
    ) -> list[bool]:
        """As `save`, without a copy.

        Args:
            released: called exactly once, from any thread, when the payload is not read any more. After a
                timeout that is later than the return.
        """

        def save(seconds: float) -> list[bool]:
            return self.store.save(segments, deadline_seconds=seconds)

        def saved_bytes(saved: Sequence[bool]) -> int:
            return sum(each.header.payload_bytes for each, done in zip(segments, saved, strict=True) if done)

        saved = self._call(oc.SAVE, len(segments), deadline_seconds, save, saved_bytes, released)
        if isinstance(saved, Unanswered):
            saved = [False] * len(segments)
        num_saved = sum(saved)
        self.outcomes.add(oc.SAVE, oc.SAVED, num_saved)
        self.outcomes.add(oc.SAVE, oc.NOT_SAVED, len(segments) - num_saved)
        return [bool(each) for each in saved]

    def lacking(self, keys: Sequence[bytes], deadline_seconds: float) -> list[bytes]:
        """Those that the store says it does not have; none if it does not answer. No request asks: neither
        hits nor misses are counted."""

        def lookup(seconds: float) -> list[LookedUp]:
            return self.store.lookup(keys, deadline_seconds=seconds)

        found = self._call(oc.SAVE, len(keys), deadline_seconds, lookup)
        if isinstance(found, Unanswered):
            return []
        return [key for key, each in zip(keys, found, strict=True) if each is None]

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        return self.try_remove(keys, deadline_seconds) or 0

    def try_remove(self, keys: Sequence[bytes], deadline_seconds: float) -> int | None:
        """As `remove`; None if the store did not answer, and may still have them."""

        def remove(seconds: float) -> Sequence[None]:
            num_removed = self.store.remove(keys, deadline_seconds=seconds)
            self.outcomes.add(oc.REMOVE, oc.REMOVED, num_removed)
            return [None] * num_removed

        removed = self._call(oc.REMOVE, None, deadline_seconds, remove)
        return None if isinstance(removed, Unanswered) else len(removed)

    def followers(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[bytes]:
        return self.try_followers(keys, deadline_seconds) or []

    def try_followers(self, keys: Sequence[bytes], deadline_seconds: float) -> list[bytes] | None:
        """As `followers`; None if the store did not answer."""

        def followers(seconds: float) -> Sequence[bytes]:
            return self.store.followers(keys, deadline_seconds=seconds)

        found = self._call(oc.REMOVE, None, deadline_seconds, followers)
        return None if isinstance(found, Unanswered) else list(found)

    def close(self) -> None:
        """Let the store release everything; one that hangs is left behind."""
        call = self._lane.start(self.store.close)
        self._lane.close()
        try:
            call.wait(_CLOSE_SECONDS)
        except Exception as error:
            logger.warning("%s did not close: %r", self.name, error)

    # ------------------------------------------------------------ calls

    def check_thread(self) -> None:
        """Raises:
        InvariantError: this thread must never wait for a store.
        """
        thread = threading.current_thread()
        if thread in self._forbidden_threads:
            raise InvariantError(f"store {self.name} was called on thread {thread.name}, which must not wait")

    def _call(
        self,
        operation: str,
        num_keys: int | None,
        deadline_seconds: float,
        function: Callable[[float], Sequence[T]],
        bytes_of: Callable[[Sequence[T]], int] = lambda results: 0,
        released: Callable[[], None] = lambda: None,
    ) -> Sequence[T] | Unanswered:
        """What `function` returned in time; why not, and counted, if it did not.

        Args:
            num_keys: how many results there must be; None = any number.
        """
        self.check_thread()
        count = 1 if num_keys is None else num_keys
        if num_keys == 0:
            released()
            return []
        if deadline_seconds <= 0:
            return self._refused(operation, oc.TIMEOUT, count, released)
        if not self.breaker.admits():
            return self._refused(operation, oc.BREAKER_OPEN, count, released)
        deadline = Deadline(deadline_seconds, self._clock)
        begin = self._clock()

        def run() -> Sequence[T]:
            self.check_thread()
            # A store that keeps time itself returns what it has before it is abandoned with it.
            return function(deadline.remaining_seconds * _SHARE_OF_DEADLINE)

        try:
            call = self._lane.start(run, released)
        except RuntimeError:
            return self._refused(operation, oc.ERROR, count, released)
        try:
            results = call.wait(deadline_seconds)
            if num_keys is not None and len(results) != num_keys:
                raise ValueError(f"{len(results)} results for {num_keys} keys")
        except InvariantError:
            raise
        except TimeoutError:
            return self._timed_out(operation, count, deadline_seconds)
        except Exception as error:
            return self._failed(operation, oc.ERROR, count, repr(error))
        if self.breaker.succeeded():
            logger.warning("store %s answers again", self.name)
        self.meter.record(operation, self._clock() - begin, bytes_of(results), num_keys=count)
        return results

    def _refused(self, operation: str, outcome: str, count: int, released: Callable[[], None]) -> Unanswered:
        self.outcomes.add(operation, outcome, count)
        released()
        return Unanswered(outcome)

    def _timed_out(self, operation: str, count: int, deadline_seconds: float) -> Unanswered:
        self.meter.record(operation, deadline_seconds, 0, num_keys=count, timed_out=True)
        if deadline_seconds < self.options.patience_seconds and not self._lane.is_full:
            self.breaker.undecided()
            self.outcomes.add(operation, oc.TIMEOUT, count)
            return Unanswered(oc.TIMEOUT)
        return self._failed(operation, oc.TIMEOUT, count, f"no answer within {deadline_seconds:.3f} s")

    def _failed(self, operation: str, outcome: str, count: int, reason: str) -> Unanswered:
        self.outcomes.add(operation, outcome, count)
        if self.breaker.failed():
            logger.warning("store %s is left alone for a while: %s: %s", self.name, operation, reason)
        return Unanswered(outcome)

    def _answers(
        self, operation: str, results: Sequence[T] | Unanswered, num_keys: int
    ) -> list[T | Unanswered]:
        answers: list[T | Unanswered] = []
        answers += [results] * num_keys if isinstance(results, Unanswered) else results
        num_hits = sum(bool(each) for each in answers)
        self.outcomes.add(operation, oc.HIT, num_hits)
        self.outcomes.add(operation, oc.MISS, num_keys - num_hits)
        return answers


def _loaded_bytes(loaded: Sequence[Loaded]) -> int:
    return sum(each.header.payload_bytes for each in loaded if each)
