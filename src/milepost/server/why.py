"""Reason codes in plain sentences, for the page."""

from __future__ import annotations

from collections.abc import Mapping

from milepost.core import reasons
from milepost.engine.load_outcomes import LOADED, MEANINGS, NOT_FOUND
from milepost.engine.messages import LoadNote, ReuseExplanation

RETOKENIZED = "retokenized"

SENTENCES: Mapping[str, str] = {
    reasons.HIT: "As much is cached as a hit can cover; the last tokens of a prompt are always computed.",
    reasons.COLD: "Nothing that is cached begins with the first unit of this prompt.",
    reasons.DIVERGED: "The prompt differs from what is cached.",
    reasons.PATH_ENDS: "The cached prompt ends there; what follows was not seen before.",
    reasons.NO_STATE: "The next tokens have pages, but there is no checkpoint to start from behind them.",
    reasons.NO_PAGES: "There is a checkpoint further on, but pages before it are gone.",
    reasons.TOO_SHORT: "The prompt is shorter than one match unit and a token.",
    reasons.DISABLED: "Prefix caching is off, on the server or for this request.",
    reasons.MEDIA_SPLIT: "The next boundary lies inside a media item.",
    reasons.PROMPT_LOGPROBS: "Log-probabilities of the prompt were asked for: they are computed, not stored.",
    RETOKENIZED: "An earlier answer came back as text and was cut into other tokens than were generated.",
}
"""Reason code of a reuse report -> what it means."""

_WITHOUT_PLACE = (reasons.TOO_SHORT, reasons.DISABLED, reasons.PROMPT_LOGPROBS)
"""Where a prompt like this parts from others explains nothing."""
NOT_ADMITTED = "It ended before anything was looked up."


def divergence_shown(reason: str, place: int | None) -> int | None:
    """Number of the first token that differs, where that explains something."""
    is_far = reason == reasons.COLD and not place
    return None if is_far or reason in _WITHOUT_PLACE else place


def sentences(reuse: ReuseExplanation | None) -> str:
    """Why a request reused what it did, and not more."""
    if reuse is None:
        return NOT_ADMITTED
    parts = [SENTENCES.get(reuse.reason_code, f"{reuse.reason_code}.")]
    place = reuse.retokenized_at if reuse.retokenized_at is not None else reuse.first_divergence
    if (place := divergence_shown(reuse.reason_code, place)) is not None:
        parts.append(f"The first token that differs is number {place:,} (counted from 0).")
    if reuse.num_tokens_lost_to_missing_state:
        parts.append(
            f"{reuse.num_tokens_lost_to_missing_state:,} more tokens have pages, but no state to start from."
        )
    if reuse.eviction is not None and reuse.num_tokens_lost_to_eviction:
        cause, _, reason = reuse.eviction.partition(":")
        parts.append(
            f"{reuse.num_tokens_lost_to_eviction:,} more would have been reused, but their `{reason}` "
            f"checkpoint was {_gone(cause)}."
        )
    if reuse.load is not None and (reuse.load.outcome != NOT_FOUND or _was_known(reuse)):
        parts.append(_load_text(reuse.load))
    return " ".join(parts)


def _was_known(reuse: ReuseExplanation) -> bool:
    """Whether some of the prompt beyond the hit was seen before, so that a store might have had it."""
    is_lost = reuse.num_tokens_lost_to_eviction or reuse.num_tokens_lost_to_missing_state
    return bool(is_lost) or reuse.reason_code in (reasons.NO_STATE, reasons.NO_PAGES)


def _gone(cause: str) -> str:
    refusals = (
        reasons.REFUSED_NO_MEMORY, reasons.REFUSED_NOT_LEGAL, reasons.REFUSED_NOT_WRITTEN,
        reasons.REFUSED_STATES_PER_PATH,
    )  # fmt: skip
    return f"not kept ({cause})" if cause in refusals else f"given up for room ({cause})"


def _load_text(load: LoadNote) -> str:
    if load.outcome == LOADED:
        return f"{load.num_tokens:,} tokens were loaded from a store ({load.tier})."
    if load.outcome == NOT_FOUND:
        return "No store has more of this prompt."
    tier = f" ({load.tier})" if load.tier else ""
    return f"Stores{tier}: {MEANINGS[load.outcome]}."
