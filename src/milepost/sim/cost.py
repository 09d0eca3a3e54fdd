"""How long a step takes. A model of time for replays, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.plan import ZERO_STATE, ChunkPlan, StepPlan


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step as a sum of linear terms; all zero = time stands still.

    Attributes:
        seconds_per_step: fixed cost of a step (weights read once, launch overhead).
        seconds_per_token: dense compute per row.
        seconds_per_attended_token: per row and token it attends to.
        seconds_per_restored_state: reading a checkpoint into a running slot, per chunk that does it.
        seconds_per_exported_state: writing one checkpoint.
    """

    seconds_per_step: float = 0.0
    seconds_per_token: float = 0.0
    seconds_per_attended_token: float = 0.0
    seconds_per_restored_state: float = 0.0
    seconds_per_exported_state: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds the worker needs for `plan`; an empty plan is free."""
        if not plan.chunks:
            return 0.0
        return self.seconds_per_step + sum(self._chunk_seconds(chunk) for chunk in plan.chunks)

    def _chunk_seconds(self, chunk: ChunkPlan) -> float:
        rows = chunk.last_row_end - chunk.start
        attended = rows * (chunk.start + chunk.last_row_end + 1) / 2.0
        restored = chunk.starts_from_checkpoint or (
            chunk.initial_slots != chunk.running_slots and ZERO_STATE not in chunk.initial_slots
        )
        return (
            rows * self.seconds_per_token
            + attended * self.seconds_per_attended_token
            + restored * self.seconds_per_restored_state
            + len(chunk.exports) * self.seconds_per_exported_state
        )
