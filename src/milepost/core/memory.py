"""One byte budget over all pools; records are allocated singly, lowest free id first.

A record is *resident* from its first use until it is discarded. Only resident records count
against the budget, because only they are backed by memory; a free resident record of another
pool is discarded (given back to the operating system by the worker) when its bytes are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from milepost.core.plan import PoolDiscard
from milepost.core.units import floor_div


class _Pool:
    """Ids of one pool: used, free and resident, free and not resident."""

    __slots__ = ("capacity", "free", "num_fresh", "record_bytes", "returned", "used")

    def __init__(self, record_bytes: int, capacity: int) -> None:
        self.record_bytes = record_bytes
        self.capacity = capacity
        self.used: set[int] = set()
        self.free: list[int] = []
        self.returned: list[int] = []
        self.num_fresh = 0


class Memory:
    """Pools of equal-sized records under one budget.

    Args:
        record_bytes: bytes per record of each pool.
        budget_bytes: upper bound of resident bytes over all pools, never exceeded.
    """

    __slots__ = (
        "_discards",
        "_pools",
        "budget_bytes",
        "committed_bytes",
        "peak_committed_bytes",
        "used_bytes",
    )

    def __init__(self, record_bytes: tuple[int, ...], budget_bytes: int) -> None:
        self._pools = [_Pool(size, floor_div(budget_bytes, size)) for size in record_bytes]
        self.budget_bytes = budget_bytes
        self.committed_bytes = 0
        self.peak_committed_bytes = 0
        self.used_bytes = 0
        self._discards: dict[int, list[int]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes not held by any record in use (free resident records included)."""
        return self.budget_bytes - self.used_bytes

    def num_used(self, pool: int) -> int:
        return len(self._pools[pool].used)

    def used_ids(self, pool: int) -> frozenset[int]:
        return frozenset(self._pools[pool].used)

    def acquire(self, pool: int) -> int | None:
        """Take a record; None if its bytes do not fit beside the records in use."""
        entry = self._pools[pool]
        if entry.free:
            record_id = heappop(entry.free)
        else:
            excess = self.committed_bytes + entry.record_bytes - self.budget_bytes
            if excess > 0 and not self._discard_free(excess, pool):
                return None
            if entry.returned:
                record_id = heappop(entry.returned)
            elif entry.num_fresh < entry.capacity:
                record_id = entry.num_fresh
                entry.num_fresh += 1
            else:
                return None
            self.committed_bytes += entry.record_bytes
            self.peak_committed_bytes = max(self.peak_committed_bytes, self.committed_bytes)
        entry.used.add(record_id)
        self.used_bytes += entry.record_bytes
        return record_id

    def release(self, pool: int, record_id: int) -> None:
        """Give a record back; it stays resident until another pool needs the bytes.

        Raises:
            ValueError: if the record is not in use (a double free).
        """
        entry = self._pools[pool]
        if record_id not in entry.used:
            raise ValueError(f"pool {pool}: record {record_id} is released but not in use")
        entry.used.remove(record_id)
        heappush(entry.free, record_id)
        self.used_bytes -= entry.record_bytes

    def release_each(self, pools: Sequence[int], record_ids: Sequence[int]) -> None:
        """Give one record back to each of these pools; see `release`."""
        for pool, record_id in zip(pools, record_ids, strict=True):
            self.release(pool, record_id)

    def _discard_free(self, excess: int, wanted_pool: int) -> bool:
        """Discard free records of other pools worth `excess` bytes; all or nothing."""
        available = sum(
            len(entry.free) * entry.record_bytes
            for index, entry in enumerate(self._pools)
            if index != wanted_pool
        )
        if available < excess:
            return False
        for index, entry in enumerate(self._pools):
            if index == wanted_pool:
                continue
            while excess > 0 and entry.free:
                record_id = entry.free.pop()  # the last element of a heap is a leaf: any id, cheaply
                heappush(entry.returned, record_id)
                self._discards.setdefault(index, []).append(record_id)
                self.committed_bytes -= entry.record_bytes
                excess -= entry.record_bytes
        return True

    def keep(self, pool: int, record_id: int) -> None:
        """Do not discard a record in use that was discarded before it was taken again: somebody is going
        to write it before the worker would hear of the discard."""
        pending = self._discards.get(pool)
        if pending is not None and record_id in pending:
            self._discards[pool] = [other for other in pending if other != record_id]

    def take_discards(self) -> list[PoolDiscard]:
        """Discards since the last call. A record taken again meanwhile is still listed: the worker
        discards before it writes."""
        discards = [
            PoolDiscard(pool, sorted(set(ids))) for pool, ids in sorted(self._discards.items()) if ids
        ]
        self._discards = {}
        return discards

    def repeat_discards(self, discards: list[PoolDiscard]) -> None:
        """Put discards of a step that did not happen back; nothing was written since."""
        for discard in discards:
            self._discards.setdefault(discard.pool, []).extend(discard.record_ids)

    def audit(self) -> list[str]:
        """Conservation: every id below `num_fresh` is in exactly one place, and the sums agree."""
        problems = []
        committed = used = 0
        for index, entry in enumerate(self._pools):
            ids = sorted([*entry.used, *entry.free, *entry.returned])
            if ids != list(range(entry.num_fresh)):
                problems.append(f"pool {index}: ids are lost or doubled")
            committed += (len(entry.used) + len(entry.free)) * entry.record_bytes
            used += len(entry.used) * entry.record_bytes
        if committed != self.committed_bytes:
            problems.append(f"committed bytes {self.committed_bytes} but records sum to {committed}")
        if used != self.used_bytes:
            problems.append(f"used bytes {self.used_bytes} but records sum to {used}")
        if self.committed_bytes > self.budget_bytes:
            problems.append(
                f"committed {self.committed_bytes} bytes exceed the budget of {self.budget_bytes}"
            )
        return problems
