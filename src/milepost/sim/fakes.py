"""Faults on purpose: the n-th operation fails, writes are torn, acknowledgements are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from milepost.core.plan import ChunkPlan, StateExport


class FailAt:
    """Counts calls and answers True on chosen ones.

    Args:
        at: 1-based number of the call that fails.
        every: from then on, every so many calls fail again; 0 = only once.
    """

    def __init__(self, at: int, every: int = 0) -> None:
        if at < 1 or every < 0:
            raise ValueError(f"at must be >= 1 and every >= 0, not {at} and {every}")
        self.at = at
        self.every = every
        self.num_calls = 0
        self.num_failures = 0

    def __call__(self) -> bool:
        self.num_calls += 1
        late = self.num_calls - self.at
        fails = late == 0 or (late > 0 and self.every > 0 and late % self.every == 0)
        self.num_failures += fails
        return fails


def never() -> bool:
    """The fault that does not happen."""
    return False


def acknowledge_all(chunk: ChunkPlan, export: StateExport) -> bool:
    """Every export is written."""
    return True


def keep_all(chunk: ChunkPlan) -> bool:
    """No chunk's result is dropped."""
    return False


@dataclass(slots=True)
class WorkerFaults:
    """What goes wrong inside a worker. The default is: nothing.

    Attributes:
        fails_before: asked once a step; True = the step raises before it touched anything.
        fails_torn: asked once a step; True = everything the step writes becomes garbage, then it raises.
        acknowledges: asked per export; False = the export is not written and not acknowledged.
        drops: asked per chunk; True = what the chunk wrote is garbage and it has no result.
    """

    fails_before: Callable[[], bool] = field(default=never)
    fails_torn: Callable[[], bool] = field(default=never)
    acknowledges: Callable[[ChunkPlan, StateExport], bool] = field(default=acknowledge_all)
    drops: Callable[[ChunkPlan], bool] = field(default=keep_all)
