"""A request as the scheduler sees it, and what it reports back."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from milepost.core.hashing import CacheDomain, KeyChain, MediaSpan
from milepost.core.plan import SampledToken, SamplingParams, ScoredToken
from milepost.core.reasons import WANTED_BY_CALLER
from milepost.errors import RequestError

if TYPE_CHECKING:
    from milepost.core.lease import Lease

__all__ = [
    "CacheDomain",
    "DraftRecord",
    "MediaSpan",
    "Request",
    "RequestStatus",
    "RequestUpdate",
    "ReuseReport",
]


BACKGROUND_PRIORITY = 1 << 31
"""From this priority on a request gets what all others leave, see `background.BackgroundShare`."""


class RequestStatus(enum.Enum):
    """Life cycle; `can_become` lists the legal moves."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    def can_become(self, other: RequestStatus) -> bool:
        return other in _LEGAL_MOVES[self]


_LEGAL_MOVES = {
    RequestStatus.WAITING: (RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.RUNNING: (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
    RequestStatus.PREEMPTED: (RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.FINISHED: (),
}


@dataclass(slots=True)
class ReuseReport:
    """How much of a prompt was reused, and why not more.

    Attributes:
        num_cached_tokens: tokens not computed for this request.
        num_matched_tokens: per cache group, tokens it could have served alone.
        num_tokens_lost_to_missing_state: matched by every attention group but without a state.
        limiting_group: group that held the joint hit below the others, if any.
        reason: code of `core.reasons.MISS_REASONS`, or "hit".
        divergence_position: first token that differs from the nearest cached path of the same
            domain; None if the path or the prompt simply ends.
        num_tokens_lost_to_eviction: more that would have been reused if the checkpoint that was
            evicted, or refused, had been kept.
        eviction: (move of that eviction or code of that refusal, reason of the checkpoint).
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_matched_tokens: dict[str, int]
    num_tokens_lost_to_missing_state: int
    limiting_group: str | None
    reason: str
    divergence_position: int | None
    num_tokens_lost_to_eviction: int = 0
    eviction: tuple[str, str] | None = None


@dataclass(slots=True)
class DraftRecord:
    """What became of the drafts of one request.

    Attributes:
        num_drafts: steps with drafts.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: of these, accepted.
        num_tested_tokens: of these, those whose fate was seen: accepted ones, and the first behind them.
        acceptance: running estimate of the chance that a first draft is accepted.
        evidence: tested drafts it rests on; older ones count less.
        next_length: drafts that are worth their time in the next step.
        num_idle_steps: decode steps since the last one with drafts, while drafting does not pay.
        probe_steps: idle steps after which a draft is tried all the same.
        num_same_steps: steps with drafts since one more than the best number was tried.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tested_tokens: int = 0
    acceptance: float = 0.0
    evidence: float = 0.0
    next_length: int = 0
    num_idle_steps: int = 0
    probe_steps: int = 0
    num_same_steps: int = 0


@dataclass(slots=True)
class RequestUpdate:
    """What one step brought for one request.

    Attributes:
        tokens: new output tokens, in order.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_token_id: the stop id that ended it; it is then the last of `tokens`.
        reuse: set once, on the first update after the first admission.
        logits: float32 logits behind the prompt, if the request captures them.
        drafting: what became of its drafts so far; None if it had none.
        scores: of the next tokens of the prompt, in order; the first token has none.
    """

    request_id: int
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    reuse: ReuseReport | None = None
    error: str | None = None
    logits: bytes = b""
    drafting: DraftRecord | None = None
    scores: list[ScoredToken] = field(default_factory=list)


class Request:
    """One choice to be generated.

    Args:
        wanted: (token position, reason) pairs where a checkpoint is worth keeping, with reason
            "history", "message" or "marker"; positions are rounded down to the match unit.
        conversation: names a conversation for retention; never enters a hash.
        uses_cache: False = reuse nothing and publish nothing (audits, `cache_prompt: false`).
        is_counted: False = leave this request out of the query and hit counters (audits).
        captures_logits: return the logits behind the prompt with the first token.
        retention_priority: its checkpoints count 2**priority times as much when room is made.
        pin_seconds: its `marker` checkpoints are given up last for so long.
        priority: lower runs first; from `BACKGROUND_PRIORITY` on what others leave.
        prompt_logprobs: None = none; k >= 0 = log-probability of each prompt token but the first, and of the
            k most likely ones. What is asked for is computed, so nothing before it is reused.
        owner: owners that compete get equal shares (`queues.FairShare`); never enters a hash.

    Raises:
        RequestError: empty prompt, token id out of the uint32 range, bad `max_tokens`, or a
            wanted position or media span that lies outside of the prompt.
    """

    __slots__ = (
        "arrival", "captures_logits", "chain", "conversation", "domain", "finish_reason", "is_counted",
        "drafting", "lease", "max_tokens", "media", "num_preemptions", "num_processed",
        "num_prompt_tokens", "num_scored", "num_turns_before", "owner", "pending_abort", "pin_seconds",
        "prefill_end", "priority", "prompt_logprobs", "request_id",
        "retention_priority", "reuse", "reuse_reported", "sampling", "status", "stop_ids", "tokens", "turn",
        "uses_cache", "wanted", "wanted_by_caller",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt_tokens: Iterable[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        priority: int = 0,
        domain: CacheDomain | None = None,
        wanted: Sequence[tuple[int, str]] = (),
        media: Sequence[MediaSpan] = (),
        conversation: str | None = None,
        uses_cache: bool = True,
        is_counted: bool = True,
        captures_logits: bool = False,
        retention_priority: int = 0,
        pin_seconds: float = 0.0,
        prompt_logprobs: int | None = None,
        owner: str = "",
    ) -> None:
        try:
            self.tokens = array("I", prompt_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError("prompt", f"token ids must be integers in [0, 2**32): {error}") from None
        if not self.tokens:
            raise RequestError("prompt", "the prompt is empty; send at least one token")
        if max_tokens < 1:
            raise RequestError("max_tokens", f"must be at least 1, not {max_tokens}")
        self.request_id = request_id
        self.num_prompt_tokens = len(self.tokens)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.priority = priority
        self.domain = domain if domain is not None else CacheDomain()
        self.media = tuple(media)
        self.conversation = conversation
        self.uses_cache = uses_cache
        self.is_counted = is_counted
        self.captures_logits = captures_logits
        self.retention_priority = retention_priority
        self.pin_seconds = pin_seconds
        self.wanted_by_caller = self._checked_wanted(wanted)
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.prompt_logprobs = prompt_logprobs
        self.num_scored = 0
        self.owner = owner
        self.drafting: DraftRecord | None = None
        self.arrival = 0
        self.turn = 0
        self.chain: KeyChain | None = None
        self.lease: Lease | None = None
        self.num_processed = 0
        self.prefill_end = self.num_prompt_tokens
        self.wanted: list[tuple[int, str]] = []
        self.pending_abort: str | None = None
        self.num_preemptions = 0
        self.num_turns_before = 0
        self.finish_reason: str | None = None
        self.reuse: ReuseReport | None = None
        self.reuse_reported = False

    def _checked_wanted(self, wanted: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
        for position, reason in wanted:
            if reason not in WANTED_BY_CALLER:
                raise RequestError(
                    "wanted", f"unknown checkpoint reason {reason!r}; use one of {WANTED_BY_CALLER}"
                )
            if not 0 <= position <= self.num_prompt_tokens:
                raise RequestError(
                    "wanted",
                    f"checkpoint position {position} is outside of the prompt of "
                    f"{self.num_prompt_tokens} tokens",
                )
        for span in self.media:
            if not 0 <= span.start < span.end <= self.num_prompt_tokens:
                raise RequestError("media", f"span [{span.start}, {span.end}) is outside of the prompt")
        return tuple(wanted)

    @property
    def prompt_tokens(self) -> array[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output_tokens(self) -> array[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_match_tokens(self) -> int:
        """Tokens a hit is looked for in: all, or up to the first row whose logits are still to come."""
        if self.is_scored:
            return min(self.num_tokens, self.num_scored + 1)
        return self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1

    @property
    def follows_others(self) -> bool:
        """Whether it is worth waiting for a prefix that somebody else computes or stored."""
        return self.uses_cache and not self.is_scored and not is_background(self)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def held_lease(self) -> Lease:
        """The lease of a running request."""
        if self.lease is None:
            raise ValueError(f"request {self.request_id} holds nothing")
        return self.lease

    @property
    def known_chain(self) -> KeyChain:
        """The hash chain of a request that was added."""
        if self.chain is None:
            raise ValueError(f"request {self.request_id} was never added")
        return self.chain

    @property
    def media_spans(self) -> list[tuple[int, int]]:
        """[start, end) of every media item of the prompt."""
        return [(span.start, span.end) for span in self.media]

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that were known at admission are still to be processed."""
        return self.num_processed < self.prefill_end

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along a legal edge."""
        if not self.status.can_become(status):
            raise ValueError(f"request {self.request_id}: {self.status.value} cannot become {status.value}")
        self.status = status


def is_background(request: Request) -> bool:
    """Whether a request gives way to every other one."""
    return request.priority >= BACKGROUND_PRIORITY
