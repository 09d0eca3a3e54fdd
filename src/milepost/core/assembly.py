"""Puts a decided chunk into the words of the plan."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.coordinator import Match
from milepost.core.hashing import token_bytes
from milepost.core.lease import Lease, Reservation
from milepost.core.plan import GREEDY, ChunkPlan, StateExport, WorkerRequest
from milepost.core.prefix_cache import PrefixCache
from milepost.core.queues import is_background
from milepost.core.request import Request


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of one chunk, see `ChunkPlan`.

    Attributes:
        tokens: uint32 LE.
        num_own: tokens the worker drafts itself, instead.
        sampling: how it does that.
    """

    tokens: bytes = b""
    num_own: int = 0
    sampling: str = GREEDY


NO_DRAFTS = Drafts()


@dataclass(slots=True)
class PlannedChunk:
    """A chunk in flight, and what is to happen when it is acknowledged."""

    request: Request
    chunk: ChunkPlan
    end_reason: str | None


def furnish_lease(
    lease: Lease, request: Request, marked_units: frozenset[int], cache: PrefixCache, match: Match
) -> None:
    """Tell a lease what its request asks of the checkpoints it is going to make, and what they continue."""
    if request.conversation is not None:
        lease.conversation = (lease.chain.root, request.conversation)
    lease.marked_units = marked_units
    lease.num_prompt_tokens = request.num_prompt_tokens
    if not cache.config.shares_generated_tokens:
        lease.shared_end = request.num_prompt_tokens
    lease.retention_priority = request.retention_priority
    lease.pin_seconds = request.pin_seconds
    lease.spares_live = is_background(request)
    if request.reuse is None:
        request.num_turns_before = cache.turns_before(lease, match)
    lease.lineage = request.num_turns_before
    is_pinned = bool(marked_units) and lease.pin_seconds > 0
    lease.is_one_off = not (lease.lineage or lease.retention_priority > 0 or is_pinned)


def build_chunk(
    request: Request, lease: Lease, end: int, reservation: Reservation, drafts: Drafts = NO_DRAFTS
) -> ChunkPlan:
    """The command for tokens [num_processed, end) of `request`."""
    start = request.num_processed
    num_tokens = len(request.tokens)
    exports = lease.exports
    replaced, lease.replaced = lease.replaced, []
    scored_start, scored_end = scored_rows(request, end)
    return ChunkPlan(
        request.request_id,
        start,
        end,
        token_bytes(request.tokens[start:end]),
        reservation.new_pages,
        replaced,
        reservation.initial,
        lease.running if lease.running is not None else [],
        [StateExport(at - start, slots, at, reason) for at, (slots, reason) in sorted(exports.items())],
        1 if end == num_tokens else 0,
        num_tokens - request.num_prompt_tokens,
        request.captures_logits and end == request.num_prompt_tokens,
        draft_tokens=drafts.tokens,
        num_own_drafts=drafts.num_own,
        draft_sampling=drafts.sampling,
        starts_from_checkpoint=reservation.starts_from_checkpoint,
        scored_offset=scored_start - start,
        scored_tokens=token_bytes(request.tokens[scored_start + 1 : scored_end + 1]),
        num_score_logprobs=request.prompt_logprobs or 0,
    )


def scored_rows(request: Request, end: int) -> tuple[int, int]:
    """Positions [first, last) below `end` whose logits score the prompt token behind them."""
    start = request.num_processed
    if not request.is_scored:
        return start, start
    first = max(start, request.num_scored)
    return first, max(first, min(end, request.num_prompt_tokens - 1))


def build_start(request: Request, lease: Lease, num_units: int) -> WorkerRequest:
    """How the worker gets to know `request`, whose first `num_units` units are reused."""
    history = token_bytes(request.tokens) if request.sampling.needs_history else b""
    tables = [table[:num_units] for table in lease.page_tables]
    return WorkerRequest(request.request_id, request.sampling, request.num_prompt_tokens, history, tables)


def nothing_reserved(lease: Lease, now: float) -> Reservation:
    """A chunk that needs no record: it goes on in its own slots and its last page."""
    return Reservation([[] for _ in lease.page_tables], None, {}, [], [], lease.running or [], now)
