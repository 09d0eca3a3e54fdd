"""Clients that stop, vanish or talk nonsense to a server with the embedded model: nobody else notices.

What the tensor-less server shows is in tests/server/test_load_and_abuse.py. Here clients leave at moments
that are counted, so that none of the ways to leave is left out, and bodies are damaged at random.
"""

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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.server import streams
from milepost.server.app import Server, bind
from milepost.server.options import ServerOptions

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a keeper of a lighthouse who counted ships. " * 6
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
COMPLETIONS = "/v1/completions"
MAX_NUM_SEQS = 2
MAX_QUEUED = 8


class Served:
    """A server in a thread of this process."""

    def __init__(self, url: str, model: ServingModel) -> None:
        self.url = url
        self.model = model
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def ask(self) -> dict[str, Any]:
        """The same question every time; waits for its place."""
        for _ in range(1000):
            answer = self.http.post(COMPLETIONS, json=ASKED)
            if answer.status_code != 429:
                break
            time.sleep(0.05)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def check(self, expected: str) -> None:
        """The next request is answered as ever, then nothing is held and the cache is sound."""
        answer = self.ask()
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        deadline = time.monotonic() + 30
        while self.model.engine.look(lambda core, _: core.has_unfinished_requests).result(30):
            assert time.monotonic() < deadline, "requests of clients that left are not over"
            time.sleep(0.01)
        assert self.model.engine.act(lambda core, _: core.audit()).result(30) == []
        stats = self.model.engine.fresh_stats().result(30)
        assert (stats.num_running, stats.num_waiting, stats.running_state_bytes) == (0, 0, 0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ServingOptions(cache_bytes=48 << 20, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=MAX_QUEUED)
    model = load_serving_model(None, options)
    addresses: list[str] = []
    listening = threading.Event()

    def on_listening(url: str) -> None:
        addresses.append(url)
        listening.set()

    listener = bind(port=0)
    # Accepted connections inherit it: a reader that stops is felt after some answers, not megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    server = Server(
        lambda: model, listener, on_listening, ServerOptions(heartbeat_seconds=0.02, max_unread_deltas=64)
    )
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert listening.wait(60)
    while httpx.get(f"{addresses[0]}/health", trust_env=False).status_code != 200:
        time.sleep(0.02)
    try:
        yield Served(addresses[0], model)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def expected(served: Served) -> str:
    text: str = served.ask()["choices"][0]["text"]
    assert text
    return text


def request_bytes(body: bytes, *headers: str) -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


# ---------------------------------------------------------------- a client that is stopped

CLIENT = """
import json, socket, sys
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
connection.connect((host, port))
connection.sendall(sys.stdin.buffer.read())
received = 0
while data := connection.recv(1024):
    received += len(data)
    print(received, flush=True)
    if b"[DONE]" in data:
        break
"""


def start_client(served: Served, body: dict[str, Any], receive_buffer: int) -> subprocess.Popen[bytes]:
    data = json.dumps(body | {"stream": True}).encode()
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *map(str, served.address), str(receive_buffer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdin is not None and client.stdout is not None
    client.stdin.write(request_bytes(data, f"Content-Length: {len(data)}"))
    client.stdin.close()
    client.stdout.readline()  # the stream has begun
    client.send_signal(signal.SIGSTOP)
    return client


def num_aborted(served: Served) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    name = "vllm:request_success_total{"
    return sum(float(x.split()[-1]) for x in lines if x.startswith(name) and 'finished_reason="abort"' in x)


def test_a_client_that_stays_stopped_is_cancelled(served: Served, expected: str, monkeypatch) -> None:
    """Its buffers fill up; whether it is ever continued makes no difference to anybody."""
    monkeypatch.setattr(streams, "STALL_SECONDS", 1.0)
    before = num_aborted(served)
    large = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "logprobs": 20, "temperature": 0}
    client = start_client(served, large, 4096)
    try:
        for _ in range(3):
            assert served.ask()["choices"][0]["text"] == expected, "others are served meanwhile"
        deadline = time.monotonic() + 90
        while num_aborted(served) == before:
            assert time.monotonic() < deadline, "the request of a stopped client goes on for ever"
            time.sleep(0.1)
        served.check(expected)
        client.send_signal(signal.SIGCONT)
        assert client.stdout is not None
        client.stdout.read()
        assert client.wait(30) is not None, "it sees the end of its connection"
    finally:
        client.kill()
        client.wait()
    served.check(expected)


def test_a_client_that_is_killed_while_it_is_stopped(served: Served, expected: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
    before = num_aborted(served)
    client = start_client(served, body, 1 << 16)
    assert served.ask()["choices"][0]["text"] == expected
    client.kill()
    client.wait()
    served.check(expected)
    assert num_aborted(served) == before + 1


def test_a_client_that_goes_on_gets_the_rest(served: Served, expected: str) -> None:
    client = start_client(served, {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}, 1 << 16)
    try:
        assert served.ask()["choices"][0]["text"] == expected
        served.check(expected)
        client.send_signal(signal.SIGCONT)
        assert client.wait(60) == 0
    finally:
        client.kill()
        client.wait()


# ---------------------------------------------------------------- a thousand that leave

MOMENTS = ("in headers", "in body", "queued", "at first token", "while streaming")


class Visitor:
    """Connects, waits for its moment, and leaves: by closing, or with a reset."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._rng = random.Random(seed)

    def visit(self, moment: str) -> str | None:
        """The moment if it came to that; a request that is refused or quick may miss its own."""
        prompt = f"{self._rng.randrange(50)} {PROMPT}"
        body = json.dumps({"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
        head = request_bytes(b"", f"Content-Length: {len(body)}")
        with socket.create_connection(self._served.address, timeout=30) as connection:
            reached = self._reach(connection, moment, head, body)
            if self._rng.random() < 0.4:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return moment if reached else None

    def _reach(self, connection: socket.socket, moment: str, head: bytes, body: bytes) -> bool:
        if moment == "in headers":
            connection.sendall(head[: self._rng.randrange(len(head) - 1)])
            return True
        if moment == "in body":
            connection.sendall(head + body[: self._rng.randrange(len(body) - 1)])
            return True
        connection.sendall(head + body)
        received = b""
        num_events = 1 if moment == "at first token" else self._rng.randrange(2, 12)
        while True:
            data = connection.recv(4096)
            if not data or b"HTTP/1.1 429" in received + data:
                return False
            received += data
            if moment == "queued" and b": waiting" in received:
                return b"data: {" not in received
            if moment != "queued" and received.count(b"data: {") >= num_events and b"[DONE]" not in received:
                return True
            if b"[DONE]" in received:
                return False


@pytest.mark.timeout(900)
def test_a_thousand_leave_at_every_moment(served: Served, expected: str) -> None:
    rng = random.Random(11)
    jobs = [(rng.choice(MOMENTS), rng.randrange(1 << 30)) for _ in range(1000)]
    num_files = len(os.listdir("/proc/self/fd"))
    answers: list[str] = []
    is_over = threading.Event()

    def stay() -> None:
        while not is_over.is_set():
            answers.append(served.ask()["choices"][0]["text"])

    def visit(job: tuple[str, int]) -> str | None:
        with suppress(ConnectionError):
            return Visitor(served, job[1]).visit(job[0])
        return None

    staying = threading.Thread(target=stay)
    staying.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            reached = Counter(pool.map(visit, jobs))
    finally:
        is_over.set()
        staying.join(60)
    print(dict(reached), len(answers), "answers to one that stayed")
    assert all(reached[moment] >= 10 for moment in MOMENTS), reached
    assert answers and set(answers) == {expected}
    served.check(expected)
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > num_files + 2:
        assert time.monotonic() < deadline, "files are left open"
        time.sleep(0.05)


# ---------------------------------------------------------------- damaged chunks


def chunked(body: bytes, rng: random.Random) -> bytes:
    """The body in chunks of random sizes, in the form HTTP/1.1 gives them."""
    parts = []
    while body:
        size = rng.randint(1, 200)
        parts.append(b"%x\r\n" % len(body[:size]) + body[:size] + b"\r\n")
        body = body[size:]
    return b"".join(parts) + b"0\r\n\r\n"


def damaged(sound: bytes, rng: random.Random) -> bytes:
    """A chunked body, cut, doubled, replaced or filled with something bad in one or two places."""
    data = bytearray(sound)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 2:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 3:
            data[at:at] = rng.choice(
                [b"\r\n", b"\n", b"\x00", b"0\r\n\r\n", b"-1\r\n", b"ffffffffffffffff\r\n"]
            )
        elif kind == 4:
            data[at:at] = data[max(0, at - 30) : at]
        else:
            data[0:0] = rng.choice([b"0x10\r\n", b" 5\r\n", b"5;a=b\r\n", b"+5\r\n", b"5 \r\n", b"g\r\n"])
        if not data:
            break
    return bytes(data)


def first_status(served: Served, data: bytes) -> int | None:
    """Status of the first answer; None if the connection ended without one."""
    received = b""
    with socket.create_connection(served.address, timeout=1) as connection, suppress(ConnectionError):
        connection.sendall(data)
        while True:
            try:
                piece = connection.recv(4096)
            except TimeoutError:  # the server waits for the rest of the body: there is none
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(60)
                continue
            if not piece:
                break
            received += piece
    return int(received.split()[1]) if received.startswith(b"HTTP/1.1 ") else None


def test_damaged_chunked_bodies(served: Served, expected: str) -> None:
    rng = random.Random(5)
    body = json.dumps(ASKED).encode()
    head = ("Connection: close", "Transfer-Encoding: chunked")
    assert first_status(served, request_bytes(chunked(body, rng), *head)) == 200, "a sound one is served"
    statuses: Counter[int | None] = Counter()
    for number in range(200):
        statuses[first_status(served, request_bytes(damaged(chunked(body, rng), rng), *head))] += 1
        if number % 50 == 49:
            served.check(expected)
    print(dict(statuses))
    assert set(statuses) <= {None, 200, 400, 429}, "whatever comes is no fault of the server"
    assert statuses[400] > 50


def test_two_lengths_are_not_two_requests(served: Served, expected: str) -> None:
    """A body with a length and chunks must not be read in two ways."""
    inner = request_bytes(b"{}", "Content-Length: 2")
    data = request_bytes(
        b"0\r\n\r\n" + inner, f"Content-Length: {5 + len(inner)}", "Transfer-Encoding: chunked"
    )
    received = b""
    with socket.create_connection(served.address, timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := connection.recv(4096):
                received += piece
    assert received.count(b"HTTP/1.1 ") <= 1
    assert b" 200 " not in received
    served.check(expected)
