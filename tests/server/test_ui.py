"""The page is served by the server alone; its data are guarded; a probe explains a miss."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.server.serving import HTTP, MATCH_UNIT, Running, running_server
from tests.server.test_life import wait_for

from milepost.server.options import ServerOptions
from milepost.server.recent import MAX_RECENT_REQUESTS
from milepost.server.why import SENTENCES


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
    around = other["divergence"]
    assert around["before"].endswith(text[190:200])
    assert (around["marked"] + around["after"]).startswith("DIFF") and around["marked"]
    assert other["sentence"] == SENTENCES[other["reason"]]
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
        ({"pasted": "a", "prompt": "a"}, "prompt"),
        ({"pasted": " \n"}, "pasted"),
        ({"pasted": '[{"role": "user"'}, "pasted"),
        ({"pasted": '{"messages": 3}'}, "pasted"),
        ({"pasted": '{"messages": [], "tools": 3}'}, "pasted"),
        ({"pasted": "[]"}, "pasted"),
        ({"pasted": '["a"]'}, "pasted"),
        ({"pasted": '[{"role": "nobody", "content": "a"}]'}, "messages[0].role"),
        ({"pasted": "a", "read_as": "poem"}, "read_as"),
    ],
)
def test_a_wrong_probe_is_explained(server: Running, body: dict[str, object], field: str) -> None:
    answer = server.post("/ui/probe", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def lookup(server: Running, pasted: str, read_as: str = "auto") -> dict[str, object]:
    answer = server.post("/ui/probe", {"pasted": pasted, "read_as": read_as})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_is_pasted_is_read_as_it_was_sent(server: Running) -> None:
    text = "a question that is long enough to fill a unit of the cache, and a few more of them. " * 2
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]
    wanted = server.post("/ui/probe", {"messages": messages}).json()
    assert lookup(server, json.dumps(messages)) == wanted
    assert lookup(server, json.dumps({"model": "x", "temperature": 0, "messages": messages})) == wanted
    apart = {"system": "Be short.", "messages": messages[1:]}
    assert lookup(server, json.dumps(apart)) == wanted
    one = server.post("/ui/probe", {"messages": messages[1:]}).json()
    assert lookup(server, text) == one
    raw = server.post("/ui/probe", {"prompt": text}).json()
    assert lookup(server, text, "text") == raw == lookup(server, json.dumps({"prompt": text}))
    assert lookup(server, "[1, 2, 3]")["num_prompt_tokens"] == 3
    braces = server.post("/ui/probe", {"messages": [{"role": "user", "content": "[not JSON"}]}).json()
    assert lookup(server, "[not JSON", "message") == braces


def test_json_that_is_none_is_said_with_its_place(server: Running) -> None:
    answer = server.post("/ui/probe", {"pasted": '{"messages": [}'})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "begins like JSON but is none" in message and "line 1 column 15" in message
    assert "one user message" in message


def test_two_prompts_are_compared(server: Running) -> None:
    same = "the same words at the beginning of both, for more than a unit of the cache, "
    first, second = f"{same}then RED and more", f"{same}then BLUE and much more of it"
    found = server.post("/ui/compare", {"first": {"prompt": first}, "second": {"prompt": second}}).json()
    for side, whole in (("first", first), ("second", second)):
        around = found[side]
        assert whole.endswith(around["before"] + around["marked"] + around["after"])
    assert found["first"]["before"] == found["second"]["before"]
    assert found["first"]["marked"] != found["second"]["marked"]
    common = found["num_common_tokens"]
    assert 0 < found["num_reusable_tokens"] <= common < found["num_first_tokens"]
    assert found["num_reusable_tokens"] == common // MATCH_UNIT * MATCH_UNIT
    again = server.post("/ui/compare", {"first": {"prompt": first}, "second": {"prompt": first}}).json()
    assert again["num_common_tokens"] == again["num_first_tokens"] == again["num_second_tokens"]
    assert again["num_reusable_tokens"] < again["num_second_tokens"]
    assert again["first"]["marked"] == again["second"]["after"] == ""


def test_the_comparison_is_what_the_cache_does(server: Running) -> None:
    """The second one reuses as much as was said, if a checkpoint lies there: the second time it does."""
    system = "what both have in common, for several units of the cache and a few words beyond. " * 2
    bodies = [{"messages": [{"role": "system", "content": system}, {"role": "user", "content": end}]}
              for end in ("One question.", "Another question.")]  # fmt: skip
    found = server.post("/ui/compare", {"first": bodies[0], "second": bodies[1]}).json()
    for body in (bodies[0], bodies[1]):
        assert server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
    server.wait_idle()
    third = {"messages": [bodies[0]["messages"][0], {"role": "user", "content": "Yet another."}]}
    assert server.post("/ui/probe", third).json()["num_cached_tokens"] == found["num_reusable_tokens"] > 0


def test_a_side_that_cannot_be_read_is_named(server: Running) -> None:
    answer = server.post("/ui/compare", {"first": {"prompt": "a"}, "second": {"pasted": " "}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "second.pasted" and ": the second prompt: " in error["message"]


def test_the_first_difference_is_whole_characters(server: Running) -> None:
    pair = {"first": {"prompt": "one 😀 two"}, "second": {"prompt": "one 😁 two"}}
    found = server.post("/ui/compare", pair).json()
    assert found["first"]["before"] == found["second"]["before"]
    assert (found["first"]["marked"].strip(), found["second"]["marked"].strip()) == ("😀", "😁")
    assert "".join(found["first"].values()) == "one 😀 two"


def test_finished_requests_say_why(server: Running) -> None:
    text = "A secret plan, told at some length so that it fills more than one unit of the cache. " * 3
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answers = [server.post("/v1/chat/completions", body).json() for _ in range(2)]
    server.wait_idle()
    answer = server.get("/ui/state")
    newest, oldest = answer.json()["finished"]
    for shown, sent in ((oldest, answers[0]), (newest, answers[1])):
        reuse = sent["milepost"]["reuse"]
        assert shown["label"] == sent["id"]
        assert shown["num_prompt_tokens"] == sent["usage"]["prompt_tokens"]
        assert shown["num_cached_tokens"] == reuse["cached_tokens"]
        assert (shown["reason"], shown["first_divergence"]) == (reuse["reason"], reuse["first_divergence"])
        assert shown["num_output_tokens"] == sent["usage"]["completion_tokens"]
        assert 0 <= shown["time_to_first_token_seconds"] <= shown["seconds"]
        assert shown["eviction"] is None and shown["load"] is None
        assert abs(time.time() - shown["ended_at"]) < 60
    assert oldest["sentence"] == SENTENCES["cold"] and newest["sentence"] == SENTENCES["hit"]
    assert "secret" not in answer.text


def test_an_open_request_has_the_name_it_has_when_it_is_finished(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    server.worker.gate.clear()  # in its first step, until the page has asked
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.post, "/v1/completions", body)
        wait_for(lambda: server.scheduler.has_unfinished_requests, "the request did not arrive")
        state = pool.submit(server.get, "/ui/state")
        wait_for(lambda: server.model.engine._inbox, "the page did not ask")
        server.worker.gate.set()
        (open_one,) = state.result().json()["requests"]
    server.wait_idle()
    (finished,) = server.get("/ui/state").json()["finished"]
    assert answer.result().json()["id"] == open_one["label"] == finished["label"]
    assert open_one["request_id"] == finished["request_id"]


def test_only_the_last_ones_are_kept(server: Running) -> None:
    for number in range(MAX_RECENT_REQUESTS + 3):
        body = {"prompt": f"{number}", "max_tokens": 1}
        assert server.post("/v1/completions", body).status_code == 200
    server.wait_idle()
    finished = server.get("/ui/state").json()["finished"]
    assert len(finished) == MAX_RECENT_REQUESTS
    assert [each["ended_at"] for each in finished] == sorted((e["ended_at"] for e in finished), reverse=True)


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
            answer = HTTP.get(f"{server.url}/ui/state", headers=headers)
            assert answer.status_code == status
            assert ("finished" in answer.json()) is (key == "boss")
