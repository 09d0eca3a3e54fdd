"""Segments to store, made from a seed."""

from __future__ import annotations

import random
from hashlib import sha256

from milepost.stores import outcomes as oc
from milepost.stores.port import PoolPart, SegmentHeader, StoredSegment, Unanswered
from milepost.stores.segment_format import Identity

FINGERPRINT = "ab" * 32
OTHER_FINGERPRINT = "cd" * 32
IDENTITY = Identity(FINGERPRINT)
MATCH_UNIT = 16
SECONDS = 20.0
"""A deadline that is not what a test is about."""
LATE, BROKEN, LEFT_ALONE = (Unanswered(each) for each in (oc.TIMEOUT, oc.ERROR, oc.BREAKER_OPEN))
"""What stands for the answer of a store that gave none."""


def key_of(*parts: object) -> bytes:
    return sha256(repr(parts).encode()).digest()


def segment(
    name: object,
    *,
    parent: StoredSegment | None = None,
    num_units: int = 2,
    record_bytes: int = 1000,
    identity: Identity = IDENTITY,
    key: bytes | None = None,
) -> StoredSegment:
    """One attention pool and one recurrent pool; the payload depends on `name`."""
    start = parent.header.position if parent else 0
    parts = (PoolPart("attention", num_units, record_bytes), PoolPart("recurrent", 1, record_bytes + 7))
    header = SegmentHeader(
        fingerprint=identity.fingerprint,
        key=key_of(name) if key is None else key,
        parent_key=parent.header.key if parent else b"",
        start=start,
        position=start + num_units * MATCH_UNIT,
        match_unit=MATCH_UNIT,
        parts=parts,
        reason="history",
        shard=identity.shard,
        created=1.5e9,
    )
    source = random.Random(repr(name))
    pieces = [bytearray(source.randbytes(part.num_records * part.record_bytes)) for part in parts]
    return StoredSegment(header, pieces)


def chain(name: object, length: int, **options: int) -> list[StoredSegment]:
    """Segments that build on each other, the first token's first."""
    segments: list[StoredSegment] = []
    for index in range(length):
        segments.append(segment((name, index), parent=segments[-1] if segments else None, **options))
    return segments


def keys(segments: list[StoredSegment]) -> list[bytes]:
    return [each.header.key for each in segments]


def payload(stored: StoredSegment | None) -> bytes | None:
    return None if stored is None else b"".join(bytes(piece) for piece in stored.payload)
