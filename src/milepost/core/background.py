"""What background requests may compute while others are there: a bounded share of what those compute.

Deterministic: counts tokens, not time.
"""

from __future__ import annotations

import sys

from milepost.core.queues import is_background
from milepost.core.request import Request


class BackgroundShare:
    """Credit that other requests' tokens earn and background requests spend.

    It is spent in pieces, so that few steps become longer, and does not pile up: a pause of the background
    work is not made up for.

    Args:
        share: background tokens per token of other requests; 0.0 = they wait until nobody else is there.
        piece_tokens: least number of tokens that are worth a chunk.
        step_tokens: most tokens of a step.

    Attributes:
        num_left_tokens: background tokens that the current step may still take.
    """

    __slots__ = ("_credit", "_is_quiet", "_max_credit", "_piece_tokens", "_share", "num_left_tokens")

    def __init__(self, share: float, piece_tokens: int, step_tokens: int) -> None:
        self._share = share
        self._piece_tokens = piece_tokens
        self._max_credit = piece_tokens + share * step_tokens
        self._credit = 0.0
        self._is_quiet = True
        self.num_left_tokens = 0

    def begin_step(self, *, is_quiet: bool) -> None:
        """`is_quiet`: nobody is there but background requests, which then take what they like."""
        self._is_quiet = is_quiet
        if is_quiet:
            self.num_left_tokens = sys.maxsize
        else:
            self.num_left_tokens = int(self._credit) if self._credit >= self._piece_tokens else 0

    def planned(self, request: Request, num_rows: int) -> None:
        """A chunk of so many tokens is part of the step."""
        if self._is_quiet:
            return
        if is_background(request):
            self.num_left_tokens -= num_rows
            self._credit -= num_rows
        else:
            self._credit = min(self._max_credit, self._credit + self._share * num_rows)
