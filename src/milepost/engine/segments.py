"""Segments between cache records and stored objects: which bytes belong to one, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milepost.core.geometry import CacheGeometry
from milepost.core.ports import Buffer, RecordAccess
from milepost.core.transfers import RestoredSegment, SegmentRecords, StoredCheckpoint
from milepost.core.units import floor_div, is_multiple
from milepost.stores.port import PoolPart, SegmentHeader, StoredSegment


class SegmentCodec:
    """Reads and writes the segments of one replica.

    Args:
        fingerprint: what wrote and may read them; see `models.identity.fingerprint`.
        clock: seconds since the epoch, for `SegmentHeader.created`.
    """

    def __init__(
        self, geometry: CacheGeometry, records: RecordAccess, fingerprint: str, clock: Callable[[], float]
    ) -> None:
        self.fingerprint = fingerprint
        self._geometry = geometry
        self._records = records
        self._clock = clock
        self._names = [g.name for g in geometry.attention] + [g.name for g in geometry.recurrent]

    def parts(self, start: int, position: int) -> tuple[PoolPart, ...]:
        """The payload of a segment with pages (start, position] and a state."""
        num_units = floor_div(position - start, self._geometry.match_unit)
        num_attention = self._geometry.num_attention_groups
        return tuple(
            PoolPart(name, num_units if pool < num_attention else 1, record_bytes)
            for pool, (name, record_bytes) in enumerate(
                zip(self._names, self._geometry.segment_record_bytes, strict=True)
            )
        )

    def encode(self, records: SegmentRecords) -> StoredSegment:
        """A segment whose payload is views of the records; they must stay pinned while it is used."""
        header = self.header(records.key, records.parent_key, records.start, records.position, records.reason)
        payload: list[Buffer] = []
        for pool, ids in enumerate([*records.pages, *([slot] for slot in records.slots)]):
            payload.extend(self._records.read_records(pool, ids))
        return StoredSegment(header, payload)

    def header(self, key: bytes, parent_key: bytes, start: int, position: int, reason: str) -> SegmentHeader:
        """Of the segment with these pages and state; see `SegmentHeader`."""
        return SegmentHeader(
            fingerprint=self.fingerprint,
            key=key,
            parent_key=parent_key,
            start=start,
            position=position,
            match_unit=self._geometry.match_unit,
            parts=self.parts(start, position),
            reason=reason,
            shard=(self._geometry.rank, self._geometry.world_size),
            created=self._clock(),
        )

    def checkpoint(self, header: SegmentHeader, keys: Sequence[bytes], units: int) -> StoredCheckpoint | None:
        """What a store found for the first `units` units of a sequence, as far as it can be used here.

        Args:
            keys: chain keys of the sequence's units; at least `units` of them.

        Returns:
            None if it was written by something else, for something else, or in another layout.
        """
        unit = self._geometry.match_unit
        position, start = units * unit, header.start
        if not (0 <= start < position and is_multiple(start, unit)):
            return None
        parent_key = keys[floor_div(start, unit) - 1] if start else b""
        is_ours = (
            header.fingerprint == self.fingerprint
            and header.shard == (self._geometry.rank, self._geometry.world_size)
            and header.match_unit == unit
            and header.position == position
            and header.key == keys[units - 1]
            and header.parent_key == parent_key
            and header.parts == self.parts(start, position)
        )
        return StoredCheckpoint(start, position, header.payload_bytes, header.reason) if is_ours else None

    def decode_into(self, segment: StoredSegment, target: RestoredSegment) -> None:
        """Write a loaded segment into the records taken for it.

        Raises:
            ValueError: the payload is not the one the records were taken for.
        """
        parts = self.parts(target.stored.start, target.stored.position)
        payload = _joined(segment.payload, sum(part.num_records * part.record_bytes for part in parts))
        num_attention = self._geometry.num_attention_groups
        first = 0
        for pool, part in enumerate(parts):
            end = first + part.num_records * part.record_bytes
            if pool < num_attention:
                ids = target.pages[pool]
                first += target.num_skipped_units * part.record_bytes
            else:
                ids = target.slots[pool - num_attention : pool - num_attention + 1]
            if ids:
                self._records.write_records(pool, ids, payload[first:end])
            first = end


def _joined(pieces: Sequence[Buffer], num_bytes: int) -> memoryview:
    """The payload as one buffer; copied only if a store hands it out in several pieces."""
    if len(pieces) == 1:
        joined = memoryview(pieces[0]).cast("B")
    else:
        joined = memoryview(b"".join(pieces))
    if joined.nbytes != num_bytes:
        raise ValueError(f"{joined.nbytes} bytes were loaded, {num_bytes} were expected")
    return joined
