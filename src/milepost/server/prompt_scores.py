"""Log-probabilities of prompt tokens, in the two forms clients know: `echo` with `logprobs`, and vLLM's
`prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from milepost.core.plan import ScoredToken
from milepost.engine.params import MAX_LOGPROBS
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError
from milepost.server.schema import Body, CompletionBody


def num_prompt_logprobs(body: Body) -> int | None:
    """Most likely tokens wanted beside each prompt token; None = no scores at all.

    Raises:
        RequestError: out of range, or in a form that cannot be served.
    """
    wanted = body.prompt_logprobs
    if wanted is not None:
        if not 0 <= wanted <= MAX_LOGPROBS:
            raise RequestError("prompt_logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {wanted}")
        if body.stream:
            raise RequestError("prompt_logprobs", "is not available in streams; leave `stream` out")
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        if body.stream and (body.n or 1) > 1:
            raise RequestError("echo", "with `logprobs` and `n` > 1 is not available in streams")
        return max(wanted or 0, body.logprobs)
    return wanted


def scores_only(body: CompletionBody) -> bool:
    """Whether nothing is to be generated: `max_tokens: 0`.

    Raises:
        RequestError: then nothing was asked for.
    """
    if body.max_tokens != 0:
        return False
    if not body.echo and body.prompt_logprobs is None:
        raise RequestError("max_tokens", "must be at least 1, or 0 together with `echo` or `prompt_logprobs`")
    return True


def echoed_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[ScoredToken], num_logprobs: int
) -> dict[str, Any]:
    """The completions API's parallel lists for an echoed prompt; the first token has no values."""
    top: list[dict[str, float] | None] = [None]
    for score in scores:
        best = {tokenizer.token_text(i): logprob for i, logprob in score.top_logprobs[:num_logprobs]}
        best[tokenizer.token_text(score.token_id)] = score.logprob  # two tokens may look the same
        top.append(best)
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [None, *(score.logprob for score in scores)],
        "top_logprobs": top,
        "text_offset": _offsets(tokenizer, token_ids),
    }


def _offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Characters of the decoded prompt before the code point that each token begins or continues."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, num_chars = [], 0
    for token_id in token_ids:
        offsets.append(num_chars)
        num_chars += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[ScoredToken], num_logprobs: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's list: null for the first token, then token id -> values of the token and of the best ones."""
    result: list[dict[str, dict[str, Any]] | None] = [None]
    for score in scores:
        entries = {score.token_id: (score.logprob, score.rank)}
        for rank, (token_id, logprob) in enumerate(score.top_logprobs[:num_logprobs], start=1):
            entries.setdefault(token_id, (logprob, rank))
        result.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, (logprob, rank) in entries.items()
            }
        )
    return result
