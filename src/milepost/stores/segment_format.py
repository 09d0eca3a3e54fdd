"""One stored segment as bytes: a head that can be read and checked alone, then the payload.

    offset  bytes  field (little endian)
    0       8      magic
    8       4      format version
    12      4      header length
    16      8      payload length
    24      32     SHA-256 of the payload
    56      32     SHA-256 of the head without this field
    88      n      header: SegmentHeader as a msgpack map
    88 + n         zeros up to a multiple of 512, then the payload

The head's checksum covers the payload's, so the two together cover every bit. SHA-256, because it is the
fastest sound hash of the standard library on processors with SHA instructions (1.8x BLAKE2b there),
`hashlib` releases the interpreter lock while it runs, and an accident that keeps 256 bits equal does not
happen; a 32-bit or 64-bit sum would meet one on a store shared by many machines for years.
The head is padded so that its first 512 bytes can be fetched without asking for the object's length.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import msgspec

from milepost.errors import StoreError
from milepost.stores.port import Buffer, PoolPart, SegmentHeader, StoredSegment

MAGIC = b"\x89MPSEG\r\n"
"""Not text, and changed by whatever translates line ends or strips the eighth bit."""
FORMAT_VERSION = 1
READABLE_VERSIONS = (1,)
KEY_BYTES = 32
HEAD_UNIT_BYTES = 512
MAX_HEADER_BYTES = 1 << 20

_FIXED = struct.Struct("<8sIIQ32s")
_DIGEST_BYTES = 32
_HEADER_OFFSET = _FIXED.size + _DIGEST_BYTES
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SegmentHeader)


class SegmentError(StoreError):
    """An object that is not a usable segment; the message says why. To a reader it is a miss."""


class CorruptSegmentError(SegmentError):
    """Torn, cut, flipped or never a segment: of no use to anybody."""


class ForeignSegmentError(SegmentError):
    """Sound, but of another format version, writer, shard or key; of use to somebody else perhaps."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose segments a store reads and writes.

    Attributes:
        fingerprint: hex; see `SegmentHeader.fingerprint`.
        shard: (rank, number of ranks).
    """

    fingerprint: str
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        problem = _fingerprint_problem(self.fingerprint) or _shard_problem(self.shard)
        if problem:
            raise StoreError(f"identity of a store: {problem}")


@dataclass(frozen=True, slots=True)
class Head:
    """Attributes:
    header: checked.
    head_bytes: where the payload begins.
    payload_digest: SHA-256 of the payload.
    """

    header: SegmentHeader
    head_bytes: int
    payload_digest: bytes

    @property
    def object_bytes(self) -> int:
        return self.head_bytes + self.header.payload_bytes


def head_bytes_of(header_bytes: int) -> int:
    return -(-(_HEADER_OFFSET + header_bytes) // HEAD_UNIT_BYTES) * HEAD_UNIT_BYTES


def encode_head(segment: StoredSegment) -> bytes:
    """The head of `segment`'s object; its payload follows as it is.

    Raises:
        StoreError: a segment that no reader would accept.
    """
    header = segment.header
    head = head_of(header, segment.payload_digest or _digest(segment.payload))
    num_bytes = sum(memoryview(piece).nbytes for piece in segment.payload)
    if num_bytes != header.payload_bytes:
        raise StoreError(f"the payload has {num_bytes} bytes, its header says {header.payload_bytes}")
    return head


def head_of(header: SegmentHeader, payload_digest: bytes = bytes(_DIGEST_BYTES)) -> bytes:
    """The head of the object that `header` describes.

    Args:
        payload_digest: SHA-256 of the payload. Without it the head tells what there is, and no payload
            matches it.

    Raises:
        StoreError: a header that no reader would accept.
    """
    if problem := header_problem(header):
        raise StoreError(f"this segment cannot be stored: {problem}")
    body = _encoder.encode(header)
    if len(body) > MAX_HEADER_BYTES:
        raise StoreError(f"the header has {len(body)} bytes, {MAX_HEADER_BYTES} are allowed")
    fixed = _FIXED.pack(MAGIC, FORMAT_VERSION, len(body), header.payload_bytes, payload_digest)
    body = body.ljust(head_bytes_of(len(body)) - _HEADER_OFFSET, b"\0")
    return fixed + _digest((fixed, body)) + body


def head_bytes_needed(start: Buffer) -> int:
    """How long the head is, from its first bytes; unchecked but for magic, version and bounds.

    Raises:
        SegmentError: this is not a head that can be read.
    """
    view = memoryview(start)
    if view.nbytes < _HEADER_OFFSET:
        raise CorruptSegmentError(f"{view.nbytes} bytes are too few for a segment")
    magic, version, header_bytes, _, _ = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise CorruptSegmentError("does not begin like a segment")
    if version not in READABLE_VERSIONS:
        raise ForeignSegmentError(f"format version {version}; readable: {READABLE_VERSIONS}")
    if header_bytes > MAX_HEADER_BYTES:
        raise CorruptSegmentError(f"a header of {header_bytes} bytes")
    return head_bytes_of(header_bytes)


def decode_head(data: Buffer, *, object_bytes: int | None = None) -> Head:
    """Read a head and check everything that can be checked without the payload.

    Args:
        data: the head; more may follow.
        object_bytes: length of the whole object, where the store knows it.

    Raises:
        SegmentError: why not.
    """
    head_bytes = head_bytes_needed(data)
    view = memoryview(data)[:head_bytes]
    if view.nbytes < head_bytes:
        raise CorruptSegmentError(f"{view.nbytes} bytes of a head of {head_bytes}")
    _, _, header_bytes, payload_bytes, payload_digest = _FIXED.unpack_from(view)
    fixed, body = view[: _FIXED.size], view[_HEADER_OFFSET:]
    if view[_FIXED.size : _HEADER_OFFSET] != _digest((fixed, body)):
        raise CorruptSegmentError("the head does not match its checksum")
    try:
        header = _decoder.decode(body[:header_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptSegmentError(f"unreadable header: {error}") from error
    if problem := header_problem(header):
        raise CorruptSegmentError(problem)
    if header.payload_bytes != payload_bytes:
        raise CorruptSegmentError(f"parts of {header.payload_bytes} bytes in a payload of {payload_bytes}")
    head = Head(header, head_bytes, payload_digest)
    if object_bytes is not None and object_bytes != head.object_bytes:
        raise CorruptSegmentError(f"{object_bytes} bytes instead of {head.object_bytes}")
    return head


def decode(data: Buffer) -> StoredSegment:
    """Read a whole object; the payload is a read-only view of `data`.

    Raises:
        SegmentError: why not.
    """
    view = memoryview(data)
    head = decode_head(view, object_bytes=view.nbytes)
    payload = view[head.head_bytes :].toreadonly()
    check_payload(head, (payload,))
    return StoredSegment(head.header, (payload,), head.payload_digest)


def with_digest(segment: StoredSegment) -> StoredSegment:
    """The segment with the digest of its payload, for several stores to use."""
    if segment.payload_digest is not None:
        return segment
    return replace(segment, payload_digest=_digest(segment.payload))


def check_payload(head: Head, payload: Sequence[Buffer]) -> None:
    """Raises:
    CorruptSegmentError: the payload is not the one that was written.
    """
    if _digest(payload) != head.payload_digest:
        raise CorruptSegmentError("the payload does not match its checksum")


def check_expected(header: SegmentHeader, key: bytes, identity: Identity) -> None:
    """Raises:
    ForeignSegmentError: the segment is not the one that ends at `key`, or another writer's.
    """
    if header.fingerprint != identity.fingerprint:
        raise ForeignSegmentError(f"written by {header.fingerprint[:16]}, not {identity.fingerprint[:16]}")
    if header.shard != identity.shard:
        raise ForeignSegmentError(f"of shard {header.shard}, not {identity.shard}")
    if header.key != key:
        raise ForeignSegmentError(f"of key {header.key.hex()[:16]}, not {key.hex()[:16]}")


def header_problem(header: SegmentHeader) -> str | None:
    """What contradicts itself in a header; None if nothing does."""
    problem = _fingerprint_problem(header.fingerprint) or _shard_problem(header.shard)
    if problem:
        return problem
    start, position, unit = header.start, header.position, header.match_unit
    if unit < 1:
        return f"match unit {unit}"
    if not 0 <= start < position or start % unit or position % unit:
        return f"tokens ({start}, {position}] with a match unit of {unit}"
    if len(header.key) != KEY_BYTES:
        return f"a key of {len(header.key)} bytes"
    if len(header.parent_key) != (KEY_BYTES if start else 0):
        return f"a parent key of {len(header.parent_key)} bytes at token {start}"
    if header.parent_key == header.key:
        return "a segment that is its own parent"
    if not math.isfinite(header.created) or header.created < 0:
        return f"created at {header.created}"
    return _parts_problem(header.parts)


def _parts_problem(parts: tuple[PoolPart, ...]) -> str | None:
    names = [part.name for part in parts]
    if not parts or len(set(names)) < len(names) or not all(names):
        return f"parts named {names}"
    for part in parts:
        if part.num_records < 1 or part.record_bytes < 1:
            return f"{part.num_records} records of {part.record_bytes} bytes in {part.name!r}"
    return None


def _fingerprint_problem(fingerprint: str) -> str | None:
    # Stores make folder and key names of it.
    if 8 <= len(fingerprint) <= 128 and not set(fingerprint) - set("0123456789abcdef"):
        return None
    return f"a fingerprint is 8 to 128 lower-case hex digits, not {fingerprint[:40]!r}"


def _shard_problem(shard: tuple[int, int]) -> str | None:
    rank, num_ranks = shard
    return None if 0 <= rank < num_ranks else f"rank {rank} of {num_ranks}"


def _digest(pieces: Sequence[Buffer]) -> bytes:
    sha = sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.digest()
