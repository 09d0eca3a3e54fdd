"""Every reason code has a sentence, and what else is known stands behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from milepost.core.reasons import HIT, MISS_REASONS
from milepost.engine.load_outcomes import MEANINGS
from milepost.engine.messages import FinishedRequest, LoadNote, ReuseExplanation
from milepost.server.collectors import REUSE_REASONS
from milepost.server.recent import RecentRequests
from milepost.server.why import NOT_ADMITTED, SENTENCES, sentences

REUSE = ReuseExplanation(
    num_prompt_tokens=1000,
    num_cached_tokens=96,
    matched_tokens={"mla": 96},
    num_tokens_lost_to_missing_state=0,
    limiting_group=None,
    reason="diverged",
    first_divergence=1234,
    retokenized_at=None,
)
RECORD = FinishedRequest(
    request_id=7,
    label="",
    num_prompt_tokens=1000,
    num_generated_tokens=3,
    finish_reason="stop",
    reuse=REUSE,
    queue_seconds=0.1,
    time_to_first_token=0.25,
    seconds=0.5,
)


def test_every_reason_has_a_sentence() -> None:
    assert set(SENTENCES) == {HIT, *MISS_REASONS, "retokenized"} == set(REUSE_REASONS)
    assert all(text.endswith(".") and text[0].isupper() for text in SENTENCES.values())
    assert len(set(SENTENCES.values())) == len(SENTENCES)


def test_places_losses_and_loads_are_said() -> None:
    assert (
        sentences(REUSE)
        == f"{SENTENCES['diverged']} The first token that differs is number 1,234 (counted from 0)."
    )
    again = sentences(replace(REUSE, reason="retokenized@640", retokenized_at=640))
    assert again.startswith(SENTENCES["retokenized"]) and "number 640" in again
    assert sentences(replace(REUSE, reason="cold", first_divergence=0)) == SENTENCES["cold"]
    assert "differs is number 27 " in sentences(replace(REUSE, reason="cold", first_divergence=27))
    assert "number" not in sentences(replace(REUSE, reason="too_short"))
    lost = sentences(replace(REUSE, reason="no_state", num_tokens_lost_to_missing_state=2048))
    assert "2,048 more tokens have pages, but no state" in lost
    assert sentences(None) == NOT_ADMITTED


@pytest.mark.parametrize(
    ("eviction", "text"),
    [
        ("tail_dropped:history", "their `history` checkpoint was given up for room (tail_dropped)"),
        ("states_per_path:interval", "their `interval` checkpoint was not kept (states_per_path)"),
    ],
)
def test_an_eviction_and_a_refusal(eviction: str, text: str) -> None:
    said = sentences(replace(REUSE, eviction=eviction, num_tokens_lost_to_eviction=512))
    assert f"512 more would have been reused, but {text}." in said


def test_what_stores_did() -> None:
    said = sentences(replace(REUSE, load=LoadNote("loaded", "persist", 640, 0.01)))
    assert said == f"{sentences(REUSE)} 640 tokens were loaded from a store (persist)."
    for outcome in set(MEANINGS) - {"loaded", "not_found"}:
        said = sentences(replace(REUSE, load=LoadNote(outcome, "", 0, 0.0)))
        assert said == f"{sentences(REUSE)} Stores: {MEANINGS[outcome]}."
    assert "Stores (redis): " in sentences(replace(REUSE, load=LoadNote("failed", "redis", 0, 0.0)))


@pytest.mark.parametrize("reason", ["hit", "cold", "diverged", "path_ends", "retokenized@640"])
def test_where_text_is_new_no_store_is_missed(reason: str) -> None:
    """A usual turn: nobody has seen what follows, so it alarms nobody that no store has it."""
    reuse = replace(REUSE, reason=reason)
    assert sentences(replace(reuse, load=LoadNote("not_found", "", 0, 0.0))) == sentences(reuse)


@pytest.mark.parametrize(
    "known",
    [
        {"reason": "no_state"},
        {"reason": "no_pages"},
        {"num_tokens_lost_to_missing_state": 64},
        {"num_tokens_lost_to_eviction": 64, "eviction": "drop:tail"},
    ],
)
def test_where_more_was_known_a_store_might_have_had_it(known: dict[str, Any]) -> None:
    reuse = replace(REUSE, **known)
    said = sentences(replace(reuse, load=LoadNote("not_found", "", 0, 0.0)))
    assert said == f"{sentences(reuse)} No store has more of this prompt."


def test_the_ring_forgets_the_oldest() -> None:
    now = [100.0]
    recent = RecentRequests(lambda: now[0], max_requests=2)
    for number in range(3):
        now[0] += 1
        recent.finished(replace(RECORD, request_id=number, label="b" if number == 2 else ""))
    newest, oldest = recent.views()
    assert (newest["request_id"], newest["label"], newest["ended_at"]) == (2, "b", 103.0)
    assert (oldest["request_id"], oldest["label"], oldest["ended_at"]) == (1, "", 102.0)
    assert newest["time_to_first_token_seconds"] == 0.25 and newest["num_cached_tokens"] == 96


def test_a_request_that_ended_in_the_queue() -> None:
    recent = RecentRequests(lambda: 0.0)
    recent.finished(replace(RECORD, reuse=None, time_to_first_token=None, finish_reason="abort"))
    (shown,) = recent.views()
    assert shown["reason"] is None and shown["num_cached_tokens"] is None
    assert shown["sentence"] == NOT_ADMITTED and shown["finish_reason"] == "abort"
