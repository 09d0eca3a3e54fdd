"""Memory for payloads: filled without holding the interpreter lock, given back at once."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from milepost.stores.port import Buffer

_LARGE_BYTES = 1 << 20
"""From here on a mapping of its own: no zeroing up front, no holes left in the heap when it goes."""


def new_buffer(num_bytes: int) -> memoryview:
    """Writable memory of `num_bytes`."""
    if num_bytes >= _LARGE_BYTES:
        # Private: shared mappings count as shared memory, and the kernel does not join neighbours.
        return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return memoryview(bytearray(num_bytes))


def owned_copy(pieces: Sequence[Buffer]) -> memoryview:
    """The pieces one after the other, in memory that nobody else writes; read-only."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    target = new_buffer(sum(view.nbytes for view in views))
    offset = 0
    for view in views:
        copy_into(target[offset : offset + view.nbytes], view)
        offset += view.nbytes
    return target.toreadonly()


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy between views of equal length; other threads get their turn meanwhile."""
    if source.readonly:
        # ctypes takes addresses of writable memory only; short copies let others in between.
        for offset in range(0, source.nbytes, _LARGE_BYTES):
            target[offset : offset + _LARGE_BYTES] = source[offset : offset + _LARGE_BYTES]
    elif source.nbytes:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def address_of(view: memoryview) -> int:
    """Where writable memory begins; valid as long as the view is kept."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
