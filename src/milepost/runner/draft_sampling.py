"""Drafts that are drawn, not the most likely ones, and how drawn drafts are verified.

Two ways, for requests that sample; greedy ones always get the most likely drafts and the exact rule.

coupled        A draft is drawn with the noise its position will be sampled with. It is accepted iff it is
               the token that is sampled there, so the answer does not depend on it. Two argmaxes over the
               same noise agree with a chance of at least (1 - d) / (1 + d), d being the total variation
               between the two distributions (Daliri, Musco, Suresh: Coupling without communication).
probabilistic  A draft is drawn with noise of its own from q, accepted with a chance of min(1, p / q), and
               else replaced by a token of the renormalised max(p - q, 0) (Leviathan, Kalman, Matias: Fast
               inference from transformers via speculative decoding). Tokens have the distribution of the
               model; which ones they are depends on what was drafted.

p and q are what is sampled from: behind penalties, bias, temperature and filters. A draft that was drawn must
be verified: to leave one out for what it is would shift what is sampled instead. So q has no token that ends
the answer, since drafts end before one, and requests that follow a grammar, which leaves drafts out, are
drafted for in the first way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from milepost.core.plan import COUPLED, GREEDY, SampledToken, SamplingParams
from milepost.kernels.native_sampling import NativeSampling
from milepost.runner.sampler import (
    SamplingRow,
    TokenHistory,
    gumbel_noise,
    log_weights,
    noise_key,
    sample,
    token_of,
    uniform_noise,
    with_logprobs,
)

DRAFT_STREAM = 1
ACCEPT_STREAM = 2
"""Streams of noise besides the one that tokens are sampled with, which is number 0."""


class DraftSampler:
    """Draws the drafts of one request in one step, and keeps the distributions they were drawn from.

    Attributes:
        output_position: of the first draft.
        probabilities: one fp64 [vocabulary] per draw if drafts are probabilistic, else empty.
    """

    def __init__(
        self,
        params: SamplingParams,
        output_position: int,
        history: TokenHistory | None,
        method: str,
        native: NativeSampling | None = None,
    ) -> None:
        """
        Args:
            output_position: of the first draft, among the request's outputs.
            history: tokens before the first draft; needed if the parameters hold a penalty.
            method: `COUPLED` or `PROBABILISTIC`.
            native: what tokens are sampled by.
        """
        self._params = params
        self.output_position = output_position
        self._history = history
        self._is_coupled = method == COUPLED
        self._native = native
        self._drafts: list[int] = []
        self.probabilities: list[torch.Tensor] = []

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        output_position: int,
        history: TokenHistory | None,
        method: str,
        native: NativeSampling | None = None,
    ) -> DraftSampler | None:
        """None if the most likely drafts are wanted."""
        if method == GREEDY or params.temperature <= 0.0:
            return None
        return cls(params, output_position, history, method, native)

    def draw(self, logits: torch.Tensor) -> int:
        """The next draft.

        Args:
            logits: fp32 [vocabulary of the model], of the drafter, not changed; -inf for tokens it does not
                know.
        """
        place = self.output_position + len(self._drafts)
        if not self._is_coupled:
            logits = _without(logits, self._params.stop_token_ids)
        row = SamplingRow(self._params, place, history_at(self._history, self._drafts))
        if self._is_coupled:
            draft = token_of(logits, row, self._native)
        else:
            weights = log_weights(logits, row)
            key = noise_key(self._params.seed, self._params.choice_index, place, DRAFT_STREAM)
            draft = int((weights + gumbel_noise([key], weights.shape[0])[0]).argmax())
            self.probabilities.append(torch.softmax(weights, dim=-1))
        self._drafts.append(draft)
        return draft


def _without(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    known = [token_id for token_id in token_ids if 0 <= token_id < logits.shape[0]]
    if not known:
        return logits
    return logits.index_fill(0, torch.tensor(known, dtype=torch.int64), -math.inf)


def pick_drafts(logits: torch.Tensor, samplers: Sequence[DraftSampler | None]) -> list[int]:
    """One draft per row: the most likely token, or what the row's sampler draws.

    Every drafter calls this, once per draft of a request and in order of position.

    Args:
        logits: fp32 [rows, vocabulary of the model]; -inf for tokens the drafter does not know.
    """
    picked: list[int] = logits.argmax(-1).tolist()
    for number, sampler in enumerate(samplers):
        if sampler is not None:
            picked[number] = sampler.draw(logits[number])
    return picked


def verify_drawn(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    drafts: Sequence[int],
    probabilities: Sequence[torch.Tensor],
    native: NativeSampling | None = None,
) -> list[SampledToken]:
    """Accepted drafts, then one more token: the replacement of the first draft that was not, or a sample.

    Args:
        logits: fp32 [1 + drafts, vocabulary] of the model.
        rows: one per row of `logits`; the one of draft j has the drafts before it in its history.
        probabilities: what draft j was drawn from, fp64 [vocabulary].
    """
    sampled: list[SampledToken] = []
    for place, draft in enumerate(drafts):
        params = rows[place].params
        target = torch.softmax(log_weights(logits[place], rows[place]), dim=-1)
        keys = (params.seed, params.choice_index, rows[place].output_position)
        chance = uniform_noise(noise_key(*keys, ACCEPT_STREAM))
        if chance * float(probabilities[place][draft]) < float(target[draft]):
            sampled.append(with_logprobs(logits[place], draft, params, native))
            continue
        noise = gumbel_noise([noise_key(*keys)], logits.shape[1])[0]
        token = int((residual(target, probabilities[place]).log() + noise).argmax())
        return [*sampled, with_logprobs(logits[place], token, params, native)]
    return sampled + sample(logits[len(drafts) :], rows[len(drafts) :], native)


def residual(target: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """What a rejected draft is replaced from: max(p - q, 0) over its sum; fp64 [vocabulary].

    p itself where rounding leaves nothing, which only happens if both are the same.
    """
    left = (target - drawn).clamp_min(0.0)
    total = left.sum()
    return left / total if float(total) > 0.0 else target


def history_at(history: TokenHistory | None, drafts: Sequence[int]) -> TokenHistory | None:
    """The history as if `drafts` had been accepted."""
    if history is None or not drafts:
        return history
    output = history.output.copy()
    output.update(drafts)
    return TokenHistory(history.prompt, output)
