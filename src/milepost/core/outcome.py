"""What a finished step means for one request: progress, published records, stop conditions."""

from __future__ import annotations

from array import array

from milepost.core import reasons
from milepost.core.hashing import token_bytes
from milepost.core.plan import TOKEN_BYTES, ChunkPlan, ChunkResult
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request, RequestUpdate
from milepost.core.units import floor_div, is_multiple

NOT_EXECUTED = "the worker did not execute this step"
MAX_TOKEN_ID = 2**32 - 1


def settle_chunk(
    cache: PrefixCache,
    request: Request,
    chunk: ChunkPlan,
    result: ChunkResult | None,
    end_reason: str | None,
    error: str | None,
    now: float,
) -> tuple[RequestUpdate, str | None, bool]:
    """Apply the acknowledgement of one chunk.

    Returns:
        (update, finish reason or None, whether the running state is sound).
    """
    update = RequestUpdate(request.request_id, drafting=request.drafting)
    if not request.reuse_reported and request.reuse is not None:
        update.reuse = request.reuse
        request.reuse_reported = True
    mismatch = _mismatch(chunk, result)
    if result is None or mismatch is not None:
        update.error = error or mismatch
        return update, "error", False
    lease = request.lease
    if lease is None:
        raise ValueError(f"request {request.request_id} holds nothing")
    is_decode = request.num_processed >= request.prefill_end
    # Accepted drafts are tokens like any other: the chain must know them before their units are published.
    request.tokens.extend(token.token_id for token in result.sampled)
    request.num_processed = end = result.end
    if result.scores:
        request.num_scored = chunk.start + chunk.scored_offset + len(result.scores)
        update.scores = result.scores
    if is_decode:
        cache.counters.num_decode_tokens += end - chunk.start
        if chunk.num_drafts or lease.previous is not None or is_multiple(end, cache.match_unit):
            cache.publish(lease, end, result.exported_positions, reasons.DECODE, now)
            cache.thin_decode(lease)
    else:
        cache.counters.num_prefill_tokens += end - chunk.start
        cache.publish(lease, end, result.exported_positions, end_reason, now)
    if chunk.num_samples:
        update.tokens = result.sampled
        update.logits = result.logits
        reason = _stop_reason(request, update)
        if reason is not None:
            return update, reason, True
    return update, request.pending_abort, True


def verified_drafts(chunk: ChunkPlan, result: ChunkResult) -> bytes:
    """The drafts of the chunk that were verified (uint32 LE), whoever made them."""
    return result.draft_tokens if chunk.num_own_drafts else chunk.draft_tokens


def _mismatch(chunk: ChunkPlan, result: ChunkResult | None) -> str | None:
    """What is wrong with an acknowledgement; None if it stands for the chunk that was planned."""
    if result is None:
        return NOT_EXECUTED
    num_accepted = result.end - chunk.end
    num_planned = chunk.num_samples + num_accepted
    drafts = verified_drafts(chunk, result)
    if len(drafts) > TOKEN_BYTES * chunk.num_drafts:
        num_drafts = floor_div(len(drafts), TOKEN_BYTES)
        return f"the worker drafted {num_drafts} tokens, asked for were at most {chunk.num_drafts}"
    if not 0 <= num_accepted <= chunk.num_drafts:
        planned = f"{chunk.end} with {chunk.num_drafts} drafts" if chunk.num_drafts else f"{chunk.end}"
        return f"the worker acknowledged position {result.end}, planned was {planned}"
    if len(result.sampled) != num_planned:
        return f"the worker sampled {len(result.sampled)} tokens, planned were {num_planned}"
    num_scored = floor_div(len(chunk.scored_tokens), TOKEN_BYTES)
    if len(result.scores) != num_scored:
        return f"the worker scored {len(result.scores)} tokens, planned were {num_scored}"
    if any(not 0 <= token.token_id <= MAX_TOKEN_ID for token in result.sampled):
        return f"the worker sampled a token id outside of [0, {MAX_TOKEN_ID}]"
    accepted = token_bytes(array("I", (token.token_id for token in result.sampled[:num_accepted])))
    if not drafts.startswith(accepted):
        return "the worker accepted a draft that is not the token it sampled"
    if any(position > result.end for position in result.exported_positions):
        return f"the worker acknowledged an export behind position {result.end}"
    return None


def _stop_reason(request: Request, update: RequestUpdate) -> str | None:
    token_id = update.tokens[-1].token_id
    num_output_tokens = request.num_output_tokens
    if token_id in request.stop_ids and num_output_tokens > request.sampling.min_tokens:
        update.stop_token_id = token_id
        return "stop"
    if num_output_tokens >= request.max_tokens:
        return "length"
    return None
