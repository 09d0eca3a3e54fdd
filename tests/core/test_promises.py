"""P1 (bound), P3 (committed) and P6 (second sighting) on the real scheduler.

P1: recomputed tokens <= (U - 1) + max(1, N - P), where P tokens were processed for an earlier request
and are a prefix of the new prompt of N tokens. The cache here is large enough to lose nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.core.harness import Harness, make_chain, make_geometry, numbered

from milepost.core.geometry import CacheGeometry
from milepost.core.plan import ChunkResult, SampledToken, StepResult
from milepost.sim.fakes import FailAt, WorkerFaults

UNITS = (4, 16, 32)


def geometries(unit: int) -> Iterator[CacheGeometry]:
    for alignment in (1, unit, 2 * unit, None):
        yield make_geometry(unit, alignment=alignment)


def bound(num_tokens: int, num_processed_before: int, unit: int) -> int:
    return unit - 1 + max(1, num_tokens - num_processed_before)


def quiet(harness: Harness) -> Harness:
    """Audit at the end of a scenario instead of after each of its many steps."""
    harness.check = lambda: None  # type: ignore[method-assign]
    return harness


def audit(harness: Harness) -> None:
    assert harness.scheduler.audit() == []


def around(unit: int, multiples: tuple[int, ...]) -> list[int]:
    return sorted({m * unit + d for m in multiples for d in (-1, 0, 1)} - {0})


def budgets_of(unit: int) -> list[int]:
    return sorted({1, 3, unit - 1, unit, unit + 1, 5 * unit} - {0})


# ------------------------------------------------------------------ P1: resend, extend
@pytest.mark.parametrize("unit", UNITS)
def test_a_resend_recomputes_less_than_a_unit_and_one(unit: int) -> None:
    for geometry, budget in itertools.product(geometries(unit), (3, unit, unit + 1, 512)):
        for num_tokens in around(unit, (1, 2, 5)):
            harness = quiet(Harness(geometry=geometry, budget=budget))
            harness.serve(numbered(num_tokens))
            again = harness.serve(numbered(num_tokens))
            assert harness.computed[again] <= bound(num_tokens, num_tokens, unit)
            assert harness.computed[again] == num_tokens - harness.cached(again)
            audit(harness)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_generated", ["1", "U", "2U + 3"])
def test_the_next_turn_computes_its_new_tokens(unit: int, num_generated: str) -> None:
    """The earlier prompt, its answer, and 1 to 2U more tokens."""
    generated = {"1": 1, "U": unit, "2U + 3": 2 * unit + 3}[num_generated]
    extensions = range(1, 2 * unit + 1) if unit == 4 else (1, unit - 1, unit, unit + 1, 2 * unit)
    for geometry, num_tokens in itertools.product(geometries(unit), around(unit, (1, 3))):
        for extension in extensions:
            harness = quiet(Harness(geometry=geometry, budget=unit + 5))
            first = harness.serve(numbered(num_tokens), generated)
            prompt = harness.tokens_of(first) + numbered(extension, 1)
            num_processed = num_tokens + generated - 1
            second = harness.serve(prompt)
            assert harness.computed[second] <= bound(len(prompt), num_processed, unit)
            audit(harness)


def test_reuse_never_decreases_over_append_only_turns() -> None:
    """B55: twenty turns, each an extension of the one before."""
    for geometry in geometries(16):
        harness = quiet(Harness(geometry=geometry, budget=40))
        tokens = numbered(100)
        previous = 0
        for turn in range(20):
            request_id = harness.serve(tokens, 7)
            if turn:
                assert harness.computed[request_id] - 6 <= bound(len(tokens), len(tokens) - 9, 16)
            assert harness.cached(request_id) >= previous
            previous = harness.cached(request_id)
            tokens = harness.tokens_of(request_id) + numbered(8, turn + 1)
        audit(harness)


# ------------------------------------------------------------------ P1: abort, preemption
def scenarios(unit: int) -> Iterator[tuple[CacheGeometry, int, int]]:
    """(geometry, budget, prompt length); one token per step only with the small unit."""
    lengths = around(unit, (1, 4)) if unit == 4 else [3 * unit + 1, 2 * unit]
    for geometry, budget, num_tokens in itertools.product(geometries(unit), budgets_of(unit), lengths):
        if unit == 4 or budget >= unit - 1:
            yield geometry, budget, num_tokens


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_aborted_prompt_is_taken_up_where_it_stopped(unit: int, in_flight: bool) -> None:
    """B13 and P1: abort after every number of steps, between steps or with a plan in flight; retry."""
    for geometry, budget, num_tokens in scenarios(unit):
        for num_steps in itertools.count(0):
            harness = quiet(Harness(geometry=geometry, budget=budget))
            first = harness.add(numbered(num_tokens), 3)
            for _ in range(num_steps):
                harness.step()
            is_over = first in harness.ended
            if in_flight and not is_over:
                harness.schedule()
            harness.scheduler.abort(first)
            while harness.scheduler.has_unfinished_requests:
                harness.step()
            num_processed = min(num_tokens, harness.computed[first])
            second = harness.serve(numbered(num_tokens))
            assert harness.computed[second] <= bound(num_tokens, num_processed, unit)
            audit(harness)
            if is_over:
                break


@pytest.mark.parametrize("unit", UNITS)
def test_a_preempted_request_resumes_from_its_own_checkpoints(unit: int) -> None:
    for geometry, budget, num_tokens in scenarios(unit):
        for num_steps in itertools.count(1):
            harness = quiet(Harness(geometry=geometry, budget=budget))
            request_id = harness.add(numbered(num_tokens), unit + 2)
            for _ in range(num_steps):
                harness.step()
            if request_id in harness.ended:
                break
            request = harness.requests[request_id]
            before, num_processed = harness.computed[request_id], request.num_processed
            harness.scheduler.preempt(request_id)
            num_known = request.num_tokens
            harness.run()
            repeated = harness.computed[request_id] - before - (num_tokens + unit + 1 - num_known)
            assert repeated <= bound(num_known, num_processed, unit)
            assert harness.outputs[request_id] == harness.worker.truth(request_id).outputs(unit + 2)
            audit(harness)


@pytest.mark.parametrize("unit", [4, 16])
def test_the_bound_holds_under_load(unit: int) -> None:
    """Six decoders leave odd numbers of tokens per step; hits do not depend on that (B42)."""
    for geometry, budget, num_tokens in itertools.product(
        geometries(unit), (7, unit + 3, 3 * unit), around(unit, (3,))
    ):
        harness = quiet(Harness(geometry=geometry, budget=budget))
        for seed in range(6):
            harness.add(numbered(3, 10 + seed), 200)
        for _ in range(8):
            harness.step()
        first = harness.add(numbered(num_tokens), 5)
        while first not in harness.ended:
            harness.step()
        prompt = harness.tokens_of(first) + numbered(5, 1)
        second = harness.add(prompt)
        while second not in harness.ended:
            harness.step()
        assert len(prompt) - harness.cached(second) <= bound(len(prompt), num_tokens + 4, unit)
        audit(harness)


def test_a_full_unit_of_every_prompt_length_hits() -> None:
    """B37, B38, B53: no minimum length beyond one unit and one token; what `stats` announces is true."""
    for num_tokens in range(1, 40):
        harness = Harness()
        harness.serve(numbered(num_tokens))
        second = harness.serve(numbered(num_tokens))
        assert harness.cached(second) == (num_tokens - 1) // 4 * 4
        is_long_enough = num_tokens >= harness.scheduler.stats().smallest_hit_prompt
        assert (harness.cached(second) > 0) == is_long_enough


# ------------------------------------------------------------------ P3
def test_nothing_is_visible_before_its_step_is_committed() -> None:
    for geometry in geometries(4):
        harness = Harness(geometry=geometry, budget=8)
        harness.add(numbered(30), wanted=[(12, "message")])
        while harness.scheduler.has_unfinished_requests:
            committed = harness.requests[0].num_processed
            harness.schedule()
            for num_tokens in range(1, 31):
                match = harness.cache.match(make_chain(numbered(num_tokens)), num_tokens)
                assert len(match.path) * 4 <= committed
                assert match.position <= committed
            harness.execute()


def test_a_request_never_sees_what_was_scheduled_in_its_own_step() -> None:
    """B15: two requests with a common beginning in one batch."""
    harness = Harness()
    shared = numbered(12)
    harness.add(shared + [1] * 5, priority=0)
    harness.add(shared + [2] * 5, priority=0)
    plan = harness.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == [0], "the second waits for the first's commit"
    harness.execute()
    plan = harness.schedule()
    assert [(chunk.request_id, chunk.start) for chunk in plan.chunks] == [(1, 12)]
    harness.execute()


@pytest.mark.parametrize("failing_step", range(1, 8))
@pytest.mark.parametrize("kind", ["fails_before", "fails_torn"])
def test_a_failed_step_never_happened(failing_step: int, kind: str) -> None:
    """Requests in it end with an error; what earlier steps committed stays and is right."""
    faults = WorkerFaults(**{kind: FailAt(failing_step)})
    harness = Harness(budget=8, faults=faults)
    first = harness.add(numbered(30), 3)
    harness.run()
    committed = harness.computed[first]
    failed = harness.ended[first].finish_reason == "error"
    if failed:
        assert harness.ended[first].error == f"injected: step {failing_step} " + (
            "failed before it began" if kind == "fails_before" else "failed half-way"
        )
    second = harness.serve(numbered(30), 3)
    assert harness.cached(second) <= committed
    if not failed:
        assert harness.computed[second] - 2 <= bound(30, 30, 4)
    assert harness.outputs[second] == harness.worker.truth(second).outputs(3)


def test_a_dropped_chunk_fails_its_request_only() -> None:
    dropped = {0}
    harness = Harness(faults=WorkerFaults(drops=lambda chunk: chunk.request_id in dropped))
    first, second = harness.add(numbered(20), 4), harness.add(numbered(20, 1), 4)
    harness.run()
    assert harness.ended[first].finish_reason == "error"
    assert harness.ended[first].error == "the worker did not execute this step"
    assert harness.ended[second].finish_reason == "length"
    third = harness.serve(numbered(20), 4)
    assert harness.cached(third) == 0


def test_an_unwritten_export_is_not_published() -> None:
    harness = Harness(faults=WorkerFaults(acknowledges=lambda chunk, export: export.reason != "message"))
    harness.serve(numbered(30), wanted=[(12, "message"), (20, "history")])
    assert harness.checkpoints(numbered(30)) == [20, 28]
    assert harness.scheduler.stats().counters.refusals == {("not_written", "message"): 1}


def wrong_results(plan_end: int) -> list[tuple[ChunkResult | None, str]]:
    token = [SampledToken(3)]
    return [
        (None, "the worker did not execute this step"),
        (ChunkResult(0, plan_end - 1, [], token), f"position {plan_end - 1}, planned was {plan_end}"),
        (ChunkResult(0, plan_end + 1, [], token), f"position {plan_end + 1}, planned was {plan_end}"),
        (ChunkResult(0, plan_end, [], []), "sampled 0 tokens, planned were 1"),
        (ChunkResult(0, plan_end, [], token * 2), "sampled 2 tokens, planned were 1"),
        (ChunkResult(0, plan_end, [], [SampledToken(-1)]), "token id outside of"),
        (ChunkResult(0, plan_end, [], [SampledToken(2**32)]), "token id outside of"),
    ]


@pytest.mark.parametrize("case", range(7))
def test_a_wrong_acknowledgement_is_an_error_and_publishes_nothing(case: int) -> None:
    harness = Harness()
    harness.add(numbered(10), 4)
    plan = harness.schedule()
    result, message = wrong_results(plan.chunks[0].end)[case]
    harness.commit(StepResult(plan.step_id, [result] if result is not None else []))
    update = harness.ended[0]
    assert update.finish_reason == "error"
    assert message in str(update.error)
    assert update.tokens == []
    assert len(harness.cache.tree) == 0
    assert harness.cache.memory.used_bytes == 0


def test_acknowledgements_for_requests_that_were_not_planned_are_ignored() -> None:
    harness = Harness()
    harness.add(numbered(10), 4)
    plan = harness.schedule()
    chunk = plan.chunks[0]
    good = ChunkResult(0, chunk.end, [8], [SampledToken(3)])
    stray = ChunkResult(77, 5, [4], [SampledToken(3)])
    updates = harness.commit(StepResult(plan.step_id, [stray, good]))
    assert [(u.request_id, u.finish_reason) for u in updates] == [(0, None)]


# ------------------------------------------------------------------ P6
@pytest.mark.parametrize("unit", [4, 16])
@pytest.mark.parametrize("reason", ["message", "history", "marker"])
def test_the_second_request_with_a_shared_beginning_hits_it(unit: int, reason: str) -> None:
    """A wanted position anywhere: B39, B45."""
    for geometry, num_shared in itertools.product(geometries(unit), around(unit, (1, 3))):
        harness = quiet(Harness(geometry=geometry, budget=2 * unit + 1))
        shared = numbered(num_shared)
        harness.serve(shared + numbered(unit + 3, 1), wanted=[(num_shared, reason)])
        second = harness.serve(shared + numbered(unit + 3, 2), wanted=[(num_shared, reason)])
        grid = unit if reason == "history" else max(unit, geometry.checkpoint_alignment or unit)
        assert num_shared // grid * grid <= harness.cached(second) <= num_shared
        assert harness.cached(second) % unit == 0
        audit(harness)


def test_an_unmarked_shared_beginning_hits_from_the_third_request() -> None:
    """B45: the second request finds pages without a state and leaves a junction for the third."""
    for geometry in geometries(4):
        harness = Harness(geometry=geometry)
        shared = numbered(24)
        cached = [harness.cached(harness.serve(shared + numbered(9, seed))) for seed in (1, 2, 3)]
        assert cached == [0, 0, 24]


def test_an_insertion_in_the_middle_keeps_the_beginning() -> None:
    """B57, with a marker or after the first sight of the fork."""
    harness = Harness()
    head, middle, tail = numbered(32), numbered(8, 1), numbered(32, 2)
    harness.serve(head + tail, wanted=[(32, "marker")])
    request_id = harness.serve(head + middle + tail)
    assert harness.cached(request_id) == 32


def test_thinking_stripped_from_history_still_hits_the_prompt() -> None:
    """B66: the next turn omits 50 generated tokens."""
    harness = Harness()
    first = harness.serve(numbered(45), 60)
    answer = harness.tokens_of(first)[-10:]
    second = harness.serve(numbered(45) + answer + numbered(5, 1))
    assert harness.cached(second) == 44


# ------------------------------------------------------------------ B42 on the scheduler
@pytest.mark.parametrize("unit", [4, 16])
def test_the_boundaries_that_are_kept_do_not_depend_on_the_load(unit: int) -> None:
    """Alone with a large budget, or in crumbs beside decoders: the same checkpoints, with the same
    reasons. (`interval` ones come on top where a crumb ends between two boundaries.)"""
    num_tokens = 7 * unit + 3
    asked = [
        (2 * unit + 1, "message"),
        (3 * unit, "history"),
        (4 * unit + 2, "marker"),
        (6 * unit, "message"),
    ]
    for geometry in geometries(unit):
        kept = set()
        for budget, num_decoders in itertools.product((1, 5, unit, unit + 3, 1000), (0, 3)):
            harness = quiet(Harness(geometry=geometry, budget=budget + num_decoders))
            for seed in range(num_decoders):
                harness.add(numbered(2, 90 + seed), 400)
            for _ in range(3):
                harness.step()
            request_id = harness.add(numbered(num_tokens), wanted=asked)
            while request_id not in harness.ended:
                harness.step()
            tokens = numbered(num_tokens)
            chain = make_chain(tokens, unit)
            path = harness.cache.match(chain, num_tokens).path
            reasons = [(n.depth * unit, n.reason) for n in path if n.states is not None]
            kept.add(tuple((p, reason) for p, reason in reasons if reason != "interval"))
        assert len(kept) == 1, kept
        [positions] = kept
        assert {3 * unit, 7 * unit} <= {p for p, _ in positions}
