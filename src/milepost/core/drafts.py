"""Speculation: how many drafts a decode step carries, the records they need, and what came of them.

Drafts never decide anything. They are rows a worker computes on suspicion; what is sampled, published
and kept is what a run without them would have sampled, published and kept. So drafts take no memory by
preemption, cross a boundary only if its checkpoint can be written on the way, and end where the answer
could end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from milepost.core import reasons
from milepost.core.assembly import NO_DRAFTS, Drafts, PlannedChunk
from milepost.core.chunking import is_legal_export
from milepost.core.hashing import token_bytes
from milepost.core.lease import Lease, Reservation
from milepost.core.metrics import CacheCounters
from milepost.core.outcome import verified_drafts
from milepost.core.plan import GREEDY, TOKEN_BYTES, ChunkPlan, ChunkResult, StepPlan, StepResult
from milepost.core.ports import Drafter
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.core.speculation import DraftLengths, FixedLength
from milepost.core.step_cost import StepShape
from milepost.core.units import ceil_div, ceil_to, floor_div


@dataclass(slots=True)
class _Taken:
    """What a chunk holds for its drafts.

    Attributes:
        num_units: that the page tables cover without them.
        boundaries: positions of the checkpoints they may cross.
        is_parted: the chunk writes another slot than the one it starts from.
    """

    num_units: int
    boundaries: list[int] = field(default_factory=list)
    is_parted: bool = False


class DraftPlanner:
    """Adds drafts to decode chunks.

    Args:
        drafter: who makes them; None = the worker, from hidden states that only it has.
        num_draft_tokens: most drafts per request and step.
        lengths: how many of them are worth it; all of them by default.
        draft_sampling: of drafts that the worker makes, see `ChunkPlan`.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        num_draft_tokens: int,
        lengths: DraftLengths | FixedLength | None = None,
        draft_sampling: str = GREEDY,
    ) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.lengths = lengths if lengths is not None else FixedLength()
        self.draft_sampling = draft_sampling
        self._spare_rows = 0
        self._asked: dict[int, int] = {}
        self._taken: dict[int, _Taken] = {}
        self._now = 0.0

    def begin_step(self, budget_rows: int, decoding: Sequence[Request], now: float) -> None:
        """Drafts may take half of the rows that the decoding requests leave.

        Args:
            budget_rows: rows of the step.
            decoding: requests that decode in it.
        """
        self._spare_rows = floor_div(max(0, budget_rows - len(decoding)), 2)
        self._asked = {}
        self._taken = {}
        self._now = now
        records = []
        for request in decoding:
            room = self._room(request)
            if room > 0:
                if request.drafting is None:
                    request.drafting = self.lengths.start()
                records.append((request.drafting, room))
        if records:
            self.lengths.begin_step(records, len(decoding))

    def _room(self, request: Request) -> int:
        """Drafts that a request may have; those behind the last token it may generate are useless."""
        return min(self.num_draft_tokens, request.max_tokens - request.num_output_tokens - 1)

    def plan(self, cache: PrefixCache, request: Request, reservation: Reservation) -> Drafts:
        """Drafts for the next decode chunk of `request`, and the records they need besides.

        They stop short of the last token the request may generate and of any token that would end it:
        both are sampled but never processed, with or without drafts.

        Args:
            reservation: of the chunk without drafts, confirmed; gets the pages of the drafts as well.
        """
        room = min(self._room(request), self._spare_rows)
        if room < 1 or request.drafting is None:
            return NO_DRAFTS
        room = self.lengths.choose(request.drafting, room)
        tokens = _proposed(self.drafter, request, room) if self.drafter is not None else None
        count = room if tokens is None else len(tokens)
        if count < 1:
            return NO_DRAFTS
        end = self._reserve(cache, request, reservation, request.num_tokens + count)
        count = max(0, min(count, end - request.num_tokens))
        self._spare_rows -= count
        if tokens is not None:
            return Drafts(token_bytes(tokens[:count]))
        self._asked[request.request_id] = count
        return Drafts(num_own=count, sampling=self.draft_sampling)

    def _reserve(self, cache: PrefixCache, request: Request, reservation: Reservation, end: int) -> int:
        """Records for rows up to position `end`; returns up to where they can be had.

        Pages up to the last row, a running slot apart from the one the chunk starts from, and a slot for
        every boundary that drafts may cross.
        """
        lease, start, unit = request.held_lease, request.num_processed, cache.match_unit
        taken = self._taken[request.request_id] = _Taken(lease.num_units)
        if lease.page_tables and ceil_div(end, unit) > lease.num_units:
            pages = cache.take_pages(lease, ceil_div(end, unit), self._now)
            if pages is None:
                end = lease.num_units * unit
            else:
                reservation.new_pages = [[*a, *b] for a, b in zip(reservation.new_pages, pages, strict=True)]
        if not cache.recurrent:
            return end
        last = lease.shared(end) if lease.is_caching else start
        alignment = cache.geometry.checkpoint_alignment
        for boundary in range(ceil_to(start + 1, unit), last, unit):
            if not is_legal_export(start, end, boundary, unit, alignment):
                end = boundary
                break
        if end <= start + 1 or not _part(cache, lease, reservation, self._now):
            return start + 1
        taken.is_parted = lease.previous is not None
        for boundary in range(ceil_to(start + 1, unit), min(last, end) + 1, unit):
            if boundary in lease.exports or (boundary == end and not cache.is_end_exported(lease, end)):
                continue
            slots = cache.take_slots(self._now, may_evict=True)
            if slots is None:
                # A chunk without drafts gets there next, and says so if it finds no room either.
                return boundary - 1 if cache.is_end_exported(lease, boundary) else boundary
            lease.exports[boundary] = (slots, reasons.DECODE)
            taken.boundaries.append(boundary)
        return end

    def take_back(self, cache: PrefixCache, planned: Iterable[PlannedChunk]) -> bool:
        """Give back what the drafts of this step hold: somebody needs it who would have it without them.

        Args:
            planned: of the step so far; these chunks go on without drafts.

        Returns:
            whether there was something.
        """
        taken_by, self._taken = self._taken, {}
        for each in planned:
            chunk, lease = each.chunk, each.request.held_lease
            taken = taken_by.get(chunk.request_id)
            if taken is None:
                continue
            num_more = lease.num_units - taken.num_units
            for pool, pages in enumerate(lease.cut(taken.num_units)):
                for page in pages:
                    cache.memory.release(pool, page)
            chunk.new_pages = [pages[: len(pages) - num_more] for pages in chunk.new_pages]
            for boundary in taken.boundaries:
                cache.give_back_slots(lease.exports.pop(boundary)[0])
            chunk.exports = [export for export in chunk.exports if export.position in lease.exports]
            if taken.is_parted and lease.running is not None:
                cache.give_back_running(lease.running)
                lease.running, lease.previous = lease.previous, None
                chunk.running_slots = lease.running or []
            self._spare_rows += chunk.num_drafts
            self._asked.pop(chunk.request_id, None)
            chunk.set_drafts(b"")
        return bool(taken_by)

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """The step begun last took so long, from planning it to having its tokens.

        Steps that only decode tell what drafts cost.
        """
        shape = self._shape(plan, result)
        if shape is not None:
            self.lengths.note_step(shape, seconds, result.draft_seconds)

    def _shape(self, plan: StepPlan, result: StepResult) -> StepShape | None:
        """None if it did something else, or failed in part."""
        if not plan.chunks or result.error is not None or len(result.chunk_results) != len(plan.chunks):
            return None
        num_drafts = num_replays = 0
        for chunk, done in zip(plan.chunks, result.chunk_results, strict=True):
            if not chunk.num_samples or chunk.end != chunk.start + 1:
                return None
            count = floor_div(len(verified_drafts(chunk, done)), TOKEN_BYTES)
            num_drafts += count
            num_replays += done.end < chunk.end + count
        asked = self._asked.values()
        return StepShape(len(plan.chunks), num_drafts, num_replays, sum(asked), max(asked, default=0))

    def settle(
        self, counters: CacheCounters, request: Request, chunk: ChunkPlan, result: ChunkResult
    ) -> None:
        """Count the drafts of a step that happened."""
        record = request.drafting
        num_drafts = floor_div(len(verified_drafts(chunk, result)), TOKEN_BYTES)
        if record is None or not num_drafts + chunk.has_unfit_draft:
            return
        num_accepted = result.end - chunk.end
        if not num_drafts:
            self.lengths.learn(record, 1, 0)
            return
        record.num_drafts += 1
        record.num_draft_tokens += num_drafts
        record.num_accepted_tokens += num_accepted
        self.lengths.learn(record, num_drafts + chunk.has_unfit_draft, num_accepted)
        if request.is_counted:
            counters.num_drafts += 1
            counters.num_draft_tokens += num_drafts
            counters.num_accepted_draft_tokens += num_accepted
            counters.accepted_drafts_by_position.update(range(num_accepted))

    def forget(self, request_id: int) -> None:
        """The request is over."""
        if self.drafter is not None:
            self.drafter.forget(request_id)


def _proposed(drafter: Drafter, request: Request, max_drafts: int) -> array[int]:
    if max_drafts < 1:
        return array("I")
    drafts = array("I", drafter.propose(request.request_id, request.tokens, max_drafts))[:max_drafts]
    stop = next((at for at, token in enumerate(drafts) if token in request.stop_ids), len(drafts))
    return drafts[:stop]


def _part(cache: PrefixCache, lease: Lease, reservation: Reservation, now: float) -> bool:
    """Let `lease` write another slot than the one it starts from; False if there is none."""
    if lease.running != reservation.initial:
        return True
    slots = cache.take_running(now)
    if slots is None:
        return False
    lease.previous, lease.running = lease.running, slots
    return True
