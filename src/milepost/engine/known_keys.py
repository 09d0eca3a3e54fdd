"""Keys that are believed to be in a store; the least recently noted ones are forgotten."""

from __future__ import annotations

from array import array

MAX_KNOWN_KEYS = 1 << 18
_WAYS = 4
_TAG_BYTES = 8


class KnownKeys:
    """A set of chain keys with a bound, in memory that does not grow: 8 bytes for each key it has room for.

    Keys are hashes. Four of them share a place, the one noted last in front; a fifth pushes out the last.
    What stays of a key is 64 bits that did not choose its place: one in 2^62 unknown keys is taken for known.

    Args:
        max_keys: rounded up to a multiple of four.
    """

    def __init__(self, max_keys: int = MAX_KNOWN_KEYS) -> None:
        self._num_places = max(1, -(-max_keys // _WAYS))
        self._tags = array("Q", bytes(8 * _WAYS * self._num_places))

    def __contains__(self, key: bytes) -> bool:
        first, tag = self._place(key)
        return tag in self._tags[first : first + _WAYS]

    def add(self, key: bytes) -> None:
        first, tag = self._place(key)
        self._put(first, [tag, *(each for each in self._tags[first : first + _WAYS] if each != tag)])

    def discard(self, *keys: bytes) -> None:
        for key in keys:
            first, tag = self._place(key)
            self._put(first, [each for each in self._tags[first : first + _WAYS] if each != tag])

    def _put(self, first: int, tags: list[int]) -> None:
        self._tags[first : first + _WAYS] = array("Q", [*tags, *[0] * _WAYS][:_WAYS])

    def _place(self, key: bytes) -> tuple[int, int]:
        """Where the key's four tags begin, and its tag, which is never 0."""
        tag = int.from_bytes(key[:_TAG_BYTES], "little") or 1
        return _WAYS * (int.from_bytes(key[_TAG_BYTES:], "little") % self._num_places), tag
