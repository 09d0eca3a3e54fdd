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

    __slots__ = ("keys", "match_unit", "media", "root", "tokens")

    def __init__(
        self, tokens: array[int], domain: CacheDomain, match_unit: int, media: Sequence[MediaSpan] = ()
    ) -> None:
        self.tokens = tokens
        self.match_unit = match_unit
        self.root = domain_root(domain, match_unit)
        self.media = sorted(media, key=lambda span: (span.start, span.end))
        self.keys: list[bytes] = []

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
        fields = b""
        for span in self.media:
            if span.start < end and span.end > start:
                fields += _field(_TAG_MEDIA, pack("<qq", span.start - start, span.end - start) + span.digest)
        return fields

    def splits_media(self, position: int) -> bool:
        """Whether `position` lies strictly inside a media span (no boundary may split one)."""
        return any(span.start < position < span.end for span in self.media)
