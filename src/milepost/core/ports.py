"""What the core asks of the outside, as protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from milepost.core.plan import StepDrafts, StepPlan, StepResult


class Worker(Protocol):
    """Executes plans. Holds tensors and per-request page tables, decides nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; blocking. A raised exception means that nothing of the plan counts."""
        ...

    def draft(self, plan: StepPlan) -> StepDrafts:
        """Make the drafts that `plan` asks for, and nothing else of it; blocking.

        For drafts that somebody must see before they are verified. What is made goes into the plan
        (`ChunkPlan.set_drafts`), which is executed next. A raised exception fails the step.
        """
        ...

    def close(self) -> None:
        """Release memory; no call may follow."""
        ...


class Drafter(Protocol):
    """Guesses how sequences go on. A wrong guess costs time, never correctness."""

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Up to `max_drafts` ids that may follow `tokens` (prompt and output so far); empty = no idea.

        Every id must be one of the model's. Called once per decode step, in order of position.
        """
        ...

    def forget(self, request_id: int) -> None:
        """The request is over; ids that were never proposed for are fine."""
        ...


Buffer = bytes | bytearray | memoryview


class RecordAccess(Protocol):
    """Bytes of cache records, for loads and saves. Callable from any thread, also during `execute`.

    Whoever calls owns the records: nothing else writes those that are read (committed pages and
    checkpoints, pinned), and nothing else touches those that are written (taken, not yet published).
    Pools are numbered as in `CacheGeometry.pool_record_bytes`.
    """

    def read_records(self, pool: int, record_ids: Sequence[int]) -> list[Buffer]:
        """One buffer per record, of the pool's record size; views of live memory where there is some."""
        ...

    def write_records(self, pool: int, record_ids: Sequence[int], payload: Buffer) -> None:
        """Fill records, one after the other, from `payload` (their sizes summed)."""
        ...
