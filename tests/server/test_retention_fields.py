"""What clients say about caching: cache_control, breakpoints, priority, cache_prompt, keys and salts."""

from __future__ import annotations

from array import array
from typing import Any

import httpx
import pytest
from tests.server.serving import MATCH_UNIT, Running

from milepost.core.hashing import CacheDomain, KeyChain
from milepost.core.tree import Node
from milepost.engine.markers import MAX_MARKERS
from milepost.engine.serving import cache_domain

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 3
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
WEATHER = {"type": "function", "function": {"name": "weather", "description": TEXT, "parameters": {}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": TEXT, "parameters": {}}}


def chat(server: Running, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Running, path: str, body: dict[str, Any]) -> tuple[str | None, str]:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def pinned(server: Running, tokens: list[int], domain: CacheDomain | None = None) -> dict[int, float]:
    """Position -> seconds of the pins that still hold on the path of `tokens`."""
    server.wait_idle()
    chain = KeyChain(array("I", tokens), domain or CacheDomain(), MATCH_UNIT)
    found = {}
    for position in range(MATCH_UNIT, len(tokens) + 1, MATCH_UNIT):
        node: Node | None = server.scheduler.cache.node_at(chain, position)
        if node is not None and node.states is not None and node.pinned_until > node.last_used:
            found[position] = round(node.pinned_until - node.last_used, 3)
    return found


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


# ---------------------------------------------------------------- cache_control


def test_a_marked_part_is_kept_and_shared(server: Running) -> None:
    """A document and a question in one message: another question hits where the document ends."""

    def ask(question: str, **control: Any) -> dict[str, Any]:
        content = [part(TEXT, **control), part(question)]
        return chat(server, [{"role": "user", "content": content}])

    first = ask("Who jumps?", cache_control=EPHEMERAL)
    pins = pinned(server, first["prompt_token_ids"])
    assert list(pins.values()) == [300.0]
    (position,) = pins
    assert first["usage"]["prompt_tokens"] - 2 * MATCH_UNIT < position
    second = ask("9 lives?")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == position
    assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
    ask("Who jumps?")
    without = ask("9 lives?")["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert without < position, "without the marker the second sighting had to make the checkpoint"


def test_marked_messages_and_tools_are_kept(server: Running) -> None:
    messages = [
        {"role": "system", "content": TEXT, "cache_control": HOUR},
        {"role": "user", "content": [part("the first question", cache_control=EPHEMERAL)]},
        {"role": "assistant", "content": "the first answer"},
        {"role": "user", "content": "the second question", "cache_control": EPHEMERAL},
    ]
    tools = [{**WEATHER, "cache_control": EPHEMERAL}, CLOCK]
    answer = chat(server, messages, tools=tools)
    pins = pinned(server, answer["prompt_token_ids"])
    assert set(pins.values()) == {3600.0}, "the longest time holds for all"
    assert 3 <= len(pins) <= 4
    plain = [{key: value for key, value in m.items() if key != "cache_control"} for m in messages]
    plain[1]["content"] = "the first question"
    again = chat(server, plain, tools=[WEATHER, CLOCK])
    assert again["prompt_token_ids"] == answer["prompt_token_ids"], "templates never see the field"
    tokens = server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    assert tokens == answer["prompt_token_ids"]
    inside = {**WEATHER, "function": {**WEATHER["function"], "cache_control": EPHEMERAL}}
    assert chat(server, plain, tools=[inside, CLOCK])["prompt_token_ids"] == answer["prompt_token_ids"]


def test_asking_again_starts_the_time_anew_and_usage_is_as_without(server: Running) -> None:
    messages = [{"role": "user", "content": [part(TEXT, cache_control=EPHEMERAL), part("a?")]}]
    first = chat(server, messages)
    again = chat(server, messages)
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    longer = [{"role": "user", "content": [part(TEXT, cache_control=HOUR), part("b?")]}]
    chat(server, longer)
    assert list(pinned(server, first["prompt_token_ids"]).values()) == [3600.0]


def test_markers_that_are_wrong_name_their_field(server: Running) -> None:
    for messages, param in (
        ([{"role": "user", "content": "x", "cache_control": "yes"}], "messages[0].cache_control"),
        ([{"role": "user", "content": [part("x", cache_control={"type": "x"})]}],
         "messages[0].content[0].cache_control.type"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [part("x"), part("y", cache_control={
            "type": "ephemeral", "ttl": "1d"})]}], "messages[1].content[1].cache_control.ttl"),
    ):  # fmt: skip
        assert refused(server, "/v1/chat/completions", {"messages": messages})[0] == param
    tools = [{**WEATHER, "cache_control": 5}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    assert refused(server, "/v1/chat/completions", body)[0] == "tools[0].cache_control"
    parts = [part("x", cache_control=EPHEMERAL) for _ in range(MAX_MARKERS + 1)]
    param, message = refused(
        server, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    )
    assert param == f"messages[0].content[{MAX_MARKERS}].cache_control" and str(MAX_MARKERS) in message
    chat(server, [{"role": "user", "content": parts[:-1]}])
    nothing = [{"role": "user", "content": [part("x", cache_control=None)], "cache_control": None}]
    chat(server, nothing, tools=[{**WEATHER, "cache_control": None}])


# ---------------------------------------------------------------- prompt_cache_breakpoints


def test_breakpoints_of_a_completion(server: Running) -> None:
    prompt = server.model.tokenizer.encode(TEXT * 2)
    body = {"prompt": prompt, "max_tokens": 1, "prompt_cache_breakpoints": [40, 71]}
    assert server.post("/v1/completions", body).status_code == 200
    assert pinned(server, prompt) == {32: 300.0, 64: 300.0}
    other = [*prompt[:40], *server.model.tokenizer.encode("numbers 0 1 2 3 4 5")]
    answer = server.post("/v1/completions", {"prompt": other, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_breakpoints_that_are_wrong_name_the_field(server: Running) -> None:
    for prompt, positions, param in (
        ("some text", [0], "prompt_cache_breakpoints[0]"),
        ("some text", [1, 1000], "prompt_cache_breakpoints[1]"),
        (["a", "b"], [1], "prompt_cache_breakpoints"),
        ("some text", [1] * (MAX_MARKERS + 1), "prompt_cache_breakpoints"),
        ("some text", 3, "prompt_cache_breakpoints"),
        ("some text", [1.5], "prompt_cache_breakpoints"),
        ("some text", [True], "prompt_cache_breakpoints"),
    ):
        body = {"prompt": prompt, "prompt_cache_breakpoints": positions}
        assert refused(server, "/v1/completions", body)[0] == param
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_cache_breakpoints": [1]}
    param, message = refused(server, "/v1/chat/completions", body)
    assert param == "prompt_cache_breakpoints" and "cache_control" in message
    assert chat(server, body["messages"], prompt_cache_breakpoints=None)["usage"]["prompt_tokens"] > 0


# ---------------------------------------------------------------- cache_prompt, cache_priority, keys, salts


def test_cache_prompt_false_reads_and_leaves_nothing(server: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    first = server.post("/v1/completions", {**body, "cache_prompt": False}).json()
    server.wait_idle()
    assert server.model.engine.fresh_stats().result(10).num_units == 0
    second = server.post("/v1/completions", body).json()
    third = server.post("/v1/completions", {**body, "cache_prompt": False}).json()
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == third["choices"][0]["text"]
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, third)] == [0, 0, 0]
    assert third["milepost"]["reuse"]["reason"] == "disabled"
    fourth = server.post("/v1/completions", {**body, "cache_prompt": True}).json()
    assert fourth["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    messages = [{"role": "user", "content": [part(TEXT, cache_control=EPHEMERAL)]}]
    assert chat(server, messages, cache_prompt=False)["milepost"]["reuse"]["reason"] == "disabled"


@pytest.mark.parametrize(("priority", "kept"), [(4, True), (-4, False)])
def test_cache_priority_decides_who_stays(server: Running, priority: int, kept: bool) -> None:
    prompts = [server.model.tokenizer.encode(f"{number} {TEXT}") for number in range(4)]
    for number, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": 1, **({"cache_priority": priority} if number == 1 else {})}
        assert server.post("/v1/completions", body).status_code == 200
    server.wait_idle()
    evictor = server.scheduler.cache.evictor
    num_before = len(server.scheduler.cache.tree.state_nodes)
    while len(server.scheduler.cache.tree.state_nodes) > num_before // 2:
        assert evictor.evict_one(1e9)
    answer = server.post("/v1/completions", {"prompt": prompts[1], "max_tokens": 1}).json()
    assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == kept


def test_values_out_of_range_name_the_field(server: Running) -> None:
    for field, value in (
        ("cache_priority", 5), ("cache_priority", -5), ("cache_priority", 1.5), ("cache_priority", "1"),
        ("prompt_cache_key", "k" * 513), ("prompt_cache_key", 7), ("cache_prompt", "no"), ("cache_salt", ""),
    ):  # fmt: skip
        assert refused(server, "/v1/completions", {"prompt": "x", field: value})[0] == field


def test_a_key_joins_and_separates_nothing(server: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 1}
    server.post("/v1/completions", {**body, "prompt_cache_key": "a"})
    for key in ("b", None, "a"):
        answer = server.post("/v1/completions", {**body, "prompt_cache_key": key}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_salt_is_bound_to_the_key_it_came_with(server: Running) -> None:
    """Who guesses another client's salt, but has another key, learns nothing from it."""

    def cached(salt: str | None, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"prompt": TEXT, "max_tokens": 1, "cache_salt": salt}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("salt", "alice") == 0
    assert cached("salt", "alice") > 0
    assert cached("salt", "mallory") == cached("salt", None) == cached("other", "alice") == 0
    assert cached(None, "alice") == 0
    assert cached(None, "mallory") > 0, "without a salt everybody shares"


def test_domains_are_told_apart_by_both() -> None:
    pairs = [("s", None), ("s", "k"), ("sk", ""), ("t", "k"), ("s", "kk"), ("k", "s"), ("s" * 128, "k" * 999)]
    domains = {cache_domain(salt, key) for salt, key in pairs}
    assert len(domains) == len(pairs)
    assert cache_domain(None, "k") == cache_domain("", "k") == CacheDomain()
    assert cache_domain("s", None) == cache_domain("s", "")
