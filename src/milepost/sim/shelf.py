"""A store for simulated replicas: segments leave the cache, come back late, in part, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from milepost.core.request import Request, RequestStatus
from milepost.core.transfers import Restore, SegmentRecords, StoredCheckpoint, TransferCost, choose_segments
from milepost.core.units import floor_div
from milepost.sim.records import FingerprintRecords
from milepost.sim.world import World

ANY_LOAD_WINS = TransferCost(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_load=0.0)


@dataclass(slots=True)
class ShelvedSegment:
    """A segment, its payload per pool."""

    stored: StoredCheckpoint
    payload: list[bytes]


class Shelf:
    """Segments by chain key. Replicas that share one must share their `FingerprintModel` and geometry."""

    def __init__(self) -> None:
        self.segments: dict[bytes, ShelvedSegment] = {}

    def is_stored(self, key: bytes) -> bool:
        return key in self.segments


class ShelfTraffic:
    """Saves and loads of one world, begun and ended by random actions.

    Attributes:
        num_loaded_segments: segments that arrived and were published.
    """

    def __init__(self, world: World, shelf: Shelf, rng: Random) -> None:
        self.shelf = shelf
        self.num_loaded_segments = 0
        self._world = world
        self._rng = rng
        self._records = FingerprintRecords(world.worker)
        self._saves: list[SegmentRecords] = []
        self._loads: list[tuple[Restore, int]] = []

    def save(self) -> None:
        """Begin to read a random checkpoint."""
        nodes = list(self._world.scheduler.cache.tree.state_nodes.values())
        if not nodes:
            return
        transfers = self._world.scheduler.transfers
        records = transfers.begin_save(self._rng.choice(nodes), self.shelf.is_stored)
        if records is not None:
            self._saves.append(records)
        self._world.after_outside("save")

    def load(self) -> None:
        """Hold a waiting request back and begin to load what the shelf has for it."""
        known = self._world.scheduler.requests
        waiting = [r for r in known.values() if r.status is not RequestStatus.RUNNING]
        if not waiting:
            return
        request = self._rng.choice(waiting)
        restore = self._begin_load(request)
        if restore is not None:
            if self._rng.random() < 0.8:
                self._world.scheduler.transfers.hold(request.request_id)
            self._loads.append((restore, request.request_id))
        self._world.after_outside("load")

    def _begin_load(self, request: Request) -> Restore | None:
        transfers = self._world.scheduler.transfers
        outlook = transfers.outlook(request)
        if outlook is None:
            return None
        seen = [k for k in outlook.keys if self.shelf.is_stored(k) and self._rng.random() < 0.95]
        offers = [self.shelf.segments[key].stored for key in seen]
        return transfers.begin(request, choose_segments(offers, outlook, ANY_LOAD_WINS), self._world.now)

    def end_one(self) -> None:
        """End a random transfer: a save succeeds or fails; a load arrives whole, in part or not at all."""
        if self._saves and (not self._loads or self._rng.random() < 0.5):
            self._end_save(self._saves.pop(self._rng.randrange(len(self._saves))))
        elif self._loads:
            self._end_load(*self._loads.pop(self._rng.randrange(len(self._loads))))

    def end_all(self) -> None:
        while self._saves or self._loads:
            self.end_one()

    def _end_save(self, records: SegmentRecords) -> None:
        if self._rng.random() < 0.9:
            pools = [*records.pages, *([slot] for slot in records.slots)]
            payload = [b"".join(self._records.read_records(pool, ids)) for pool, ids in enumerate(pools)]
            num_bytes = sum(len(part) for part in payload)
            stored = StoredCheckpoint(records.start, records.position, num_bytes, records.reason)
            self.shelf.segments[records.key] = ShelvedSegment(stored, payload)
        self._world.scheduler.transfers.end_save(records)
        self._world.after_outside("end of a save")

    def _end_load(self, restore: Restore, request_id: int) -> None:
        num_arrived = len(restore.segments)
        if self._rng.random() < 0.3:
            num_arrived = self._rng.randrange(num_arrived + 1)
        for index in range(min(num_arrived + 1, len(restore.segments))):
            self._fill(restore, index, is_torn=index == num_arrived)
        transfers = self._world.scheduler.transfers
        transfers.finish(restore, num_arrived, self._world.now)
        transfers.lift(request_id)
        self.num_loaded_segments += num_arrived
        self._world.after_outside("end of a load")

    def _fill(self, restore: Restore, index: int, *, is_torn: bool) -> None:
        """Write one segment's records; a torn one is only begun."""
        target = restore.segments[index]
        unit = self._world.geometry.match_unit
        key = restore.lease.chain.keys[floor_div(target.stored.position, unit) - 1]
        payload = self.shelf.segments[key].payload
        for pool, pages in enumerate(target.pages):
            skipped = target.num_skipped_units * self._world.geometry.pool_record_bytes[pool]
            self._records.write_records(pool, pages, payload[pool][skipped:])
        if is_torn:
            return
        for group, slot in enumerate(target.slots):
            pool = len(target.pages) + group
            self._records.write_records(pool, [slot], payload[pool])
