"""Requests nobody would write: from the OpenAPI page (schemathesis), and bytes that are hardly HTTP."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.server.serving import HTTP, Running, running_server
from tests.server.test_life import wait_for

from milepost.server.options import ServerOptions

schemathesis = pytest.importorskip("schemathesis")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KEY = "fuzz-key"
OPTIONS = ServerOptions(api_keys=(KEY,), max_body_bytes=64 << 10)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory) -> Iterator[Running]:
    """Short contexts: what a fuzzer asks for should end soon."""
    directory = tmp_path_factory.mktemp("fuzzed")
    with running_server(directory, server_options=OPTIONS, max_model_len=64) as running:
        yield running
        running.wait_idle()
        wait_for(lambda: running.num_open() == 0, "requests are still open")


def assert_alive(server: Running) -> None:
    """The next request is served normally, and the core is sound."""
    body = {"prompt": "{{alive}}", "temperature": 0}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEY})
    assert answer.json()["choices"][0]["text"] == "alive"
    wait_for(lambda: server.num_open() == 0, "requests of clients that left are still open")
    server.wait_idle()


def test_whatever_the_page_allows_is_answered(fuzzed: Running) -> None:
    """Never 500; an error is JSON in the form of its API, and says something."""
    headers = {"x-api-key": KEY}
    schema = schemathesis.openapi.from_dict(HTTP.get(f"{fuzzed.url}/openapi.json", headers=headers).json())
    seen: set[tuple[str, int]] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # another name ends it at the first check
            answer = case.call(base_url=fuzzed.url, headers=headers, timeout=30)
            seen.add((case.operation.path, answer.status_code))
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and error["type"]

        send()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= {path for path, _ in seen}
    assert ("/v1/completions", 400) in seen and ("/tokenize", 200) in seen, seen
    assert_alive(fuzzed)


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_are_hardly_http(fuzzed: Running, seed: int) -> None:
    """Valid requests with bytes changed, cut, doubled, and sent in pieces."""
    rng = random.Random(seed)
    host, port = fuzzed.url.removeprefix("http://").split(":")
    body = b'{"prompt": "the quick fox", "max_tokens": 3, "stream": true}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: fuzz-key\r\n"
    valid = [
        post + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer fuzz-key\r\n\r\n",
        b"HEAD /health HTTP/1.0\r\n\r\n",
    ]
    for _ in range(60):
        data = bytearray(rng.choice(valid) * rng.randrange(1, 3))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[place] = rng.randrange(256)
            elif kind == 1:
                del data[place : place + rng.randrange(1, 8)]
            elif kind == 2:
                data[place:place] = rng.choice([b"\r\n", b"\x00", b":", b" ", b"\xff\xfe", b"0\r\n\r\n"])
            else:
                data[place:place] = data[place : place + rng.randrange(1, 30)]
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.settimeout(0.2)
            try:
                while data:
                    size = rng.randrange(1, len(data) + 1)
                    connection.sendall(bytes(data[:size]))
                    del data[:size]
                if rng.random() < 0.5:
                    connection.recv(4096)
            except OSError:
                pass
    assert_alive(fuzzed)
