"""The messages between scheduler and worker. Plain data: they round-trip through msgpack.

The plan carries every decision; the worker derives none. Token ids travel as little-endian
uint32 bytes (`array("I").tobytes()`), which is also what the hash chain reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from milepost.core.units import floor_div

TOKEN_BYTES = 4
"""Bytes of a token id on the wire."""

ZERO_STATE = -1
"""`initial_slots` entry: start from the defined initial state (zeros), not from a slot."""

GREEDY = "greedy"
COUPLED = "coupled"
PROBABILISTIC = "probabilistic"
"""`draft_sampling` entries, see there."""


@dataclass(slots=True)
class SamplingParams:
    """How tokens of one choice are sampled. Noise is keyed by (seed, choice_index, output position).

    Attributes:
        temperature: 0 = greedy.
        top_k: 0 = off.
        min_p: 0.0 = off, relative to the most likely token.
        num_logprobs: None = none; k >= 0 = log-probability of the sampled token and of the k best.
        logit_bias: token id -> value added to its logit.
        min_tokens: while fewer tokens were generated, `stop_token_ids` cannot be sampled.
        stop_token_ids: ids that end the request (EOS included unless ignored).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    choice_index: int = 0
    num_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)

    @property
    def needs_history(self) -> bool:
        """Whether the worker must know the tokens so far (penalties look at them)."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(slots=True)
class WorkerRequest:
    """A request the worker meets for the first time (or again, after a preemption).

    Attributes:
        tokens: all tokens known so far (uint32 LE) if `sampling.needs_history`, else empty.
        num_prompt_tokens: length of the prompt; tokens behind it were generated.
        page_tables: per attention group, the page ids of units [0, k) that were reused.
    """

    request_id: int
    sampling: SamplingParams
    num_prompt_tokens: int
    tokens: bytes
    page_tables: list[list[int]]


@dataclass(slots=True)
class StateExport:
    """Write the state at `position` into `slots` (one per recurrent group) of checkpoints.

    `offset` = position - chunk start, 1 <= offset <= chunk length; offset == length is the state
    at the end of the chunk.
    """

    offset: int
    slots: list[int]
    position: int
    reason: str


@dataclass(slots=True)
class ChunkPlan:
    """Tokens [start, end) of one request, to be processed in this step.

    Attributes:
        tokens: the end - start token ids (uint32 LE).
        new_pages: per attention group, page ids to append to the request's page table *before*
            the forward pass (they hold positions from the first unit the table does not cover).
        replaced_pages: (attention group, unit, page id): from this step on the request reads this page
            for the unit; somebody else published the same tokens first and the own page was freed.
            Applied before `new_pages`.
        initial_slots: per recurrent group, where to read the state at `start`: a slot, or ZERO_STATE.
            The slot is read only; it may be a checkpoint shared with other requests.
        starts_from_checkpoint: `initial_slots` are those of a checkpoint. Where checkpoints are kept apart
            it is converted into `running_slots` first, and the chunk has no drafts.
        running_slots: per recurrent group, where to write the state at `end`. May equal
            `initial_slots` (in place).
        exports: ascending by offset.
        num_samples: 1 if a token is sampled from the last row, 0 if the prefill goes on.
        draft_tokens: guesses (uint32 LE) for the tokens behind `end`. They are computed as further rows
            of the chunk, and a token is sampled from each of these rows as well. A draft is accepted if it
            equals the token sampled at its position and all drafts before it were accepted. Page tables
            reach up to `last_row_end`, exports may lie up to there; `running_slots` then differ from
            `initial_slots` and get the state behind the last accepted token.
        num_own_drafts: instead of `draft_tokens`: the worker drafts, with modules of the model, up to so many
            tokens, none behind one that ends the request, and reports them.
        draft_sampling: how the worker drafts, and verifies what it drafted, for a request that samples:
            `GREEDY` = the most likely tokens; `COUPLED` = drawn with the noise their positions are sampled
            with; `PROBABILISTIC` = drawn with noise of their own, and verified by rejection sampling.
        has_unfit_draft: a further draft was made that cannot be accepted, and is not verified.
        output_position: index of the sampled token among the request's outputs (keys the noise).
        captures_logits: return the raw logits of the last row (audits compare them).
        allowed_tokens: the ids that may be sampled: packed bits, the lowest id in the lowest bit of the
            first byte, rounded up to whole 32-bit words; one row per sample, joined. Empty = all of them.
            The scheduler leaves it empty, the engine fills it in for answers that follow a grammar.
        scored_offset: rows from here on are scored, as many as `scored_tokens` has.
        scored_tokens: for each of these rows the token that follows it in the prompt (uint32 LE), the last
            of them beyond the chunk; its log-probability is returned. Empty = no row is scored.
        num_score_logprobs: so many of the most likely tokens are returned with each of them.
    """

    request_id: int
    start: int
    end: int
    tokens: bytes
    new_pages: list[list[int]]
    replaced_pages: list[tuple[int, int, int]]
    initial_slots: list[int]
    running_slots: list[int]
    exports: list[StateExport]
    num_samples: int
    output_position: int
    captures_logits: bool = False
    allowed_tokens: bytes = b""
    scored_offset: int = 0
    scored_tokens: bytes = b""
    num_score_logprobs: int = 0
    draft_tokens: bytes = b""
    num_own_drafts: int = 0
    draft_sampling: str = GREEDY
    has_unfit_draft: bool = False
    starts_from_checkpoint: bool = False

    @property
    def num_drafts(self) -> int:
        """Drafts of the chunk; at most so many where the worker makes them."""
        return floor_div(len(self.draft_tokens), TOKEN_BYTES) + self.num_own_drafts

    @property
    def last_row_end(self) -> int:
        """Position behind the last row there may be, drafts included."""
        return self.end + self.num_drafts

    def set_drafts(self, draft_tokens: bytes) -> None:
        """Verify these drafts, whoever made them, and no others; exports behind them are left out."""
        self.draft_tokens = draft_tokens
        self.num_own_drafts = 0
        self.exports = [export for export in self.exports if export.position <= self.last_row_end]


@dataclass(slots=True)
class StateCopy:
    """Copy a slot inside one recurrent group's pool of running states, before the forward pass."""

    group: int
    source_slot: int
    destination_slot: int


@dataclass(slots=True)
class PoolDiscard:
    """Records whose memory goes back to the operating system before anything else in the step.

    `pool` counts as in `CacheGeometry.pool_record_bytes`.
    """

    pool: int
    record_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step. Order for the worker: discards, finished, started, copies, forward over chunks.

    All reads of initial states and checkpoints see the contents from before the step.
    """

    step_id: int
    chunks: list[ChunkPlan]
    started: list[WorkerRequest] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    copies: list[StateCopy] = field(default_factory=list)
    discards: list[PoolDiscard] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the step, those of drafts included, as many as there may be."""
        return sum(chunk.last_row_end - chunk.start for chunk in self.chunks)


@dataclass(slots=True)
class SampledToken:
    """A sampled token.

    Attributes:
        logprob: natural log-probability under the model's raw distribution (before temperature and
            filters), if asked for.
        top_logprobs: the most likely (token id, logprob), descending.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class ScoredToken:
    """A token of the prompt under the model's raw distribution behind the tokens before it.

    Attributes:
        rank: 1 = the most likely one; tokens with the same logit share the better rank.
        top_logprobs: the most likely (token id, logprob), descending.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class ChunkResult:
    """Acknowledges what the worker really wrote for one chunk.

    Attributes:
        end: position of the running state after the step; pages [start, end) are written. The chunk's
            `end`, plus one for each accepted draft.
        exported_positions: positions, at most `end`, whose export was written.
        sampled: `num_samples` tokens, plus one for each accepted draft; the last one was not processed.
        logits: float32 little-endian logits of the last row, before any processing, if asked for.
        scores: one per token in `scored_tokens`.
        draft_tokens: what the worker drafted (uint32 LE), if the plan asked for it.
    """

    request_id: int
    end: int
    exported_positions: list[int]
    sampled: list[SampledToken]
    logits: bytes = b""
    scores: list[ScoredToken] = field(default_factory=list)
    draft_tokens: bytes = b""


@dataclass(slots=True)
class StepResult:
    """What a step did. A chunk without a result did not happen: its request is failed by the core.

    Attributes:
        draft_seconds: what making drafts took of it, where the worker makes them.
    """

    step_id: int
    chunk_results: list[ChunkResult]
    error: str | None = None
    draft_seconds: float = 0.0


@dataclass(slots=True)
class ChunkDrafts:
    """Drafts for one chunk.

    Attributes:
        draft_tokens: uint32 LE, at most the `num_own_drafts` that were asked for.
    """

    request_id: int
    draft_tokens: bytes


@dataclass(slots=True)
class StepDrafts:
    """Drafts that a plan asks for, made before it is executed.

    Attributes:
        seconds: what making them took.
    """

    step_id: int
    chunks: list[ChunkDrafts]
    seconds: float
