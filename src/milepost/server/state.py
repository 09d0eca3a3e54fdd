"""Where a server stands: loading, ready, draining; and how many requests are open."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from milepost.errors import MilepostError

LOADING_RETRY_SECONDS = 5


class Phase(enum.Enum):
    """`LOADING`: weights, self-test and warm-up are not through. `DRAINING`: nothing new is admitted."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Unavailable(MilepostError):
    """Not now; the request was not looked at."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True)
class ServerState:
    """Attributes:
    num_open: requests that are being answered; probes do not count.
    num_responses: begun responses by HTTP status, probes included.
    drain_seconds: how long draining may take.
    check_room: raises if a request that wants an answer would be refused; None = not loaded yet.
    """

    drain_seconds: float = 0.0
    phase: Phase = Phase.LOADING
    num_open: int = 0
    num_responses: Counter[int] = field(default_factory=Counter)
    check_room: Callable[[], None] | None = None

    def check_admits(self) -> None:
        """Raises: Unavailable: no request is taken in this phase."""
        if self.phase is Phase.LOADING:
            raise Unavailable("the model is being loaded", LOADING_RETRY_SECONDS)
        if self.phase is Phase.DRAINING:
            raise Unavailable("the server is shutting down", max(1, math.ceil(self.drain_seconds)))
