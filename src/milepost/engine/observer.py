"""Who may watch the engine: metrics, logs, tests."""

from __future__ import annotations

from typing import Protocol

from milepost.engine.messages import FinishedRequest, ReuseExplanation


class Observer(Protocol):
    """Hears of events in the engine thread; must not block and must not raise."""

    def admitted(self, reuse: ReuseExplanation) -> None:
        """A request was admitted; `reuse` says how much of its prompt is not computed."""

    def tokens(
        self, num_tokens: int, seconds_since_submission: float | None, seconds_since_last: float | None
    ) -> None:
        """New output tokens; for the first ones the second argument is set, for later ones the third."""

    def finished(self, record: FinishedRequest) -> None:
        """A request ended, for whatever reason."""
