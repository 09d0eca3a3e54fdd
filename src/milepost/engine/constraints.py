"""What the loop needs to know of structured output: which tokens may come next.

A constraint is read at an output position, with drafts that may follow, and told of the tokens that were
committed. It is a function of the committed tokens alone, so preemption, cached prefixes, drafts and
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

    def allowed_rows(self, output_position: int, drafts: Sequence[int]) -> tuple[list[bytes], bool]:
        """What may be sampled next, and behind each of the leading drafts that may stand.

        A row is packed bits, the lowest id in the lowest bit of the first byte, rounded up to whole 32-bit
        words; empty = every token. Drafts end before one that may not stand, and before one with which
        the answer would be complete.

        Args:
            output_position: number of tokens generated so far.
            drafts: tokens that may come next.

        Returns:
            1 + leading drafts that stay rows, and whether the draft behind them may not stand.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed; tokens that end the answer are not among them."""
        ...


def packed_bits(vocab_size: int, missing: Sequence[int] = ()) -> bytes:
    """Every id below `vocab_size`, without some."""
    bits = (1 << vocab_size) - 1
    for token_id in missing:
        bits &= ~(1 << token_id)
    return bits.to_bytes(packed_size(vocab_size), "little")


def is_allowed(row: bytes, token_id: int) -> bool:
    """Whether packed bits have this id."""
    return not row or (token_id // 8 < len(row) and bool(row[token_id // 8] >> token_id % 8 & 1))


def packed_size(vocab_size: int) -> int:
    """Bytes of one row of packed bits."""
    return -(-vocab_size // 32) * 4
