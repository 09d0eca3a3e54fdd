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
        tokenizer = self._tokenizer
        skip = self._skip_special_tokens
        data = b"".join(
            tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not (skip and tokenizer.is_special(token_id))
        )
        return self._counted(self._decoder.decode(data))

    def finish(self) -> str:
        """What is left: the bytes of an incomplete code point as one U+FFFD, else nothing."""
        return self._counted(self._decoder.decode(b"", final=True))

    def _counted(self, text: str) -> str:
        self.num_chars += len(text)
        return text
