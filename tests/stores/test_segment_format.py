"""The object format: everything that is not what was written is refused, with the reason."""

from __future__ import annotations

import dataclasses
import struct
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stores.segments import FINGERPRINT, IDENTITY, chain, key_of, payload, segment

from milepost.errors import StoreError
from milepost.stores.port import PoolPart, SegmentHeader, StoredSegment
from milepost.stores.segment_format import (
    FORMAT_VERSION,
    MAGIC,
    CorruptSegmentError,
    ForeignSegmentError,
    Identity,
    SegmentError,
    check_expected,
    decode,
    decode_head,
    encode_head,
    head_bytes_needed,
    with_digest,
)


def forge(
    header: SegmentHeader, data: bytes, *, version: int = FORMAT_VERSION, magic: bytes = MAGIC
) -> bytes:
    """An object with right checksums, written from the format's description and without its code."""
    return forge_body(msgspec.msgpack.encode(header), data, version=version, magic=magic)


def forge_body(body: bytes, data: bytes, *, version: int = FORMAT_VERSION, magic: bytes = MAGIC) -> bytes:
    fixed = struct.pack("<8sIIQ", magic, version, len(body), len(data)) + sha256(data).digest()
    padding = bytes(-(88 + len(body)) % 512)
    return fixed + sha256(fixed + body + padding).digest() + body + padding + data


def object_of(stored: StoredSegment) -> bytes:
    return encode_head(stored) + (payload(stored) or b"")


def test_the_format_is_as_described() -> None:
    stored = segment("described")
    assert object_of(stored) == forge(stored.header, payload(stored) or b"")
    assert len(encode_head(stored)) == 512


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
parts = st.lists(
    st.builds(PoolPart, names, st.integers(1, 5), st.integers(1, 40)),
    min_size=1,
    max_size=8,
    unique_by=lambda part: part.name,
)


@st.composite
def segments(draw: st.DrawFn) -> StoredSegment:
    unit = draw(st.integers(1, 64))
    start = draw(st.integers(0, 1 << 20)) * unit
    num_ranks = draw(st.integers(1, 9))
    header = SegmentHeader(
        fingerprint=draw(st.text("0123456789abcdef", min_size=8, max_size=128)),
        key=key_of("child"),
        parent_key=key_of("parent") if start else b"",
        start=start,
        position=start + unit * draw(st.integers(1, 100)),
        match_unit=unit,
        parts=tuple(draw(parts)),
        reason=draw(names),
        shard=(draw(st.integers(0, num_ranks - 1)), num_ranks),
        created=draw(st.floats(0, 1e12)),
    )
    data = draw(st.binary(min_size=header.payload_bytes, max_size=header.payload_bytes))
    cut = draw(st.integers(0, len(data)))
    return StoredSegment(header, [data[:cut], memoryview(bytearray(data[cut:]))])


@given(segments())
def test_round_trip(stored: StoredSegment) -> None:
    data = object_of(stored)
    read = decode(data)
    assert read.header == stored.header and payload(read) == payload(stored)
    assert head_bytes_needed(data[:512]) == len(encode_head(stored))
    assert decode_head(data, object_bytes=len(data)).object_bytes == len(data)
    with pytest.raises((TypeError, ValueError)):
        memoryview(read.payload[0])[:1] = b"x"


@given(segments(), st.data())
def test_no_damage_goes_unnoticed(stored: StoredSegment, data: st.DataObject) -> None:
    good = object_of(stored)
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "other"]))
    offset = data.draw(st.integers(0, len(good) - 1))
    if kind == "flip":
        bad = bytearray(good)
        bad[offset] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        bad = bytearray(good[:offset])
    elif kind == "longer":
        bad = bytearray(good + data.draw(st.binary(min_size=1, max_size=20)))
    else:
        bad = bytearray(data.draw(st.binary(max_size=700)))
    with pytest.raises(SegmentError):
        decode(bytes(bad))


def test_reasons_are_told_apart() -> None:
    header, data = segment("reasons").header, payload(segment("reasons")) or b""
    with pytest.raises(CorruptSegmentError, match="too few"):
        decode(b"abc")
    with pytest.raises(CorruptSegmentError, match="does not begin"):
        decode(forge(header, data, magic=b"PNG\r\n\x1a\n\0"))
    with pytest.raises(ForeignSegmentError, match="format version 2"):
        decode(forge(header, data, version=2))
    with pytest.raises(CorruptSegmentError, match="payload does not match"):
        decode(forge(header, data)[:-1] + b"\0")
    with pytest.raises(CorruptSegmentError, match="head does not match"):
        decode_head(forge(header, data)[:200].ljust(512, b"\0"))
    with pytest.raises(CorruptSegmentError, match="a header of"):
        decode(struct.pack("<8sIIQ", MAGIC, FORMAT_VERSION, 1 << 30, 5) + bytes(100))
    with pytest.raises(CorruptSegmentError, match="in a payload of"):
        decode(forge(header, data + b"x"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "not hex!"}, "fingerprint"),
        ({"key": b"short"}, "a key of 5 bytes"),
        ({"parent_key": b"p" * 32}, "a parent key of 32 bytes at token 0"),
        ({"start": 16}, "a parent key of 0 bytes at token 16"),
        ({"start": 32}, "tokens"),
        ({"start": -16}, "tokens"),
        ({"start": 8, "parent_key": b"p" * 32}, "match unit of 16"),
        ({"position": 33}, "match unit of 16"),
        ({"match_unit": 0}, "match unit 0"),
        ({"match_unit": -16}, "match unit -16"),
        ({"parts": ()}, "parts named"),
        ({"parts": (PoolPart("a", 1, 5), PoolPart("a", 1, 5))}, "parts named"),
        ({"parts": (PoolPart("", 1, 5),)}, "parts named"),
        ({"parts": (PoolPart("a", 0, 5),)}, "0 records"),
        ({"parts": (PoolPart("a", 3, -5),)}, "-5 bytes"),
        ({"shard": (3, 2)}, "rank 3 of 2"),
        ({"created": float("nan")}, "created"),
        ({"created": -1.0}, "created"),
        ({"start": 16, "parent_key": key_of("self"), "key": key_of("self")}, "its own parent"),
    ],
)
def test_a_header_that_cannot_be_is_neither_written_nor_read(change: dict[str, object], reason: str) -> None:
    stored = segment("invalid")
    header = msgspec.structs.replace(stored.header, **change)
    with pytest.raises(StoreError, match=reason):
        encode_head(dataclasses.replace(stored, header=header))
    with pytest.raises(CorruptSegmentError, match=reason):
        decode(forge(header, payload(stored) or b""))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode({"fingerprint": 5}), b"\x81\xa3\xff\xfe\xfd\x01"]
)
def test_a_header_that_is_no_header_is_corrupt(body: bytes) -> None:
    with pytest.raises(CorruptSegmentError, match="unreadable header"):
        decode(forge_body(body, b"data"))


def test_a_head_alone_says_whether_its_object_has_the_right_length() -> None:
    data = object_of(segment("length"))
    assert decode_head(data[:512]).object_bytes == len(data)
    assert decode_head(data[:512], object_bytes=len(data)).head_bytes == 512
    for wrong in (512, len(data) - 1, len(data) + 1):
        with pytest.raises(CorruptSegmentError, match=f"{wrong} bytes instead of {len(data)}"):
            decode_head(data[:512], object_bytes=wrong)


def test_a_payload_of_another_length_is_not_written() -> None:
    stored = segment("short")
    with pytest.raises(StoreError, match="the payload has"):
        encode_head(dataclasses.replace(stored, payload=stored.payload[:1]))


def test_a_wrong_digest_makes_an_object_that_nobody_accepts() -> None:
    stored = segment("digest")
    assert encode_head(with_digest(stored)) == encode_head(stored)
    wrong = dataclasses.replace(stored, payload_digest=bytes(32))
    with pytest.raises(CorruptSegmentError, match="payload does not match"):
        decode(object_of(wrong))
    read = decode(object_of(stored))
    assert read.payload_digest == sha256(payload(stored) or b"").digest()
    assert with_digest(read) is read


def test_only_the_expected_segment_is_accepted() -> None:
    header = chain("expected", 2)[1].header
    check_expected(header, header.key, IDENTITY)
    for key, identity in [
        (key_of("other"), IDENTITY),
        (header.key, Identity("12" * 20)),
        (header.key, Identity(FINGERPRINT, (0, 2))),
    ]:
        with pytest.raises(ForeignSegmentError):
            check_expected(header, key, identity)


def test_the_identity_is_checked_before_anything_is_made_of_it() -> None:
    for fingerprint in ("", "xyz", "../../etc", "AB" * 32, "a" * 200):
        with pytest.raises(StoreError, match="fingerprint is 8 to 128"):
            Identity(fingerprint)
    with pytest.raises(StoreError, match="rank 2 of 2"):
        Identity(FINGERPRINT, (2, 2))
    for fingerprint in ("a" * 8, "0123456789abcdef", "f" * 128):
        assert Identity(fingerprint).shard == (0, 1)
    for fingerprint in ("a" * 7, "f" * 129):
        with pytest.raises(StoreError):
            Identity(fingerprint)


def test_a_header_has_a_limit() -> None:
    """Nobody reserves memory for a length that a torn head names."""
    stored = segment("limit")
    fitting = (1 << 20) - 600
    for num_bytes, fits in ((fitting, True), (1 << 20, False)):
        header = msgspec.structs.replace(stored.header, reason="r" * num_bytes)
        large = dataclasses.replace(stored, header=header)
        data = forge(header, payload(stored) or b"")
        if fits:
            assert decode(encode_head(large) + (payload(stored) or b"")).header == header
        else:
            with pytest.raises(StoreError, match="1048576 are allowed"):
                encode_head(large)
            with pytest.raises(CorruptSegmentError, match="a header of"):
                head_bytes_needed(data[:512])
