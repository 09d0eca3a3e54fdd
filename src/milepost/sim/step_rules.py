"""Rules a step plan must keep whatever its records hold: ranges, exports, and who writes what."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from milepost.core.geometry import CacheGeometry
from milepost.core.plan import ChunkPlan, ScoredToken
from milepost.errors import MilepostError


class FingerprintError(MilepostError):
    """A plan would have computed a wrong answer, or broke the contract of `core.plan`.

    Attributes:
        check: short name of the assertion that fired.
    """

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


def check_slots(
    chunks: Sequence[ChunkPlan], geometry: CacheGeometry, check_owner: Callable[[int, int, int], None]
) -> None:
    """No two chunks write one slot, and nobody writes what somebody else reads in the same step.

    Args:
        check_owner: called with (pool, slot, request id) for every write.
    """
    checkpoints, running = geometry.checkpoint_pools, geometry.running_pools
    readers: dict[tuple[int, int], set[int]] = {}
    written: set[tuple[int, int]] = set()
    seen: set[int] = set()
    for chunk in chunks:
        request_id = chunk.request_id
        if request_id in seen:
            raise FingerprintError("chunk", f"request {request_id} has two chunks in one step")
        seen.add(request_id)
        for slots in (chunk.initial_slots, chunk.running_slots, *(export.slots for export in chunk.exports)):
            if len(slots) != len(geometry.recurrent):
                raise FingerprintError("chunk", f"request {request_id}: one slot per recurrent group needed")
        pools = checkpoints if chunk.starts_from_checkpoint else running
        for key in zip(pools, chunk.initial_slots, strict=True):
            readers.setdefault(key, set()).add(request_id)
    for chunk in chunks:
        request_id = chunk.request_id
        writes = list(zip(running, chunk.running_slots, strict=True))
        for export in chunk.exports:
            writes += zip(checkpoints, export.slots, strict=True)
        for key in writes:
            pool, slot = key
            if slot < 0:
                raise FingerprintError("slot", f"request {request_id} writes slot {slot}")
            if key in written:
                raise FingerprintError("slot", f"pool {pool}, slot {slot} is written twice in one step")
            if readers.get(key, set()) - {request_id}:
                raise FingerprintError("slot", f"pool {pool}, slot {slot} is read by another request")
            written.add(key)
            check_owner(pool, slot, request_id)


def check_exports(chunk: ChunkPlan) -> None:
    """Exports ascend, lie in (start, end of the rows], and offset and position name the same place."""
    position = chunk.start
    for export in chunk.exports:
        if (
            export.position != chunk.start + export.offset
            or not position < export.position <= chunk.last_row_end
        ):
            raise FingerprintError(
                "export",
                f"request {chunk.request_id}: position {export.position} at offset {export.offset} "
                f"of [{chunk.start}, {chunk.last_row_end})",
            )
        position = export.position


def check_sampling(chunk: ChunkPlan, num_prompt_tokens: int) -> None:
    """At most one token is sampled, behind the prompt, and its noise has the right key."""
    if chunk.num_samples not in (0, 1):
        raise FingerprintError("sampling", f"request {chunk.request_id}: {chunk.num_samples} samples")
    if not chunk.num_samples:
        return
    if chunk.end < num_prompt_tokens:
        raise FingerprintError("sampling", f"request {chunk.request_id} samples inside its prompt")
    if chunk.output_position != chunk.end - num_prompt_tokens:
        raise FingerprintError(
            "sampling",
            f"request {chunk.request_id}: output {chunk.output_position} at position {chunk.end} "
            f"of a prompt of {num_prompt_tokens}",
        )


def scores_of(chunk: ChunkPlan, tokens: Sequence[int]) -> list[ScoredToken]:
    """The scores a chunk asks for; `tokens` are the request's own."""
    first = chunk.start + chunk.scored_offset + 1
    scored = array("I", chunk.scored_tokens).tolist()
    if scored != list(tokens[first : first + len(scored)]):
        raise FingerprintError(
            "tokens", f"request {chunk.request_id}: not its own tokens are scored at {first}"
        )
    return [ScoredToken(token_id, 0.0, 1) for token_id in scored]
