"""A bounded area that objects pass through on their way to a peer, or from one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from milepost.core.units import ceil_to, floor_to
from milepost.errors import StoreError
from milepost.stores.buffers import new_buffer
from milepost.stores.objects import Clock, Deadline

ALIGNMENT_BYTES = 4096


class StagingArea:
    """Memory of a fixed size, backed by the system as it is used; first fit. Thread-safe.

    Attributes:
        view: all of it, writable.
    """

    def __init__(self, num_bytes: int) -> None:
        """
        Raises:
            StoreError: no size.
        """
        if num_bytes < ALIGNMENT_BYTES:
            raise StoreError(f"a staging area has at least {ALIGNMENT_BYTES} bytes, not {num_bytes}")
        self.num_bytes = floor_to(num_bytes, ALIGNMENT_BYTES)
        self.view = new_buffer(self.num_bytes)
        self._condition = threading.Condition()
        self._holes = [(0, self.num_bytes)]  # [first, end), by position
        self._taken: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes on their way."""
        with self._condition:
            return self.num_bytes - sum(end - first for first, end in self._holes)

    @property
    def largest_hole(self) -> int:
        """The most bytes that `take` would give now."""
        with self._condition:
            return max((end - first for first, end in self._holes), default=0)

    def take(self, num_bytes: int) -> int | None:
        """Where so many bytes are free now; None if they are not. `give_back` returns them."""
        needed = ceil_to(max(1, num_bytes), ALIGNMENT_BYTES)
        with self._condition:
            for index, (first, end) in enumerate(self._holes):
                if end - first >= needed:
                    rest = [(first + needed, end)] if end - first > needed else []
                    self._holes[index : index + 1] = rest
                    self._taken[first] = needed
                    return first
        return None

    def wait_for_room(self, deadline: Deadline, is_enough: Callable[[], bool]) -> bool:
        """Wait until `is_enough`, which is asked whenever bytes came back; False at the deadline."""
        with self._condition:
            return self._condition.wait_for(is_enough, deadline.remaining_seconds)

    def give_back(self, offset: int) -> None:
        """
        Raises:
            KeyError: nothing was taken there.
        """
        with self._condition:
            end = offset + self._taken.pop(offset)
            holes = sorted([*self._holes, (offset, end)])
            merged = [holes[0]]
            for first, last in holes[1:]:
                if merged[-1][1] == first:
                    merged[-1] = (merged[-1][0], last)
                else:
                    merged.append((first, last))
            self._holes = merged
            self._condition.notify_all()


class Leases:
    """Places in a staging area that somebody else reads, until he says that he is done or is late.

    Args:
        seconds: after which a lease is over by itself: whoever reads later reads other bytes, and notices by
            their checksum.
    """

    def __init__(self, area: StagingArea, seconds: float, clock: Clock) -> None:
        self._area = area
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, tuple[float, list[int]]] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def open(self, offsets: list[int]) -> int:
        """A number for these places, which belong to it from now on."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open[number] = (self._clock() + self._seconds, offsets)
            return number

    def close(self, number: int) -> bool:
        """Give the places back; False if the lease is over already."""
        with self._lock:
            found = self._open.pop(number, None)
        for offset in found[1] if found else ():
            self._area.give_back(offset)
        return found is not None

    def close_late(self) -> int:
        """End those whose time is over; how many."""
        now = self._clock()
        with self._lock:
            late = [number for number, (end, _) in self._open.items() if end <= now]
        return sum(map(self.close, late))
