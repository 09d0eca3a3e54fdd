"""What a store is: batched lookup, load, save and remove of segments, each call with a deadline.

A segment is a checkpoint together with the pages back to the segment before it. It is stored as one
object, so it is complete by construction; it can be used if and only if the segments before it can.
Stores block; they are called from threads of their own, never from the one that runs the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

Buffer = bytes | bytearray | memoryview


class PoolPart(msgspec.Struct, frozen=True):
    """Records of one pool inside the payload.

    Attributes:
        name: the group the pool belongs to.
        num_records: records, in order of position; they follow each other without a gap.
        record_bytes: bytes of one record.
    """

    name: str
    num_records: int
    record_bytes: int


class SegmentHeader(msgspec.Struct, frozen=True):
    """Everything about a stored segment but its bytes.

    Attributes:
        fingerprint: hex; what wrote it: config, weights, dtypes, exactness mode, numerics. A segment
            of another fingerprint is never used.
        key: chain key of the unit that ends at `position`. It covers the tenant's salt and every token.
        parent_key: chain key of the unit that ends at `start`; empty if `start` is 0.
        start: tokens before the segment (q).
        position: tokens the state has read (p); the pages cover (start, position].
        match_unit: tokens per unit of the chain.
        parts: the payload, pool after pool: attention groups first, then one state of every recurrent
            group.
        reason: why the checkpoint was made.
        shard: (rank, number of ranks) the records belong to.
        created: seconds since the epoch.
    """

    fingerprint: str
    key: bytes
    parent_key: bytes
    start: int
    position: int
    match_unit: int
    parts: tuple[PoolPart, ...]
    reason: str
    shard: tuple[int, int] = (0, 1)
    created: float = 0.0

    @property
    def payload_bytes(self) -> int:
        return sum(part.num_records * part.record_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment on its way into or out of a store.

    Attributes:
        payload: the bytes, in pieces whose lengths sum to `header.payload_bytes`. Pieces handed to
            `save` may be views of live memory; the caller keeps them unchanged until `save` returns.
        payload_digest: SHA-256 of the payload, where somebody computed it already: it is not computed again
            for every store. A wrong one makes an object that no reader accepts.
    """

    header: SegmentHeader
    payload: Sequence[Buffer]
    payload_digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """In place of a header or a segment: the store did not say whether it has it. Not true, as None is not;
    but None says that it is not there, or that it is of no use.

    Attributes:
        outcome: one of `outcomes.SILENCES`.
    """

    outcome: str

    def __bool__(self) -> Literal[False]:
        return False


LookedUp = SegmentHeader | Unanswered | None
Loaded = StoredSegment | Unanswered | None


class SegmentStore(Protocol):
    """One place that keeps segments. Anything unexpected in it is a miss, never an exception that
    reaches a request: implementations raise StoreError, their caller counts it and goes on.

    `deadline_seconds` bounds the call; what is not done by then is `Unanswered` (lookup, load) or not saved.
    """

    name: str
    """How the tier is called in metrics and logs; unique within a process."""

    takes_saves: bool
    """False: somebody else decides what is in it. `save` then saves nothing, `remove` removes nothing, and
    tiers do not ask for either."""

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        """Headers of the segments that end at `keys`; None where there is none that can be read."""
        ...

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        """Whole segments, checksums verified."""
        ...

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        """Whether each segment is in the store now (it may have been there before)."""
        ...

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        """Forget segments; how many there were."""
        ...

    def followers(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[bytes]:
        """Keys of the segments that build on these, directly or not; none if the store cannot list what it
        has. Visits every segment: for removals that people ask for."""
        ...

    def close(self) -> None:
        """Release everything. No call may follow."""
        ...
