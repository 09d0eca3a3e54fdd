"""The book of promise P1: which positions of which prefixes must be resumable.

For an earlier request the promised positions are the end of its prompt, the positions its caller
wanted (unless they lie inside what it reused itself), and, once it has ended by itself, everything
it processed. A new prompt of N tokens with promised position P on its own path must recompute at most
(U - 1) + max(1, N - P) tokens. A position the caller wanted serves longer prompts only: a prompt
that ends exactly there would need the state one unit earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milepost.errors import MilepostError
from milepost.sim.model import TrueSequence


class BoundError(MilepostError):
    """P1 was broken."""


@dataclass(slots=True)
class _Open:
    truth: TrueSequence
    positions: list[int]
    """Not processed yet, descending."""

    def keep(self, promised: dict[int, bool], num_processed: int) -> None:
        """Promise the positions that are processed now."""
        while self.positions and self.positions[-1] <= num_processed:
            position = self.positions.pop()
            node = self.truth.path[position]
            serves_itself = position == self.truth.num_prompt_tokens
            promised[node] = promised.get(node, False) or serves_itself


class PromiseBook:
    """Promised prefixes, as nodes of the prefix tree.

    Args:
        match_unit: U, tokens.
    """

    def __init__(self, match_unit: int) -> None:
        self.match_unit = match_unit
        self.num_checked = 0
        self.num_reached = 0
        self._promised: dict[int, bool] = {}
        self._open: dict[int, _Open] = {}

    def opened(
        self, request_id: int, truth: TrueSequence, positions: Sequence[int], num_cached_tokens: int
    ) -> None:
        """A request was admitted. `positions` of its prompt are promised, unless it reused them."""
        ahead = {p for p in positions if p >= num_cached_tokens}
        self._open[request_id] = _Open(truth, sorted(ahead, reverse=True))

    def processed(self, request_id: int, num_processed: int) -> None:
        """Tokens [0, num_processed) of a request are computed and committed."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.keep(self._promised, num_processed)

    def ended(self, request_id: int, num_processed: int | None) -> None:
        """A request has ended; None = not by itself, so only what it passed before counts."""
        entry = self._open.pop(request_id, None)
        if entry is not None and num_processed:
            entry.keep(self._promised, num_processed)
            self._promised[entry.truth.path[num_processed]] = True

    def forget(self) -> None:
        """The cache was reset: old promises are void, requests on their way make new ones."""
        self._promised.clear()
        for entry in self._open.values():
            entry.positions.clear()

    def promised_position(self, truth: TrueSequence) -> int:
        """P: the deepest promised position on the path of a new prompt, tokens."""
        promised = self._promised
        path = truth.path
        num_tokens = truth.num_prompt_tokens
        for position in range(num_tokens, 0, -1):
            serves_itself = promised.get(path[position])
            if serves_itself or (serves_itself is not None and position < num_tokens):
                return position
        return 0

    def check(self, request_id: int, truth: TrueSequence, num_cached_tokens: int) -> None:
        """Compare what a lookup found with what was promised.

        Raises:
            BoundError: more must be recomputed than P1 allows.
        """
        self.num_checked += 1
        position = self.promised_position(truth)
        if not position:
            return
        self.num_reached += 1
        num_tokens = truth.num_prompt_tokens
        allowed = self.match_unit - 1 + max(1, num_tokens - position)
        recomputed = num_tokens - num_cached_tokens
        if recomputed > allowed:
            raise BoundError(
                f"request {request_id}: {recomputed} of {num_tokens} tokens are recomputed, "
                f"{position} were promised, so at most {allowed} are allowed"
            )
