"""Every reason code comes from a scenario; divergence names the token; other tenants stay unseen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.harness import Harness, make_chain, make_geometry, numbered

from milepost.core import reasons
from milepost.core.explain import MAX_COMPARED_CHILDREN, first_divergence, reuse_report
from milepost.core.hashing import CacheDomain, MediaSpan
from milepost.core.request import ReuseReport
from milepost.core.tree import NO_RECORD


def report(harness: Harness, prompt: list[int], **options: object) -> ReuseReport:
    request_id = harness.serve(prompt, **options)
    result = harness.reuse[request_id]
    assert isinstance(result, ReuseReport)
    assert result.num_prompt_tokens == len(prompt)
    assert result.num_cached_tokens == len(prompt) - harness.computed[request_id]
    return result


def hit() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(18))


def cold() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(18, 1))


def diverged() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18), wanted=[(8, "message")])
    return report(harness, numbered(10) + numbered(8, 1))


def path_ends() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(16))
    return report(harness, numbered(30))


def no_state() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(12) + numbered(8, 1))


def no_pages() -> ReuseReport:
    """A page of one group is missing, as after a partial restore from a lower tier."""
    harness = Harness(geometry=make_geometry(num_attention=2))
    harness.serve(numbered(17), wanted=[(12, "message")])
    chain = make_chain(numbered(17))
    harness.cache.match(chain, 17).path[3].pages[1] = NO_RECORD
    return reuse_report(harness.cache, harness.cache.match(chain, 17), chain, 17)


def too_short() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(4))


def disabled() -> ReuseReport:
    harness = Harness(enable_prefix_caching=False)
    harness.serve(numbered(18))
    return report(harness, numbered(18))


def bypassed() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(18), uses_cache=False)


def media_split() -> ReuseReport:
    """A checkpoint inside a picture, which nothing publishes today, must not be resumed from."""
    harness = Harness()
    media = [MediaSpan(6, 18, b"picture")]
    harness.serve(numbered(20), media=media)
    chain = make_chain(numbered(20), media=media)
    node = harness.cache.match(chain, 20).path[2]
    slot = harness.cache.memory.acquire(1)
    assert slot is not None
    harness.cache.tree.attach_state(node, [slot], "message")
    return reuse_report(harness.cache, harness.cache.match(chain, 15), chain, 15)


def prompt_logprobs() -> ReuseReport:
    harness = Harness()
    harness.serve(numbered(18))
    return report(harness, numbered(18), prompt_logprobs=0)


SCENARIOS: list[tuple[str, Callable[[], ReuseReport], int, int, str | None, int | None]] = [
    # reason, scenario, cached, lost to a missing state, limiting group, divergence
    (reasons.HIT, hit, 16, 0, None, None),
    (reasons.COLD, cold, 0, 0, None, 0),
    (reasons.DIVERGED, diverged, 8, 0, None, 10),
    (reasons.PATH_ENDS, path_ends, 16, 0, None, None),
    (reasons.NO_STATE, no_state, 0, 12, "recurrent 0", 12),
    (reasons.NO_PAGES, no_pages, 12, 0, "attention 1", None),
    (reasons.TOO_SHORT, too_short, 0, 0, None, None),
    (reasons.DISABLED, disabled, 0, 0, None, None),
    (reasons.DISABLED, bypassed, 0, 0, None, None),
    (reasons.MEDIA_SPLIT, media_split, 4, 0, None, None),
    (reasons.PROMPT_LOGPROBS, prompt_logprobs, 0, 0, None, None),
]


@pytest.mark.parametrize(("reason", "scenario", "cached", "lost", "limiting", "divergence"), SCENARIOS)
def test_every_reason_code(
    reason: str,
    scenario: Callable[[], ReuseReport],
    cached: int,
    lost: int,
    limiting: str | None,
    divergence: int | None,
) -> None:
    result = scenario()
    assert result.reason == reason
    assert result.num_cached_tokens == cached
    assert result.num_tokens_lost_to_missing_state == lost
    assert result.limiting_group == limiting
    assert result.divergence_position == divergence


def test_no_reason_code_is_without_a_scenario() -> None:
    assert {reason for reason, *_ in SCENARIOS} == {reasons.HIT, *reasons.MISS_REASONS}


def test_each_group_reports_its_own_reach() -> None:
    harness = Harness(geometry=make_geometry(num_attention=2, num_recurrent=2))
    harness.serve(numbered(18))
    result = report(harness, numbered(12) + numbered(8, 1))
    assert result.num_matched_tokens == {
        "attention 0": 12, "attention 1": 12, "recurrent 0": 0, "recurrent 1": 0,
    }  # fmt: skip
    assert harness.scheduler.stats().counters.num_lost_tokens == 12


# ------------------------------------------------------------------ first divergence
@pytest.mark.parametrize("position", range(0, 30))
def test_the_first_token_that_differs_is_named(position: int) -> None:
    """B67: wherever it is, also inside a unit and before the first boundary."""
    harness = Harness()
    harness.serve(numbered(30))
    changed = numbered(30)
    changed[position] = 7
    result = report(harness, changed)
    if position < 28:
        assert result.divergence_position == position
    else:
        assert (result.reason, result.divergence_position) == ("hit", None), (
            "28 tokens were never cached as a unit"
        )


def test_the_nearest_of_several_paths_counts() -> None:
    harness = Harness()
    base = numbered(12)
    for differs_at in (4, 5, 6, 7):
        changed = list(base)
        changed[differs_at] = 9000 + differs_at
        harness.serve(changed)
    assert report(harness, base).divergence_position == 7


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_a_prompt_that_ends_inside_a_cached_path_does_not_diverge(length: int) -> None:
    """Although another path does leave it there."""
    for newest_agrees in (False, True):
        harness = Harness()
        long, other = numbered(20), numbered(8) + numbered(12, 1)
        for prompt in (other, long) if newest_agrees else (long, other):
            harness.serve(prompt)
        assert report(harness, numbered(length)).divergence_position is None


@pytest.mark.parametrize(("start", "expected"), [(0, 0), (2, 2), (5, 5), (9, 9)])
def test_equal_tokens_with_other_media_diverge_where_the_item_begins(start: int, expected: int) -> None:
    harness = Harness()
    harness.serve([5] * 14, media=[MediaSpan(start, 13, b"cat")])
    result = report(harness, [5] * 14, media=[MediaSpan(start, 13, b"dog")])
    assert result.divergence_position == expected
    assert result.num_cached_tokens == start // 4 * 4


def test_only_the_newest_paths_are_compared() -> None:
    harness = Harness()
    near = numbered(8)
    near[7] = 9999
    harness.serve(near)
    for seed in range(MAX_COMPARED_CHILDREN - 1):
        harness.serve([*numbered(5), 100 + seed, 1, 2])
    chain = make_chain(numbered(8))
    match = harness.cache.match(chain, 8)
    assert first_divergence(harness.cache, match, chain) == 7
    harness.serve([*numbered(5), 9000, 1, 2])
    match = harness.cache.match(chain, 8)
    assert first_divergence(harness.cache, match, chain) == 5


def test_other_tenants_are_never_looked_at() -> None:
    harness = Harness()
    harness.serve(numbered(20), domain=CacheDomain(b"a"))
    harness.serve(numbered(20), domain=CacheDomain(b"", "a"))
    changed = numbered(20)
    changed[18] = 7
    result = report(harness, changed, domain=CacheDomain(b"b"))
    assert (result.reason, result.divergence_position, result.num_cached_tokens) == ("cold", None, 0)
    assert set(result.num_matched_tokens.values()) == {0}
    own = report(harness, changed, domain=CacheDomain(b"a"))
    assert (own.reason, own.num_cached_tokens, own.divergence_position) == ("hit", 16, 18)


def test_the_report_is_that_of_the_first_admission() -> None:
    harness = Harness(budget=8)
    request_id = harness.add(numbered(30))
    for _ in range(3):
        harness.step()
    first = harness.reuse[request_id]
    harness.scheduler.preempt(request_id)
    harness.run()
    assert harness.reuse[request_id] is first
    assert (first.num_cached_tokens, first.reason) == (0, "cold")
    assert harness.scheduler.stats().counters.num_queried_tokens == 30
