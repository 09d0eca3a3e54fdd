"""Block tables, lookup and keying of the `align` policy: upstream's coordinator and its two managers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from milepost.core.units import ceil_div, floor_to
from milepost.errors import InvariantError
from milepost.sim.policies.align_rules import AlignConfig, proof_margin, replay_boundaries
from milepost.sim.policies.block_pool import NULL_BLOCK, BlockKey, BlockPool


@dataclass(frozen=True, slots=True)
class AlignHit:
    """Outcome of a lookup.

    Attributes:
        num_tokens: where the request would resume; attention and state both exist there.
        junction: longest prefix a single group matched, if the hit is shorter, else None.
        attention_blocks: per attention group the blocks that hold [0, num_tokens).
        state_block: block that holds the state at `num_tokens`; NULL_BLOCK without a hit.
    """

    num_tokens: int
    junction: int | None
    attention_blocks: tuple[tuple[int, ...], ...]
    state_block: int


class BlockCopy(NamedTuple):  # copy-on-write, run before the forward of the step
    group: int
    source: int
    destination: int


class BoundaryOffer(NamedTuple):  # a state a connector may store: exact block and boundary
    group: int
    block: int
    num_tokens: int


class Checkpoint(NamedTuple):  # reserved for the chunk in flight
    position: int
    column: int


@dataclass(slots=True, eq=False)
class AlignRequest:
    """Everything kept per request; `tables` (per group, states last) is empty until it gets blocks."""

    request_id: Hashable
    tokens: list[int]
    num_prompt_tokens: int
    num_loadable_tokens: int = 0  # prefix a connector can bring
    hashes: list[bytes] = field(default_factory=list)
    junction: int | None = None
    num_computed_tokens: int = 0
    scheduled_start: int = 0
    scheduled_end: int | None = None
    tables: list[list[int]] = field(default_factory=list)
    num_cached_columns: list[int] = field(default_factory=list)
    num_swept_columns: int = 0
    # A tail inside a block: (block, boundary). The entry moves before the owner overwrites the block.
    producer: tuple[int, int] | None = None
    offers: list[BoundaryOffer] = field(default_factory=list)
    checkpoint: Checkpoint | None = None  # this and the rest: of the chunk in flight
    held: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    new_blocks: list[list[int]] = field(default_factory=list)
    new_keys: list[BlockKey] = field(default_factory=list)

    @property
    def is_allocated(self) -> bool:
        return bool(self.tables)

    @property
    def prefill_end(self) -> int:
        return max(self.num_prompt_tokens, len(self.tokens) - 1)


class AlignManager:
    def __init__(self, config: AlignConfig, record_events: bool = False) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, record_events)
        self.cached_this_step: set[BlockKey] = set()
        # Position whose state a block holds once the chunk in flight has run.
        self._state_at: dict[int, int] = {}

    def find_hit(self, hashes: list[bytes], num_tokens: int) -> AlignHit:
        """Joint hit of a prompt of `num_tokens`, its last token excluded. No side effects.

        Attention is looked up once per group and later only cut, so one pass reaches the fixed point.
        """
        config = self.config
        length = longest = max(0, num_tokens - 1)
        blocks = []
        for group in range(config.state_group):
            matched, found = self.find_attention(group, hashes, length)
            length = min(length, matched)
            longest = length if group == 0 else longest
            blocks.append(found)
        length, state_block = self._find_state(hashes, length)
        cut = (
            tuple(b[: ceil_div(length, size)]) for b, size in zip(blocks, config.group_sizes, strict=False)
        )
        return AlignHit(length, longest if longest > length else None, tuple(cut), state_block)

    def find_attention(self, group: int, hashes: list[bytes], max_tokens: int) -> tuple[int, list[int]]:
        """Longest prefix of one attention group: tokens after the drop, and their blocks."""
        config, unit = self.config, self.config.hash_block_size
        size = config.attention_group_tokens[group]
        fine = config.has_partial_hits
        drops = config.drop_eagle_block and config.holds_draft(group)
        limit = max_tokens + proof_margin(size, unit, fine) if drops else max_tokens
        limit = min(limit, len(hashes) * unit)
        blocks: list[int] = []
        matched = 0
        while matched + size <= limit:
            block = self.pool.lookup(self._key(group, hashes, matched + size))
            if block is None:
                break
            blocks.append(block)
            matched += size
        if fine:
            for boundary in range(min(matched + size - unit, floor_to(limit, unit)), matched, -unit):
                block = self.pool.lookup(self._key(group, hashes, boundary))
                if block is not None:
                    blocks.append(block)
                    matched = boundary
                    break
        if drops:
            matched -= min(config.hit_alignment, size)
        matched = max(0, floor_to(matched, config.hit_alignment))
        return matched, blocks[: ceil_div(matched, size)]

    def _find_state(self, hashes: list[bytes], max_tokens: int) -> tuple[int, int]:
        step = self.config.hit_alignment
        top = floor_to(min(max_tokens, len(hashes) * self.config.hash_block_size), step)
        for boundary in range(top, 0, -step):
            block = self.pool.lookup(self._key(self.config.state_group, hashes, boundary))
            if block is not None:
                return boundary, block
        return 0, NULL_BLOCK

    def is_written(self, hashes: list[bytes], hit: AlignHit) -> bool:
        """False while the state of the hit is only written by a chunk that is still in flight."""
        key = self._key(self.config.state_group, hashes, hit.num_tokens) if hit.num_tokens else None
        return key not in self.cached_this_step

    def allocate(self, request: AlignRequest, hit: AlignHit, start: int, end: int) -> bool:
        """Blocks for the chunk [start, end); False, and nothing changed, where the pool is too full.

        `hit` counts for a request without blocks only; `start` exceeds it by what a connector loads.
        """
        config, pool = self.config, self.pool
        sizes, states = config.group_sizes, config.state_group
        tables, is_first = request.tables, not request.is_allocated
        local = hit.num_tokens if is_first else 0
        if is_first:
            state_table = [NULL_BLOCK] * ceil_div(start, sizes[states])
            state_table[-1:] = [hit.state_block if start == local else NULL_BLOCK] if start else []
            tables = [*map(list, hit.attention_blocks), state_table]
        hit_blocks = [block for table in tables for block in table if block != NULL_BLOCK] if is_first else []
        copied = [group for group, size in enumerate(sizes) if local % size]
        running = ceil_div(end, sizes[states]) - 1
        is_past_own_tail = request.producer is not None and tables[-1][running:][:1] == [request.producer[0]]
        checkpoint = self._wanted_checkpoint(request, start, end)
        growth = [max(0, ceil_div(end, size) - len(table)) for size, table in zip(sizes, tables, strict=True)]
        num_scratch = config.num_scratch_blocks if is_first else 0
        wanted = max(0, running + 1 + config.num_scratch_blocks - len(tables[-1]))
        growth[states] = min(wanted, 1 + num_scratch + (checkpoint is not None))
        num_new = sum(growth) + len(copied) + is_past_own_tail + (start > local and is_first)
        if not pool.can_allocate(num_new + sum(map(pool.is_free, hit_blocks))):
            return False
        for block in hit_blocks:
            pool.touch(block)
        request.new_blocks = [[] for _ in sizes]
        for group in copied:
            tables[group][-1] = self._private_copy(request, group, tables[group][-1])
        if is_first:
            request.num_cached_columns = [local // size for size in sizes]
            if start > local:
                tables[states][-1] = self._take(request, states)
            if start:
                self._state_at[tables[states][-1]] = start
        for group in range(states):
            tables[group] += [self._take(request, group) for _ in range(growth[group])]
        if is_past_own_tail:
            self._move_own_tail(request)
        self._extend_states(request, tables[states], checkpoint, start, end)
        request.tables, request.checkpoint = tables, checkpoint
        return True

    def _extend_states(
        self, request: AlignRequest, table: list[int], checkpoint: Checkpoint | None, start: int, end: int
    ) -> None:
        """Append null blocks for skipped columns, move scratch blocks left behind, then take new ones."""
        size, num_scratch = self.config.mamba_block_size, self.config.num_scratch_blocks
        running, owned, column = ceil_div(end, size) - 1, len(table), ceil_div(start, size) - 1
        if request.producer and running > column:
            # The chunk runs in another column: the tail's block stays as it is.
            request.offers.append(BoundaryOffer(self.config.state_group, *request.producer))
            request.producer = None
        if request.is_allocated and start >= request.prefill_end and running > column:
            # Decode across a block end: the worker puts the state at that end into the column below.
            self._state_at[table[column]] = (column + 1) * size
        reserved = checkpoint.column if checkpoint else running
        spare = []
        for left in range(owned - num_scratch, min(owned, running)) if request.is_allocated else ():
            if left != reserved:
                if not self.pool.is_writable(table[left]):
                    raise InvariantError(f"scratch block {table[left]} of {request.request_id!r} is shared")
                spare.append(table[left])
                table[left] = NULL_BLOCK
        for added in range(owned, running + 1 + num_scratch):
            is_real = added >= running or added == reserved
            block = NULL_BLOCK if not is_real else spare.pop(0) if spare else self._take(request, -1)
            table.append(block)
        self._state_at[table[running]] = end
        if checkpoint:
            self._state_at[table[checkpoint.column]] = checkpoint.position

    def _wanted_checkpoint(self, request: AlignRequest, start: int, end: int) -> Checkpoint | None:
        """The checkpoint to reserve. With retention 0 only the last chunk of a prefill has one."""
        config = self.config
        position = config.checkpoint_position(end, config.hit_alignment)
        is_too_early = config.retention_interval == 0 and end < request.prefill_end
        if is_too_early or not config.exports(start, end, position):
            return None
        return Checkpoint(position, ceil_div(end, config.mamba_block_size) - 2)

    def _move_own_tail(self, request: AlignRequest) -> None:
        """Before the owner writes past its tail, the entry moves to a copy; the owner's table stays."""
        assert request.producer is not None
        group, pool = self.config.state_group, self.pool
        (block, boundary), copy = request.producer, pool.allocate()
        keys = pool.move_keys(block, copy)
        pool.touch(block)
        request.held += [block, copy]
        request.copies.append(BlockCopy(group, block, copy))
        self._state_at[copy] = boundary
        self._note_written(request, keys)
        request.offers.append(BoundaryOffer(group, copy, boundary))
        request.producer = None

    def _private_copy(self, request: AlignRequest, group: int, source: int) -> int:
        """A copy of a hit block to write into. The source keeps its reference until the copy has run."""
        private = self._take(request, group)
        self.pool.touch(private)
        request.held += [source, private]
        request.copies.append(BlockCopy(group, source, private))
        return private

    def _take(self, request: AlignRequest, group: int) -> int:
        block = self.pool.allocate()
        request.new_blocks[group].append(block)
        return block

    def cache(self, request: AlignRequest, start: int, end: int) -> None:
        """Key what the chunk [start, end) will have written, as upstream does: when it is scheduled."""
        config = self.config
        registered = end if config.has_partial_hits else floor_to(end, config.scheduler_block_size)
        finalized = end - (config.prefill_lookahead - 1)
        for group, size in enumerate(config.attention_group_tokens):
            limit = registered
            if config.holds_draft(group):
                limit = min(limit + (size if config.drop_eagle_block else 0), finalized)
            self._cache_attention(request, group, limit)
        self._cache_states(request, registered, start, end)

    def _cache_attention(self, request: AlignRequest, group: int, limit: int) -> None:
        config, unit = self.config, self.config.hash_block_size
        size, table = config.attention_group_tokens[group], request.tables[group]
        limit = min(limit, len(request.hashes) * unit)
        for column in range(request.num_cached_columns[group], limit // size):
            self.pool.cache_full(table[column], self._key(group, request.hashes, (column + 1) * size))
            request.num_cached_columns[group] = column + 1
        drops = config.drop_eagle_block and config.holds_draft(group)
        tail = floor_to(request.num_prompt_tokens - (0 if drops else 1), unit)
        if config.has_partial_hits and tail % size and tail <= limit:
            self.pool.cache_partial(table[tail // size], self._key(group, request.hashes, tail))

    def _cache_states(self, request: AlignRequest, registered: int, start: int, end: int) -> None:
        config, pool, group = self.config, self.pool, self.config.state_group
        size, table = config.mamba_block_size, request.tables[group]
        hashed = len(request.hashes) * config.hash_block_size
        written: list[tuple[int, int]] = []
        reserved = request.checkpoint.column if request.checkpoint else None
        for column in range(request.num_cached_columns[group], min(registered, hashed) // size):
            block, boundary = table[column], (column + 1) * size
            request.num_cached_columns[group] = column + 1
            # The reserved block gets a provisional key here, which `_publish` replaces or withdraws.
            holds_boundary = column == reserved or self._state_at.get(block) == boundary
            if block != NULL_BLOCK and holds_boundary and self._is_retained(request, column):
                pool.cache_full(block, self._key(group, request.hashes, boundary))
                written.append((block, boundary))
        if request.checkpoint:
            self._publish(request, request.checkpoint, written)
        elif config.has_partial_hits and end <= hashed and self._is_tail(request, start, end):
            block = table[ceil_div(end, size) - 1]
            pool.cache_partial(block, self._key(group, request.hashes, end))
            written.append((block, end))
            if end % size:
                request.producer = (block, end)
        for block, boundary in dict.fromkeys(written):
            key = self._key(group, request.hashes, boundary)
            if key in pool.keys_of(block):
                self._note_written(request, [key])
                if request.producer is None or request.producer[0] != block:
                    request.offers.append(BoundaryOffer(group, block, boundary))

    def _publish(self, request: AlignRequest, checkpoint: Checkpoint, written: list[tuple[int, int]]) -> None:
        """Key the reserved block at the position it was written for, or not at all."""
        config, (position, column) = self.config, checkpoint
        block, size = request.tables[-1][column], config.mamba_block_size
        is_wanted = (
            position == config.checkpoint_position(request.num_prompt_tokens, config.hit_alignment)
            or (position % size == 0 and self._is_retained(request, position // size - 1))
            or position == request.junction
        )
        if not is_wanted or position > len(request.hashes) * config.hash_block_size:
            self.pool.remove_keys(block)
            return
        key = self._key(config.state_group, request.hashes, position)
        if self.pool.keys_of(block)[:1] != [key]:
            self.pool.cache_partial(block, key, replace_existing_hashes=True)
        written.append((block, position))

    def _is_tail(self, request: AlignRequest, start: int, end: int) -> bool:
        """Whether a chunk end is a state worth an entry of its own: the prompt's tail, or a junction."""
        unit = self.config.hash_block_size
        is_junction = self.config.is_junction_exact and request.junction == end > start and end % unit == 0
        return is_junction or end == self.config.checkpoint_position(request.num_prompt_tokens, unit)

    def _is_retained(self, request: AlignRequest, column: int) -> bool:
        """The retention mask of the state group for the block at `column`."""
        config, size, interval = self.config, self.config.mamba_block_size, self.config.retention_interval
        if interval is None or (interval and (column + 1) * size % interval == 0):
            return True
        block, drop = config.scheduler_block_size, config.drop_eagle_block
        reachable = replay_boundaries(request.num_prompt_tokens, block, drop)
        if request.junction is not None:
            reachable.append(request.junction)
            if drop and config.eagle_flags_all_groups:
                reachable.append(request.junction - size)
        return any(floor_to(p, config.hit_alignment) // size - 1 == column for p in reachable)

    def _note_written(self, request: AlignRequest, keys: list[BlockKey]) -> None:
        request.new_keys += keys
        self.cached_this_step.update(keys)

    def _key(self, group: int, hashes: list[bytes], num_tokens: int) -> BlockKey:
        return BlockKey(hashes[num_tokens // self.config.hash_block_size - 1], group, num_tokens)

    def commit(self, request: AlignRequest) -> None:
        """The chunk in flight has run: its states exist and its copies are done."""
        assert request.scheduled_end is not None
        request.num_computed_tokens, request.scheduled_end = request.scheduled_end, None
        self._release_step(request)

    def sweep(self, request: AlignRequest) -> None:
        """Before the next chunk: free the states left behind. The newest one is still read from."""
        table = request.tables[-1]
        keep_from = (request.num_computed_tokens - 1) // self.config.mamba_block_size
        left_behind = range(request.num_swept_columns, keep_from)
        self.pool.free([table[column] for column in reversed(left_behind)])
        for column in left_behind:
            table[column] = NULL_BLOCK
        request.num_swept_columns = max(request.num_swept_columns, keep_from)

    def release(self, request: AlignRequest) -> None:
        """Give all blocks back, tails first; offers nobody took are dropped. Entries stay findable."""
        self._release_step(request)
        for table in request.tables:
            self.pool.free(reversed(table))
        request.tables, request.offers, request.producer = [], [], None
        request.num_computed_tokens, request.num_swept_columns, request.scheduled_end = 0, 0, None

    def _release_step(self, request: AlignRequest) -> None:
        self.pool.free(request.held)
        self.cached_this_step.difference_update(request.new_keys)
        request.held, request.copies, request.new_keys, request.checkpoint = [], [], [], None

    def audit(self) -> None:
        """Raise InvariantError unless every state entry names a block that holds exactly that state."""
        for key in self.pool.keys():
            block = self.pool.lookup(key)
            held = None if block is None else self._state_at.get(block)
            if key.group == self.config.state_group and held != key.num_tokens:
                raise InvariantError(f"state block {block} is keyed {key.num_tokens} and holds {held}")
