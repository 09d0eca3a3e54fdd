"""The page is served by the server alone; its data are guarded; a probe explains a miss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.serving import HTTP, Running, running_server

from milepost.server.options import ServerOptions


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running_server(tmp_path) as running:
        yield running


def chat(server: Running, text: str, **headers: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    assert HTTP.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).status_code == 200


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    answer = server.get("/ui")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    addresses = set(re.findall(r"https?://[^\"' <)]+", answer.text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|document\.write|eval\(", answer.text)


def test_the_state_shows_the_tree_without_any_text(server: Running) -> None:
    chat(server, "A secret plan, told at some length so that it fills more than one unit of the cache. " * 3)
    server.wait_idle()
    answer = server.get("/ui/state")
    state = answer.json()
    assert state["cache"]["num_checkpoints"] == len(state["cache"]["checkpoints"]) > 0
    assert state["totals"]["queried_tokens"] > 0
    assert state["memory"]["used_bytes"] <= state["memory"]["budget_bytes"]
    assert state["requests"] == []
    assert state["cache"]["next_evictions"]
    assert "secret" not in answer.text


def test_a_probe_says_where_a_prompt_would_hit_and_why_not_further(server: Running) -> None:
    text = "one two three four five six seven eight nine ten, and so on until it is long enough. " * 4
    chat(server, text)
    server.wait_idle()
    before = server.metrics()
    same = server.post("/ui/probe", {"messages": [{"role": "user", "content": text}]}).json()
    assert same["reason"] == "hit" and same["num_cached_tokens"] > 100
    assert same["reused_text"] and same["next_text"]
    other = server.post(
        "/ui/probe", {"messages": [{"role": "user", "content": text[:200] + "DIFFERENT"}]}
    ).json()
    assert other["reason"] in ("diverged", "no_state")
    assert other["num_cached_tokens"] < same["num_cached_tokens"]
    assert "DIFFERENT"[:4] in other["divergence_text"]
    cold = server.post("/ui/probe", {"prompt": "zzzz " * 40}).json()
    assert cold["num_cached_tokens"] == 0
    after = server.metrics()
    assert after["vllm:prefix_cache_queries_total"] == before["vllm:prefix_cache_queries_total"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"x": 1}, "x"),
    ],
)
def test_a_wrong_probe_is_explained(server: Running, body: dict[str, object], field: str) -> None:
    answer = server.post("/ui/probe", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_another_tenants_cache_is_not_shown(tmp_path: Path) -> None:
    options = ServerOptions(api_keys=("one", "two"), admin_api_keys=("boss",))
    text = "what only the first tenant knows, said at length so that it is cached in several units. " * 3
    body = {"messages": [{"role": "user", "content": text}]}
    with running_server(tmp_path, server_options=options) as server:
        assert HTTP.get(f"{server.url}/ui").status_code == 200
        assert HTTP.get(f"{server.url}/ui/state").status_code == 401
        chat(server, text, authorization="Bearer one")
        found = {
            key: HTTP.post(
                f"{server.url}/ui/probe", json=body, headers={"authorization": f"Bearer {key}"}
            ).json()["num_cached_tokens"]
            for key in ("one", "two")
        }
        assert found["one"] > 0 and found["two"] == 0
        for key, status in (("one", 403), ("boss", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert HTTP.get(f"{server.url}/ui/state", headers=headers).status_code == status
