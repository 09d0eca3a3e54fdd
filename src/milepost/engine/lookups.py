"""What the stores are asked for on behalf of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from milepost.core.request import Request
from milepost.core.transfers import Outlook, Restore, StoredCheckpoint
from milepost.engine.messages import LoadNote

if TYPE_CHECKING:
    from milepost.stores.tiers import Found


@dataclass(slots=True)
class Lookup:
    """A waiting request and what the stores have for it, or a prefetch.

    Attributes:
        deadline: on the engine's clock; of what is asked of the stores now.
        patience_seconds: that a request may be held once more; what it was held for is taken off. A request
            that waits for room is not held.
        done: of a prefetch, told how it ended. Its request stands for a prompt and is never scheduled:
            nothing is held back, and nothing is weighed against computing.
    """

    request: Request
    outlook: Outlook
    begun_at: float
    deadline: float
    patience_seconds: float = 0.0
    done: Callable[[LoadNote], None] | None = None
    found: dict[int, Found] = field(default_factory=dict)
    offers: list[StoredCheckpoint] = field(default_factory=list)
    is_ready: bool = False
    restore: Restore | None = None
    note: LoadNote | None = None

    @property
    def is_prefetch(self) -> bool:
        return self.done is not None
