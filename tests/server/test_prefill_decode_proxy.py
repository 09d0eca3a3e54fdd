"""The proxy before replicas that hang, dawdle or are gone; `tests/e2e/test_peers.py` has real ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest

FILE = Path(__file__).parents[2] / "deploy" / "prefill_decode_proxy.py"
Answer = Callable[[str], "float | int | None"]
"""Path -> status of the answer, or None for none; a float is slept for first, and the status is 200."""


@pytest.fixture(scope="module")
def proxy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prefill_decode_proxy", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Replica:
    """Speaks just enough HTTP.

    Attributes:
        paths: what it was asked for.
        num_left: connections that were closed before it had answered.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.paths: list[str] = []
        self.num_left = 0
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                lengths = [
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ]
                body = await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
                self.paths.append(path)
                said = self.answer(path)
                if isinstance(said, float):
                    await asyncio.sleep(said)
                if said is None:
                    if not await reader.read():
                        self.num_left += 1
                    return
                status = 200 if isinstance(said, float) else said
                text = json.dumps({"by": self.url, "asked": len(body)}).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Replica]:
    replica = Replica(answer)
    server = await asyncio.start_server(replica.talk, "127.0.0.1", 0)
    replica.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield replica
    finally:
        server.close()


async def ask(app: object, prompt: str) -> tuple[dict[str, object], float]:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        begin = time.monotonic()
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5})
        assert answer.status_code == 200
        return answer.json(), time.monotonic() - begin


def nothing(path: str) -> None:
    return None


def well_but_stuck(path: str) -> int | None:
    return 200 if path == "/health" else None


def ill(path: str) -> int | None:
    return 503 if path == "/health" else None


@pytest.mark.parametrize(
    ("answer", "least", "most"),
    [
        (nothing, 0.3, 2.0),  # it hangs as a whole
        (ill, 0.15, 2.0),  # its engine is dead
        (well_but_stuck, 1.0, 3.0),  # no end in sight
        (lambda path: 500, 0.0, 1.0),
    ],
)
def test_a_prefill_replica_that_gives_nothing_costs_a_bounded_time(
    proxy: ModuleType, answer: Answer, least: float, most: float
) -> None:
    async def main() -> None:
        async with serving(answer) as prefill, serving(lambda path: 200) as decode:
            patience = proxy.Patience(prefill_seconds=1.2, silence_seconds=0.2, rest_seconds=60)
            app = proxy.build([prefill.url], [decode.url], patience)
            said, seconds = await ask(app, "one")
            assert said["by"] == decode.url and least <= seconds < most
            assert prefill.paths[0] == "/v1/completions"
            if answer(prefill.paths[0]) is not None:
                return
            # It is let go, so that it need not compute what nobody waits for; and others do not wait for it.
            await asyncio.sleep(0.1)
            assert prefill.num_left >= 1
            said, seconds = await ask(app, "two")
            assert said["by"] == decode.url and seconds < 0.2
            assert prefill.paths.count("/v1/completions") == 1

    asyncio.run(main())


def test_a_prefill_replica_that_is_busy_is_waited_for(proxy: ModuleType) -> None:
    """It answers for its health while it computes for longer than a silence may last."""

    async def main() -> None:
        def slow(path: str) -> float | int:
            return 200 if path == "/health" else 1.0

        async with serving(slow) as prefill, serving(lambda path: 200) as decode:
            app = proxy.build([prefill.url], [decode.url], proxy.Patience(5.0, 0.15))
            said, seconds = await ask(app, "one")
            assert said["by"] == decode.url and 1.0 <= seconds < 4.0
            assert prefill.num_left == 0 and prefill.paths.count("/health") >= 3

    asyncio.run(main())


def test_another_replica_takes_the_place_of_one_that_rests(proxy: ModuleType) -> None:
    async def main() -> None:
        async with (
            serving(nothing) as hanging,
            serving(lambda path: 200) as sound,
            serving(lambda path: 200) as decode,
        ):
            patience = proxy.Patience(5.0, 0.1, rest_seconds=0.5)
            app = proxy.build([hanging.url, sound.url], [decode.url], patience)
            mine = next(
                prompt
                for prompt in map(str, range(100))
                if proxy.choose([hanging.url, sound.url], proxy.conversation_of({"prompt": prompt}))
                == hanging.url
            )
            await ask(app, mine)
            assert len(hanging.paths) >= 1 and not sound.paths
            num_asked = len(hanging.paths)
            await ask(app, mine)
            assert sound.paths == ["/v1/completions"] and len(hanging.paths) == num_asked
            await asyncio.sleep(0.6)
            hanging.answer = lambda path: 200
            await ask(app, mine)
            assert len(hanging.paths) == num_asked + 1 and len(sound.paths) == 1

    asyncio.run(main())


def test_a_prefill_replica_that_is_not_there_costs_nothing(proxy: ModuleType) -> None:
    async def main() -> None:
        async with serving(lambda path: 200) as gone:
            address = gone.url
        async with serving(lambda path: 200) as decode:
            said, seconds = await ask(proxy.build([address], [decode.url]), "one")
            assert said["by"] == decode.url and seconds < 1.0

    asyncio.run(main())
