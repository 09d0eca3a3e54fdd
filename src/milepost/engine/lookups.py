"""What the stores are asked for on behalf of a prompt, and how such a lookup can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from milepost.core.request import Request
from milepost.core.transfers import Outlook, Restore, StoredCheckpoint
from milepost.engine.messages import LoadNote

if TYPE_CHECKING:
    from milepost.stores.tiers import Found

LOADED, NOT_FOUND, SOONER_COMPUTED = "loaded", "not_found", "sooner_computed"
TOO_LATE, FAILED, NO_ROOM, UNUSABLE = "too_late", "failed", "no_room", "unusable"
LOOKUP_OUTCOMES = (LOADED, NOT_FOUND, SOONER_COMPUTED, TOO_LATE, FAILED, NO_ROOM, UNUSABLE)


@dataclass(slots=True)
class Lookup:
    """A waiting request and what the stores have for it, or a prefetch.

    Attributes:
        done: of a prefetch, told how it ended. Its request stands for a prompt and is never scheduled:
            nothing is held back, and nothing is weighed against computing.
    """

    request: Request
    outlook: Outlook
    begun_at: float
    deadline: float
    done: Callable[[LoadNote], None] | None = None
    found: dict[int, Found] = field(default_factory=dict)
    offers: list[StoredCheckpoint] = field(default_factory=list)
    is_ready: bool = False
    restore: Restore | None = None
    note: LoadNote | None = None

    @property
    def is_prefetch(self) -> bool:
        return self.done is not None
