"""What the core asks of the outside, as protocols."""

from __future__ import annotations

from typing import Protocol

from milepost.core.plan import StepPlan, StepResult


class Worker(Protocol):
    """Executes plans. Holds tensors and per-request page tables, decides nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocking. A raised exception means that nothing of the plan counts."""
        ...

    def close(self) -> None:
        """Release memory; no call may follow."""
        ...
