"""A worker that computes nothing and checks everything.

A state is the prefix it summarises, a page entry is the prefix its token was computed from, a drafter's
tap is the prefix whose hidden state it is.
Executing a plan asserts that every value a request can see belongs to that request's own tokens,
which is what "reusing a prefix never changes an answer" means below the level of tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from milepost.core.geometry import CacheGeometry
from milepost.core.plan import (
    ZERO_STATE,
    ChunkPlan,
    ChunkResult,
    SampledToken,
    SamplingParams,
    StateCopy,
    StepPlan,
    StepResult,
    WorkerRequest,
)
from milepost.errors import WorkerError
from milepost.sim.counters import WorkerCounters
from milepost.sim.drafting import check_drafts, verify
from milepost.sim.fakes import WorkerFaults
from milepost.sim.model import FingerprintModel, MediaSymbols, TrueSequence
from milepost.sim.step_rules import FingerprintError, check_exports, check_sampling, check_slots, scores_of
from milepost.sim.taps import check_tap, page_values, tapped_groups, taps_of_rows

__all__ = ["POISON", "FingerprintError", "FingerprintWorker", "WorkerCounters"]

POISON = -1
"""What a record holds that was never written, was discarded, or was torn by a failed step."""


@dataclass(slots=True)
class _Live:
    """A request the worker has met: its page tables and, after its first chunk, its running slots."""

    tables: list[list[int]]
    position: int | None = None
    running_slots: list[int] = field(default_factory=list)


class FingerprintWorker:
    """Implements `core.ports.Worker` over prefixes instead of tensors.

    Args:
        geometry: groups and match unit; any number of attention and recurrent groups.
        budget_bytes: if given, the bytes of all records ever touched and not discarded are
            asserted to stay within it.
        model: shared between workers that must agree on tokens.
        faults: see `WorkerFaults`.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        budget_bytes: int | None = None,
        model: FingerprintModel | None = None,
        faults: WorkerFaults | None = None,
    ) -> None:
        self.geometry = geometry
        self.match_unit = geometry.match_unit
        self.model = model if model is not None else FingerprintModel()
        self.tree = self.model.tree
        self.faults = faults if faults is not None else WorkerFaults()
        self.counters = WorkerCounters()
        self.closed = False
        self.pages: list[dict[int, list[int]]] = [{} for _ in geometry.attention]
        self.slots: dict[int, dict[int, int]] = {
            pool: {} for pool in (*geometry.checkpoint_pools, *geometry.running_pools)
        }
        self.live: dict[int, _Live] = {}
        self._page_users: list[dict[int, int]] = [{} for _ in geometry.attention]
        self._page_values = [page_values(geometry, group) for group in range(len(geometry.attention))]
        self._tapped = tapped_groups(geometry)
        self._truth: dict[int, TrueSequence] = {}
        self._budget_bytes = budget_bytes
        self._record_bytes = geometry.pool_record_bytes
        self._committed_bytes = 0
        self._uncertain: set[int] = set()

    # --- what the harness tells and asks -------------------------------------------------

    def expect(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        domain: Hashable = (),
        weights: bytes = b"",
        media: Sequence[MediaSymbols] = (),
    ) -> TrueSequence:
        """Register what request `request_id` really asks; the worker checks plans against it."""
        root = self.tree.root(domain, weights)
        truth = TrueSequence(self.model, prompt, sampling, root, media)
        self._truth[request_id] = truth
        return truth

    def truth(self, request_id: int) -> TrueSequence:
        return self._truth[request_id]

    def forget(self, request_id: int) -> None:
        """Drop the expectation of a request that is over."""
        self._truth.pop(request_id, None)

    @property
    def committed_bytes(self) -> int:
        """Bytes of all records touched and not discarded since."""
        return self._committed_bytes

    def put_record(self, pool: int, record: int, content: list[int]) -> None:
        """Fill a record from outside, between steps: all that a page holds, or one state."""
        if pool < len(self.pages):
            self._page(pool, record)[:] = content
        else:
            self._set_slot(pool, record, content[0])

    # --- Worker --------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """Check and run one step.

        Raises:
            FingerprintError: the plan is wrong.
            WorkerError: an injected fault.
        """
        if self.closed:
            raise FingerprintError("closed", "execute() after close()")
        self.counters.num_steps += 1
        if self.faults.fails_before():
            self._note_uncertain(plan)
            raise WorkerError(f"injected: step {plan.step_id} failed before it began")
        for discard in plan.discards:
            for record in discard.record_ids:
                self._discard(discard.pool, record)
        for request_id in plan.finished:
            self._finish(request_id)
        for request in plan.started:
            self._start(request)
        self._check_discarded(plan)
        self._replace_pages(plan.chunks)
        self._append_pages(plan.chunks)
        self._copy(plan.copies)
        check_slots(plan.chunks, self.geometry, self._check_not_running)
        for chunk in plan.chunks:
            self._check_inputs(chunk)
        if self.faults.fails_torn():
            for chunk in plan.chunks:
                self._poison(chunk)
            self._note_uncertain(plan)
            raise WorkerError(f"injected: step {plan.step_id} failed half-way")
        starts = {chunk.request_id: chunk.start for chunk in plan.chunks}
        results = [r for r in [self._write(chunk, starts) for chunk in plan.chunks] if r is not None]
        self._check_budget()
        return StepResult(plan.step_id, results)

    def close(self) -> None:
        self.closed = True

    # --- order of a step -----------------------------------------------------------------

    def _note_uncertain(self, plan: StepPlan) -> None:
        """After a failed step the core may or may not repeat its starts and finishes."""
        self._uncertain.update(plan.finished)
        self._uncertain.update(request.request_id for request in plan.started)
        self._uncertain.update(chunk.request_id for chunk in plan.chunks)

    def _discard(self, pool: int, record: int) -> None:
        if pool < len(self.pages):
            touched = self.pages[pool].pop(record, None) is not None
        else:
            touched = self.slots[pool].pop(record, None) is not None
        if touched:
            self._committed_bytes -= self._record_bytes[pool]

    def _finish(self, request_id: int) -> None:
        live = self.live.pop(request_id, None)
        if live is None:
            if request_id not in self._uncertain:
                raise FingerprintError("finished", f"request {request_id} was never started or has ended")
            return
        for users, table in zip(self._page_users, live.tables, strict=True):
            for page in table:
                users[page] -= 1

    def _start(self, request: WorkerRequest) -> None:
        request_id = request.request_id
        truth = self._truth.get(request_id)
        if truth is None:
            raise FingerprintError("started", f"request {request_id} is unknown to the harness")
        if request_id in self.live:
            if request_id not in self._uncertain:
                raise FingerprintError("started", f"request {request_id} was started twice")
            self._finish(request_id)
        if request.num_prompt_tokens != truth.num_prompt_tokens:
            raise FingerprintError(
                "started",
                f"request {request_id} has {truth.num_prompt_tokens} prompt tokens, "
                f"the plan says {request.num_prompt_tokens}",
            )
        if len(request.page_tables) != len(self.pages):
            raise FingerprintError(
                "started", f"request {request_id}: one page table per attention group needed"
            )
        if request.tokens:
            known = array("I")
            known.frombytes(request.tokens)
            truth.ensure(len(known))
            if truth.tokens[: len(known)] != known:
                raise FingerprintError("tokens", f"request {request_id} was started with other tokens")
        elif request.sampling.needs_history:
            raise FingerprintError("tokens", f"request {request_id} has penalties but no history")
        live = _Live([[] for _ in self.pages])
        self.live[request_id] = live
        for group, table in enumerate(request.page_tables):
            self._extend_table(request_id, live, group, table)

    def _extend_table(self, request_id: int, live: _Live, group: int, pages: Sequence[int]) -> None:
        table = live.tables[group]
        users = self._page_users[group]
        for page in pages:
            if page < 0 or page in table:
                raise FingerprintError(
                    "page table", f"request {request_id}, group {group}: page {page} twice"
                )
            table.append(page)
            users[page] = users.get(page, 0) + 1

    def _replace_pages(self, chunks: Sequence[ChunkPlan]) -> None:
        """Before any page is appended: a page one request gives up may be a new page of another."""
        for chunk in chunks:
            for group, unit, page in chunk.replaced_pages:
                live = self.live.get(chunk.request_id)
                if live is None or not unit < len(live.tables[group]) or page in live.tables[group]:
                    raise FingerprintError(
                        "page table",
                        f"request {chunk.request_id}, group {group}: unit {unit} cannot be page {page}",
                    )
                users = self._page_users[group]
                users[live.tables[group][unit]] -= 1
                users[page] = users.get(page, 0) + 1
                live.tables[group][unit] = page

    def _append_pages(self, chunks: Sequence[ChunkPlan]) -> None:
        for chunk in chunks:
            live = self.live.get(chunk.request_id)
            if live is None:
                raise FingerprintError("chunk", f"request {chunk.request_id} is not live")
            if len(chunk.new_pages) != len(self.pages):
                raise FingerprintError("chunk", f"request {chunk.request_id}: new_pages has a wrong length")
            for group, pages in enumerate(chunk.new_pages):
                self._extend_table(chunk.request_id, live, group, pages)

    def _copy(self, copies: Sequence[StateCopy]) -> None:
        pools = self.geometry.running_pools
        contents = [self.slots[pools[copy.group]].get(copy.source_slot, POISON) for copy in copies]
        sources = {(copy.group, copy.source_slot) for copy in copies}
        written: set[tuple[int, int]] = set()
        for copy, content in zip(copies, contents, strict=True):
            target = (copy.group, copy.destination_slot)
            if content == POISON:
                raise FingerprintError("copy", f"group {copy.group}: slot {copy.source_slot} holds nothing")
            if target in sources or target in written:
                raise FingerprintError("copy", f"group {copy.group}: slot {copy.destination_slot} is in use")
            written.add(target)
            self._check_not_running(pools[copy.group], copy.destination_slot, None)
            self._set_slot(pools[copy.group], copy.destination_slot, content)

    def _check_discarded(self, plan: StepPlan) -> None:
        """A state that went back to the operating system must not be anybody's running state.

        A table may still list a discarded page, until its request's next chunk replaces it.
        """
        for discard in plan.discards:
            for record in discard.record_ids:
                self._check_not_running(discard.pool, record, None, "discard")

    def _check_not_running(self, pool: int, slot: int, writer: int | None, check: str = "slot") -> None:
        if pool not in self.geometry.running_pools:
            return
        group = self.geometry.running_pools.index(pool)
        for request_id, live in self.live.items():
            if request_id != writer and live.running_slots and live.running_slots[group] == slot:
                raise FingerprintError(check, f"pool {pool}, slot {slot} is the running slot of {request_id}")

    # --- reading -------------------------------------------------------------------------

    def _check_inputs(self, chunk: ChunkPlan) -> None:
        request_id, start, end = chunk.request_id, chunk.start, chunk.end
        live = self.live[request_id]
        truth = self._truth[request_id]
        if not 0 <= start < end:
            raise FingerprintError("chunk", f"request {request_id}: empty range [{start}, {end})")
        if live.position is not None and live.position != start:
            raise FingerprintError("chunk", f"request {request_id} stands at {live.position}, not at {start}")
        truth.ensure(end)
        if truth.tokens[start:end].tobytes() != chunk.tokens:
            raise FingerprintError("tokens", f"request {request_id}: tokens [{start}, {end}) are not its own")
        check_sampling(chunk, truth.num_prompt_tokens)
        check_exports(chunk)
        check_drafts(chunk, keeps_apart=self.geometry.keeps_states_apart)
        self._check_pages(request_id, live, truth, start, chunk.last_row_end)
        geometry = self.geometry
        pools = geometry.checkpoint_pools if chunk.starts_from_checkpoint else geometry.running_pools
        for pool, slot in zip(pools, chunk.initial_slots, strict=True):
            self._check_state(request_id, live, pool, slot, truth.path[start], start)

    def _check_pages(self, request_id: int, live: _Live, truth: TrueSequence, start: int, end: int) -> None:
        unit = self.match_unit
        path = truth.path
        for group, table in enumerate(live.tables):
            if len(table) * unit < end:
                raise FingerprintError(
                    "page table", f"request {request_id}, group {group} does not cover {end}"
                )
            pages = self.pages[group]
            first = 0
            for page in table:
                if first >= start:
                    break
                last = min(first + unit, start)
                entries = pages.get(page)
                if entries is None or entries[: last - first] != path[first + 1 : last + 1]:
                    self._report_page(request_id, group, page, first, last, truth)
                first = last
            if start and group in self._tapped:
                page = table[(start - 1) // unit]
                check_tap(request_id, group, page, pages[page][-1], path[start], start)

    def _report_page(
        self, request_id: int, group: int, page: int, first: int, last: int, truth: TrueSequence
    ) -> None:
        entries = self.pages[group].get(page)
        for position in range(first, last):
            found = POISON if entries is None else entries[position - first]
            wanted = truth.path[position + 1]
            if found != wanted:
                held = "nothing" if found == POISON else self.tree.describe(found)
                raise FingerprintError(
                    "poison page" if found == POISON else "page",
                    f"request {request_id}, group {group}, page {page}, position {position} holds {held}, "
                    f"wanted {self.tree.describe(wanted)}",
                )

    def _check_state(
        self, request_id: int, live: _Live, pool: int, slot: int, wanted: int, start: int
    ) -> None:
        if slot == ZERO_STATE:
            if start != 0:
                raise FingerprintError("zero state", f"request {request_id}, pool {pool} at position {start}")
            return
        found = self.slots[pool].get(slot, POISON)
        if found == POISON:
            raise FingerprintError(
                "poison state", f"request {request_id}, pool {pool}: slot {slot} holds nothing"
            )
        if found != wanted:
            raise FingerprintError(
                "state",
                f"request {request_id}, pool {pool}, slot {slot} at {start} holds "
                f"{self.tree.describe(found)}, wanted {self.tree.describe(wanted)}",
            )
        if live.position is None:
            self.counters.num_restored += 1

    # --- writing -------------------------------------------------------------------------

    def _write(self, chunk: ChunkPlan, starts: dict[int, int]) -> ChunkResult | None:
        request_id, start, end = chunk.request_id, chunk.start, chunk.end
        if self.faults.drops(chunk):
            self._poison(chunk)
            self._uncertain.add(request_id)
            return None
        live = self.live[request_id]
        truth = self._truth[request_id]
        num_accepted, nodes = verify(self.tree, truth, chunk)
        end += num_accepted
        self._write_pages(request_id, live, start, nodes, starts)
        self._write_taps(live, taps_of_rows(truth.path, start, end, self.match_unit))
        exported: list[int] = []
        for export in chunk.exports:
            written = self.faults.acknowledges(chunk, export)
            content = nodes[export.offset - 1] if written else POISON
            for pool, slot in zip(self.geometry.checkpoint_pools, export.slots, strict=True):
                self._set_slot(pool, slot, content)
            if written and export.position <= end:
                exported.append(export.position)
        for pool, slot in zip(self.geometry.running_pools, chunk.running_slots, strict=True):
            self._set_slot(pool, slot, truth.path[end])
        live.position = end
        live.running_slots = list(chunk.running_slots)
        counters = self.counters
        counters.num_computed_tokens += end - start
        counters.num_rejected_rows += chunk.last_row_end - end
        counters.num_exports += len(exported)
        counters.computed_by_request[request_id] = (
            counters.computed_by_request.get(request_id, 0) + end - start
        )
        counters.passes_by_request[request_id] = counters.passes_by_request.get(request_id, 0) + 1
        sampled: list[SampledToken] = []
        if chunk.num_samples:
            truth.ensure(end + 1)
            sampled = [SampledToken(token) for token in truth.tokens[chunk.end : end + 1]]
        scores = scores_of(chunk, truth.tokens)
        return ChunkResult(request_id, end, exported, sampled, scores=scores)

    def _write_pages(
        self, request_id: int, live: _Live, start: int, nodes: list[int], starts: dict[int, int]
    ) -> None:
        """Write the entries of positions [start, start + len(nodes)).

        Args:
            starts: request id -> position it reads up to in this step.
        """
        unit = self.match_unit
        end = start + len(nodes)
        for group, table in enumerate(live.tables):
            users = self._page_users[group]
            position = start
            while position < end:
                offset = position % unit
                count = min(unit - offset, end - position)
                page = table[position // unit]
                entries = self._page(group, page)
                new = nodes[position - start : position - start + count]
                if users[page] > 1 and entries[offset : offset + count] != new:
                    self._check_not_read(request_id, group, page, offset, starts)
                entries[offset : offset + count] = new
                position += count

    def _write_taps(self, live: _Live, taps: dict[int, int]) -> None:
        for group in self._tapped:
            for unit, tap in taps.items():
                self._page(group, live.tables[group][unit])[-1] = tap

    def _check_not_read(
        self, writer: int, group: int, page: int, offset: int, starts: dict[int, int]
    ) -> None:
        """A write that changes a page must not hit entries another chunk of this step reads."""
        for request_id, start in starts.items():
            table = self.live[request_id].tables[group]
            if (
                request_id != writer
                and page in table
                and table.index(page) * self.match_unit + offset < start
            ):
                raise FingerprintError(
                    "shared page",
                    f"request {writer}, group {group} overwrites page {page} that {request_id} reads",
                )

    def _poison(self, chunk: ChunkPlan) -> None:
        """A torn chunk: all its targets hold garbage, shared or not."""
        live = self.live[chunk.request_id]
        for group, table in enumerate(live.tables):
            for position in range(chunk.start, chunk.last_row_end):
                entries = self._page(group, table[position // self.match_unit])
                entries[position % self.match_unit] = POISON
                if group in self._tapped:
                    entries[-1] = POISON
        targets = list(zip(self.geometry.running_pools, chunk.running_slots, strict=True))
        for export in chunk.exports:
            targets += zip(self.geometry.checkpoint_pools, export.slots, strict=True)
        for pool, slot in targets:
            self._set_slot(pool, slot, POISON)

    def _page(self, group: int, page: int) -> list[int]:
        entries = self.pages[group].get(page)
        if entries is None:
            entries = [POISON] * self._page_values[group]
            self.pages[group][page] = entries
            self._committed_bytes += self._record_bytes[group]
        return entries

    def _set_slot(self, pool: int, slot: int, content: int) -> None:
        slots = self.slots[pool]
        if slot not in slots:
            self._committed_bytes += self._record_bytes[pool]
        slots[slot] = content

    def _check_budget(self) -> None:
        if self._budget_bytes is not None and self._committed_bytes > self._budget_bytes:
            raise FingerprintError(
                "budget", f"{self._committed_bytes} bytes are committed, the budget is {self._budget_bytes}"
            )
