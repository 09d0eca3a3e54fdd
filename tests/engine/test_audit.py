"""Audits of hits: what they find, what they leave alone, and that nobody waits for them."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from array import array

import pytest
from tests.engine.engines import Bench, assert_accepted, collect, running_engine

from milepost.core.hashing import KeyChain
from milepost.core.metrics import TimeCounts
from milepost.core.queues import BACKGROUND_PRIORITY
from milepost.core.request import CacheDomain
from milepost.engine.audit import (
    LOGIT_BOUNDS,
    MAX_BACKLOG,
    RESULTS,
    AuditConfig,
    AuditCounts,
    largest_difference,
    logit_bound,
)
from milepost.engine.messages import EngineError
from milepost.errors import ConfigError

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 5
EVERY_HIT = AuditConfig(1.0)


def wait_for(bench: Bench, num_audits: int) -> AuditCounts:
    """Until so many hits were audited or dropped and nothing is left to do."""
    deadline = time.monotonic() + 20
    while True:
        counts = bench.engine.audits()
        is_idle = not (bench.scheduler.has_unfinished_requests or bench.worker.live or counts.num_waiting)
        if is_idle and sum(counts.by_result().values()) >= num_audits:
            assert bench.scheduler.audit() == []
            return counts
        assert time.monotonic() < deadline, f"{counts}; {bench.scheduler.num_running} run"
        time.sleep(0.002)


def cached(deltas) -> int:
    return next(delta.reuse for delta in deltas if delta.reuse is not None).num_cached_tokens


def poison(bench: Bench, prompt: list[int], position: int, domain: CacheDomain | None = None) -> None:
    """Make the checkpoint at `position` of a prompt silently wrong."""
    node = bench.scheduler.cache.node_at(KeyChain(array("I", prompt), domain or CacheDomain(), 16), position)
    assert node is not None and node.states is not None
    bench.worker.poisoned.add(node.states[0])


# ---------------------------------------------------------------- sound caches


def test_every_hit_is_recomputed_and_equal() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        for number in range(6):
            bench.run(bench.request(f"{LONG} {number}", max_tokens=3))
        counts = wait_for(bench, 5)
        assert counts == AuditCounts(num_equal=5)


def test_audits_change_no_usage_no_counter_and_no_answer() -> None:
    """The same requests, each after the other, with and without audits in between."""

    def serve(audit: AuditConfig | None):
        with running_engine(audit=audit) as bench:
            answers = []
            for number in range(8):
                text, deltas = bench.run(bench.request(f"{LONG} {number % 3}", max_tokens=9))
                answers.append((text, [delta.token_ids for delta in deltas]))
                if audit is not None:
                    wait_for(bench, max(0, number))
            stats = bench.engine.fresh_stats().result(10)
            records = [
                dataclasses.replace(
                    record, seconds=0.0, queue_seconds=None, time_to_first_token=None, request_id=0
                )
                for record in bench.recorder.records
            ]
            assert sum(stats.counters.reuse_gaps.counts) == 7
            counted = dataclasses.replace(
                stats.counters, num_steps=0, num_prefill_tokens=0, reuse_gaps=TimeCounts()
            )
            gauges = (stats.num_running, stats.num_waiting, stats.states_by_reason, stats.used_bytes)
            return answers, records, bench.recorder.reuses, bench.recorder.num_tokens, counted, gauges

    plain, audited = serve(None), serve(EVERY_HIT)
    for without, with_audits in zip(plain, audited, strict=True):
        assert without == with_audits


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (0.1, 2), (0.25, 5), (0.5, 10), (1.0, 20)])
def test_the_share_is_one_of_hits_and_exact(rate: float, expected: int) -> None:
    """Cold requests in between, in any rhythm, take nobody's turn."""
    with running_engine(audit=AuditConfig(rate)) as bench:
        bench.run(bench.request(LONG))
        for number in range(20):
            if number % 2:
                bench.run(bench.request(f"{number} {LONG}", max_tokens=1))
            assert cached(bench.run(bench.request(LONG, max_tokens=1))[1])
        counts = wait_for(bench, expected)
        assert counts == AuditCounts(num_equal=expected)


def test_requests_that_reuse_nothing_are_never_audited() -> None:
    with running_engine(audit=EVERY_HIT) as bench, running_engine(audit=EVERY_HIT, caching=False) as off:
        for _ in range(3):
            assert cached(bench.run(bench.request(LONG, uses_cache=False))[1]) == 0
            assert cached(off.run(off.request(LONG))[1]) == 0
        assert wait_for(bench, 0) == wait_for(off, 0) == AuditCounts()


# ---------------------------------------------------------------- planted faults


def test_a_wrong_state_is_found_dropped_and_not_met_again(caplog) -> None:
    with running_engine() as clean:
        right, _ = clean.run(clean.request(LONG))
    with running_engine(audit=EVERY_HIT) as bench:
        prompt = bench.tokenizer.encode(LONG)
        reusable = (len(prompt) - 1) // 16 * 16
        assert bench.run(bench.request(prompt))[0] == right
        poison(bench, prompt, reusable)
        with caplog.at_level(logging.INFO):
            text, deltas = bench.run(bench.request(prompt, label="the-victim"))
            assert text != right and cached(deltas) == reusable, "the planted fault must show"
            counts = wait_for(bench, 1)
        assert counts.num_mismatch == 1 and counts.max_difference > 0.1
        stats = bench.engine.fresh_stats().result(10)
        condemned = {r: n for (move, r), n in stats.counters.evictions.items() if move == "condemned"}
        assert sum(condemned.values()) == counts.num_condemned_checkpoints >= 2
        assert stats.num_checkpoints == stats.num_units == 0
        (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        message = line.getMessage()
        for part in (
            "audit=mismatch", "request=the-victim", f"prompt_tokens={len(prompt)}",
            f"reused_tokens={reusable}", f"dropped_checkpoints={counts.num_condemned_checkpoints}",
        ):  # fmt: skip
            assert part in message
        assert "fox" not in caplog.text, "no text in logs"
        text, deltas = bench.run(bench.request(prompt))
        assert (text, cached(deltas)) == (right, 0), "computed again, and right"
        text, deltas = bench.run(bench.request(prompt))
        assert (text, cached(deltas)) == (right, reusable)
        assert wait_for(bench, 2).num_equal == 1


def test_a_fault_below_the_hit_is_cured_too() -> None:
    """The state that was hit was computed from a wrong one further down: both must go."""
    with running_engine() as clean:
        right, _ = clean.run(clean.request(LONG * 2))
    with running_engine(audit=EVERY_HIT) as bench:
        prompt = bench.tokenizer.encode(LONG)
        bench.run(bench.request(prompt))
        poison(bench, prompt, (len(prompt) - 1) // 16 * 16)
        longer = bench.tokenizer.encode(LONG * 2)
        bench.run(bench.request(longer, max_tokens=1))
        assert wait_for(bench, 1).num_mismatch == 1
        text, deltas = bench.run(bench.request(longer))
        assert (text, cached(deltas)) == (right, 0)


def test_other_paths_and_other_tenants_keep_theirs() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        prompt, other = bench.tokenizer.encode(LONG), bench.tokenizer.encode("numbers 0 1 2 " + LONG)
        tenant = CacheDomain(b"tenant")
        for request in (bench.request(prompt), bench.request(other), bench.request(prompt, domain=tenant)):
            bench.run(request)
        poison(bench, prompt, (len(prompt) - 1) // 16 * 16)
        bench.run(bench.request(prompt, max_tokens=1))
        assert wait_for(bench, 1).num_mismatch == 1
        assert cached(bench.run(bench.request(other, max_tokens=1))[1]) > 0
        assert cached(bench.run(bench.request(prompt, domain=tenant, max_tokens=1))[1]) > 0
        assert cached(bench.run(bench.request(prompt, max_tokens=1))[1]) == 0
        counts = wait_for(bench, 3)
        assert (counts.num_mismatch, counts.num_equal) == (1, 2)


def test_what_waits_on_a_dropped_path_does_not_drop_the_new_one() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        prompt, other = bench.tokenizer.encode(LONG), bench.tokenizer.encode("numbers 0 1 2 " + LONG)
        bench.run(bench.request(prompt))
        bench.run(bench.request(other))
        poison(bench, prompt, (len(prompt) - 1) // 16 * 16)
        bench.worker.gate.clear()
        waiting = [
            bench.submit(bench.request(ids, max_tokens=1))[1] for ids in (prompt, prompt, other, prompt)
        ]
        bench.worker.gate.set()
        for events in waiting:
            collect(events)
        counts = wait_for(bench, 4)
        assert (counts.num_mismatch, counts.num_dropped, counts.num_equal) == (1, 2, 1)


@pytest.mark.parametrize(("bound", "result"), [(1e-3, "within_bound"), (1e-5, "mismatch"), (0.0, "mismatch")])
def test_small_differences_are_judged_by_the_bound(bound: float, result: str) -> None:
    with running_engine(audit=AuditConfig(1.0, bound)) as bench:
        bench.worker.taint = 1e-4
        prompt = bench.tokenizer.encode(LONG)
        bench.run(bench.request(prompt))
        poison(bench, prompt, (len(prompt) - 1) // 16 * 16)
        bench.run(bench.request(prompt, max_tokens=1))
        counts = wait_for(bench, 1)
        assert counts.by_result() == {**dict.fromkeys(RESULTS, 0), result: 1}
        assert counts.max_difference == pytest.approx(1e-4, rel=0.01)
        assert (cached(bench.run(bench.request(prompt, max_tokens=1))[1]) > 0) == (result == "within_bound")


# ---------------------------------------------------------------- nobody waits for them


def test_no_step_of_a_user_holds_an_audit() -> None:
    with running_engine(audit=EVERY_HIT, max_num_batched_tokens=32) as bench:
        users: set[int] = set()
        bench.run(bench.request(LONG))
        for number in range(12):
            request_id, events = bench.submit(bench.request(f"{LONG} {number}", max_tokens=1 + number))
            users.add(request_id)
            if number % 3 == 0:
                collect(events)
                time.sleep(0.004)
            else:
                waiting, later = bench.submit(bench.request(f"{LONG} {number + 1}", max_tokens=2))
                users.add(waiting)
                collect(events)
                collect(later)
        counts = wait_for(bench, 1)
        assert counts.num_mismatch == 0 and counts.num_equal > 0
        steps = [ids for ids in bench.worker.chunk_log if users.intersection(ids)]
        assert steps and all(users.issuperset(ids) for ids in steps)
        preempted = bench.engine.fresh_stats().result(10).counters.num_preemptions
        assert preempted == 0


def test_a_user_who_comes_in_the_middle_of_an_audit_is_next() -> None:
    with running_engine(audit=EVERY_HIT, max_num_batched_tokens=16) as bench:
        bench.run(bench.request(LONG))
        execute = bench.worker.execute
        caught, go_on = threading.Event(), threading.Event()

        def stopping(plan):
            requests = [bench.scheduler.requests[chunk.request_id] for chunk in plan.chunks]
            if requests and requests[0].priority >= BACKGROUND_PRIORITY and plan.chunks[0].start == 32:
                caught.set()
                assert go_on.wait(10)
            return execute(plan)

        bench.worker.execute = stopping
        bench.run(bench.request(LONG, max_tokens=1))
        assert caught.wait(10), "two steps of the audit are done, the third is in flight"
        num_steps = len(bench.worker.chunk_log)
        user, events = bench.submit(bench.request("{{quick}}"))
        go_on.set()
        assert collect(events)[0] == "quick"
        later = bench.worker.chunk_log[num_steps:]
        assert [user in ids for ids in later[:3]] == [False, True, True], "only the step in flight came first"
        assert wait_for(bench, 1).num_equal == 1
        audit = later[0][0]
        num_audit_steps = sum(audit in ids for ids in bench.worker.chunk_log)
        assert num_audit_steps == math.ceil(len(bench.tokenizer.encode(LONG)) / 16), "nothing was done twice"


def test_the_backlog_is_bounded_and_what_it_cannot_hold_is_counted() -> None:
    """One more is at the scheduler, which gives it nothing as long as a user is there."""
    with running_engine(audit=AuditConfig(rate=1.0, share=0.0), max_model_len=8192) as bench:
        bench.run(bench.request(LONG))
        _, endless = bench.submit(bench.request("numbers", max_tokens=4000))
        assert_accepted(endless.get(timeout=10))
        for _ in range(MAX_BACKLOG + 5):
            assert cached(bench.run(bench.request(LONG, max_tokens=1))[1])
        counts = bench.engine.audits()
        assert counts == AuditCounts(num_dropped=4, num_waiting=MAX_BACKLOG)
        for request_id in list(bench.scheduler.requests):
            if bench.scheduler.requests[request_id].priority < BACKGROUND_PRIORITY:
                bench.engine.abort(request_id)
        counts = wait_for(bench, MAX_BACKLOG + 5)
        assert counts == AuditCounts(num_dropped=4, num_equal=MAX_BACKLOG + 1)


def test_a_server_that_is_never_idle_audits_too() -> None:
    with running_engine(audit=EVERY_HIT, background_share=1.0, max_model_len=8192) as bench:
        bench.run(bench.request(LONG))
        _, endless = bench.submit(bench.request("numbers", max_tokens=4000))
        assert_accepted(endless.get(timeout=10))
        for number in range(3):
            assert cached(bench.run(bench.request(LONG, max_tokens=1))[1])
            deadline = time.monotonic() + 20
            while bench.engine.audits().num_equal <= number:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        assert bench.scheduler.has_unfinished_requests, "a user was there all the time"


def test_closing_with_a_backlog_leaves_nothing() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        bench.run(bench.request(LONG))
        bench.worker.gate.clear()
        waiting = [bench.submit(bench.request(LONG, max_tokens=500))[1] for _ in range(3)]
        for events in waiting:
            assert_accepted(events.get(timeout=10))
    counts = bench.engine.audits()
    assert counts.num_waiting == 0
    assert sum(counts.by_result().values()) == counts.num_dropped <= 3
    assert bench.worker.closed


def test_an_audit_that_fails_is_dropped_and_costs_nobody_anything() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        bench.run(bench.request(LONG))
        execute = bench.worker.execute

        def failing(plan):
            if any(chunk.start == 0 for chunk in plan.chunks):
                bench.worker.fail_next = 1
            return execute(plan)

        bench.worker.execute = failing
        bench.run(bench.request(LONG, max_tokens=1))
        counts = wait_for(bench, 1)
        bench.worker.execute = execute
        assert counts == AuditCounts(num_dropped=1)
        assert bench.engine.is_healthy
        assert cached(bench.run(bench.request(LONG, max_tokens=1))[1]) > 0
        assert wait_for(bench, 2) == AuditCounts(num_dropped=1, num_equal=1)


def test_a_reset_cache_disturbs_no_audit() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        for _ in range(3):
            bench.run(bench.request(LONG, max_tokens=1))
            bench.engine.reset_prefix_cache().result(10)
            bench.run(bench.request(LONG, max_tokens=1))
            bench.run(bench.request(LONG, max_tokens=1))
        counts = wait_for(bench, 4)
        assert counts.num_mismatch == counts.num_dropped == 0 and counts.num_equal >= 4


def test_an_aborted_hit_is_not_audited() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        bench.run(bench.request(LONG))
        bench.worker.gate.clear()
        request_id, events = bench.submit(bench.request(LONG))
        assert_accepted(events.get(timeout=10))
        bench.engine.abort(request_id)
        bench.worker.gate.set()
        assert sum(wait_for(bench, 0).by_result().values()) <= 1


def test_a_worker_that_keeps_failing_ends_audits_too() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        bench.run(bench.request(LONG))
        bench.worker.fail_next = 100
        for _ in range(5):
            with pytest.raises(EngineError):
                bench.run(bench.request(LONG))
        deadline = time.monotonic() + 10
        while bench.engine.is_healthy:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert bench.engine.audits().num_waiting == 0


# ---------------------------------------------------------------- arithmetic


def test_differences() -> None:
    row = array("f", [1.0, -2.0, 0.5]).tobytes()
    assert largest_difference(row, row) == 0.0
    assert largest_difference(row, array("f", [1.0, -2.25, 0.625]).tobytes()) == 0.25
    assert largest_difference(row, row[:-4]) == math.inf
    assert largest_difference(row, array("f", [1.0, math.nan, 0.5]).tobytes()) == math.inf
    assert largest_difference(array("f", [0.0]).tobytes(), array("f", [-0.0]).tobytes()) == 0.0


def test_minus_zero_is_not_zero_where_bits_are_promised() -> None:
    with running_engine(audit=EVERY_HIT) as bench:
        bench.worker.taint = -0.0
        prompt = bench.tokenizer.encode(LONG)
        bench.run(bench.request(prompt))
        scores = bench.worker._scores
        bench.worker._scores = lambda tokens, live: [
            -0.0 if live.is_tainted else 0.0, *scores(tokens, live)[1:]
        ]  # fmt: skip
        poison(bench, prompt, (len(prompt) - 1) // 16 * 16)
        bench.run(bench.request(prompt, max_tokens=1))
        assert wait_for(bench, 1).num_mismatch == 1


@pytest.mark.parametrize("rate", [-0.1, 1.01, math.nan, math.inf])
def test_rates_that_cannot_work(rate: float) -> None:
    with pytest.raises(ConfigError, match="audit_hits"):
        AuditConfig(rate)


def test_native_kernels_promise_bits() -> None:
    assert logit_bound(True, "bfloat16") == logit_bound(True, "float32") == 0.0
    assert logit_bound(False, "float32") == LOGIT_BOUNDS["float32"] == 1e-3
    assert logit_bound(False, "bfloat16") == LOGIT_BOUNDS["bfloat16"]
