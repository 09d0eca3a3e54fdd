"""Chain keys: golden vectors by a second writing of the format, and domains that never collide."""

from __future__ import annotations

import hashlib
import itertools
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.hashing import (
    CacheDomain,
    KeyChain,
    MediaSpan,
    domain_root,
    token_bytes,
    tokens_from_bytes,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def restated_keys(
    tokens: list[int], unit: int, salt: bytes, adapter: str, media: list[MediaSpan]
) -> list[bytes]:
    """The documented format, written down a second time with other means."""

    def tagged(tag: int, data: bytes) -> bytes:
        return bytes([tag]) + len(data).to_bytes(8, "little") + data

    head = b"milepost/prefix/1" + tagged(1, unit.to_bytes(8, "little"))
    head += tagged(2, salt) if salt else b""
    head += tagged(3, adapter.encode("utf-8")) if adapter else b""
    parent = hashlib.sha256(head).digest()
    keys = []
    for first in range(0, len(tokens) - unit + 1, unit):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[first : first + unit])
        for span in sorted(media, key=lambda s: (s.start, s.end)):
            if max(span.start, first) < min(span.end, first + unit):
                data += tagged(4, struct.pack("<qq", span.start - first, span.end - first) + span.digest)
        parent = hashlib.sha256(parent + data).digest()
        keys.append(parent)
    return keys


@given(
    TOKENS,
    st.integers(1, 9),
    st.binary(max_size=3),
    st.sampled_from(["", "a", "ä"]),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.binary(max_size=3)), max_size=3),
)
def test_keys_follow_the_documented_format(
    tokens: list[int], unit: int, salt: bytes, adapter: str, spans: list[tuple[int, int, bytes]]
) -> None:
    media = [MediaSpan(start, start + length, digest) for start, length, digest in spans]
    chain = KeyChain(array("I", tokens), CacheDomain(salt, adapter), unit, media)
    assert chain.extend(len(tokens) // unit) == restated_keys(tokens, unit, salt, adapter, media)


def test_a_fixed_vector() -> None:
    """Catches a change of the format that both writings would follow."""
    chain = KeyChain(array("I", [1, 2, 3, 4]), CacheDomain(b"s", "a"), 2, [MediaSpan(3, 4, b"m")])
    assert chain.extend(2)[-1].hex() == "e2d293ee1216cecfdba6be95935e2ac226dfde3ea6929d2f12dbc349d440d8bf"


@given(TOKENS, st.lists(st.integers(0, 10), max_size=6))
def test_growing_a_chain_gives_the_keys_of_a_fresh_one(tokens: list[int], stops: list[int]) -> None:
    unit = 4
    growing = KeyChain(array("I"), CacheDomain(), unit)
    for stop in sorted(min(stop, len(tokens) // unit) for stop in stops):
        del growing.tokens[:]
        growing.tokens.extend(tokens[: stop * unit])
        growing.extend(stop)
    del growing.tokens[:]
    growing.tokens.extend(tokens)
    fresh = KeyChain(array("I", tokens), CacheDomain(), unit)
    num_units = len(tokens) // unit
    assert growing.extend(num_units) == fresh.extend(num_units)


def test_keys_are_computed_once_and_read_tokens_of_their_unit_only() -> None:
    tokens = array("I", range(8))
    chain = KeyChain(tokens, CacheDomain(), 4)
    first = list(chain.extend(1))
    tokens[4] = 99
    tokens.append(5)
    assert chain.extend(2)[:1] == first
    assert chain.extend(1) is chain.keys
    assert len(chain.keys) == 2


def test_a_unit_that_is_not_complete_has_no_key() -> None:
    chain = KeyChain(array("I", range(7)), CacheDomain(), 4)
    with pytest.raises(ValueError, match="unit 1 is not complete: 7 tokens, match unit 4"):
        chain.extend(2)
    assert len(chain.keys) == 1


def test_a_key_depends_on_every_token_before_it() -> None:
    base = list(range(12))
    reference = KeyChain(array("I", base), CacheDomain(), 4).extend(3)
    for position in range(12):
        changed = list(base)
        changed[position] ^= 1 << 31
        keys = KeyChain(array("I", changed), CacheDomain(), 4).extend(3)
        equal = [a == b for a, b in zip(keys, reference, strict=True)]
        assert equal == [index < position // 4 for index in range(3)]


def test_no_two_domains_share_a_key() -> None:
    """Salt and adapter from a set full of look-alikes, several match units: B85."""
    names = ["", "X", "x", "XX", "X\x00", "\x00", "\x02", "\x03", "a" * 8, "milepost/prefix/1"]
    roots: dict[bytes, tuple[str, str, int]] = {}
    for salt, adapter, unit in itertools.product(names, names, (1, 2, 4, 256)):
        root = domain_root(CacheDomain(salt.encode(), adapter), unit)
        assert root not in roots, (roots[root], salt, adapter, unit)
        roots[root] = (salt, adapter, unit)
    assert domain_root(CacheDomain(b"X"), 4) != domain_root(CacheDomain(b"", "X"), 4)


def test_a_salt_cannot_imitate_an_adapter_field() -> None:
    imitation = struct.pack("<BQ", 3, 1) + b"X"
    assert domain_root(CacheDomain(imitation), 4) != domain_root(CacheDomain(b"", "X"), 4)
    with_both = domain_root(CacheDomain(b"s", "X"), 4)
    assert domain_root(CacheDomain(b"s" + imitation), 4) != with_both


def test_match_units_do_not_share_keys_even_where_their_bytes_agree() -> None:
    tokens = array("I", range(8))
    keys = {key for unit in (1, 2, 4, 8) for key in KeyChain(tokens, CacheDomain(), unit).extend(8 // unit)}
    assert len(keys) == 8 + 4 + 2 + 1


def test_media_separate_by_digest_place_and_length() -> None:
    tokens = array("I", [7] * 12)
    variants: list[list[MediaSpan]] = [[]]
    for start, end, digest in itertools.product((3, 4, 5), (6, 7, 9), (b"", b"a", b"ab")):
        variants.append([MediaSpan(start, end, digest)])
    variants.append([MediaSpan(3, 6, b"a"), MediaSpan(6, 9, b"b")])
    variants.append([MediaSpan(3, 6, b"b"), MediaSpan(6, 9, b"a")])
    variants.append([MediaSpan(3, 6, b"ab"), MediaSpan(6, 9, b"")])
    last = [KeyChain(tokens, CacheDomain(), 4, media).extend(3)[-1] for media in variants]
    assert len(set(last)) == len(variants)


def test_media_enter_exactly_the_units_they_touch() -> None:
    tokens = array("I", range(16))
    plain = KeyChain(tokens, CacheDomain(), 4).extend(4)
    for start, end in itertools.combinations(range(17), 2):
        chain = KeyChain(tokens, CacheDomain(), 4, [MediaSpan(start, end, b"m")])
        keys = chain.extend(4)
        first_touched = start // 4
        assert keys[:first_touched] == plain[:first_touched]
        assert all(keys[i] != plain[i] for i in range(first_touched, 4))
        for units in range(5):
            allowed = [k for k in range(units + 1) if not start < 4 * k < end]
            assert chain.unsplit_units(units) == max(allowed)


def test_the_order_in_which_media_are_listed_does_not_matter() -> None:
    spans = [MediaSpan(0, 2, b"a"), MediaSpan(2, 5, b"b"), MediaSpan(5, 8, b"c")]
    keys = {
        tuple(KeyChain(array("I", range(8)), CacheDomain(), 4, order).extend(2))
        for order in itertools.permutations(spans)
    }
    assert len(keys) == 1


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=5), st.integers(0, 12))
def test_nested_and_overlapping_media_push_a_boundary_below_all_of_them(
    spans: list[tuple[int, int]], units: int
) -> None:
    media = [MediaSpan(start, start + length, b"") for start, length in spans]
    chain = KeyChain(array("I", range(64)), CacheDomain(), 4, media)
    allowed = [k for k in range(units + 1) if not any(s.start < 4 * k < s.end for s in media)]
    assert chain.unsplit_units(units) == max(allowed)
    stepwise = KeyChain(array("I", range(64)), CacheDomain(), 4, media)
    for num_units in range(17):
        stepwise.extend(num_units)
    assert stepwise.keys == chain.extend(16)


@given(TOKENS)
def test_token_bytes_are_little_endian_uint32_and_invert(tokens: list[int]) -> None:
    data = token_bytes(array("I", tokens))
    assert data == struct.pack(f"<{len(tokens)}I", *tokens)
    assert list(tokens_from_bytes(data)) == tokens


def test_byte_order_is_that_of_the_format_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milepost.core.hashing.sys.byteorder", "big")
    # A big-endian machine's array holds swapped bytes; the functions must swap them back and forth.
    swapped = array("I", [0x01020304])
    assert token_bytes(swapped) == bytes([1, 2, 3, 4])
    assert tokens_from_bytes(bytes([1, 2, 3, 4])) == swapped
