"""Event streams end, whatever their heartbeat does at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from milepost.server.streams import DONE, EventStream


async def one_event(seconds: float) -> AsyncGenerator[dict[str, Any], None]:
    await asyncio.sleep(seconds)
    yield {"n": 1}


async def serve(seconds: float, heartbeat: float, client_leaves: float | None = None) -> list[bytes]:
    """Bodies that were sent."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(3600 if client_leaves is None else client_leaves)
        return {"type": "http.disconnect"}

    stream = EventStream(one_event(seconds), lambda: None, heartbeat_seconds=heartbeat)
    await stream({"type": "http"}, receive, send)
    return sent


def test_a_heartbeat_that_comes_with_the_end_holds_nothing_up() -> None:
    """An end that cancels the heartbeat while it takes the lock was lost once in a few thousand streams."""

    async def many() -> None:
        for number in range(40):
            delays = [0.002 + 0.00002 * (number % 20) for _ in range(40)]
            ended = await asyncio.gather(*(serve(delay, 0.002) for delay in delays))
            assert all(sent[-1] == DONE for sent in ended)
            left = await asyncio.gather(*(serve(3600, 0.002, client_leaves=delay) for delay in delays))
            assert not any(DONE in sent for sent in left)

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await many()

    asyncio.run(bounded())


def test_heartbeats_fill_the_silence() -> None:
    sent = asyncio.run(serve(0.1, 0.02))
    assert 2 <= sent.count(b": waiting\n\n") <= 5
    assert sent[-2:] == [b'data: {"n":1}\n\n', DONE]
