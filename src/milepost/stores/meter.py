"""How fast a tier is, measured: what a cost model needs to choose between loading and computing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from milepost.stores import outcomes as oc

_WEIGHT = 0.2
"""Of the newest call in the running averages."""
_FEW_KEYS = 32


@dataclass(frozen=True, slots=True)
class CallTotals:
    """Since the start, of one operation."""

    num_calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class Meter:
    """Totals by operation, and running estimates of latency and bandwidth. Thread-safe.

    A load of n bytes is expected to take `call_seconds + n / load_bytes_per_second`. The first comes from
    lookups, which carry next to no bytes; one of many keys may lower it and never raises it. The second comes
    from the time of loads beyond the first. A call that ran into its deadline counts with its time and no
    bytes, so a slow tier prices itself out.

    Args:
        call_seconds, load_bytes_per_second: what is believed before anything was measured.
    """

    def __init__(self, *, call_seconds: float = 0.002, load_bytes_per_second: float = 5e8) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, CallTotals] = {}
        self._call_seconds = call_seconds
        # Believed like one call of ten milliseconds.
        self._mean_bytes = load_bytes_per_second / 100
        self._mean_seconds = 0.01

    def record(
        self, operation: str, seconds: float, num_bytes: int, *, num_keys: int = 1, timed_out: bool = False
    ) -> None:
        with self._lock:
            old = self._totals.get(operation, CallTotals())
            self._totals[operation] = CallTotals(
                old.num_calls + 1, old.seconds + seconds, old.num_bytes + num_bytes
            )
            if operation == oc.LOOKUP:
                if num_keys <= _FEW_KEYS or seconds < self._call_seconds:
                    is_first = not old.num_calls
                    self._call_seconds = seconds if is_first else _mixed(self._call_seconds, seconds)
            elif operation == oc.LOAD and (num_bytes or timed_out):
                self._record_load(seconds, num_bytes, first=not old.num_bytes)

    def _record_load(self, seconds: float, num_bytes: int, *, first: bool) -> None:
        transfer_seconds = max(seconds - self._call_seconds, seconds / 10, 1e-9)
        if first and num_bytes:
            self._mean_bytes, self._mean_seconds = float(num_bytes), transfer_seconds
        else:
            self._mean_bytes = _mixed(self._mean_bytes, num_bytes)
            self._mean_seconds = _mixed(self._mean_seconds, transfer_seconds)

    @property
    def call_seconds(self) -> float:
        with self._lock:
            return self._call_seconds

    @property
    def load_bytes_per_second(self) -> float:
        with self._lock:
            return max(1.0, self._mean_bytes / self._mean_seconds)

    def totals(self) -> dict[str, CallTotals]:
        with self._lock:
            return dict(self._totals)


def _mixed(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old)
