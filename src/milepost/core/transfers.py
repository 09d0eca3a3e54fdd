"""Segments on their way in from a store or out to one, as far as the cache is concerned.

in    the request is held back, records are taken, filled by somebody else while steps go on, and
      published like a step's output once all bytes have arrived. Nothing is visible before.
out   the checkpoint and its pages are pinned while somebody reads them.

Which store, which bytes and which thread is not known here. All calls come between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.core.tree import Node
from milepost.core.units import ceil_div, floor_div


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A segment some store says it has.

    Attributes:
        start: tokens before it: pages [0, start) must come from elsewhere.
        position: tokens its state has read; its pages cover (start, position].
        num_bytes: size of its payload.
        reason: why the checkpoint was made.
    """

    start: int
    position: int
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What loading costs against computing; estimates of whoever measures them.

    Attributes:
        seconds_per_token: to compute one prompt token.
        seconds_per_byte: to load one byte.
        seconds_per_load: fixed part of a load.
    """

    seconds_per_token: float
    seconds_per_byte: float
    seconds_per_load: float

    def computing_seconds(self, num_tokens: int) -> float:
        return num_tokens * self.seconds_per_token

    def loading_seconds(self, num_bytes: int) -> float:
        return self.seconds_per_load + num_bytes * self.seconds_per_byte


ANY_COST = TransferCost(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_load=0.0)
"""Of whoever wants everything there is, however long it takes."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a waiting request would reuse now, and what a store could add.

    Attributes:
        hit_position: tokens reused without any load.
        pages_position: tokens whose pages are here (a state may be missing): segments that start at
            or below it need no other segment.
        keys: chain keys of the units behind `hit_position` that a hit could still cover, in order.
    """

    hit_position: int
    pages_position: int
    keys: list[bytes]


def choose_segments(
    found: Sequence[StoredCheckpoint], outlook: Outlook, cost: TransferCost
) -> list[StoredCheckpoint]:
    """The segments worth loading, by ascending position; empty if computing is sooner.

    A segment can be used if its start is covered by local pages or is the position of another usable
    one. Of all usable positions the one that saves most time is taken. O(n log n).
    """
    chains: dict[int, tuple[int, StoredCheckpoint]] = {}
    best_gain, best_position = 0.0, 0
    for segment in sorted(found, key=lambda s: (s.position, -s.start)):
        if segment.position <= outlook.hit_position:
            continue
        num_bytes = segment.num_bytes
        if segment.start > outlook.pages_position:
            if segment.start not in chains:
                continue
            num_bytes += chains[segment.start][0]
        if segment.position in chains and chains[segment.position][0] <= num_bytes:
            continue
        chains[segment.position] = (num_bytes, segment)
        num_tokens = segment.position - outlook.hit_position
        gain = cost.computing_seconds(num_tokens) - cost.loading_seconds(num_bytes)
        if gain > best_gain:
            best_gain, best_position = gain, segment.position
    chosen: list[StoredCheckpoint] = []
    position = best_position
    while position > outlook.pages_position or (position and not chosen):
        segment = chains[position][1]
        chosen.append(segment)
        position = segment.start
    chosen.reverse()
    return chosen


@dataclass(frozen=True, slots=True)
class RestoredSegment:
    """Where the payload of one segment goes.

    Attributes:
        num_skipped_units: units at the head of the payload whose pages are here already.
        pages: per attention group, page ids of the units behind those.
        slots: per recurrent group, where the state goes; empty = no room for it, the pages are enough.
    """

    stored: StoredCheckpoint
    num_skipped_units: int
    pages: list[list[int]]
    slots: list[int]


@dataclass(slots=True)
class Restore:
    """A load in progress; its records belong to it until it is finished or cancelled."""

    lease: Lease
    segments: list[RestoredSegment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SegmentRecords:
    """A checkpoint that is being read.

    Attributes:
        start, position: the pages cover tokens (start, position].
        parent_key: chain key of the unit that ends at `start`; empty at 0.
        pages: per attention group, page ids of the segment's units.
        slots: per recurrent group, the slot of the state.
        reason: why the checkpoint was made.
    """

    node: Node
    start: int
    position: int
    parent_key: bytes
    pages: list[list[int]]
    slots: list[int]
    reason: str

    @property
    def key(self) -> bytes:
        return self.node.key


class Transfers:
    """Loads and saves of one cache. No call while a plan is in flight, except `hold` and `is_held`."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._held: set[int] = set()
        self._restores: list[Restore] = []
        self._saving: list[Node] = []

    # -- requests that wait --------------------------------------------------------------------

    def hold(self, request_id: int) -> None:
        """Do not admit this request before `lift`."""
        self._held.add(request_id)

    def lift(self, request_id: int) -> None:
        """Undo `hold`; harmless for a request that is not held or is gone."""
        self._held.discard(request_id)

    def is_held(self, request_id: int) -> bool:
        return request_id in self._held

    @property
    def num_held(self) -> int:
        return len(self._held)

    # -- in ------------------------------------------------------------------------------------

    def outlook(self, request: Request) -> Outlook | None:
        """What `request` would reuse, and the keys a store may know; None if nothing can be added."""
        chain = request.chain
        if chain is None or not request.follows_others or not self._cache.config.enable_prefix_caching:
            return None
        match = self._cache.match(chain, request.num_tokens)
        limit = chain.unsplit_units(match.limit_units)
        if match.units >= limit:
            return None
        unit = self._cache.match_unit
        return Outlook(match.position, match.hit.attention_units * unit, chain.keys[match.units : limit])

    def begin(self, request: Request, wanted: Sequence[StoredCheckpoint], now: float) -> Restore | None:
        """Take records for segments chosen by `choose_segments`.

        Returns None, with nothing taken, if there is no room or the cache has changed since.
        """
        chain = request.chain
        if chain is None or not wanted:
            return None
        unit = self._cache.match_unit
        match = self._cache.match(chain, request.num_tokens)
        num_local = min(match.hit.attention_units, floor_div(wanted[0].position, unit))
        if wanted[0].start > num_local * unit or wanted[-1].position <= match.position:
            return None
        restore = Restore(self._cache.stand_on(chain, match.path[:num_local], now))
        self._restores.append(restore)
        if request.conversation is not None:
            restore.lease.conversation = (chain.root, request.conversation)
        restore.lease.retention_priority = request.retention_priority
        for stored in wanted:
            segment = self._take(restore.lease, stored, now, is_last=stored is wanted[-1])
            if segment is None:
                self.cancel(restore, now)
                return None
            restore.segments.append(segment)
        return restore

    def _take(
        self, lease: Lease, stored: StoredCheckpoint, now: float, *, is_last: bool
    ) -> RestoredSegment | None:
        """Records of one segment, handed to `lease`. Its state may be left out unless it is the last."""
        unit = self._cache.match_unit
        first = lease.num_units if lease.page_tables else lease.tip.depth
        pages = self._cache.take_pages(lease, floor_div(stored.position, unit), now)
        if pages is None:
            return None
        slots = self._cache.take_slots(now, may_evict=is_last)
        if slots is not None:
            lease.exports[stored.position] = (slots, stored.reason)
        elif is_last:
            return None
        skipped = max(0, first - ceil_div(stored.start, unit))
        return RestoredSegment(stored, skipped, pages, slots or [])

    def finish(self, restore: Restore, num_segments: int, now: float) -> int:
        """Publish the first `num_segments` segments, whose bytes are all written; returns the tokens up
        to the last of them, 0 if none."""
        position = 0
        written = []
        for segment in restore.segments[:num_segments]:
            position = segment.stored.position
            if segment.slots:
                written.append(position)
        for at in [at for at in restore.lease.exports if at > position]:
            self._cache.give_back_slots(restore.lease.exports.pop(at)[0])
        if written:
            self._cache.publish(restore.lease, written[-1], written, None, now)
            self._cache.counters.num_restored_checkpoints += len(written)
        self._forget(restore, now)
        return written[-1] if written else 0

    def cancel(self, restore: Restore, now: float) -> None:
        """Give all records back; nobody may write them any more."""
        self._forget(restore, now)

    def _forget(self, restore: Restore, now: float) -> None:
        self._restores.remove(restore)
        self._cache.release(restore.lease, None, now)

    # -- out -----------------------------------------------------------------------------------

    def begin_save(self, node: Node, is_stored: Callable[[bytes], bool]) -> SegmentRecords | None:
        """Pin the checkpoint at `node` and say what belongs to it, back to the nearest one below whose
        key is stored. None if it is not in the cache any more. O(units of the segment)."""
        if node.states is None or self._cache.tree.index.get(node.key) is not node:
            return None
        pages: list[list[int]] = [[] for _ in self._cache.attention]
        current: Node = node
        while True:
            for table, page in zip(pages, current.pages, strict=True):
                table.append(page)
            parent = current.parent
            if parent is None or parent.is_root or is_stored(parent.key):
                break
            current = parent
        for table in pages:
            table.reverse()
        unit = self._cache.match_unit
        start = (current.depth - 1) * unit
        parent_key = current.parent.key if start and current.parent is not None else b""
        self._cache.tree.pin(node)
        self._saving.append(node)
        return SegmentRecords(
            node, start, node.depth * unit, parent_key, pages, list(node.states), node.reason
        )

    def end_save(self, records: SegmentRecords) -> None:
        """Nobody reads the records any more."""
        self._saving.remove(records.node)
        self._cache.tree.unpin(records.node)
        self._cache.evictor.reconsider(records.node)

    # -- for admission and audits --------------------------------------------------------------

    def leases(self) -> Iterator[Lease]:
        """Leases of loads in progress."""
        return (restore.lease for restore in self._restores)

    def pinned(self) -> Sequence[Node]:
        """Nodes that are being read, once per reader."""
        return self._saving

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read or loaded, so that no memory comes back by itself."""
        return not self._restores and not self._saving

    def audit(self, request_ids: set[int]) -> list[str]:
        """Held requests exist."""
        problems = []
        for request_id in sorted(self._held - request_ids):
            problems.append(f"transfers: request {request_id} is held but gone")
        return problems
