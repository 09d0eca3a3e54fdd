"""Block caches of fixed capacity that know nothing of states: LRU and the offline optimum.

They answer how many prompt tokens a cache of so many blocks would have served, counting the longest
continuous prefix of cached blocks. States cost nothing here, so on a hybrid model these figures are
an upper yardstick, not something an engine could reach with the same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class BlockReplay:
    """Hit tokens per request.

    Attributes:
        block_tokens: tokens of a full block.
        capacity: blocks the cache holds.
        num_hit_tokens: per request.
    """

    policy: str
    block_tokens: int
    capacity: int
    num_hit_tokens: list[int]


def prefix_blocks(blocks: Sequence[int], cached: OrderedDict[int, None] | dict[int, int]) -> int:
    """How many leading blocks of a request are cached."""
    count = 0
    for block in blocks:
        if block not in cached:
            break
        count += 1
    return count


def replay_lru(
    requests: Sequence[tuple[int, Sequence[int]]], block_tokens: int, capacity: int
) -> BlockReplay:
    """Least recently used.

    Args:
        requests: (prompt tokens, block ids) in order of arrival; equal ids mean equal prefixes.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits: list[int] = []
    for num_tokens, blocks in requests:
        hits.append(min(prefix_blocks(blocks, cached) * block_tokens, num_tokens))
        for block in blocks:
            if block in cached:
                cached.move_to_end(block)
            else:
                cached[block] = None
                if len(cached) > capacity:
                    cached.popitem(last=False)
    return BlockReplay("lru", block_tokens, capacity, hits)


def replay_optimal(
    requests: Sequence[tuple[int, Sequence[int]]], block_tokens: int, capacity: int
) -> BlockReplay:
    """Belady's rule with bypass: give up the block whose next use lies furthest ahead.

    Blocks of one request are used from the first to the last, so of two blocks with the same next
    request the deeper one goes first and what stays is a prefix.
    """
    next_uses = _next_uses(requests)
    cached: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits: list[int] = []
    use = 0
    for num_tokens, blocks in requests:
        hits.append(min(prefix_blocks(blocks, cached) * block_tokens, num_tokens))
        for block in blocks:
            upcoming = next_uses[use]
            use += 1
            if upcoming < 0:
                cached.pop(block, None)
                continue
            cached[block] = upcoming
            heappush(furthest, (-upcoming, block))
            while len(cached) > capacity:
                negative, candidate = heappop(furthest)
                if cached.get(candidate) == -negative:
                    del cached[candidate]
        if len(furthest) > 4 * capacity + 1024:
            furthest = [(-upcoming, block) for block, upcoming in cached.items()]
            heapify(furthest)
    return BlockReplay("optimal", block_tokens, capacity, hits)


def _next_uses(requests: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """For every use of a block, in order, the index of its next use; -1 = never again."""
    flat = [block for _, blocks in requests for block in blocks]
    following: dict[int, int] = {}
    result = [-1] * len(flat)
    for index in range(len(flat) - 1, -1, -1):
        result[index] = following.get(flat[index], -1)
        following[flat[index]] = index
    return result
