"""A drafter without weights: what followed the last time the text read like this.

The last few tokens are looked up in the request's own prompt and answer; what followed there is drafted.
That pays wherever an answer repeats its prompt: edits of code, extraction, quotations, tool results.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4
MAX_CANDIDATES = 64
"""Earlier places that are compared; the most recent ones."""
MAX_SEARCHED_TOKENS = 1 << 16
"""Only so many of the latest tokens are searched, so that a step stays fast on long prompts."""


class NgramDrafter:
    """Implements `core.ports.Drafter`. Keeps nothing between steps.

    Args:
        min_match: tokens at the end of the text that must be found again.
        max_match: of several places the one with the longest match is taken, up to so many tokens; among
            equals the most recent one.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"1 <= min_match <= max_match is needed, not {min_match} and {max_match}")
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        text = array("I", tokens[-MAX_SEARCHED_TOKENS:])
        end = self._best_match(text)
        if end is None:
            return ()
        # The match may overlap the end of the text: a period goes on, so what is drafted is read again.
        for _ in range(max_drafts):
            text.append(text[end])
            end += 1
        return text[len(text) - max_drafts :]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""

    def _best_match(self, text: array[int]) -> int | None:
        """Position behind the best earlier occurrence of the end of `text`."""
        best_end, best_length = None, 0
        for end in _occurrences(text, self._min_match):
            length = _common_suffix(text, end, self._max_match)
            if length > best_length:
                best_end, best_length = end, length
            if length == self._max_match:
                break
        return best_end


def _occurrences(text: array[int], length: int) -> list[int]:
    """Positions behind earlier occurrences of the last `length` tokens, the latest first."""
    if len(text) <= length:
        return []
    data = text.tobytes()
    pattern = data[-length * TOKEN_BYTES :]
    found: list[int] = []
    limit = len(data) - TOKEN_BYTES
    while len(found) < MAX_CANDIDATES:
        at = data.rfind(pattern, 0, limit)
        if at < 0:
            break
        if at % TOKEN_BYTES == 0:
            found.append(at // TOKEN_BYTES + length)
        limit = at + len(pattern) - 1
    return found


def _common_suffix(text: array[int], end: int, limit: int) -> int:
    """How many tokens before `end` equal those at the end of the text, up to `limit`."""
    count = 0
    while count < limit and count < end and text[end - 1 - count] == text[-1 - count]:
        count += 1
    return count
