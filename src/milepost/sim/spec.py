"""What a simulated client asks, and what it gets back."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain, MediaSpan


@dataclass(slots=True)
class RequestSpec:
    """One request of a workload.

    Attributes:
        delay: seconds between the previous answer (or the start of the conversation) and this request.
        abort_after_steps: the client leaves after so many steps of the world; None = it stays.
        abort_after_tokens: the client leaves once it has read so many tokens; None = it stays.
        label: free text, kept in the record of the request.
    """

    prompt: array[int]
    max_tokens: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    wanted: tuple[tuple[int, str], ...] = ()
    priority: int = 0
    domain: CacheDomain = field(default_factory=CacheDomain)
    media: tuple[MediaSpan, ...] = ()
    conversation: str | None = None
    delay: float = 0.0
    abort_after_steps: int | None = None
    abort_after_tokens: int | None = None
    label: str = ""


@dataclass(slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        finish_reason: as in `RequestUpdate`; None while it runs.
        was_cut: the engine ended it with `finish`, because of a stop string.
        num_cached_tokens: as reported by the core, tokens.
        num_computed_tokens: rows the worker computed for it, preemptions included.
        num_passes: forward passes (chunks) it took part in.
        time_to_first_token: seconds from arrival; None if it got none.
    """

    request_id: int
    spec: RequestSpec
    arrival: float
    output_tokens: array[int] = field(default_factory=lambda: array("I"))
    finish_reason: str | None = None
    was_cut: bool = False
    error: str | None = None
    num_cached_tokens: int | None = None
    reuse_reason: str | None = None
    num_computed_tokens: int = 0
    num_passes: int = 0
    num_preemptions: int = 0
    time_to_first_token: float | None = None
    finished_at: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt)

    @property
    def num_recomputed_tokens(self) -> int:
        """Prompt tokens that were not reused."""
        return self.num_prompt_tokens - (self.num_cached_tokens or 0)


Conversation = Generator[Sequence[RequestSpec], list[Outcome], None]
"""A client: yields requests that run side by side, receives their outcomes once all have ended."""
