"""One answer on its way: tokens in, text out, with stop strings and timings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from milepost.core.plan import ChunkPlan, StepPlan
from milepost.core.request import DraftRecord, RequestUpdate
from milepost.engine.detokenizer import IncrementalDetokenizer
from milepost.engine.marks import MarkedStream
from milepost.engine.messages import (
    DraftCounts,
    EngineEvent,
    FinishedRequest,
    GenerationRequest,
    OutputDelta,
    ReuseExplanation,
)
from milepost.engine.stops import StopChecker
from milepost.engine.tokenizer import Tokenizer

Sink = Callable[[EngineEvent], None]
"""Takes the events of one request, in the engine thread; must not block."""


class Answer:
    """State of one running request inside the engine thread.

    Args:
        submitted_at: clock reading when the caller handed the request in.
        admitted_at: clock reading when its first step was planned; None = not yet.
    """

    __slots__ = (
        "request_id", "request", "sink", "submitted_at", "admitted_at", "first_token_at", "last_token_at",
        "num_tokens", "generated", "reuse", "finish_reason", "drafting", "_detokenizer", "_stops",
        "_marked",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: Tokenizer,
        submitted_at: float,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.sink = sink
        self.submitted_at = submitted_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = submitted_at
        self.num_tokens = 0
        self.generated: array[int] = array("I")
        self.reuse: ReuseExplanation | None = None
        self.finish_reason: str | None = None
        self.drafting: DraftCounts | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._stops = StopChecker(request.stop, include_stop=request.include_stop_str_in_output)
        self._marked = None if request.marks is None else MarkedStream()

    def advance(self, update: RequestUpdate) -> OutputDelta:
        """Turn new tokens into text. The delta's finish reason is set if the answer ends here, also
        when it was a stop string that the core knows nothing of."""
        pieces: list[str] = []
        self._note_drafts(update.drafting)
        delta = OutputDelta()
        for index, token in enumerate(update.tokens):
            is_stop_token = update.stop_token_id is not None and index == len(update.tokens) - 1
            delta.tokens.append(token)
            delta.text_offsets.append(self._detokenizer.num_chars)
            self.num_tokens += 1
            if not is_stop_token:
                self.generated.append(token.token_id)
            if not is_stop_token or self.request.include_stop_str_in_output:
                text = self._text_of(token.token_id)
                pieces.append(self._stops.feed(text, may_stop=self._may_stop()))
            if self._stops.found is not None:
                return self._end(delta, pieces, "stop", self._stops.found)
        if update.finish_reason is None and not self._follow(delta.token_ids):
            return self._with_text(delta, pieces, is_last=False)
        pieces.append(self._stops.feed(self._detokenizer.finish(), may_stop=self._may_stop()))
        if self._stops.found is not None:
            return self._end(delta, pieces, "stop", self._stops.found)
        pieces.append(self._stops.finish())
        return self._end(delta, pieces, update.finish_reason or "stop", update.stop_token_id)

    def _note_drafts(self, record: DraftRecord | None) -> None:
        if record is not None and record.num_draft_tokens:
            self.drafting = DraftCounts(record.num_draft_tokens, record.num_accepted_tokens)

    def _follow(self, token_ids: Sequence[int]) -> bool:
        """Tell the constraint; True if the answer is complete by it."""
        constraint = self.request.constraint
        if constraint is None:
            return False
        constraint.accept(token_ids)
        return constraint.is_complete

    @property
    def is_guided(self) -> bool:
        """Whether a grammar says which tokens may be sampled."""
        return self.request.constraint is not None

    def guide(self, chunk: ChunkPlan) -> None:
        """Say which tokens may be sampled, and leave out drafts that cannot be."""
        constraint = self.request.constraint
        if constraint is None:
            return
        drafts = array("I", chunk.draft_tokens)
        rows, ends_at_unfit = constraint.allowed_rows(chunk.output_position, drafts)
        if len(rows) <= len(drafts):
            chunk.set_drafts(drafts[: len(rows) - 1].tobytes())
            chunk.has_unfit_draft = ends_at_unfit
        chunk.allowed_tokens = b"".join(rows)

    @property
    def failure(self) -> str | None:
        """Why the answer cannot go on; the tokens so far count, the last one may be wrong."""
        constraint = self.request.constraint
        if constraint is None or constraint.failure is None:
            return None
        return f"the grammar cannot be followed: {constraint.failure}"

    def _may_stop(self) -> bool:
        return self.num_tokens > self.request.sampling.min_tokens

    def _end(
        self, delta: OutputDelta, pieces: list[str], finish_reason: str, stop_reason: str | int | None
    ) -> OutputDelta:
        self.finish_reason = finish_reason
        delta.finish_reason = finish_reason
        delta.stop_reason = stop_reason
        delta.drafting = self.drafting
        return self._with_text(delta, pieces, is_last=True)

    def _text_of(self, token_id: int) -> str:
        text = self._detokenizer.feed([token_id])
        char = (self.request.marks or {}).get(token_id)
        if char is not None and self._marked is not None:
            end = self._detokenizer.num_chars
            self._marked.note(end - self._detokenizer.num_shown(token_id), end, char)
        return text

    def _with_text(self, delta: OutputDelta, pieces: list[str], *, is_last: bool) -> OutputDelta:
        delta.text = "".join(pieces)
        if self._marked is not None:
            delta.marked = self._marked.take(delta.text, is_last=is_last)
        return delta

    def note_time(self, now: float) -> tuple[float | None, float | None]:
        """Tokens came: seconds since submission, if they are the first, else since the last ones."""
        first = self.first_token_at is None
        since_submission = now - self.submitted_at if first else None
        since_last = None if first else now - self.last_token_at
        if first:
            self.first_token_at = now
        self.last_token_at = now
        return since_submission, since_last

    def record(self, finish_reason: str, now: float) -> FinishedRequest:
        """What log and metrics keep of it."""
        first = self.first_token_at
        return FinishedRequest(
            request_id=self.request_id,
            label=self.request.label,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_generated_tokens=self.num_tokens,
            finish_reason=finish_reason,
            reuse=self.reuse,
            queue_seconds=None if self.admitted_at is None else self.admitted_at - self.submitted_at,
            time_to_first_token=None if first is None else first - self.submitted_at,
            seconds=now - self.submitted_at,
            drafting=self.drafting,
            trace_parent=self.request.trace_parent,
        )


def constrain(plan: StepPlan, answers: Mapping[int, Answer]) -> None:
    """Fill in which tokens may be sampled, for answers that follow a grammar."""
    for chunk in plan.chunks:
        answer = answers.get(chunk.request_id) if chunk.num_samples else None
        if answer is not None:
            answer.guide(chunk)


def note_admissions(plan: StepPlan, answers: Mapping[int, Answer], now: float) -> None:
    """Requests that `plan` starts have a seat; some had one before."""
    for start in plan.started:
        answer = answers.get(start.request_id)
        if answer is not None and answer.admitted_at is None:
            answer.admitted_at = now
