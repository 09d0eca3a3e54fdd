"""Memory for payloads: copies are equal, independent and given back."""

from __future__ import annotations

import array
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.stores.buffers import address_of, copy_into, new_buffer, owned_copy

MIB = 1 << 20


@given(st.lists(st.binary(max_size=300), max_size=6), st.booleans())
def test_a_copy_is_equal_and_read_only(pieces: list[bytes], is_writable: bool) -> None:
    copied = owned_copy([bytearray(piece) if is_writable else piece for piece in pieces])
    assert bytes(copied) == b"".join(pieces)
    assert copied.readonly


@pytest.mark.parametrize("num_bytes", [MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
@pytest.mark.parametrize("is_writable", [True, False])
def test_large_copies(num_bytes: int, is_writable: bool) -> None:
    data = os.urandom(num_bytes)
    source = bytearray(data) if is_writable else data
    copied = owned_copy([b"head", source, b"tail"])
    if isinstance(source, bytearray):
        source[:] = bytes(num_bytes)
    assert bytes(copied) == b"head" + data + b"tail"


def test_views_of_other_items_are_bytes() -> None:
    numbers = array.array("I", range(1000))
    assert bytes(owned_copy([memoryview(numbers)])) == numbers.tobytes()


def test_part_of_a_buffer_is_written_in_place() -> None:
    buffer = new_buffer(2 * MIB)
    copy_into(buffer[100:104], memoryview(bytearray(b"abcd")))
    assert bytes(buffer[98:106]) == b"\0\0abcd\0\0"
    assert address_of(buffer[100:]) == address_of(buffer) + 100


def test_large_memory_is_given_back_at_once() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    held = owned_copy([bytes(64 * MIB)])
    assert resident_bytes() - before > 48 * MIB
    del held
    assert resident_bytes() - before < 16 * MIB
