"""How a load from the stores can end, and what that says to people."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.stores import outcomes as oc
from milepost.stores.port import Unanswered

LOADED, NOT_FOUND, NOT_ASKED, SOONER_COMPUTED = "loaded", "not_found", "not_asked", "sooner_computed"
TOO_LATE, FAILED, NO_ROOM, UNUSABLE = "too_late", "failed", "no_room", "unusable"
CACHED = "cached"
MEANINGS = {
    LOADED: "a store had more of this prompt than the cache, and it was loaded",
    NOT_FOUND: "no store has more of this prompt: the rest is new, or what was saved of it is gone",
    NOT_ASKED: "no store was asked, because this prompt is being forgotten at the moment",
    SOONER_COMPUTED: "a store has more of this prompt, but loading it would take longer than computing it",
    TOO_LATE: "a store did not answer in the time that a request waits for stores; with --kv-load-policy "
    "always requests wait longer",
    FAILED: "a store failed, or is left alone for a while because it did, or could not give what it has",
    NO_ROOM: "a store has more of this prompt, but the cache had no room for it",
    UNUSABLE: "a store has a part of this prompt that cannot be used: what it builds on is missing, or it is "
    "of another model",
    CACHED: "everything was in the cache, and no store was asked",
}
"""What each outcome says; in a response it stands beside it."""
LOOKUP_OUTCOMES = tuple(outcome for outcome in MEANINGS if outcome != CACHED)
"""Those of a request, or of a load ahead of one, that needed the stores."""


def outcome_of_silence(silent: Sequence[Unanswered]) -> str:
    """How a load ended that nothing came of because these are all the answers there were."""
    return TOO_LATE if all(each.outcome == oc.TIMEOUT for each in silent) else FAILED
