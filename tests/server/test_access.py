"""API keys: who is let in, and what one caller can learn of another."""

from __future__ import annotations

import ast
import json
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.datastructures import Headers
from tests.server.serving import Running, running_server
from tests.server.test_errors import assert_error
from tests.server.test_life import LONG, wait_for

from milepost.errors import ConfigError, RequestError
from milepost.server import access, schema
from milepost.server.access import Access, read_key_file
from milepost.server.options import ServerOptions

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
KEYS = ServerOptions(api_keys=(ALICE, BOB), admin_api_keys=(ADMIN,))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("guarded"), server_options=KEYS) as running:
        yield running


@pytest.fixture
def server(guarded: Running) -> Iterator[Running]:
    guarded.wait_idle()
    assert guarded.model.engine.reset_prefix_cache().result(10)
    yield guarded
    guarded.wait_idle()


def ask(server: Running, key: str | None, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if path == COMPLETIONS:
        body.setdefault("prompt", LONG)
    body.setdefault("max_tokens", 1)
    return httpx.post(server.url + path, json=body, headers=headers, timeout=30)


def cached(server: Running, key: str | None, **body: Any) -> int:
    return int(ask(server, key, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": f"Bearer {ALICE[:-1]}"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"authorization": "Bearer"},
        {"authorization": "Bearer \xff"},
        {"x-api-key": "wrong"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/reset_prefix_cache", "/nothing"])
def test_without_a_known_key_nothing_is_answered(server: Running, path: str, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.post(server.url + path, content=b'{"prompt": "a"}', headers=raw)
    error = assert_error(answer, 401, None)
    assert error["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert ALICE not in answer.text and "wrong" not in answer.text


def test_reading_needs_a_key_too_but_probes_do_not(server: Running) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json", "/docs"):
        assert_error(server.get(path), 401, None)
        answer = httpx.get(server.url + path, headers={"authorization": f"bearer {BOB}"})
        assert answer.status_code == 200, path
    for path in ("/health", "/version"):
        assert server.get(path).status_code == 200
    assert httpx.head(f"{server.url}/health").status_code == 200


def test_official_clients_get_in_and_see_their_own_exception(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0)
    assert client.completions.create(model="tiny", prompt="{{hi}}", temperature=0).choices[0].text == "hi"
    with pytest.raises(openai.AuthenticationError) as raised:
        client.with_options(api_key="wrong").models.list()
    assert raised.value.code == "invalid_api_key"
    headers = {"x-api-key": BOB}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_the_size_of_a_body_is_not_looked_at_without_a_key(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode()
        )
        assert b" 401 " in connection.recv(4096).split(b"\r\n")[0]


def test_routes_that_concern_everybody_need_the_admin_key(server: Running) -> None:
    for path in access.ADMIN_PATHS:
        error = assert_error(ask(server, ALICE, path), 403, None, "--admin-api-key")
        assert error["type"] == "permission_error" and error["code"] == "admin_key_needed"
    assert cached(server, ALICE) == 0 and cached(server, ALICE) > 0
    assert ask(server, ADMIN, "/reset_prefix_cache").json() == {"reset": True}
    assert cached(server, ALICE) == 0
    assert ask(server, ADMIN, prompt="{{admin}}", max_tokens=9, temperature=0).status_code == 200


def test_only_an_admin_key_overtakes_others(server: Running) -> None:
    error = assert_error(ask(server, ALICE, priority=-1), 403, "priority", "--admin-api-key")
    assert error["code"] == "admin_key_needed"
    for key, priority in ((ALICE, 0), (ALICE, 5), (ADMIN, -1)):
        assert ask(server, key, priority=priority).status_code == 200


def test_the_only_key_there_is_may_do_everything() -> None:
    single = Access(ServerOptions(api_keys=(ALICE,)))
    headers = Headers({"authorization": f"Bearer {ALICE}"})
    assert single.check("/reset_prefix_cache", headers).is_admin
    assert Access(ServerOptions()).check("/reset_prefix_cache", Headers()).is_admin
    with pytest.raises(RequestError):
        Access(KEYS).check("/reset_prefix_cache", headers)


def test_every_known_key_is_compared_whatever_was_found(monkeypatch) -> None:
    """A look-up that ends early tells which key was nearly right."""
    calls: list[tuple[bytes, bytes]] = []
    real = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: calls.append((a, b)) or real(a, b))
    gate = Access(KEYS)
    for key in (ALICE, BOB):
        calls.clear()
        gate.check("/v1/models", Headers({"authorization": f"Bearer {key}"}))
        assert len(calls) == 3 + 1
        assert all(len(a) == len(b) == 32 for a, b in calls), "digests, so that lengths tell nothing"


# ---------------------------------------------------------------- keys of a file


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# team one\n{ALICE}\n\n  {BOB}  \n")
    path.chmod(0o600)
    assert read_key_file(path) == (ALICE, BOB)
    for mode in (0o640, 0o604, 0o620, 0o666, 0o601):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_key_file(path)
    path.chmod(0o400)
    assert read_key_file(path) == (ALICE, BOB)


def test_a_key_file_without_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(path)
    path.touch(0o600)
    os.chmod(path, 0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"api_keys": ("",)}, "api_key"),
        ({"api_keys": ("a b",)}, "api_key"),
        ({"api_keys": ("ä",)}, "api_key"),
        ({"admin_api_keys": ("a",)}, "admin_api_key"),
        ({"share_prefix_across_keys": True}, "share_prefix_across_keys"),
        ({"max_body_bytes": 5}, "max_body_bytes"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"drain_seconds": -1.0}, "drain_seconds"),
    ],
    ids=str,
)
def test_options_that_cannot_work(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerOptions(**options)
    assert raised.value.field == field


# ---------------------------------------------------------------- what one learns of another


def test_each_key_has_a_cache_of_its_own(server: Running) -> None:
    assert (cached(server, ALICE), cached(server, ALICE) > 0) == (0, True)
    assert cached(server, BOB) == 0
    assert cached(server, ADMIN) == 0
    assert cached(server, BOB) > 0


def test_a_salt_divides_the_cache_of_a_key_and_joins_no_two(server: Running) -> None:
    assert cached(server, ALICE, cache_salt="s") == 0
    assert cached(server, ALICE, cache_salt="s") > 0
    assert cached(server, ALICE) == 0
    assert cached(server, BOB, cache_salt="s") == 0


def test_explanations_say_nothing_about_another_tenant(server: Running) -> None:
    """Bob's response is the same whether Alice asked the same before, or something near, or nothing."""

    def strip(answer: httpx.Response) -> dict[str, Any]:
        body = answer.json()
        assert answer.status_code == 200, body
        for key in ("id", "created"):
            body.pop(key)
        return dict(body)

    chat = {
        "path": CHAT,
        "messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"},
                     {"role": "user", "content": "and then?"}],
        "seed": 3, "max_tokens": 12,
    }  # fmt: skip
    plain = {"prompt": LONG, "seed": 3, "max_tokens": 12}
    alone = [strip(ask(server, BOB, **body)) for body in (plain, chat)]
    for nearby in (LONG, LONG[: len(LONG) // 2] + "another end", LONG + "more"):
        assert server.model.engine.reset_prefix_cache().result(10)
        for key in (ALICE, ADMIN):
            ask(server, key, prompt=nearby, max_tokens=30)
            ask(server, key, **{**chat, "messages": [{"role": "user", "content": nearby}]})
            ask(server, key, **chat)
        assert [strip(ask(server, BOB, **body)) for body in (plain, chat)] == alone
    first = alone[0]["milepost"]["reuse"]
    assert (first["reason"], first["first_divergence"], first["retokenized_at"]) == ("cold", None, None)


def test_retokenization_of_another_tenant_is_not_reported(server: Running) -> None:
    answer = ask(server, ALICE, prompt=LONG, max_tokens=40, ignore_eos=True, temperature=1, seed=5)
    text = answer.json()["choices"][0]["text"]
    continued = LONG + text + LONG
    reports = {key: ask(server, key, prompt=continued).json()["milepost"]["reuse"] for key in (BOB, ALICE)}
    assert reports[ALICE]["cached_tokens"] > 0
    assert reports[BOB]["reason"] == "cold" and reports[BOB]["retokenized_at"] is None
    assert reports[BOB]["matched_tokens"] == {"mla": 0, "kda": 0}


def test_sharing_must_be_asked_for(tmp_path) -> None:
    options = ServerOptions(api_keys=(ALICE, BOB), share_prefix_across_keys=True)
    with running_server(tmp_path, server_options=options) as server:
        assert (cached(server, ALICE), cached(server, BOB) > 0) == (0, True)
        assert cached(server, BOB, cache_salt="s") == 0
        assert cached(server, ALICE, cache_salt="s") == 0, "a salt still counts with its key only"


def test_metrics_have_no_label_for_a_caller(server: Running) -> None:
    ask(server, ALICE)
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {BOB}"}).text
    assert ALICE not in text and access._digest(ALICE).hex()[:8] not in text


def test_a_burst_of_one_key_does_not_hold_up_another(tmp_path) -> None:
    """One seat: Bob waits for what Alice has begun, not for all that she has sent."""
    with running_server(tmp_path, server_options=KEYS, max_num_seqs=1) as server:
        ended: list[str] = []

        def num_there() -> int:
            return len(server.scheduler.requests) + len(server.model.engine._inbox)

        def send(key: str, number: int) -> None:
            prompt = f"{key} {number} " + LONG
            assert ask(server, key, prompt=prompt, max_tokens=20, ignore_eos=True).status_code == 200
            ended.append(key)

        server.worker.gate.clear()
        with ThreadPoolExecutor(9) as pool:
            jobs = [pool.submit(send, ALICE, number) for number in range(8)]
            wait_for(lambda: num_there() == 8, "the burst is not there")
            jobs.append(pool.submit(send, BOB, 0))
            wait_for(lambda: num_there() == 9, "the other one is not there")
            server.worker.gate.set()
            for job in jobs:
                job.result(30)
        assert ended.index(BOB) <= 2, ended


# ---------------------------------------------------------------- logs and files


def test_no_log_record_holds_text_or_keys(server: Running, caplog) -> None:
    """All loggers, all levels: requests that work, fail, are refused, and break in the engine."""
    caplog.set_level(logging.DEBUG)
    secret = "Pssst-7a1f"
    text = f"{secret} {LONG}"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"tell me {secret}"}]
    tools = [{"type": "function", "function": {"name": "f", "description": secret}}]
    kwargs = {secret: secret}
    for key in (ALICE, "wrong"):
        ask(server, key, prompt=text, max_tokens=9)
        ask(server, key, prompt=text, max_tokens=9, stop=[secret], user=secret, cache_salt=secret)
        ask(server, key, CHAT, messages=messages, max_tokens=3, chat_template_kwargs=kwargs)
        ask(server, key, CHAT, messages=messages, tools=tools, max_tokens=3, prompt_cache_key=secret)
        ask(server, key, CHAT, messages=[{"role": secret, "content": text}])
        ask(server, key, CHAT, messages=[{"role": "user", "content": [{"type": secret, "text": text}]}])
        ask(server, key, prompt={"a": text})
        ask(server, key, prompt=text * 50)
        ask(server, key, "/tokenize", prompt=text)
        ask(server, key, prompt=text, model=secret)
    server.worker.fail_next = 1
    assert ask(server, ALICE, prompt=text).status_code == 500
    server.wait_idle()
    records = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "asyncio"))]
    assert any(record.name == "milepost.request" for record in records)
    formatter = logging.Formatter()
    for record in records:
        line = formatter.format(record)
        for word in (secret, "quick brown", ALICE):
            assert word not in line, line


def test_names_of_unknown_fields_are_all_a_client_can_write_into_the_log(
    server: Running, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(schema, "_warned", set())
    caplog.set_level(logging.DEBUG)
    ask(server, ALICE, **{"un\nknown" + "y" * 100: "value-of-it"})
    lines = [r.getMessage() for r in caplog.records if r.name == "milepost.server.schema"]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert "value-of-it" not in lines[0] and len(lines[0]) < 150


def test_nothing_is_pickled() -> None:
    """Neither by name, nor through what pickles for others."""
    root = Path(access.__file__).resolve().parents[1]
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = {"eval", "exec"}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, f"{path}: {node.func.id}()"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                assert (owner, node.func.attr) not in {("torch", "load"), ("torch", "save")}, path
                assert (owner, node.func.attr) not in {("numpy", "load"), ("np", "load")}, path
                unsafe = owner == "yaml" and node.func.attr != "safe_load"
                assert not unsafe, f"{path}: yaml.{node.func.attr}"
            assert not banned.intersection(names), f"{path} imports {names}"


def test_multiprocessing_sends_bytes_only() -> None:
    """`Connection.send` and queues pickle; `send_bytes` does not."""
    root = Path(access.__file__).resolve().parents[1]
    for path in root.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "multiprocessing" in source:
            assert ".send(" not in source and ".recv(" not in source, path
            assert "multiprocessing.Queue" not in source and "Manager(" not in source, path


def test_error_bodies_are_json_whatever_is_sent(server: Running) -> None:
    answer = httpx.post(server.url + COMPLETIONS, content=b"\xff", headers={"x-api-key": ALICE})
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
