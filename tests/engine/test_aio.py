"""The asyncio front: order, slow readers, leaving early, a dead engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.engine.engines import Bench, running_engine

from milepost.engine.aio import AnswerStream, AsyncEngine
from milepost.engine.messages import (
    EngineError,
    EngineOverloaded,
    EngineStopped,
    ReaderTooSlow,
    RequestTimedOut,
)
from milepost.errors import RequestError

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 3


def run(
    scenario: Callable[[Bench, AsyncEngine], Awaitable[None]],
    front_options: dict[str, Any] | None = None,
    **options,
) -> None:
    """`scenario` in a fresh loop over a fresh engine, which must be idle and sound afterwards."""

    async def inside(bench: Bench) -> None:
        front = AsyncEngine(bench.engine, **(front_options or {}))
        try:
            await asyncio.wait_for(scenario(bench, front), 30)
            if bench.engine.is_healthy:
                stats = await front.fresh_stats()
                while stats.num_running or stats.num_waiting:
                    await asyncio.sleep(0.005)
                    stats = await front.fresh_stats()
        finally:
            front.close()

    with running_engine(**options) as bench:
        asyncio.run(inside(bench))
        deadline = time.monotonic() + 10
        while bench.engine.is_healthy and bench.worker.live:
            assert time.monotonic() < deadline, "the worker still holds a request"
            time.sleep(0.005)
        assert bench.scheduler.audit() == []


async def text_of(stream: AnswerStream) -> str:
    return "".join([delta.text async for delta in stream])


def test_answers_come_to_their_own_streams() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        streams = [front.submit(bench.request(f"{{{{bytes:answer {n}}}}}", max_tokens=99)) for n in range(20)]
        for stream in streams:
            await stream.accepted()
        assert await asyncio.gather(*map(text_of, streams)) == [f"answer {n}" for n in range(20)]
        assert [delta async for delta in streams[0]] == [], "an ended stream stays ended"

    run(scenario)


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        idle = front.submit(bench.request("{{bytes:" + "x" * 300 + "}}", max_tokens=999))
        assert await text_of(front.submit(bench.request("{{quick}}"))) == "quick"
        stats = await front.fresh_stats()
        while stats.num_running:
            await asyncio.sleep(0.005)
            stats = await front.fresh_stats()
        assert await text_of(idle) == "x" * 300, "all of it waited for its reader"

    run(scenario)


def test_leaving_a_stream_aborts_the_request() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        async with front.submit(bench.request(LONG, max_tokens=3000)) as stream:
            async for _ in stream:
                break
        await stream.aclose()

        async def read() -> None:
            async with front.submit(bench.request(LONG, max_tokens=3000)) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while len(bench.recorder.records) < 2:
            await asyncio.sleep(0.005)
        assert [record.finish_reason for record in bench.recorder.records] == ["abort", "abort"]
        assert all(record.num_generated_tokens < 2000 for record in bench.recorder.records)

    run(scenario)


def test_refusals_and_failures_reach_the_reader() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="empty"):
            await front.submit(bench.request([])).accepted()
        bench.worker.fail_next = 1
        stream = front.submit(bench.request("{{x}}"))
        await stream.accepted()
        with pytest.raises(EngineError, match="planted"):
            await text_of(stream)

    run(scenario)


def test_a_dead_engine_answers_at_once() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        bench.worker.fail_next = 100
        while bench.engine.is_healthy:
            with pytest.raises(EngineError):
                await text_of(front.submit(bench.request("{{x}}")))
        with pytest.raises(EngineStopped, match="planted"):
            await front.submit(bench.request("{{x}}")).accepted()
        with pytest.raises(EngineStopped):
            await front.reset_prefix_cache()

    run(scenario)


def test_a_loop_that_is_gone_does_not_stop_the_engine() -> None:
    with running_engine() as bench:

        async def leave() -> None:
            AsyncEngine(bench.engine).submit(bench.request(LONG, max_tokens=50))

        asyncio.run(leave())
        assert bench.run(bench.request("{{alive}}"))[0] == "alive"


def test_a_reader_that_falls_too_far_behind_is_cancelled() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        idle = front.submit(bench.request("{{bytes:" + "x" * 300 + "}}", max_tokens=999))
        await idle.accepted()
        while not bench.recorder.records:
            await asyncio.sleep(0.005)
        assert bench.recorder.records[0].finish_reason == "abort"
        assert bench.recorder.records[0].num_generated_tokens < 300
        assert len(idle._events) == 1, "what it did not read is let go"
        with pytest.raises(ReaderTooSlow):
            await text_of(idle)
        assert [delta async for delta in idle] == []
        bench.worker.seconds_per_step = 0.002  # this loop shares its core with others
        reads = front.submit(bench.request("{{bytes:" + "y" * 50 + "}}", max_tokens=999))
        assert await text_of(reads) == "y" * 50

    run(scenario, {"max_unread_deltas": 20})


@pytest.mark.parametrize("waits", [False, True], ids=["while it runs", "while it waits"])
def test_a_request_that_takes_too_long_is_ended(waits: bool) -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        quick = front.submit(bench.request("{{quick}}"))
        assert await text_of(quick) == "quick"
        if waits:
            bench.worker.gate.clear()
        slow = front.submit(bench.request(LONG, max_tokens=3500))
        begun = time.monotonic()
        with pytest.raises(RequestTimedOut, match=r"0\.3 s"):
            await text_of(slow)
        assert time.monotonic() - begun < 5
        bench.worker.gate.set()

    run(scenario, {"request_timeout": 0.3})


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def scenario(bench: Bench, front: AsyncEngine) -> None:
        await text_of(front.submit(bench.request("{{first}}")))
        bench.worker.gate.clear()
        running = front.submit(bench.request("{{running}}"))
        while not (await asyncio.sleep(0.005, bench.scheduler.num_running)):
            pass
        waiting = [front.submit(bench.request(f"{{{{waiting {n}}}}}")) for n in range(3)]
        bench.worker.gate.set()
        refused = 0
        for stream in waiting:
            try:
                await stream.accepted()
            except EngineOverloaded as error:
                refused += 1
                assert 1 <= error.retry_after_seconds <= 600
        assert refused == 1, "one runs, two may wait"
        assert await text_of(running) == "running"
        assert await text_of(waiting[0]) == "waiting 0"
        assert await text_of(waiting[1]) == "waiting 1"
        assert await text_of(front.submit(bench.request("{{room again}}"))) == "room again"

    run(scenario, max_num_seqs=1, max_queued_requests=2)
