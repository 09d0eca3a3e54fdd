"""Too large, too many, too slow, gone: others are served, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from tests.server.serving import Running, running_server
from tests.server.test_errors import assert_error
from tests.server.test_life import LONG, wait_for

from milepost.server import chat_run, completion_routes, middleware, streams
from milepost.server.options import ServerOptions

COMPLETIONS = "/v1/completions"
SMALL = ServerOptions(max_body_bytes=4096, heartbeat_seconds=0.1)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Running]:
    """Bodies up to 4 KiB, one request at a time, two may wait."""
    directory = tmp_path_factory.mktemp("small")
    with running_server(directory, server_options=SMALL, max_num_seqs=1, max_queued_requests=2) as running:
        yield running


@pytest.fixture
def server(small: Running) -> Iterator[Running]:
    small.wait_idle()
    yield small
    small.worker.gate.set()
    small.wait_idle()
    wait_for(lambda: small.num_open() == 0, "a request is still being answered to nobody")


def address(server: Running) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def head(server: Running, *lines: str) -> bytes:
    return "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


# ---------------------------------------------------------------- size


def test_an_announced_body_is_refused_before_it_comes(server: Running) -> None:
    with socket.create_connection(address(server), timeout=10) as connection:
        connection.sendall(head(server, "Content-Length: 1000000000000"))
        answer = connection.recv(4096)
    assert b" 413 " in answer.split(b"\r\n")[0]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_too_large" and "4096 bytes" in error["message"]


def test_a_chunked_body_is_refused_when_it_gets_too_large(server: Running) -> None:
    sent = [0]

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            sent[0] += 1
            yield b" " * 1024

    answer = httpx.post(server.url + COMPLETIONS, content=chunks(), timeout=10)
    assert_error(answer, 413, None, "4096 bytes")
    assert_error(httpx.post(server.url + COMPLETIONS, content=b" " * 4097), 413, None)
    assert_error(httpx.post(server.url + COMPLETIONS, content=b" " * 4096), 400, None)


def test_bodies_that_are_no_http(server: Running) -> None:
    """Whatever comes, the next request is served."""
    broken = [
        head(server, "Transfer-Encoding: chunked") + b"zz\r\nxx\r\n",
        head(server, "Transfer-Encoding: chunked") + b"5\r\n{}",
        head(server, "Content-Length: 10") + b"{}",
        head(server, "Content-Length: -5") + b"{}",
        head(server, "Content-Length: abc") + b"{}",
        head(server, "Content-Length: 2", "Content-Length: 3") + b"{}",
        b"\x00\xff" * 100,
        b"POST / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: " + b"x" * 100_000 + b"\r\n\r\n",
    ]
    for data in broken:
        with socket.create_connection(address(server), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not connection.recv(4096):
                        break
                except ConnectionError:
                    break
    answer = server.post(COMPLETIONS, {"prompt": "{{fine}}", "temperature": 0})
    assert answer.json()["choices"][0]["text"] == "fine"


def test_a_body_that_stands_still_is_ended(server: Running, monkeypatch) -> None:
    monkeypatch.setattr(middleware, "BODY_PAUSE_SECONDS", 0.2)
    with socket.create_connection(address(server), timeout=10) as connection:
        connection.sendall(head(server, "Content-Length: 100") + b"{")
        assert b" 408 " in connection.recv(4096)


# ---------------------------------------------------------------- queue


@contextmanager
def held(server: Running, num_waiting: int) -> Iterator[list[httpx.Response]]:
    """One request that runs and stands still, and some that wait; all are answered at the end."""
    server.worker.gate.clear()
    answers: list[httpx.Response] = []

    def ask(number: int) -> None:
        body = {"prompt": f"held {number} {{{{held {number}}}}}", "temperature": 0}
        answers.append(httpx.post(server.url + COMPLETIONS, json=body, timeout=30))

    threads = []
    for number in range(1 + num_waiting):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        if number == 0:
            wait_for(lambda: server.scheduler.num_running == 1, "nothing runs")
    # Those that wait are in the engine's inbox until the step that stands still is over; the others are
    # refused at once.
    engine = server.model.engine
    wait_for(lambda: len(engine._inbox) + len(answers) == num_waiting, "nobody waits")
    try:
        yield answers
    finally:
        server.worker.gate.set()
        for thread in threads:
            thread.join(30)


def test_a_full_queue_is_429_with_retry_after(server: Running) -> None:
    server.post(COMPLETIONS, {"prompt": "{{measured}}", "temperature": 0})
    with held(server, 4) as answers:
        assert [answer.status_code for answer in answers] == [429, 429], "while a step stands still"
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 200, 429, 429], "one runs, two wait"
    for answer in answers:
        if answer.status_code == 429:
            error = assert_error(answer, 429, None, "wait already")
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
            assert 1 <= int(answer.headers["retry-after"]) <= 600
    assert server.post(COMPLETIONS, {"prompt": "{{room}}", "temperature": 0}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_prompts_that_would_be_refused_are_not_rendered(server: Running, monkeypatch, path: str) -> None:
    """Rendering is slow, so that a flood would wait for it without bound, before any limit."""
    module = completion_routes if path == COMPLETIONS else chat_run
    name = "checked_prompts" if path == COMPLETIONS else "render"
    original = getattr(module, name)
    is_open = threading.Event()
    rendered: list[int] = []

    def slow(*arguments: Any) -> Any:
        rendered.append(1)
        assert is_open.wait(30)
        return original(*arguments)

    monkeypatch.setattr(module, name, slow)
    text = "{{answer}}"
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    body |= {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    with ThreadPoolExecutor(3) as pool:
        admitted = [pool.submit(httpx.post, server.url + path, json=body, timeout=30) for _ in range(3)]
        try:
            wait_for(lambda: len(rendered) == 3, "one runs, two may wait: three are rendered")
            for _ in range(20):
                assert_error(server.post(path, body), 429, None, "2 requests wait already")
        finally:
            is_open.set()
        assert [answer.result().status_code for answer in admitted] == [200] * 3
    assert len(rendered) == 3
    assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_full_queue_refuses_before_the_body_comes(server: Running, path: str) -> None:
    """Under twice the load half of the bodies would be read and parsed for nothing."""
    with held(server, 2):
        with socket.create_connection(address(server), timeout=10) as connection:
            lines = head(server, "Content-Length: 4000")
            connection.sendall(lines.replace(COMPLETIONS.encode(), path.encode()))
            answer = connection.recv(4096)
        assert b" 429 " in answer.split(b"\r\n")[0] and b"retry-after:" in answer.lower()
        assert server.get("/v1/models").status_code == 200
        counted = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]})
        assert counted.status_code == 200, "what waits for nothing is answered"


def test_the_time_in_the_queue_is_measured(server: Running) -> None:
    """One runs and stands still for a while: the other's time is spent waiting, not computing."""
    server.wait_idle()
    names = [f"vllm:request_{kind}_time_seconds_sum" for kind in ("queue", "prefill")]
    before = [server.metrics().get(name, 0.0) for name in names]
    with held(server, 1):
        time.sleep(0.4)
    server.wait_idle()
    queued, computed = (server.metrics()[name] - old for name, old in zip(names, before, strict=True))
    assert 0.4 <= queued and 0.4 <= computed, "one waited for its seat, the other for its first token"
    assert queued + computed < 2 * 0.4 + 5


def test_the_official_client_waits_and_comes_back(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=8, timeout=60)
    with ThreadPoolExecutor(8) as pool:
        texts = list(
            pool.map(
                lambda n: client.completions.create(
                    model="tiny", prompt=f"{{{{answer {n}}}}}", temperature=0
                ).choices[0].text,
                range(8),
            )
        )  # fmt: skip
    assert texts == [f"answer {n}" for n in range(8)]


def test_more_choices_than_may_wait_are_refused_together(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"prompt": LONG, "n": 8, "max_tokens": 400})
    assert_error(answer, 429, None)
    server.wait_idle()


def test_a_stream_that_waits_says_so(server: Running) -> None:
    body = {"prompt": "{{later}}", "temperature": 0, "stream": True}
    server.worker.gate.clear()
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=10) as answer:
        lines = answer.iter_lines()
        assert [line for line in (next(lines) for _ in range(4)) if line] == [": waiting", ": waiting"]
        server.worker.gate.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1])
    assert text == "later"


def test_comments_do_not_disturb_the_official_client(server: Running) -> None:
    server.worker.gate.clear()
    stream = server.client().completions.create(model="tiny", prompt="{{later}}", temperature=0, stream=True)
    threading.Timer(0.5, server.worker.gate.set).start()
    assert "".join(chunk.choices[0].text for chunk in stream) == "later"


# ---------------------------------------------------------------- time


def test_a_request_that_takes_too_long_is_ended(tmp_path) -> None:
    with running_server(tmp_path, server_options=ServerOptions(request_timeout=0.3)) as server:
        body = {"prompt": LONG, "max_tokens": 1900, "ignore_eos": True}
        server.worker.seconds_per_step = 0.01
        error = assert_error(server.post(COMPLETIONS, body), 504, None, "0.3 s")
        assert error["code"] == "request_timeout"
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body) as answer:
            events = [line[6:] for line in answer.iter_lines() if line]
        assert answer.status_code == 200 and events[-1] == "[DONE]"
        assert json.loads(events[-3])["error"]["code"] == "request_timeout"
        assert json.loads(events[-2])["usage"]["completion_tokens"] > 0
        server.wait_idle()


def test_a_reader_that_stops_is_cancelled_and_costs_nobody_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(streams, "STALL_SECONDS", 0.5)
    options = ServerOptions(heartbeat_seconds=0.2, max_unread_deltas=50)
    with running_server(tmp_path, server_options=options) as server:
        # Every chunk is large, so that the buffers on the way are full long before the end.
        body = {
            "prompt": LONG, "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4,
            "return_token_ids": True, "logprobs": 20, "temperature": 0,
        }  # fmt: skip
        data = json.dumps(body).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(address(server))
            slow.sendall(head(server, f"Content-Length: {len(data)}") + data)
            quick = server.post(COMPLETIONS, {"prompt": "{{quick}}", "temperature": 0})
            assert quick.json()["choices"][0]["text"] == "quick"
            server.wait_idle()
            assert server.metrics()["vllm:request_success_total{finished_reason=abort}"] == 4
            # It is let go as well: a server that drains would wait for it.
            wait_for(lambda: server.num_open() == 0, "the connection is still served")


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_while_queued(server: Running, stream: bool) -> None:
    server.worker.seconds_per_step = 0.005
    # Not as a stream: one that nobody reads is cancelled, sooner or later.
    body = {"prompt": LONG, "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=60)
        wait_for(lambda: server.scheduler.num_running == 1, "nothing runs")
        waiting = {"prompt": "other " + LONG, "max_tokens": 900, "stream": stream}
        limit = httpx.Timeout(5, read=5 if stream else 0.3)
        with (
            suppress(httpx.ReadTimeout),
            httpx.stream("POST", server.url + COMPLETIONS, json=waiting, timeout=limit) as response,
        ):
            lines = response.iter_lines()  # kept: without it the connection is closed
            assert stream and next(lines) == ": waiting"
            assert server.scheduler.num_waiting == 1
            del lines
        wait_for(lambda: server.scheduler.num_waiting == 0, "it still waits")
        assert server.scheduler.num_running == 1
        server.worker.seconds_per_step = 0.0
        usage = running.result().json()["usage"]
        assert usage["completion_tokens"] == 1500, "the one that runs is not disturbed"
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_while_a_step_stands_still(server: Running, stream: bool) -> None:
    """The request is in the inbox of an engine that is in the middle of a step."""
    with held(server, 0):
        body = {"prompt": LONG, "max_tokens": 900, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETIONS, json=body, timeout=httpx.Timeout(5, read=0.06))
        wait_for(lambda: len(server.model.engine._inbox) == 2, "the abort did not come")
    server.wait_idle()


def test_leaving_while_waiting_for_a_sibling(tmp_path) -> None:
    with running_server(tmp_path, max_model_len=4096) as server:
        prompt = LONG * 18
        counters = server.scheduler.cache.counters
        server.worker.seconds_per_step = 0.1
        with ThreadPoolExecutor(1) as pool:
            leading = pool.submit(server.post, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
            wait_for(lambda: server.scheduler.num_running == 1, "nobody leads")
            body = {"prompt": prompt + "and more", "max_tokens": 900, "stream": True}
            with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=30):
                wait_for(lambda: counters.num_sibling_waits > 0, "it does not wait")
            wait_for(lambda: server.scheduler.num_waiting == 0, "it still waits")
            server.worker.seconds_per_step = 0.0
            assert leading.result(20).status_code == 200
        server.wait_idle()
        assert len(server.scheduler.siblings) == 0
        answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_leaving_before_the_body_is_complete(server: Running, caplog) -> None:
    for data in (head(server, "Content-Length: 100") + b"{", b"POST /v1", b""):
        with socket.create_connection(address(server), timeout=10) as connection:
            connection.sendall(data)
    time.sleep(0.1)
    server.wait_idle()
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


def test_hundreds_that_leave_at_any_moment(server: Running) -> None:
    """Every fourth one stays and is answered as if it were alone."""
    body: dict[str, Any] = {"prompt": "{{bytes:stays until the end}}", "temperature": 0, "max_tokens": 99}

    def visit(number: int) -> str | None:
        if number % 4 == 0:
            for _ in range(400):
                answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=60)
                if answer.status_code != 429:
                    return answer.json()["choices"][0]["text"]
                time.sleep(0.02)
            return "never admitted"
        try:
            limit = httpx.Timeout(5, read=0.002 * (number % 30))
            httpx.post(server.url + COMPLETIONS, json={"prompt": LONG, "max_tokens": 200}, timeout=limit)
        except httpx.TransportError:
            return None
        return None

    with ThreadPoolExecutor(8) as pool:
        found = [text for text in pool.map(visit, range(60)) if text is not None]
    assert found == ["stays until the end"] * 15
    server.wait_idle()


# ---------------------------------------------------------------- prompts that cannot fit


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_two_million_characters_are_refused_before_they_are_tokenized(tmp_path, monkeypatch, path) -> None:
    with running_server(tmp_path) as server:
        tokenizer = server.model.tokenizer
        seen: list[int] = []
        encode = tokenizer.encode_array
        monkeypatch.setattr(tokenizer, "encode_array", lambda text: seen.append(len(text)) or encode(text))
        text = "word " * 400_000
        chat = {"messages": [{"role": "user", "content": text}]}
        answer = server.post(path, chat if "chat" in path else {"prompt": text})
        param = "messages" if "chat" in path else "prompt"
        error = assert_error(answer, 400, param, "characters, at least")
        assert error["code"] == "context_length_exceeded"
        assert max(seen, default=0) < 1000, "it was tokenized"
        ids = server.post(COMPLETIONS, {"prompt": [5] * 1_000_000})
        assert_error(ids, 400, "prompt", "has 1000000 tokens")


def test_counts_of_a_request_are_bounded(tmp_path) -> None:
    with running_server(tmp_path) as server:
        hello = {"role": "user", "content": "x"}
        tool = {"type": "function", "function": {"name": "f"}}
        chat = "/v1/chat/completions"
        assert_error(server.post(chat, {"messages": [hello] * 4097}), 400, "messages", "at most 4096")
        body = {"messages": [hello], "tools": [tool] * 513}
        assert_error(server.post(chat, body), 400, "tools", "at most 512")
        body = {"prompt": "a", "stop": ["x" * 3000, "y" * 3000]}
        assert_error(server.post(COMPLETIONS, body), 400, "stop", "4096")
        body = {"prompt": "a", "stop": ["x" * 2000, "y" * 2000], "max_tokens": 1}
        assert server.post(COMPLETIONS, body).status_code == 200


def num_threads() -> int:
    """Without those of the event loop's pool, which has a bound of its own."""
    return sum(not thread.name.startswith(("uvloop", "asyncio")) for thread in threading.enumerate())


def wait_until_quiet(server: Running) -> None:
    """Nothing was open for half a second; connections of clients that have gone may still be coming in."""
    deadline, quiet_since = time.monotonic() + 60, time.monotonic()
    while time.monotonic() < quiet_since + 0.5:
        if server.num_open() or server.scheduler.has_unfinished_requests:
            quiet_since = time.monotonic()
        assert time.monotonic() < deadline, "requests of clients that left are still open"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_thousand_connections_leave_no_file_thread_or_request(server: Running) -> None:
    """Clients that connect, send a part, all, or read a little, and go: by closing or by a reset."""
    rng = random.Random(7)
    data = json.dumps({"prompt": LONG, "max_tokens": 30, "stream": True}).encode()
    whole = head(server, f"Content-Length: {len(data)}") + data
    server.post(COMPLETIONS, {"prompt": "{{before}}", "temperature": 0})
    server.wait_idle()
    before = len(os.listdir("/proc/self/fd")), num_threads()

    def visit(seed: int) -> None:
        draw = random.Random(seed)
        with socket.create_connection(address(server), timeout=10) as connection:
            with suppress(OSError):
                connection.sendall(whole[: draw.choice([0, 10, len(whole) - 5, len(whole), len(whole)])])
                connection.settimeout(draw.random() * 0.02 + 0.001)
                connection.recv(draw.choice([1, 200, 4000]))
            if draw.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, [rng.randrange(1 << 30) for _ in range(1000)]))
    wait_until_quiet(server)

    def is_served() -> bool:
        """Bodies of clients that have gone may still be on their way in, and fill the queue for a moment."""
        answer = server.post(COMPLETIONS, {"prompt": "{{served}}", "temperature": 0})
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "served"

    wait_for(is_served, "the next request is not served")
    wait_until_quiet(server)
    server.wait_idle()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 2, "files are left open")
    wait_for(lambda: num_threads() == before[1], "threads are left")


@pytest.mark.slow
def test_a_stopped_client_process_disturbs_nobody(server: Running) -> None:
    """kill -STOP in the middle of a stream, others are served, kill -CONT: it reads on to the end."""
    body = {"prompt": LONG, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    script = (
        "import sys, httpx\n"
        f"with httpx.stream('POST', {server.url + COMPLETIONS!r}, json={body!r}, timeout=60) as answer:\n"
        "    for line in answer.iter_lines():\n"
        "        print(line, flush=True)\n"
    )
    server.worker.seconds_per_step = 0.005
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        client.stdout.readline()
        client.send_signal(signal.SIGSTOP)
        quick = server.post(COMPLETIONS, {"prompt": "{{quick}}", "temperature": 0})
        assert quick.json()["choices"][0]["text"] == "quick"
        client.send_signal(signal.SIGCONT)
        rest, _ = client.communicate(timeout=60)
    finally:
        client.kill()
        server.worker.seconds_per_step = 0.0
    assert rest.strip().endswith("data: [DONE]") and '"finish_reason":"length"' in rest
