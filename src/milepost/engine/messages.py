"""What goes into the engine and what comes out of it. Plain data; no text of a prompt is kept."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milepost.core.plan import SampledToken, SamplingParams, ScoredToken
from milepost.core.request import CacheDomain
from milepost.engine.constraints import Constraint
from milepost.engine.load_outcomes import MEANINGS
from milepost.errors import MilepostError


class EngineError(MilepostError):
    """The engine could not finish a request, or has stopped: the server's fault, not the caller's."""


class EngineStopped(EngineError):
    """The engine takes no request any more."""


class EngineOverloaded(EngineError):
    """Too many requests wait already; this one was not taken. Nothing is wrong with it."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RequestTimedOut(EngineError):
    """A request was ended because it took longer than the server allows."""


class ReaderTooSlow(EngineError):
    """A request was ended because its client reads slower than tokens come."""


@dataclass(slots=True)
class GenerationRequest:
    """One answer to be generated.

    Attributes:
        wanted: (token position, reason) pairs where a checkpoint is worth keeping.
        stop: strings that end the answer; `sampling.stop_token_ids` are the ids that do.
        max_tokens: output tokens at most.
        conversation: names a conversation for retention (`prompt_cache_key`).
        uses_cache: False = computed from its first token, and nothing of it is kept.
        retention_priority: its checkpoints count 2**priority times as much when room is made.
        pin_seconds: its `marker` checkpoints are given up last for so long.
        marks: control tokens that the deltas' `marked` text must tell from ordinary text: id -> character.
        constraint: what the answer must follow; it belongs to this request alone.
        label: how log lines call the request.
        prompt_logprobs: None = none; k = log-probabilities of its prompt tokens, with the k best.
        owner: who competes for a fair share; requests with the same one wait for each other.
        trace_parent: the caller's W3C trace context; "" = none.
        is_counted: False = in no metric and no log (the warm-up).
    """

    prompt_token_ids: array[int]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    domain: CacheDomain = field(default_factory=CacheDomain)
    wanted: Sequence[tuple[int, str]] = ()
    conversation: str | None = None
    uses_cache: bool = True
    retention_priority: int = 0
    pin_seconds: float = 0.0
    marks: Mapping[int, str] | None = None
    constraint: Constraint | None = None
    label: str = ""
    prompt_logprobs: int | None = None
    owner: str = ""
    trace_parent: str = ""
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class LoadNote:
    """What the stores added to a request's reuse.

    Attributes:
        outcome: one of `load_outcomes.MEANINGS`.
        tier: slowest store that was read; "" if none was.
        num_tokens: tokens that were loaded instead of computed.
        seconds: how long the request was looked after, at most what computing would have taken.
    """

    outcome: str
    tier: str
    num_tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The `load` object of a response."""
        return {
            "outcome": self.outcome,
            "meaning": MEANINGS[self.outcome],
            "tier": self.tier,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True, slots=True)
class ReuseExplanation:
    """How much of a prompt was reused and why not more; what usage, metrics and log report.

    Attributes:
        num_cached_tokens: prompt tokens that were not computed, at most `num_prompt_tokens` - 1.
        matched_tokens: per cache group, tokens it could have served alone.
        reason: "hit", a miss reason of the core, or "retokenized@i".
        first_divergence: first token that differs from the nearest cached path, if one does.
        retokenized_at: token position where an earlier answer, encoded again from its text, got
            other ids than were generated.
        num_tokens_lost_to_eviction: more that would have been reused if a checkpoint had not been evicted,
            or refused.
        eviction: "move:reason" of that eviction, or "why:reason" of that refusal.
        load: what stores contributed; None without stores, or if nothing was missing.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    matched_tokens: dict[str, int]
    num_tokens_lost_to_missing_state: int
    limiting_group: str | None
    reason: str
    first_divergence: int | None
    retokenized_at: int | None
    load: LoadNote | None = None
    num_tokens_lost_to_eviction: int = 0
    eviction: str | None = None

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def reason_code(self) -> str:
        """`reason` without a position: a bounded set, fit for a metric label."""
        return self.reason.partition("@")[0]

    def log_fields(self) -> dict[str, Any]:
        """Names and values for the request log."""
        fields: dict[str, Any] = {
            "cached_tokens": self.num_cached_tokens,
            "computed_tokens": self.num_computed_tokens,
            "reason": self.reason,
            "matched_tokens": dict(self.matched_tokens),
            "lost_to_missing_state": self.num_tokens_lost_to_missing_state,
            "lost_to_eviction": self.num_tokens_lost_to_eviction,
            "limiting_group": self.limiting_group,
            "first_divergence": self.first_divergence,
        }
        if self.load is not None:
            fields["load"] = self.load.outcome
            fields["loaded_tokens"] = self.load.num_tokens
            fields["load_seconds"] = round(self.load.seconds, 4)
        return fields

    def as_dict(self) -> dict[str, Any]:
        """The `milepost.reuse` object of a response."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "computed_tokens": self.num_computed_tokens,
            "matched_tokens": dict(self.matched_tokens),
            "tokens_lost_to_missing_state": self.num_tokens_lost_to_missing_state,
            "tokens_lost_to_eviction": self.num_tokens_lost_to_eviction,
            "eviction": self.eviction,
            "limiting_group": self.limiting_group,
            "reason": self.reason,
            "first_divergence": self.first_divergence,
            "retokenized_at": self.retokenized_at,
        }
        if self.load is not None:
            fields["load"] = self.load.as_dict()
        return fields


@dataclass(frozen=True, slots=True)
class Accepted:
    """The scheduler took the request; errors from now on are not the caller's."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer: a `RequestError` (refused) or an `EngineError`."""

    error: MilepostError


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the tokens that were guessed for an answer.

    Attributes:
        num_draft_tokens: those that were verified.
        num_accepted_tokens: those that were right.
    """

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    def as_dict(self) -> dict[str, int]:
        """The `milepost.speculation` object of a response."""
        return {
            "draft_tokens": self.num_draft_tokens,
            "accepted_draft_tokens": self.num_accepted_tokens,
        }


@dataclass(slots=True)
class OutputDelta:
    """What one step added to an answer.

    Attributes:
        text: new text that can no longer become part of a stop string.
        marked: the same with control tokens as marks, if the request asked for it; the beginning of a
            control token may wait.
        tokens: new tokens, the stop token included.
        text_offsets: for each of them, characters of the answer before its own; a token that only
            continues a code point has the offset of the code point. Text that a stop string took away
            counts, because it was not known when earlier tokens went out.
        finish_reason: "stop" or "length" on the last delta.
        stop_reason: the stop string or stop token id that ended the answer.
        reuse: on the first delta.
        drafting: on the last delta, if tokens were guessed for the answer.
        prompt_scores: of the next tokens of the prompt; the first one has none.
    """

    text: str = ""
    marked: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reuse: ReuseExplanation | None = None
    drafting: DraftCounts | None = None
    prompt_scores: list[ScoredToken] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


EngineEvent = Accepted | Failed | OutputDelta


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One line of the request log, and what metrics record.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        reuse: None if it ended before it was admitted.
        queue_seconds: from submission to admission; None if it ended before.
        time_to_first_token: seconds from submission; None if there was no token.
        seconds: from submission to the end.
        drafting: None if no tokens were guessed for it.
    """

    request_id: int
    label: str
    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reason: str
    reuse: ReuseExplanation | None
    queue_seconds: float | None
    time_to_first_token: float | None
    seconds: float
    drafting: DraftCounts | None = None
    trace_parent: str = ""

    def log_fields(self) -> dict[str, Any]:
        """Counts and reasons only; never text."""
        fields: dict[str, Any] = {
            "request": self.label or self.request_id,
            "finish": self.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
        }
        if self.reuse is not None:
            fields |= self.reuse.log_fields()
        fields["generated_tokens"] = self.num_generated_tokens
        if self.drafting is not None:
            fields |= self.drafting.as_dict()
        if self.queue_seconds is not None:
            fields["queue_ms"] = round(1000 * self.queue_seconds, 1)
        if self.time_to_first_token is not None:
            fields["ttft_ms"] = round(1000 * self.time_to_first_token, 1)
        fields["e2e_ms"] = round(1000 * self.seconds, 1)
        return fields

    def log_line(self) -> str:
        """`log_fields` as `name=value`; `-` stands for none."""
        return " ".join(f"{name}={_as_text(value)}" for name, value in self.log_fields().items())


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{number}" for key, number in value.items()) or "-"
    return "-" if value is None else str(value)
