"""Keys that are believed to be in a store; the least recently noted ones are forgotten."""

from __future__ import annotations

from collections import OrderedDict

MAX_KNOWN_KEYS = 1 << 18


class KnownKeys:
    """A set with a bound."""

    def __init__(self, max_keys: int = MAX_KNOWN_KEYS) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._max_keys = max_keys

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def discard(self, *keys: bytes) -> None:
        for key in keys:
            self._keys.pop(key, None)
