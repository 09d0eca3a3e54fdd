"""From logits to tokens in one native call. The rule and its twin in torch: `milepost.runner.sampler`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch


class SampleRule(NamedTuple):
    """How one row with a temperature is sampled.

    Attributes:
        temperature: above 0.
        log_min_p: logarithm of min-p; -inf = off.
        top_p: 1 or more = off.
        top_k: 0 = off.
        noise_key: unsigned, 64 bits.
    """

    temperature: float
    log_min_p: float
    top_p: float
    top_k: int
    noise_key: int


class NativeSampling:
    """Token ids and log-probabilities of rows of logits, fp32 [rows, vocabulary].

    A row's result depends on the row and its rule alone; every instruction set gives the same.
    """

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def sample(
        self, logits: torch.Tensor, rules: Sequence[SampleRule | None]
    ) -> tuple[list[int], list[bool]]:
        """One token id per row, and whether the row holds neither NaN nor infinity.

        -inf cannot be sampled; a row that holds NaN or +inf, or -inf alone, gives id 0.

        Args:
            rules: one per row; None = the lowest id of the largest logit.
        """
        ids, finite = self._library.sample(logits, list(rules))
        return ids, finite

    def log_probabilities(
        self, logits: torch.Tensor, token_ids: Sequence[int], count: int
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Per row, the log-probabilities of its token and of the `count` best, and the ids of the best.

        The best descend; equal logits: the lowest id first.
        """
        num_rows = logits.shape[0]
        values = torch.empty(num_rows, 1 + count)
        best = torch.empty(num_rows, count, dtype=torch.int64)
        self._library.log_probabilities(logits, torch.tensor(token_ids, dtype=torch.int64), values, best)
        return values.tolist(), best.tolist()
