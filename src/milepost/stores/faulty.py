"""A store whose faults are chosen: for tests of what is above it, and for the simulator."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.outcomes import Outcomes
from milepost.stores.port import Loaded, LookedUp, SegmentStore, StoredSegment
from milepost.stores.segment_format import ForeignSegmentError, SegmentError, decode, encode_head


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities: of `slow` and `error` per call, of the others per segment.

    Attributes:
        slow: the call takes `slow_seconds`, whatever its deadline.
        error: the call raises.
        torn: a loaded object ends early.
        bit_flip: a loaded object has one bit changed.
        lost: the segment is not there any more.
        full: the segment is not saved.
        foreign: a loaded object is of another format version.
        slow_seconds: see `slow`.
    """

    slow: float = 0.0
    error: float = 0.0
    torn: float = 0.0
    bit_flip: float = 0.0
    lost: float = 0.0
    full: float = 0.0
    foreign: float = 0.0
    slow_seconds: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "slow_seconds" and not 0 <= value <= 1:
                raise StoreError(f"faults: {field.name} is a probability, not {value}")


class FaultyStore:
    """Passes calls on to `store`, and damages some of them.

    Damage is done to the bytes of the object, and the real reader decides what they are worth: a fault that
    it did not notice would come through as a wrong segment.

    Args:
        seed: equal seeds and calls give equal faults.
        sleep: seconds -> None; a simulator advances its clock here.
    """

    def __init__(
        self, store: SegmentStore, faults: Faults, *, seed: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.store = store
        self.name = store.name
        self.takes_saves = store.takes_saves
        self.faults = faults
        self.outcomes: Outcomes = getattr(store, "outcomes", None) or Outcomes()
        self._random = random.Random(seed)
        self._sleep = sleep

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        self._before_call()
        found = self.store.lookup(keys, deadline_seconds=deadline_seconds)
        return [None if self._happens(self.faults.lost) else each for each in found]

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        self._before_call()
        loaded = self.store.load(keys, deadline_seconds=deadline_seconds)
        return [self._damaged(each) if isinstance(each, StoredSegment) else each for each in loaded]

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        self._before_call()
        fits = [not self._happens(self.faults.full) for _ in segments]
        self.outcomes.add(oc.SAVE, oc.FULL, fits.count(False))
        kept = [segment for segment, fit in zip(segments, fits, strict=True) if fit]
        saved = iter(self.store.save(kept, deadline_seconds=deadline_seconds))
        return [fit and next(saved) for fit in fits]

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        self._before_call()
        return self.store.remove(keys, deadline_seconds=deadline_seconds)

    def followers(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[bytes]:
        self._before_call()
        return self.store.followers(keys, deadline_seconds=deadline_seconds)

    def close(self) -> None:
        self.store.close()

    def set_faults(self, **changes: float) -> None:
        """Change some of them from now on."""
        self.faults = replace(self.faults, **changes)

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _before_call(self) -> None:
        if self._happens(self.faults.slow):
            self._sleep(self.faults.slow_seconds)
        if self._happens(self.faults.error):
            raise StoreError(f"{self.name}: a fault that was asked for")

    def _damaged(self, segment: StoredSegment) -> StoredSegment | None:
        if self._happens(self.faults.lost):
            return None
        torn, flipped = self._happens(self.faults.torn), self._happens(self.faults.bit_flip)
        foreign = self._happens(self.faults.foreign)
        if not (torn or flipped or foreign):
            return segment
        data = bytearray(b"".join((encode_head(segment), *segment.payload)))
        if flipped:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        if torn:
            del data[self._random.randrange(len(data)) :]
        if foreign:
            data[8:12] = (0xFFFF).to_bytes(4, "little")
        try:
            return decode(bytes(data))
        except SegmentError as error:
            foreign = isinstance(error, ForeignSegmentError)
            self.outcomes.add(oc.LOAD, oc.FOREIGN if foreign else oc.CORRUPT)
            return None
