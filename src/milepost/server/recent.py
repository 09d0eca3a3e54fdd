"""The last requests that ended, for the page: counts and reasons, never text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from milepost.engine.messages import FinishedRequest, ReuseExplanation
from milepost.server.why import sentences

MAX_RECENT_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class _Ended:
    at_seconds: float
    record: FinishedRequest


class RecentRequests:
    """An observer that remembers the last requests; what is older is forgotten. The engine thread writes,
    others read.

    Args:
        wall_clock: seconds since 1970.
    """

    def __init__(self, wall_clock: Callable[[], float], max_requests: int = MAX_RECENT_REQUESTS) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[_Ended] = deque(maxlen=max_requests)

    def admitted(self, reuse: ReuseExplanation) -> None:
        """Nothing: the record at the end has it."""

    def tokens(
        self, num_tokens: int, seconds_since_submission: float | None, seconds_since_last: float | None
    ) -> None:
        """Nothing."""

    def finished(self, record: FinishedRequest) -> None:
        self._ended.append(_Ended(self._wall_clock(), record))

    def views(self) -> list[dict[str, Any]]:
        """The newest one first; times in seconds, moments in seconds since 1970."""
        # A copy is made in one piece, whatever the engine thread does meanwhile.
        return [_view(each) for each in reversed(self._ended.copy())]


def _view(ended: _Ended) -> dict[str, Any]:
    record = ended.record
    reuse = record.reuse
    return {
        "request_id": record.request_id,
        "label": record.label,
        "ended_at": round(ended.at_seconds, 3),
        "finish_reason": record.finish_reason,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": None if reuse is None else reuse.num_cached_tokens,
        "num_output_tokens": record.num_generated_tokens,
        "reason": None if reuse is None else reuse.reason,
        "sentence": sentences(reuse),
        "first_divergence": None if reuse is None else reuse.first_divergence,
        "eviction": None if reuse is None else reuse.eviction,
        "num_tokens_lost_to_eviction": 0 if reuse is None else reuse.num_tokens_lost_to_eviction,
        "load": None if reuse is None or reuse.load is None else reuse.load.as_dict(),
        "queue_seconds": record.queue_seconds,
        "time_to_first_token_seconds": record.time_to_first_token,
        "seconds": record.seconds,
    }
