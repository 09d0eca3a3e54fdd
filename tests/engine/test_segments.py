"""What is put into a stored segment comes out of it, into the right records, and nothing else is taken."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tests.core.harness import Harness, make_geometry, numbered

from milepost.core.ports import Buffer
from milepost.core.transfers import RestoredSegment, SegmentRecords, StoredCheckpoint
from milepost.engine.segments import SegmentCodec
from milepost.sim.records import FingerprintRecords
from milepost.stores.port import PoolPart, SegmentHeader, StoredSegment

FINGERPRINT = "ab" * 32
GROUPS = [(1, 1), (2, 1), (1, 2), (2, 2), (0, 1), (1, 0)]


def saved(
    num_attention: int, num_recurrent: int
) -> tuple[Harness, SegmentCodec, SegmentRecords, list[bytes]]:
    """A checkpoint at 20 tokens whose segment reaches back to 8, and the keys of its path."""
    geometry = make_geometry(num_attention=num_attention, num_recurrent=num_recurrent)
    harness = Harness(geometry=geometry)
    request_id = harness.serve(numbered(21), wanted=[(8, "message")])
    chain = harness.requests[request_id].chain
    assert chain is not None
    node = harness.cache.tree.index[chain.keys[4]]
    if not num_recurrent:
        harness.cache.tree.attach_state(node, [], "tail")
    records = harness.scheduler.transfers.begin_save(node, lambda key: key == chain.keys[1])
    assert records is not None
    codec = SegmentCodec(geometry, FingerprintRecords(harness.worker), FINGERPRINT, lambda: 7.0)
    return harness, codec, records, chain.keys


@pytest.mark.parametrize(("num_attention", "num_recurrent"), GROUPS)
def test_the_header_says_what_the_payload_holds(num_attention: int, num_recurrent: int) -> None:
    harness, codec, records, keys = saved(num_attention, num_recurrent)
    segment = codec.encode(records)
    header = segment.header
    assert (header.start, header.position, header.match_unit) == (8, 20, 4)
    assert (header.key, header.parent_key) == (keys[4], keys[1])
    assert [(part.name, part.num_records) for part in header.parts] == [
        *((f"attention {index}", 3) for index in range(num_attention)),
        *((f"recurrent {index}", 1) for index in range(num_recurrent)),
    ]
    assert sum(len(piece) for piece in segment.payload) == header.payload_bytes
    stored = codec.checkpoint(header, keys, 5)
    assert stored == StoredCheckpoint(8, 20, header.payload_bytes, header.reason)
    assert harness.scheduler.transfers.pinned() == [records.node]


class Written:
    """Records what is written where."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], bytes] = {}

    def read_records(self, pool: int, record_ids: list[int]) -> list[Buffer]:
        raise NotImplementedError

    def write_records(self, pool: int, record_ids: list[int], payload: Buffer) -> None:
        size = len(payload) // len(record_ids)
        for number, record in enumerate(record_ids):
            self.records[pool, record] = bytes(payload[number * size : (number + 1) * size])


@pytest.mark.parametrize("num_skipped", range(4))
@pytest.mark.parametrize(("num_attention", "num_recurrent"), GROUPS)
def test_bytes_go_to_the_records_that_were_taken_for_them(
    num_attention: int, num_recurrent: int, num_skipped: int
) -> None:
    harness, codec, records, _ = saved(num_attention, num_recurrent)
    segment = codec.encode(records)
    written = Written()
    target_codec = SegmentCodec(harness.geometry, written, FINGERPRINT, lambda: 0.0)  # type: ignore[arg-type]
    pages = [[50 + 10 * group + unit for unit in range(3 - num_skipped)] for group in range(num_attention)]
    slots = [90 + group for group in range(num_recurrent)]
    stored = StoredCheckpoint(8, 20, segment.header.payload_bytes, "tail")
    target_codec.decode_into(segment, RestoredSegment(stored, num_skipped, pages, slots))
    wanted = {}
    access = FingerprintRecords(harness.worker)
    for pool, ids in enumerate(records.pages):
        for target, record in zip(pages[pool], ids[num_skipped:], strict=True):
            wanted[pool, target] = bytes(access.read_records(pool, [record])[0])
    for group, slot in enumerate(records.slots):
        pool = num_attention + group
        wanted[pool, slots[group]] = bytes(access.read_records(pool, [slot])[0])
    assert written.records == wanted


def test_a_state_there_was_no_room_for_is_left_out() -> None:
    harness, codec, records, _ = saved(1, 2)
    written = Written()
    target_codec = SegmentCodec(harness.geometry, written, FINGERPRINT, lambda: 0.0)  # type: ignore[arg-type]
    segment = codec.encode(records)
    stored = StoredCheckpoint(8, 20, segment.header.payload_bytes, "tail")
    target_codec.decode_into(segment, RestoredSegment(stored, 0, [[1, 2, 3]], []))
    assert sorted(written.records) == [(0, 1), (0, 2), (0, 3)]


# ------------------------------------------------------------------ what is not taken
def _without_last_part(header: SegmentHeader) -> SegmentHeader:
    return msgspec.structs.replace(header, parts=header.parts[:-1])


def _other_names(header: SegmentHeader) -> SegmentHeader:
    parts = tuple(PoolPart("other", part.num_records, part.record_bytes) for part in header.parts)
    return msgspec.structs.replace(header, parts=parts)


def _swapped_parts(header: SegmentHeader) -> SegmentHeader:
    return msgspec.structs.replace(header, parts=header.parts[::-1])


def _one_page_less(header: SegmentHeader) -> SegmentHeader:
    first = header.parts[0]
    fewer = PoolPart(first.name, first.num_records - 1, first.record_bytes)
    return msgspec.structs.replace(header, parts=(fewer, *header.parts[1:]))


CHANGES = {
    "fingerprint": "cd" * 32,
    "key": bytes(32),
    "parent_key": bytes(32),
    "start": 4,
    "position": 16,
    "match_unit": 8,
    "shard": (0, 2),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_segment_of_something_else_is_refused(field: str) -> None:
    _, codec, records, keys = saved(2, 2)
    header = codec.encode(records).header
    assert codec.checkpoint(header, keys, 5) is not None
    changed = msgspec.structs.replace(header, **{field: CHANGES[field]})
    assert codec.checkpoint(changed, keys, 5) is None


@pytest.mark.parametrize("change", [_without_last_part, _other_names, _swapped_parts, _one_page_less])
def test_a_component_that_is_missing_or_moved_makes_a_miss(change: object) -> None:
    """Never a partial restore: one kind of state, or one page, that is not there is a miss."""
    _, codec, records, keys = saved(2, 2)
    header = codec.encode(records).header
    assert codec.checkpoint(change(header), keys, 5) is None  # type: ignore[operator]


@pytest.mark.parametrize("start", [-4, 2, 20, 24])
def test_an_impossible_start_is_refused(start: int) -> None:
    _, codec, records, keys = saved(1, 1)
    header = msgspec.structs.replace(codec.encode(records).header, start=start)
    assert codec.checkpoint(header, keys, 5) is None


def test_a_layout_of_equal_size_but_another_fingerprint_is_refused() -> None:
    """A store written by another version of the layout: all sizes agree, the text would be salad."""
    _, codec, records, keys = saved(1, 1)
    segment = codec.encode(records)
    newer = SegmentCodec(make_geometry(), Written(), "ef" * 32, lambda: 0.0)  # type: ignore[arg-type]
    assert newer.parts(8, 20) == segment.header.parts
    assert newer.checkpoint(segment.header, keys, 5) is None


def test_a_payload_of_another_length_is_refused() -> None:
    _, codec, records, _ = saved(1, 1)
    segment = codec.encode(records)
    stored = StoredCheckpoint(8, 20, segment.header.payload_bytes, "tail")
    target = RestoredSegment(stored, 0, [[1, 2, 3]], [1])
    short = StoredSegment(segment.header, [bytes(10)])
    with pytest.raises(ValueError, match="10 bytes"):
        codec.decode_into(short, target)
    moved = dataclasses.replace(target, stored=dataclasses.replace(stored, start=4))
    with pytest.raises(ValueError, match="were expected"):
        codec.decode_into(segment, moved)
