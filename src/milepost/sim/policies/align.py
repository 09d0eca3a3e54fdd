"""The `align` policy: vLLM 0.33's prefix caching for hybrid models, to run beside Milepost's own.

One request at a time::

    policy = AlignPolicy(AlignConfig(hash_block_size=16, mamba_block_size=32, attention_block_size=32))
    policy.admit("a", tokens)                  # AlignHit: what a lookup finds now
    end = policy.schedule("a", budget=8192)    # end of this step's chunk, or WAIT
    policy.commit("a")                         # the chunk has run
    policy.append("a", [sampled])              # decode goes on with schedule and commit
    policy.finish("a")

or a step of the whole engine with `step(budget)`, which admits, preempts and returns the chunks.
Entries become visible when their chunk is scheduled, as upstream; a hit on one waits for `commit`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from milepost.core.units import floor_to
from milepost.sim.policies.align_manager import AlignHit, AlignManager, AlignRequest, BoundaryOffer
from milepost.sim.policies.align_rules import (
    DENSE,
    WAIT,
    AlignConfig,
    ChunkEnd,
    align_chunk_ends,
    align_split,
    mtp_reserve,
    proof_margin,
    replay_boundaries,
)
from milepost.sim.policies.block_pool import BlockKey

__all__ = ["DENSE", "WAIT", "AlignConfig", "AlignHit", "AlignPolicy", "Chunk"]
__all__ += ["align_chunk_ends", "align_split", "mtp_reserve", "proof_margin", "replay_boundaries"]

WaitReason = Literal["budget", "same_step", "blocks"]


class Chunk(NamedTuple):
    request_id: Hashable
    start: int
    end: int


class AlignPolicy:
    def __init__(self, config: AlignConfig, record_events: bool = False) -> None:
        self.config = config
        self.manager = AlignManager(config, record_events)
        self.wait_reason: WaitReason | None = None  # of the last `schedule`
        self.num_preemptions = 0
        self._requests: dict[Hashable, AlignRequest] = {}
        self._waiting: list[AlignRequest] = []
        self._running: list[AlignRequest] = []

    def lookup(self, tokens: Sequence[int]) -> AlignHit:
        """What a request with this prompt would hit now."""
        return self.manager.find_hit(self.config.hash_chain(tokens), len(tokens))

    def keys(self) -> frozenset[BlockKey]:
        """Every entry a lookup can find."""
        return self.manager.pool.keys()

    def keyed_positions(self, tokens: Sequence[int], group: int | None = None) -> list[int]:
        """Boundaries of a prompt that have an entry in `group` (default: the states), ascending."""
        group = self.config.state_group if group is None else group
        found = {key.digest for key in self.keys() if key.group == group}
        unit = self.config.hash_block_size
        return [(k + 1) * unit for k, digest in enumerate(self.config.hash_chain(tokens)) if digest in found]

    def request(self, request_id: Hashable) -> AlignRequest:
        """The live request: tables, copies and new blocks of the chunk in flight."""
        return self._requests[request_id]

    def admit(self, request_id: Hashable, tokens: Sequence[int], num_external_tokens: int = 0) -> AlignHit:
        """Queue a request; returns what it hits now (looked up again when it is scheduled).

        `num_external_tokens` is what a connector offers beyond the hit rounded down to the scheduler
        block, loaded with the first chunk. ValueError: id in use, no tokens, nothing left to compute.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is already admitted")
        if not tokens:
            raise ValueError("tokens must not be empty")
        request = AlignRequest(request_id, list(tokens), len(tokens))
        request.hashes = self.config.hash_chain(tokens)
        hit = self.manager.find_hit(request.hashes, len(tokens))
        if num_external_tokens:
            whole = floor_to(hit.num_tokens, self.config.scheduler_block_size)
            request.num_loadable_tokens = whole + num_external_tokens
        if request.num_loadable_tokens >= len(tokens):
            raise ValueError("num_external_tokens must leave the last token to compute")
        self._requests[request_id] = request
        self._waiting.append(request)
        return hit

    def append(self, request_id: Hashable, tokens: Sequence[int]) -> None:
        """Add sampled tokens, which the next chunk of the request will process."""
        request = self._requests[request_id]
        request.tokens.extend(tokens)
        request.hashes = self.config.hash_chain(request.tokens, request.hashes)

    def schedule(self, request_id: Hashable, budget: int, *, chunk_end: int | None = None) -> ChunkEnd:
        """Decide, allocate and key a request's next chunk: its end, or WAIT and a `wait_reason`.

        `budget` is the tokens left in this step; `chunk_end` cuts there whatever the rules say.
        """
        request = self._requests[request_id]
        self.wait_reason = None
        if request.scheduled_end is not None:
            raise ValueError(f"request {request_id!r} has a chunk in flight: commit it first")
        if request.is_allocated:
            self.manager.sweep(request)
            hit, start = AlignHit(0, None, (), 0), request.num_computed_tokens
        else:
            hit = self.manager.find_hit(request.hashes, len(request.tokens))
            request.junction = hit.junction
            hit, start = self._start(request, hit)
            if not self.manager.is_written(request.hashes, hit):
                self.wait_reason = "same_step"
                return WAIT
        end = self._split(request, start, budget) if chunk_end is None else chunk_end
        if end <= start or not self.manager.allocate(request, hit, start, end):
            self.wait_reason = "budget" if end <= start else "blocks"
            return WAIT
        request.scheduled_start, request.scheduled_end = start, end
        self.manager.cache(request, start, end)
        if request in self._waiting:
            self._waiting.remove(request)
            self._running.append(request)
        return end

    def commit(self, request_id: Hashable) -> None:
        """The request's chunk has run."""
        self.manager.commit(self._requests[request_id])

    def take_offers(self, request_id: Hashable) -> list[BoundaryOffer]:
        """States a connector may store, with their exact blocks; each is offered once."""
        request = self._requests[request_id]
        offers, request.offers = request.offers, []
        return offers

    def finish(self, request_id: Hashable) -> BoundaryOffer | None:
        """End a request. One that stands on its own tail still offers that state."""
        request = self._requests[request_id]
        block, boundary = request.producer or (0, -1)
        is_idle_there = request.scheduled_end is None and request.num_computed_tokens == boundary
        self._forget(request)
        return BoundaryOffer(self.config.state_group, block, boundary) if is_idle_there else None

    def abort(self, request_id: Hashable) -> None:
        """End a request; a chunk in flight still runs, so its entries stay, as upstream."""
        self._forget(self._requests[request_id])

    def preempt(self, request_id: Hashable) -> None:
        """Take a running request's blocks; it starts again, with a new lookup, before all others."""
        request = self._requests[request_id]
        self.manager.release(request)
        self._running.remove(request)
        self._waiting.insert(0, request)
        self.num_preemptions += 1

    def step(self, budget: int | None = None) -> list[Chunk]:
        """One step of upstream's scheduler: running requests first, then admission in order.

        A running request that gets no tokens is skipped; one that gets no blocks preempts the last
        running request. A waiting request that cannot be scheduled stops the admission of those behind.
        """
        left = self.config.max_tokens_per_step if budget is None else budget
        chunks: list[Chunk] = []
        index, has_preempted = 0, False
        while left > 0 and index < len(self._running) + (0 if has_preempted else len(self._waiting)):
            request = [*self._running, *self._waiting][index]
            was_running = request.is_allocated
            is_idle = was_running and request.num_computed_tokens == len(request.tokens)
            end = WAIT if is_idle else self.schedule(request.request_id, left)
            if end != WAIT:
                chunks.append(Chunk(request.request_id, request.scheduled_start, end))
                left -= end - request.scheduled_start
            elif not was_running:
                break
            elif not is_idle and self.wait_reason == "blocks":
                has_preempted = True
                self.preempt(self._running[-1].request_id)
                continue
            index += 1
        return chunks

    def _split(self, request: AlignRequest, start: int, budget: int) -> int:
        config = self.config
        num_unfinished = sum(r.num_computed_tokens < len(r.tokens) for r in self._requests.values())
        num_tokens = align_split(
            start=start,
            prompt_tokens=request.num_prompt_tokens,
            total_tokens=len(request.tokens),
            num_budget_tokens=budget,
            mamba_block_size=config.split_block_size,
            hash_block_size=config.hash_block_size,
            scheduler_block_size=config.scheduler_block_size,
            dcp=config.dcp,
            partial_hits=config.has_partial_hits,
            checkpoint_alignment=config.checkpoint_alignment,
            drop_eagle_block=config.drop_eagle_block,
            lookahead=config.num_hash_lookahead_tokens,
            max_tokens_per_step=config.max_tokens_per_step,
            long_prefill_threshold=config.long_prefill_threshold,
            junction=request.junction,
            junction_feature=config.is_junction_exact,
            threshold_binds=num_unfinished > 1,
        )
        return mtp_reserve(config.prefill_lookahead, request.prefill_end, start, start + num_tokens)

    def _start(self, request: AlignRequest, hit: AlignHit) -> tuple[AlignHit, int]:
        """Local hit in use and first token to compute: a load wins over a local tail it exceeds."""
        loaded, sizes = request.num_loadable_tokens, self.config.attention_group_tokens
        if loaded <= hit.num_tokens:
            return hit, hit.num_tokens
        whole = floor_to(hit.num_tokens, self.config.scheduler_block_size)
        blocks = (found[: whole // size] for found, size in zip(hit.attention_blocks, sizes, strict=True))
        return AlignHit(whole, hit.junction, tuple(blocks), 0), loaded

    def _forget(self, request: AlignRequest) -> None:
        self.manager.release(request)
        del self._requests[request.request_id]
        (self._running if request in self._running else self._waiting).remove(request)
