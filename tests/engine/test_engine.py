"""The loop: answers, stops, aborts, failures."""

from __future__ import annotations

import threading
import time

import pytest
from tests.engine.engines import Bench, assert_accepted, collect, running_engine
from tests.support.family_geometries import FAMILIES

from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain
from milepost.engine.engine import MAX_FAILED_STEPS_IN_A_ROW
from milepost.engine.messages import EngineError, Failed, OutputDelta
from milepost.errors import RequestError

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 6


@pytest.fixture(params=[None, *FAMILIES])
def bench(request):
    cache_bytes = 4 << 20 if request.param is None else 1 << 46
    with running_engine(family=request.param, cache_bytes=cache_bytes) as bench:
        yield bench
        assert_nothing_left(bench)


def assert_nothing_left(bench: Bench) -> None:
    """Idle, sound, and no request is remembered anywhere."""
    deadline = time.monotonic() + 10
    while bench.scheduler.has_unfinished_requests or bench.worker.live:
        assert time.monotonic() < deadline, "something is left in core or worker"
        time.sleep(0.005)
    if bench.engine.is_healthy:
        stats = bench.engine.fresh_stats().result(10)
        assert stats.num_running == stats.num_waiting == 0
        assert stats.running_state_bytes == 0
        assert bench.scheduler.audit() == []


def test_an_answer_and_its_end(bench: Bench) -> None:
    text, deltas = bench.run(bench.request("say {{hello world}}"))
    assert text == "hello world"
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == 2
    assert [i for delta in deltas for i in delta.token_ids] == [*bench.tokenizer.encode("hello world"), 2]
    assert bench.recorder.num_tokens == len(bench.tokenizer.encode("hello world")) + 1


def test_length(bench: Bench) -> None:
    text, deltas = bench.run(bench.request("say {{hello world}}", max_tokens=2))
    assert deltas[-1].finish_reason == "length" and deltas[-1].stop_reason is None
    assert text == bench.tokenizer.decode(bench.tokenizer.encode("hello world")[:2])


def test_stop_strings_end_the_request_in_the_core_too(bench: Bench) -> None:
    text, deltas = bench.run(bench.request("{{bytes:one two three}}", stop=("wo th",), max_tokens=50))
    assert text == "one t"
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == "wo th"
    assert sum(len(delta.tokens) for delta in deltas) == len("one two th")
    assert bench.recorder.records[-1].num_generated_tokens == len("one two th")
    text, _ = bench.run(bench.request("{{bytes:one}}", stop=("o",)))
    assert text == ""
    text, _ = bench.run(bench.request("{{bytes:one}}", stop=("n",), include_stop_str_in_output=True))
    assert text == "on"


def test_stop_strings_wait_for_min_tokens(bench: Bench) -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=4)
    text, _ = bench.run(bench.request("{{bytes:aXbaXb}}", stop=("X",), sampling=sampling))
    assert text == "aXba"


def test_an_incomplete_code_point_at_the_end(bench: Bench) -> None:
    text, deltas = bench.run(bench.request("{{bytes:a\u00e9\U0001f600}}", max_tokens=5))
    assert text == "a\u00e9\ufffd"
    assert [delta.text for delta in deltas[:4]] == ["a", "", "\u00e9", ""]


def test_a_second_request_reuses_the_first_and_says_so(bench: Bench) -> None:
    prompt = bench.tokenizer.encode(LONG)
    first, first_deltas = bench.run(bench.request(prompt))
    computed = bench.worker.num_computed
    second, second_deltas = bench.run(bench.request(prompt))
    assert first == second
    cold, hit = first_deltas[0].reuse, second_deltas[0].reuse
    assert cold is not None and hit is not None
    assert cold.num_cached_tokens == 0 and cold.reason == "cold"
    assert hit.reason == "hit"
    assert hit.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert bench.worker.num_computed - computed == hit.num_computed_tokens + 15
    assert [reuse.num_cached_tokens for reuse in bench.recorder.reuses] == [0, hit.num_cached_tokens]
    line = bench.recorder.records[-1].log_line()
    assert f"cached_tokens={hit.num_cached_tokens}" in line and "reason=hit" in line
    assert "fox" not in line, "no text in logs"


def test_domains_do_not_share(bench: Bench) -> None:
    prompt = bench.tokenizer.encode(LONG)
    bench.run(bench.request(prompt, domain=CacheDomain(b"a")))
    _, deltas = bench.run(bench.request(prompt, domain=CacheDomain(b"b")))
    assert deltas[0].reuse is not None and deltas[0].reuse.num_cached_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache_the_answer_is_the_same(family: str) -> None:
    model = {"family": family, "cache_bytes": 1 << 46}
    with running_engine(**model) as cached, running_engine(caching=False, **model) as plain:
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7)):
            cached.run(cached.request(LONG))
            warm, deltas = cached.run(cached.request(LONG, sampling=sampling))
            cold, plain_deltas = plain.run(plain.request(LONG, sampling=sampling))
            assert warm == cold
            assert deltas[0].reuse is not None and deltas[0].reuse.num_cached_tokens > 0
            assert plain_deltas[0].reuse is not None
            assert plain_deltas[0].reuse.num_cached_tokens == 0 and plain_deltas[0].reuse.reason == "disabled"


def test_many_at_once_are_all_answered_as_alone() -> None:
    prompts = [f"{LONG}{index}" for index in range(12)]
    with running_engine(cache_bytes=1 << 20) as bench:
        alone = [bench.run(bench.request(prompt))[0] for prompt in prompts]
    with running_engine(cache_bytes=400 << 10) as bench:
        queues = [bench.submit(bench.request(prompt))[1] for prompt in prompts]
        assert [collect(events)[0] for events in queues] == alone
        assert_nothing_left(bench)


def test_abort_before_during_and_after(bench: Bench) -> None:
    bench.worker.gate.clear()
    request_id, events = bench.submit(bench.request(LONG, max_tokens=500))
    assert_accepted(events.get(timeout=10))
    bench.engine.abort(request_id)
    bench.worker.gate.set()
    assert_nothing_left(bench)
    assert bench.recorder.records[-1].finish_reason == "abort"
    request_id, events = bench.submit(bench.request(LONG, max_tokens=500))
    assert_accepted(events.get(timeout=10))
    assert isinstance(events.get(timeout=10), OutputDelta)
    bench.engine.abort(request_id)
    bench.engine.abort(request_id)
    bench.engine.abort(12345)
    assert_nothing_left(bench)
    request_id, events = bench.submit(bench.request("{{x}}"))
    collect(events)
    bench.engine.abort(request_id)
    assert len(bench.recorder.records) == 3


def test_refused_by_the_scheduler(bench: Bench) -> None:
    _, events = bench.submit(bench.request([]))
    with pytest.raises(RequestError, match="empty"):
        assert_accepted(events.get(timeout=10))
    _, events = bench.submit(bench.request([1] * 4096))
    with pytest.raises(RequestError, match="4096"):
        assert_accepted(events.get(timeout=10))
    assert bench.run(bench.request("{{still here}}"))[0] == "still here"


def test_a_failed_step_costs_its_requests_only(bench: Bench) -> None:
    bench.worker.fail_next = 1
    with pytest.raises(EngineError, match="planted failure"):
        bench.run(bench.request("{{x}}"))
    assert bench.engine.is_healthy
    assert bench.recorder.records[-1].finish_reason == "error"
    assert bench.run(bench.request("{{alive}}"))[0] == "alive"


def test_a_worker_that_keeps_failing_turns_the_engine_red(bench: Bench) -> None:
    bench.worker.fail_next = 10
    for _ in range(MAX_FAILED_STEPS_IN_A_ROW):
        with pytest.raises(EngineError):
            bench.run(bench.request("{{x}}"))
    deadline = time.monotonic() + 10
    while bench.engine.is_healthy:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert bench.engine.failure is not None and "planted failure" in bench.engine.failure
    _, events = bench.submit(bench.request("{{x}}"))
    event = events.get(timeout=10)
    assert isinstance(event, Failed) and isinstance(event.error, EngineError)
    with pytest.raises(EngineError):
        bench.engine.fresh_stats().result(10)


def test_a_broken_core_turns_the_engine_red_and_nobody_waits(bench: Bench, monkeypatch) -> None:
    bench.worker.gate.clear()
    waiting = [bench.submit(bench.request(LONG))[1] for _ in range(3)]
    monkeypatch.setattr(bench.scheduler, "commit", lambda result: 1 / 0)
    bench.worker.gate.set()
    for events in waiting:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            collect(events)
    assert not bench.engine.is_healthy
    bench.scheduler.requests.clear()
    bench.worker.live.clear()


def test_closing_ends_what_runs() -> None:
    with running_engine() as bench:
        _, events = bench.submit(bench.request(LONG, max_tokens=3000))
        assert_accepted(events.get(timeout=10))
    with pytest.raises(EngineError, match="shutting down"):
        while True:
            event = events.get(timeout=10)
            if isinstance(event, Failed):
                raise event.error


def test_reset_prefix_cache(bench: Bench) -> None:
    bench.run(bench.request(LONG))
    assert bench.engine.reset_prefix_cache().result(10) is True
    _, deltas = bench.run(bench.request(LONG))
    assert deltas[0].reuse is not None and deltas[0].reuse.num_cached_tokens == 0


def test_submitting_from_many_threads(bench: Bench) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = bench.run(bench.request(f"{{{{answer {number}}}}}"))[0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {number: f"answer {number}" for number in range(20)}


def test_retokenized_is_named(bench: Bench) -> None:
    """The model spells its answer byte by byte; encoded again from text it has fewer tokens."""
    answer = "the quick brown fox and the dog"
    prompt = bench.tokenizer.encode(LONG + "{{bytes:" + answer + "}}")
    text, deltas = bench.run(bench.request(prompt, max_tokens=100))
    assert text == answer
    again = [*prompt, *bench.tokenizer.encode(answer), 2, *bench.tokenizer.encode(" next {{x}}")]
    generated = [i for delta in deltas for i in delta.token_ids]
    differs = next(i for i, (a, b) in enumerate(zip(generated, again[len(prompt) :], strict=False)) if a != b)
    _, deltas = bench.run(bench.request(again))
    reuse = deltas[0].reuse
    assert reuse is not None
    assert reuse.reason == f"retokenized@{len(prompt) + differs}"
    assert reuse.retokenized_at == len(prompt) + differs
    assert reuse.reason_code == "retokenized"
    edited = [*prompt, *bench.tokenizer.encode("something else"), 2, *bench.tokenizer.encode(" next {{x}}")]
    reuse = bench.run(bench.request(edited))[1][0].reuse
    assert reuse is not None and reuse.retokenized_at is None and "retokenized" not in reuse.reason
    foreign = bench.run(bench.request(again, domain=CacheDomain(b"other")))[1][0].reuse
    assert foreign is not None and foreign.retokenized_at is None, "another tenant's history stays unknown"


def test_stats_snapshot_is_a_copy(bench: Bench) -> None:
    bench.run(bench.request(LONG))
    assert_nothing_left(bench)
    before = bench.engine.stats()
    counted = before.counters.num_queried_tokens
    bench.run(bench.request(LONG))
    assert before.counters.num_queried_tokens == counted
