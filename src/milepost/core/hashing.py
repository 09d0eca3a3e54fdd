"""Chain hashes: one SHA-256 per match unit over (parent, raw token bytes, typed extra keys).

The key of unit i identifies the whole prefix [0, (i + 1) * U) within one domain, in every tier.
Domains (tenant salt, adapter, match unit) enter the root; media spans enter the units they touch.
Every variable part is tagged and length-prefixed, so that no two domains collide.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import pack

from milepost.core.units import floor_div

FORMAT = b"milepost/prefix/1"
_TAG_UNIT = 1
_TAG_SALT = 2
_TAG_ADAPTER = 3
_TAG_MEDIA = 4


@dataclass(frozen=True, slots=True)
class CacheDomain:
    """What separates caches of equal tokens: who may share, and which weights are active."""

    tenant_salt: bytes = b""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens [start, end) stand for a media item with this content digest."""

    start: int
    end: int
    digest: bytes


def _field(tag: int, data: bytes) -> bytes:
    return pack("<BQ", tag, len(data)) + data


def domain_root(domain: CacheDomain, match_unit: int) -> bytes:
    """Root key (32 bytes) of a domain's chain."""
    parts = [_field(_TAG_UNIT, pack("<Q", match_unit))]
    if domain.tenant_salt:
        parts.append(_field(_TAG_SALT, domain.tenant_salt))
    if domain.adapter:
        parts.append(_field(_TAG_ADAPTER, domain.adapter.encode()))
    return sha256(FORMAT + b"".join(parts)).digest()


def token_bytes(tokens: array[int]) -> bytes:
    """Little-endian uint32 bytes of token ids."""
    if sys.byteorder == "big":
        swapped = array("I", tokens)
        swapped.byteswap()
        return swapped.tobytes()
    return tokens.tobytes()


def tokens_from_bytes(data: bytes) -> array[int]:
    """Inverse of `token_bytes`."""
    tokens = array("I")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


class KeyChain:
    """Unit keys of one growing token sequence, computed once each.

    Attributes:
        tokens: the sequence itself (shared with the request, which appends to it).
        keys: keys of the full units computed so far.
    """

    __slots__ = ("_first_media", "keys", "match_unit", "media", "root", "tokens")

    def __init__(
        self, tokens: array[int], domain: CacheDomain, match_unit: int, media: Sequence[MediaSpan] = ()
    ) -> None:
        self.tokens = tokens
        self.match_unit = match_unit
        self.root = domain_root(domain, match_unit)
        self.media = sorted(media, key=lambda span: (span.start, span.end))
        self.keys: list[bytes] = []
        self._first_media = 0
        """All spans before this one end at or before the last key."""

    def extend(self, num_units: int) -> list[bytes]:
        """Make sure that the keys of units [0, num_units) exist; returns all keys so far."""
        keys = self.keys
        unit = self.match_unit
        parent = keys[-1] if keys else self.root
        for index in range(len(keys), num_units):
            data = self.unit_tokens(index)
            if len(data) != 4 * unit:
                raise ValueError(
                    f"unit {index} is not complete: {len(self.tokens)} tokens, match unit {unit}"
                )
            if self.media:
                data += self._media_fields(index * unit, (index + 1) * unit)
            parent = sha256(parent + data).digest()
            keys.append(parent)
        return keys

    def unit_tokens(self, index: int) -> bytes:
        """Token bytes of unit `index` (shorter than 4 * U if the sequence ends inside it)."""
        unit = self.match_unit
        return token_bytes(self.tokens[index * unit : (index + 1) * unit])

    def _media_fields(self, start: int, end: int) -> bytes:
        media = self.media
        while self._first_media < len(media) and media[self._first_media].end <= start:
            self._first_media += 1
        fields = b""
        for index in range(self._first_media, len(media)):
            span = media[index]
            if span.start >= end:
                break
            if span.end > start:
                fields += _field(_TAG_MEDIA, pack("<qq", span.start - start, span.end - start) + span.digest)
        return fields

    def unsplit_units(self, units: int) -> int:
        """Largest k <= `units` whose boundary lies strictly inside no media span (none may be split)."""
        unit = self.match_unit
        while self.media:
            position = units * unit
            lowest = min((s.start for s in self.media if s.start < position < s.end), default=position)
            if lowest == position:
                break
            units = floor_div(lowest, unit)
        return units
