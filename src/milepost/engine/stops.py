"""Stop strings over streamed text.

The first stop string to be complete, character by character, ends the answer, whatever the token
borders were; of two complete at the same character the longer one counts. Text that may still turn
into a stop string is held back, so nothing behind (or inside) a stop is ever sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopChecker:
    """Filters the text of one answer.

    Args:
        stop: stop strings, none of them empty.
        include_stop: keep the stop string that was found at the end of the text.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Text that can be sent now. Sets `found` when a stop string is complete.

        `may_stop=False` sends `text` unseen: its characters take part in no stop string.
        """
        if self.found is not None:
            return ""
        if not self._stop:
            return text
        if not may_stop:
            sent, self._held = self._held + text, ""
            return sent
        buffer = self._held + text
        hit = self._first_hit(buffer)
        if hit is not None:
            start, stop = hit
            self.found = stop
            self._held = ""
            return buffer[: start + len(stop)] if self._include_stop else buffer[:start]
        keep = undecided_suffix(buffer, self._stop)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Text still held back when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, buffer: str) -> tuple[int, str] | None:
        hits = []
        for stop in self._stop:
            start = buffer.find(stop)
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop


def undecided_suffix(buffer: str, needles: Iterable[str]) -> int:
    """Length of the longest end of `buffer` that begins one of `needles` without being all of it."""
    longest = 0
    for needle in needles:
        for length in range(min(len(needle) - 1, len(buffer)), longest, -1):
            if buffer.endswith(needle[:length]):
                longest = length
                break
    return longest
