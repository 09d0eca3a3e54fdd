"""vLLM's block pool as a model: ids, keys, and the order in which free blocks are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from milepost.errors import InvariantError

NULL_BLOCK = 0
"""Stands for "no block" in a table; never cached, counted or freed."""


class BlockKey(NamedTuple):
    """Chain hash at the end of what a block covers, and group; the hash implies `num_tokens`."""

    digest: bytes
    group: int
    num_tokens: int


class PoolEvent(NamedTuple):
    kind: Literal["stored", "removed"]
    key: BlockKey
    block: int


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    keys: list[BlockKey] = field(default_factory=list)  # the primary one first


class BlockPool:
    """Blocks shared by all groups.

    Free blocks are reused in this order: unkeyed ones, last freed first; ids never used, ascending;
    keyed ones, least recently freed first, losing their keys. Upstream's one linked list gives the
    same order, because unkeyed blocks always go to its front and keyed ones to its back.
    """

    def __init__(self, num_blocks: int | None, record_events: bool = False) -> None:
        self._num_blocks = num_blocks
        self._blocks: dict[int, _Block] = {}
        self._by_key: dict[BlockKey, dict[int, None]] = {}
        self._unkeyed: list[int] = []
        self._next_unused = NULL_BLOCK + 1
        self._keyed: OrderedDict[int, None] = OrderedDict()
        self._events: list[PoolEvent] | None = [] if record_events else None
        self.num_evicted_blocks = 0

    @property
    def num_used(self) -> int:
        """Blocks held by somebody, without the null block."""
        return self._next_unused - 1 - len(self._unkeyed) - len(self._keyed)

    def can_allocate(self, count: int) -> bool:
        return self._num_blocks is None or count <= self._num_blocks - 1 - self.num_used

    def is_free(self, block: int) -> bool:
        """Whether an entry lies in the queue, where a hit would take it from."""
        return block in self._keyed

    def keys(self) -> frozenset[BlockKey]:
        return frozenset(self._by_key)

    def keys_of(self, block: int) -> list[BlockKey]:
        """Keys of a block, the primary one first."""
        return list(self._blocks[block].keys)

    def is_writable(self, block: int) -> bool:
        """Whether its holder may overwrite it: held once and found by nobody."""
        return block != NULL_BLOCK and self._blocks[block].ref_count == 1 and not self._blocks[block].keys

    def lookup(self, key: BlockKey) -> int | None:
        """Any block with that key; the earliest, where there are duplicates."""
        return next(iter(self._by_key.get(key, ())), None)

    def allocate(self) -> int:
        """One block with a reference count of 1, evicting the least recently freed entry if need be."""
        if not self.can_allocate(1):
            raise InvariantError("the block pool is exhausted: ask can_allocate first")
        if self._unkeyed:
            block = self._unkeyed.pop()
        elif self._num_blocks is None or self._next_unused < self._num_blocks:
            block = self._next_unused
            self._next_unused += 1
            self._blocks[block] = _Block()
        else:
            block, _ = self._keyed.popitem(last=False)
            self.num_evicted_blocks += bool(self._blocks[block].keys)
            self.remove_keys(block)
        self._blocks[block].ref_count = 1
        return block

    def touch(self, block: int) -> None:
        """Take one more reference; a free entry leaves the queue."""
        self._keyed.pop(block, None)
        self._blocks[block].ref_count += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give one reference of each block back, null blocks skipped. Pass a table's tail first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            entry = self._blocks[block]
            if entry.ref_count < 1:
                raise InvariantError(f"block {block} is freed twice")
            entry.ref_count -= 1
            if entry.ref_count == 0 and entry.keys:
                self._keyed[block] = None
            elif entry.ref_count == 0:
                self._unkeyed.append(block)

    def cache_full(self, block: int, key: BlockKey) -> None:
        """Key a block at its end. One that covered less is promoted and loses its earlier keys."""
        keys = self._blocks[block].keys
        if keys[:1] == [key]:
            return
        if keys and keys[0].num_tokens >= key.num_tokens:
            raise InvariantError(f"block {block} already covers {keys[0].num_tokens} tokens")
        self.remove_keys(block)
        self._add_key(block, key)

    def cache_partial(self, block: int, key: BlockKey, replace_existing_hashes: bool = False) -> None:
        """Key a block at a boundary inside it.

        A shorter primary key gives way; beside a longer one this becomes a further key. With
        `replace_existing_hashes` the contents are new, so that no earlier key may stay.
        """
        keys = self._blocks[block].keys if block != NULL_BLOCK else [key]
        if replace_existing_hashes or (keys and keys[0].num_tokens < key.num_tokens):
            self.remove_keys(block)
        if replace_existing_hashes or key not in keys:
            self._add_key(block, key)

    def remove_keys(self, block: int) -> None:
        """Drop every key of a block; a block in the queue keeps its place."""
        for key in self.keys_of(block):
            self._unregister(block, key)
            self._emit("removed", key, block)
        self._blocks[block].keys.clear()

    def move_keys(self, source: int, destination: int) -> list[BlockKey]:
        """Re-point all keys of `source` to an unkeyed copy of it, without events."""
        moved = self.keys_of(source)
        for key in moved:
            self._unregister(source, key)
            self._by_key.setdefault(key, {})[destination] = None
        self._blocks[source].keys.clear()
        self._blocks[destination].keys.extend(moved)
        return moved

    def take_events(self) -> list[PoolEvent]:
        """Entries stored and removed since the last call; empty unless the pool records them."""
        events = list(self._events or ())
        self._events = None if self._events is None else []
        return events

    def _add_key(self, block: int, key: BlockKey) -> None:
        self._blocks[block].keys.append(key)
        self._by_key.setdefault(key, {})[block] = None
        self._emit("stored", key, block)

    def _unregister(self, block: int, key: BlockKey) -> None:
        holders = self._by_key[key]
        del holders[block]
        if not holders:
            del self._by_key[key]

    def _emit(self, kind: Literal["stored", "removed"], key: BlockKey, block: int) -> None:
        if self._events is not None:
            self._events.append(PoolEvent(kind, key, block))
