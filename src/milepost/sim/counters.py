"""What a fingerprint worker counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkerCounters:
    """What the worker really did.

    Attributes:
        num_steps: plans executed, failed ones included.
        num_computed_tokens: rows over all chunks, rejected drafts apart.
        num_rejected_rows: rows of drafts that were not accepted.
        num_exports: states written by exports.
        num_restored: chunks that started from a state another request had written.
        computed_by_request: rows per request, over all its chunks (a preemption counts again).
        passes_by_request: chunks per request.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_rejected_rows: int = 0
    num_exports: int = 0
    num_restored: int = 0
    computed_by_request: dict[int, int] = field(default_factory=dict)
    passes_by_request: dict[int, int] = field(default_factory=dict)
