"""What the loop needs to know of structured output: which tokens may come next.

A constraint is read at an output position, told of the tokens that were committed, and can take the
last ones back. It is a function of the committed tokens alone, so preemption, cached prefixes and
batching do not matter to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    """The rules for one answer.

    Attributes:
        is_complete: nothing may follow; the answer ends here.
        failure: why no token can be named any more; None while all is well.
    """

    is_complete: bool
    failure: str | None

    def allowed_tokens(self, output_position: int) -> bytes:
        """Packed bits, lowest id in the lowest bit of the first byte, rounded up to whole 32-bit words;
        empty = every token.

        Args:
            output_position: number of tokens generated so far.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed; tokens that end the answer are not among them."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """The last tokens are taken back (a draft was not accepted)."""
        ...


def packed_bits(vocab_size: int, missing: Sequence[int] = ()) -> bytes:
    """Every id below `vocab_size`, without some."""
    bits = (1 << vocab_size) - 1
    for token_id in missing:
        bits &= ~(1 << token_id)
    return bits.to_bytes(packed_size(vocab_size), "little")


def packed_size(vocab_size: int) -> int:
    """Bytes of one row of packed bits."""
    return -(-vocab_size // 32) * 4
