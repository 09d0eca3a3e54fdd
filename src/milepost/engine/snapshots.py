"""The core's counters as other threads may read them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from milepost.core.metrics import CoreStats
from milepost.core.scheduler import Scheduler

INTERVAL_SECONDS = 0.1
COST_FACTOR = 100
"""A snapshot visits every checkpoint; with very many it is taken less often, for at most 1 % of the time."""


class Snapshots:
    """Takes them in the engine thread, now and then.

    Attributes:
        latest: replaced as a whole.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._due = 0.0
        self.latest = self.fresh()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due

    def take(self) -> None:
        begun = self._clock()
        self.latest = self.fresh()
        ended = self._clock()
        self._due = ended + max(INTERVAL_SECONDS, COST_FACTOR * (ended - begun))

    def fresh(self) -> CoreStats:
        """As of now. The core's counters live on, so they are copied."""
        stats = self._scheduler.stats()
        return dataclasses.replace(stats, counters=copy.deepcopy(stats.counters))
