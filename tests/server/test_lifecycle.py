"""Loading, ready, draining, dead: what `/health` and requests get in each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, write_model_directory
from tests.server.serving import HTTP, running_server, serving_model
from tests.server.test_errors import assert_error
from tests.server.test_life import LONG, wait_for

from milepost.errors import ConfigError, InvariantError
from milepost.server.app import EngineDied, Server, bind
from milepost.server.options import ServerOptions

COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}


@contextmanager
def serving(load, options: ServerOptions | None = None) -> Iterator[tuple[str, Server, list[BaseException]]]:
    """Base URL at once, the server, and what it raised."""
    raised: list[BaseException] = []
    listener = bind(port=0)
    host, port = listener.getsockname()[:2]
    server = Server(load, listener, options=options)

    def serve() -> None:
        try:
            server.serve_until_stopped()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    wait_for(lambda: server.started or raised, "it does not listen")
    try:
        yield f"http://{host}:{port}", server, raised
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_a_server_listens_while_it_loads(tmp_path: Path) -> None:
    write_model_directory(tmp_path, template=KIMI_TEMPLATE)
    go_on = threading.Event()

    def load():
        assert go_on.wait(20)
        return serving_model(tmp_path, cache_bytes=4 << 20)[0]

    with serving(load) as (url, _, raised):
        for method, path in (
            ("GET", "/health"),
            ("POST", COMPLETIONS),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
        ):
            answer = HTTP.request(method, url + path)
            assert_error(answer, 503, None, "being loaded")
            assert int(answer.headers["retry-after"]) >= 1
        assert HTTP.head(f"{url}/health").status_code == 503
        assert HTTP.get(f"{url}/version").status_code == 200
        go_on.set()
        wait_for(lambda: HTTP.get(f"{url}/health").status_code == 200, "it does not get ready")
        assert HTTP.head(f"{url}/health").status_code == 200
        answer = HTTP.post(url + COMPLETIONS, json={"prompt": "{{hi}}", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "hi"
    assert raised == []


def test_the_warm_up_is_through_before_it_is_ready_and_leaves_no_trace(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        assert server.worker.num_computed > 0, "something was computed before the first request"
        metrics = server.metrics()
        assert metrics["vllm:prefix_cache_queries_total"] == metrics["vllm:generation_tokens_total"] == 0
        assert metrics["vllm:request_success_total{finished_reason=length}"] == 0
        assert metrics["milepost:cached_units"] == 0
        server.wait_idle()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    def load():
        raise ConfigError("cache_bytes", "planted")

    with serving(load) as (_, _, raised):
        wait_for(lambda: bool(raised), "it goes on without a model")
    assert isinstance(raised[0], ConfigError)


def test_a_model_that_fails_its_warm_up_ends_the_server(tmp_path: Path) -> None:
    write_model_directory(tmp_path, template=KIMI_TEMPLATE)
    model, worker, _ = serving_model(tmp_path, cache_bytes=4 << 20)
    worker.fail_next = 1
    with serving(lambda: model) as (_, _, raised):
        wait_for(lambda: bool(raised), "it serves a model that cannot answer")
    assert "planted failure" in str(raised[0])
    assert worker.closed


def test_draining_finishes_what_is_open_and_admits_nothing(tmp_path: Path) -> None:
    write_model_directory(tmp_path, template=KIMI_TEMPLATE)
    model, worker, scheduler = serving_model(tmp_path, cache_bytes=4 << 20)
    with serving(lambda: model, ServerOptions(drain_seconds=20)) as (url, server, raised):
        wait_for(lambda: HTTP.get(f"{url}/health").status_code == 200, "it does not get ready")
        worker.seconds_per_step = 0.02
        with HTTP.stream("POST", url + COMPLETIONS, json=STREAM) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.should_exit = True
            wait_for(lambda: server._state.phase.value == "draining", "it goes on")
            for method, path in (("POST", COMPLETIONS), ("GET", "/health"), ("POST", "/v1/chat/completions")):
                answer = httpx.request(method, url + path)
                assert_error(answer, 503, None, "shutting down")
                assert answer.headers["retry-after"] == "20"
            events = [line[6:] for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        begun = time.monotonic()
        wait_for(lambda: worker.closed, "it does not end")
        assert time.monotonic() - begun < 5, "it ends as soon as nothing is open"
    assert raised == [] and scheduler.audit() == []


def test_a_step_that_breaks_the_core_fails_what_runs_and_ends_the_server(tmp_path: Path) -> None:
    write_model_directory(tmp_path, template=KIMI_TEMPLATE)
    model, worker, scheduler = serving_model(tmp_path, cache_bytes=4 << 20)
    options = ServerOptions(red_seconds=1.0)
    with serving(lambda: model, options) as (url, _, raised):
        wait_for(lambda: HTTP.get(f"{url}/health").status_code == 200, "it does not get ready")

        def broken(result):
            raise InvariantError("planted")

        worker.gate.clear()
        answers: list[httpx.Response] = []
        bodies = [{"prompt": LONG, "max_tokens": 5}, {"prompt": LONG, "max_tokens": 5, "stream": True}]
        threads = [
            threading.Thread(
                target=lambda b=body: answers.append(httpx.post(url + COMPLETIONS, json=b, timeout=20))
            )
            for body in bodies
        ]
        threads[0].start()
        wait_for(lambda: scheduler.num_running == 1, "nothing runs")
        threads[1].start()
        scheduler.commit = broken
        worker.gate.set()
        for thread in threads:
            thread.join(20)
        statuses = {answer.status_code for answer in answers}
        assert 500 in statuses and statuses <= {200, 500, 503}, "what ran failed, it was not only refused"
        assert_error(HTTP.get(f"{url}/health"), 503, None, "planted")
        assert_error(HTTP.post(url + COMPLETIONS, json={"prompt": "a"}), 503, None, "planted")
        wait_for(lambda: bool(raised), "it lives on half dead")
    assert isinstance(raised[0], EngineDied) and "planted" in str(raised[0])


@pytest.mark.parametrize("number", ["abc-1", "req_2024/07:3@x~y=z+1.5", "x" * 128])
def test_a_request_id_is_taken_over_and_echoed(shared_server, number: str, caplog) -> None:
    caplog.set_level("INFO", logger="milepost.request")
    body = {"prompt": "{{hi}}", "temperature": 0}
    answer = HTTP.post(shared_server.url + COMPLETIONS, json=body, headers={"X-Request-Id": number})
    assert answer.headers["x-request-id"] == number
    assert answer.json()["id"] == f"cmpl-{number}"
    wait_for(lambda: any(f"request=cmpl-{number} " in r.getMessage() for r in caplog.records), "not logged")
    stream = HTTP.post(
        shared_server.url + "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True},
        headers={"X-Request-Id": number},
    )
    assert stream.headers["x-request-id"] == number
    assert f'"id":"chatcmpl-{number}"' in stream.text


@pytest.mark.parametrize("number", [None, "", "x" * 129, "a b", 'a"b', "ä".encode(), "a,b", "a\tb"])
def test_an_unsound_request_id_is_replaced(shared_server, number: str | bytes | None) -> None:
    headers = {} if number is None else {"X-Request-Id": number}
    seen = set()
    for path in ("/health", "/v1/nothing", COMPLETIONS):
        method = "POST" if path == COMPLETIONS else "GET"
        answer = HTTP.request(method, shared_server.url + path, headers=headers)
        echoed = answer.headers["x-request-id"]
        assert len(echoed) == 32 and echoed.isalnum()
        seen.add(echoed)
    assert len(seen) == 3
