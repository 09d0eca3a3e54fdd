"""What became of calls to a store, counted."""

from __future__ import annotations

import threading
from collections import Counter

LOOKUP, LOAD, SAVE, REMOVE = "lookup", "load", "save", "remove"

HIT, MISS, SAVED, NOT_SAVED, REMOVED = "hit", "miss", "saved", "not_saved", "removed"
"""Answers. Every key asked for ends as a hit or a miss, every segment to save as saved or not saved."""

TIMEOUT, CORRUPT, FOREIGN, FULL, ERROR = "timeout", "corrupt", "foreign", "full", "error"
BREAKER_OPEN, BACK_PRESSURE = "breaker_open", "back_pressure"
FAULTS = (TIMEOUT, CORRUPT, FOREIGN, FULL, ERROR, BREAKER_OPEN, BACK_PRESSURE)
"""Why a key that could have been a hit is a miss, or why a segment was not saved: counted besides the
answer, so that faults explain answers and never change their sum."""

SILENCES = (TIMEOUT, ERROR, BREAKER_OPEN)
"""Faults after which it is not known whether a store has a key: they say nothing about the key."""


class Outcomes:
    """Counters by operation and outcome, in keys; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, operation: str, outcome: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[operation, outcome] += count

    def get(self, operation: str, outcome: str) -> int:
        with self._lock:
            return self._counts[operation, outcome]

    def snapshot(self) -> dict[tuple[str, str], int]:
        """(operation, outcome) -> number of keys; what never happened is absent."""
        with self._lock:
            return dict(self._counts)
