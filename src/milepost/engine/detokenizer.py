"""Token ids to text, one step at a time, on bytes.

A token may end inside a code point. Such bytes wait until the next tokens complete them; at the end
of the answer they become one U+FFFD. The deltas joined are the decoding of all bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from milepost.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one answer as its tokens arrive.

    Attributes:
        num_chars: characters of complete text so far.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_chars = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        data = b"".join(
            self._tokenizer.token_bytes(token_id) for token_id in token_ids if not self.skips(token_id)
        )
        return self._counted(self._decoder.decode(data))

    def num_shown(self, token_id: int) -> int:
        """Characters of a control token in the text; 0 if it is left out."""
        return 0 if self.skips(token_id) else len(self._tokenizer.token_text(token_id))

    def skips(self, token_id: int) -> bool:
        """Whether a token leaves no text."""
        return self._skip_special_tokens and self._tokenizer.is_special(token_id)

    def finish(self) -> str:
        """What is left: the bytes of an incomplete code point as one U+FFFD, else nothing."""
        return self._counted(self._decoder.decode(b"", final=True))

    def _counted(self, text: str) -> str:
        self.num_chars += len(text)
        return text
