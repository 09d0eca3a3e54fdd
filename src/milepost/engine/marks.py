"""Control tokens inside text: text that still knows which of its parts the model wrote as tokens.

A parser must not take a `<tool_call>` that was spelled with ordinary characters for the token. So
each control token it looks for becomes one character that no decoded text can hold (a lone
surrogate; invalid UTF-8 decodes to U+FFFD). Cutting such text anywhere is then as safe as cutting
any other, and putting the spelling back gives the plain text again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from milepost.engine.detokenizer import IncrementalDetokenizer
from milepost.engine.tokenizer import Tokenizer

FIRST_MARK = 0xDC00


class MarkTable:
    """The control tokens a parser looks for.

    A content that is no control token of this tokenizer is looked for as ordinary text.

    Attributes:
        char_by_id: token id -> its character.
    """

    def __init__(self, tokenizer: Tokenizer, contents: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        control = {token.content: token for token in tokenizer.control_tokens}
        self._chars = {
            content: chr(FIRST_MARK + number)
            for number, content in enumerate(sorted(set(contents)))
            if content in control
        }
        self.char_by_id = {control[content].token_id: char for content, char in self._chars.items()}
        self._spelling = {ord(char): content for content, char in self._chars.items()}
        self._token_ids = {content: control[content].token_id for content in self._chars}

    def needle(self, content: str) -> str:
        """How `content` appears in marked text."""
        return self._chars.get(content, content)

    def needles(self, contents: Iterable[str]) -> Mapping[str, str]:
        """`needle` of each."""
        return {content: self.needle(content) for content in contents}

    def token_id(self, content: str) -> int | None:
        """Its id, if it is one of the control tokens."""
        return self._token_ids.get(content)

    def restore(self, text: str) -> str:
        """Plain text: marks spelled out."""
        return text.translate(self._spelling)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Marked text of tokens; their other control tokens are spelled out."""
        pieces = []
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        for token_id in token_ids:
            char = self.char_by_id.get(token_id)
            pieces.append(detokenizer.feed([token_id]) if char is None else detokenizer.finish() + char)
        return "".join(pieces) + detokenizer.finish()


class MarkedStream:
    """Puts marks into text that leaves in pieces of any size, a stop checker's for instance."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int, str]] = deque()
        self._position = 0
        self._waiting = ""

    def note(self, start: int, end: int, char: str) -> None:
        """Characters [start, end) of the plain text are a control token; equal if it is not shown."""
        self._marks.append((start, end, char))

    def take(self, text: str, *, is_last: bool) -> str:
        """The next plain text with its marks; a token of which only a part is here waits for the rest.

        Args:
            is_last: no text follows. A token that was cut stays as it is; one that is not shown and
                stands behind the last character counts.
        """
        self._waiting += text
        pieces: list[str] = []
        end_of_text = self._position + len(self._waiting)
        while self._marks:
            start, end, char = self._marks[0]
            if end > end_of_text:
                break
            pieces += [self._advance(start), char]
            self._advance(end)
            self._marks.popleft()
        # The beginning of a token that is not complete must not leave as text.
        limit = self._marks[0][0] if self._marks and not is_last else end_of_text
        pieces.append(self._advance(min(limit, end_of_text)))
        return "".join(pieces)

    def _advance(self, position: int) -> str:
        count = position - self._position
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._position = position
        return taken
