"""Keeps what users wrote from becoming control tokens when a template renders it.

A template is a program: it may cut, join and strip what it is given. So strings that could end up as
a control token get a secret mark *inside* the dangerous spot before rendering; the mark keeps the
token from being matched in the rendered text, and is taken out of the text pieces afterwards.
Strings without any danger (nearly all) pass unchanged.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from milepost.engine.tokenizer import ControlToken

PLAIN_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-$. ")
"""Of these alone no part of a marker's brackets can be made; templates compare such words."""


def new_mark() -> str:
    """Digits survive JSON and HTML escaping and case changes; a single leading 0 means the mark
    cannot overlap itself, so removing it removes exactly what was put in."""
    return "0" + "".join(str(1 + secrets.randbelow(9)) for _ in range(40))


class Shield:
    """Marks strings against one set of control tokens.

    Args:
        tokens: the control tokens that must not come from the string.
        mark: see `new_mark`.
        kept: control tokens that may; what stands between them is shielded piece by piece.
    """

    def __init__(self, tokens: Iterable[ControlToken], mark: str, kept: Iterable[ControlToken] = ()) -> None:
        contents = sorted({token.content for token in tokens if token.content})
        self._mark = mark
        self._contents = contents
        self._first_chars = "".join(sorted({content[0] for content in contents}))
        self._longest = max(map(len, contents), default=0)
        self._heads = {content[:end] for content in contents for end in range(1, len(content))}
        self._tails = {content[start:] for content in contents for start in range(1, len(content))}
        self._inner = {
            content[start:end]
            for content in contents
            for start in range(1, len(content))
            for end in range(start + 1, len(content))
        }
        names = sorted({token.content for token in kept if token.content}, key=len, reverse=True)
        self._kept = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def string(self, text: str) -> str:
        """`text` with marks where it could become, or complete, a control token."""
        if self._kept is None:
            return self._piece(text)
        # Every second part is a kept token.
        parts = self._kept.split(text)
        return "".join(part if number % 2 else self._piece(part) for number, part in enumerate(parts))

    def _piece(self, text: str) -> str:
        if not text or not self._contents:
            return text
        inner = text in self._inner and not PLAIN_CHARS.issuperset(text)
        marked = text
        if any(_is_subsequence(content, text) for content in self._contents):
            for char in self._first_chars:
                marked = marked.replace(char, char + self._mark)
        reach = min(self._longest - 1, len(text))
        if inner or any(text[:length] in self._tails for length in range(1, reach + 1)):
            marked = self._mark + marked
        if inner or any(text[-length:] in self._heads for length in range(1, reach + 1)):
            marked = marked + self._mark
        return marked

    def value(self, value: Any) -> Any:
        """A JSON value with every string shielded; of the keys, those that are not plain names."""
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _key(self, key: Any) -> Any:
        if not isinstance(key, str) or PLAIN_CHARS.issuperset(key):
            return key
        return self.string(key)


def _is_subsequence(needle: str, text: str) -> bool:
    """Whether deleting characters from `text` can leave `needle`."""
    position = 0
    for char in needle:
        position = text.find(char, position) + 1
        if position == 0:
            return False
    return True
