"""Why a prompt was not reused further: the core's report plus what only text can tell.

A client sends an earlier answer back as text. Encoded again it may give other token ids than the
model had generated, and the cache, which holds the generated ones, ends there. Remembering the last
answers lets that case be named.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from milepost.core.request import CacheDomain, ReuseReport
from milepost.engine.messages import ReuseExplanation
from milepost.engine.tokenizer import Tokenizer

REMEMBERED_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class _Answer:
    """Generated ids after a prompt that is known by its length and digest only."""

    num_prompt_tokens: int
    token_ids: array[int]


class ReuseExplainer:
    """Keeps the last answers, least recently used out first. Not thread-safe: one engine thread calls it."""

    def __init__(self, tokenizer: Tokenizer, *, max_answers: int = REMEMBERED_ANSWERS) -> None:
        self._tokenizer = tokenizer
        self._max_answers = max_answers
        self._answers: OrderedDict[tuple[CacheDomain, bytes], _Answer] = OrderedDict()

    def remember(self, domain: CacheDomain, prompt: array[int], generated: array[int]) -> None:
        """Keep a finished answer (without the token that ended it)."""
        if not generated:
            return
        key = (domain, blake2b(prompt.tobytes(), digest_size=16).digest())
        self._answers[key] = _Answer(len(prompt), generated)
        self._answers.move_to_end(key)
        while len(self._answers) > self._max_answers:
            self._answers.popitem(last=False)

    def forget(self, domain: CacheDomain, prompt: array[int], num_kept_tokens: int) -> None:
        """Forget answers within `prompt` behind its first `num_kept_tokens`, and all of the domain to longer
        prompts: these may go on from it."""
        data = prompt.tobytes()
        for key, answer in tuple(self._answers.items()):
            length = answer.num_prompt_tokens
            inside = num_kept_tokens < length <= len(prompt)
            digest = blake2b(data[: length * prompt.itemsize], digest_size=16).digest() if inside else b""
            if key[0] == domain and (length > len(prompt) or digest == key[1]):
                del self._answers[key]

    def explain(self, domain: CacheDomain, prompt: array[int], report: ReuseReport) -> ReuseExplanation:
        """The report in the words of the response."""
        retokenized_at = None
        reason = report.reason
        if report.divergence_position is not None:
            retokenized_at = self._retokenized_at(domain, prompt)
            if retokenized_at is not None:
                reason = f"retokenized@{retokenized_at}"
        return ReuseExplanation(
            num_prompt_tokens=report.num_prompt_tokens,
            num_cached_tokens=report.num_cached_tokens,
            matched_tokens=dict(report.num_matched_tokens),
            num_tokens_lost_to_missing_state=report.num_tokens_lost_to_missing_state,
            limiting_group=report.limiting_group,
            reason=reason,
            first_divergence=report.divergence_position,
            retokenized_at=retokenized_at,
            num_tokens_lost_to_eviction=report.num_tokens_lost_to_eviction,
            eviction=None if report.eviction is None else ":".join(report.eviction),
        )

    def _retokenized_at(self, domain: CacheDomain, prompt: array[int]) -> int | None:
        """First position inside the longest remembered prompt's answer where `prompt` has other ids
        for the same text; None if the ids agree or the text is another."""
        answer = self._longest_answer_inside(domain, prompt)
        if answer is None:
            return None
        start = answer.num_prompt_tokens
        again = prompt[start:]
        same = 0
        for generated, encoded in zip(answer.token_ids, again, strict=False):
            if generated != encoded:
                break
            same += 1
        if same == len(answer.token_ids) or same == len(again):
            return None
        said = self._visible(answer.token_ids)
        return start + same if self._visible(again, len(said)).startswith(said) else None

    def _longest_answer_inside(self, domain: CacheDomain, prompt: array[int]) -> _Answer | None:
        lengths = sorted(
            {
                answer.num_prompt_tokens
                for (answer_domain, _), answer in self._answers.items()
                if answer_domain == domain and answer.num_prompt_tokens < len(prompt)
            }
        )
        data = memoryview(prompt.tobytes())
        digest, end, best = blake2b(digest_size=16), 0, None
        for length in lengths:
            digest.update(data[end * prompt.itemsize : length * prompt.itemsize])
            end = length
            best = self._answers.get((domain, digest.copy().digest()), best)
        return best

    def _visible(self, token_ids: array[int], max_bytes: int | None = None) -> bytes:
        """Bytes a client sees, up to the first special token behind them, or about `max_bytes`."""
        text = bytearray()
        for token_id in token_ids:
            if self._tokenizer.is_special(token_id) or (max_bytes is not None and len(text) >= max_bytes):
                break
            text += self._tokenizer.token_bytes(token_id)
        return bytes(text)
