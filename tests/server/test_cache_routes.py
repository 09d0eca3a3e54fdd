"""Named conversations over HTTP: two keys, restarts, traffic, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.serving import HTTP, Running, running_server
from tests.server.test_errors import assert_error

from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.engine.stores import StoreOptions
from milepost.server.app import Server, bind
from milepost.server.options import ServerOptions

UNIT = 32
ALICE, BOB = "alice-key", "bob-key"
KEYS = ServerOptions(api_keys=(ALICE, BOB))
LONG = "Once upon a time there was a small machine that read every page only once. " * 12
SYSTEM = {"role": "system", "content": LONG[:400]}


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]


class Api:
    """One key's view of a server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def post(self, operation: str, **body: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/v1/cache/{operation}", json=body, headers=self.headers)

    def ok(self, operation: str, **body: Any) -> dict[str, Any]:
        answer = self.post(operation, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def delete(self, name: str, **query: str) -> httpx.Response:
        return HTTP.delete(f"{self.url}/v1/cache/{name}", params=query, headers=self.headers)

    def names(self, **query: str) -> list[str]:
        answer = HTTP.get(f"{self.url}/v1/cache", params=query, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return [each["name"] for each in answer.json()["data"]]

    def chat(self, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **body}
        answer = HTTP.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        answer = HTTP.post(f"{self.url}/tokenize", json={"messages": messages}, headers=self.headers)
        found: list[int] = answer.json()["tokens"]
        return found

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
        answer = HTTP.post(f"{self.url}/v1/completions", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens"])


@contextmanager
def serving(folder: Path | None, options: ServerOptions | None = None, **model: Any) -> Iterator[Api]:
    """A server with the embedded model and a store; sound when it has ended."""
    stores = StoreOptions(persist=folder) if folder is not None else StoreOptions()
    loaded: ServingModel = load_serving_model(
        None, ServingOptions(**{"cache_bytes": 96 << 20, "match_unit": UNIT, "stores": stores, **model})
    )
    listening, address = threading.Event(), []

    def on_listening(url: str) -> None:
        address.append(url)
        listening.set()

    server = Server(lambda: loaded, bind(port=0), on_listening, options)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert listening.wait(60), "the server did not start"
    try:
        yield Api(address[0], options.api_keys[0] if options and options.api_keys else None)
        problems = loaded.engine.act(lambda scheduler, now: scheduler.audit()).result(10)
        assert problems == []
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
    assert loaded.engine.failure is None


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("store") / "kv", KEYS) as running:
        yield running


@pytest.fixture
def bob(api: Api) -> Api:
    return Api(api.url, BOB)


# ------------------------------------------------------------------ what it is for
def test_a_conversation_survives_a_restart_under_its_name(tmp_path: Path) -> None:
    with serving(tmp_path / "kv") as first:
        history = talk(LONG)
        answer = first.chat(history)
        history = [*history, answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        before = first.chat(history)
        saved = first.ok("save", name="story", messages=history)
        assert saved["name"] == "story"
        assert saved["saved_tokens"] == saved["cached_tokens"] == prompt_tokens(before) // UNIT * UNIT
        assert saved["segments"] >= 1 and saved["bytes"] > 10_000
        assert first.names() == ["story"]
        entry = HTTP.get(f"{first.url}/v1/cache").json()["data"][0]
        assert entry["saved_tokens"] == saved["saved_tokens"] and entry["created"] > 1_000_000_000
    with serving(tmp_path / "kv") as second:
        assert second.names() == ["story"]
        loaded = second.ok("load", name="story")
        assert loaded["loaded_tokens"] == loaded["cached_tokens"] == saved["saved_tokens"]
        assert loaded["load"]["outcome"] == "loaded" and loaded["load"]["tier"] == "persist"
        after = second.chat(history)
        assert after["choices"] == before["choices"]
        assert prompt_tokens(after) - cached(after) <= UNIT - 1 + 1
        assert second.ok("load", name="story")["load"]["outcome"] == "cached"
        assert second.ok("load", messages=history)["name"] is None
        gone = second.delete("story").json()
        assert gone["name"] == "story" and gone["kept_tokens"] == 0 and gone["kept_for"] == []
        assert gone["forgotten_tokens"] == saved["saved_tokens"]
        assert gone["checkpoints"] >= 1 and gone["segments"] >= saved["segments"]
        assert cached(second.chat(history)) == 0


def test_messages_and_prompts_mean_what_the_generation_endpoints_make_of_them(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "tell", "parameters": {"type": "object"}}}]
    answer = api.chat(talk(LONG), tools=tools, chat_template_kwargs={"thinking": True})
    pinned = api.ok(
        "pin", messages=talk(LONG), tools=tools, chat_template_kwargs={"thinking": True}, seconds=9.5
    )
    # The last token of a prompt is always computed, but the boundary behind it may be cached.
    assert pinned["pinned_tokens"] == prompt_tokens(answer) // UNIT * UNIT
    assert pinned["seconds"] == 9.5 and pinned["name"] is None
    # Without the tools it is another prompt from its beginning.
    assert_error(api.post("pin", messages=talk(LONG), seconds=1), 404, None, "nothing of this prompt")
    answer = api.chat(talk(LONG), reasoning_effort="none")
    pinned = api.ok("pin", messages=talk(LONG), reasoning_effort="none", seconds=1)
    assert pinned["pinned_tokens"] == prompt_tokens(answer) // UNIT * UNIT
    ids = [7 + n % 100 for n in range(100)]
    api.complete(ids)
    assert api.ok("pin", prompt=ids, seconds=5)["pinned_tokens"] == 96
    assert api.ok("unpin", prompt=ids)["unpinned_tokens"] == 96
    assert api.ok("unpin", prompt=ids)["unpinned_tokens"] == 0
    text = "A text of some length, that is long enough. " * 9
    answer = api.complete(text)
    saved = api.ok("save", name="text", prompt=text)
    assert saved["saved_tokens"] == prompt_tokens(answer) // UNIT * UNIT
    assert api.ok("forget", name="text")["forgotten_tokens"] == saved["saved_tokens"]
    assert api.ok("forget", prompt=ids)["forgotten_tokens"] == 96


def test_forgetting_one_conversation_leaves_the_shared_system_prompt(api: Api) -> None:
    mine, other = talk("My secret is " + LONG), talk("Something else: " + LONG)
    for messages in (mine, other):
        api.chat(messages)
    shared = cached(api.chat(talk("A third one: " + LONG)))
    assert shared > 0
    api.ok("save", name="mine", messages=mine)
    gone = api.delete("mine").json()
    assert 0 < gone["kept_tokens"] <= shared and gone["forgotten_tokens"] > 0
    assert cached(api.chat(other)) > gone["kept_tokens"]
    assert cached(api.chat(mine)) <= shared
    api.ok("forget", messages=mine)


def test_all_turns_of_a_conversation_go_with_its_branches(api: Api) -> None:
    """Earlier turns end in a generation prompt that later ones do not have: each is a branch of its own."""
    history = talk("Branches. " + LONG)
    for question in ("Why?", "How?", "When?"):
        answer = api.chat(history, max_tokens=40)["choices"][0]["message"]
        history = [*history, {"role": "assistant", "content": answer["content"]}, *talk(question)[1:]]
    fork = [*history[:3], {"role": "user", "content": "Or something else? " * 12}]
    api.chat(fork)
    api.chat(history)
    api.ok("save", name="branchy", messages=history)
    begins = [api.tokens(history), api.tokens(talk("Another conversation."))]
    public = next(i for i, (mine, other) in enumerate(zip(*begins, strict=False)) if mine != other)
    gone = api.delete("branchy").json()
    assert gone["kept_tokens"] > public, "another branch has the first question, too"
    assert cached(api.chat(fork)) > public
    api.chat(history)
    api.ok("save", name="branchy", messages=history)
    gone = api.delete("branchy", branches="forget").json()
    assert gone["kept_tokens"] <= public
    assert cached(api.chat(fork)) <= public


# ------------------------------------------------------------------ whose
def test_names_of_one_key_are_unknown_to_another(api: Api, bob: Api) -> None:
    for caller in (api, bob):
        caller.chat(talk("Hello " + LONG))
    api.ok("save", name="mine", messages=talk("Hello " + LONG))
    assert "mine" in api.names() and bob.names() == []
    refusals = [
        bob.post("load", name="mine"),
        bob.post("pin", name="mine", seconds=5),
        bob.post("unpin", name="mine"),
        bob.post("forget", name="mine"),
        bob.delete("mine"),
        bob.post("save", name="mine"),
        api.post("load", name="mine", cache_salt="other"),
        api.delete("mine", cache_salt="other"),
    ]
    unknown = bob.post("load", name="none")
    for refusal in refusals:
        assert assert_error(refusal, 404, "name", "no conversation named")["code"] == "name_not_found"
    assert len(unknown.content) == len(refusals[0].content), "a name that exists looks like one that does not"
    # The same messages of another key are other bytes.
    assert bob.ok("forget", messages=talk("Hello " + LONG))["checkpoints"] >= 1
    assert cached(api.chat(talk("Hello " + LONG))) > 0
    assert api.ok("load", name="mine")["cached_tokens"] > 0
    api.delete("mine")


def test_a_salt_has_names_of_its_own(api: Api) -> None:
    prompt = [9 + n % 50 for n in range(80)]
    for salt in ("one", "two"):
        api.complete(prompt, cache_salt=salt)
        api.ok("save", name="chat", prompt=prompt, cache_salt=salt)
    assert api.names(cache_salt="one") == ["chat"] and "chat" not in api.names()
    assert api.delete("chat", cache_salt="one").status_code == 200
    assert api.names(cache_salt="one") == [] and api.names(cache_salt="two") == ["chat"]
    assert cached(api.complete(prompt, cache_salt="two")) == 64
    api.ok("forget", name="chat", cache_salt="two")


def test_keys_that_share_prefixes_do_not_share_names(tmp_path: Path) -> None:
    options = ServerOptions(api_keys=(ALICE, BOB), share_prefix_across_keys=True)
    with serving(tmp_path / "kv", options) as alice:
        bob = Api(alice.url, BOB)
        prompt = [9 + n % 50 for n in range(80)]
        alice.complete(prompt)
        assert cached(bob.complete(prompt)) == 64
        alice.ok("save", name="chat", prompt=prompt)
        assert bob.names() == []
        assert_error(bob.delete("chat"), 404, "name")
        bob.ok("save", name="chat", prompt=prompt)
        assert alice.delete("chat").json()["forgotten_tokens"] == 64
        assert bob.names() == ["chat"]


def test_without_keys_everybody_has_the_same_names(tmp_path: Path) -> None:
    with serving(tmp_path / "kv") as api:
        prompt = list(range(300, 400))
        api.complete(prompt)
        api.ok("save", name="chat", prompt=prompt)
        assert Api(api.url, "any").names() == ["chat"]


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("operation", "body", "param", "text"),
    [
        ("save", {"prompt": "a"}, "name", "which name"),
        ("save", {}, "name", "give `name`"),
        ("save", {"name": "a/b", "prompt": "a"}, "name", "1 to 128 characters"),
        ("save", {"name": "", "prompt": "a"}, "name", "1 to 128 characters"),
        ("save", {"name": 7, "prompt": "a"}, "name", "string"),
        ("save", {"name": "a", "prompt": ["a", "b"]}, "prompt", "one prompt"),
        ("save", {"name": "a", "prompt": ""}, "prompt", "empty"),
        ("save", {"name": "a", "prompt": "a", "messages": talk("a")}, "prompt", "either"),
        (
            "save",
            {"name": "a", "messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role",
            "one of",
        ),
        ("save", {"name": "a", "prompt": "a", "timeout": 0}, "timeout", "at most 300"),
        ("save", {"name": "a", "prompt": "a", "timeout": 301}, "timeout", "at most 300"),
        ("save", {"name": "a", "prompt": "a", "cache_salt": ""}, "cache_salt", "characters"),
        ("save", {"name": "a", "prompt": "a", "model": "other"}, "model", "does not exist"),
        ("load", {}, "name", "give `name`"),
        ("load", {"name": "a", "prompt": "a"}, "name", "either"),
        ("pin", {"prompt": "a"}, "seconds", "at most 86400"),
        ("pin", {"prompt": "a", "seconds": 0}, "seconds", "at most 86400"),
        ("pin", {"prompt": "a", "seconds": 1e6}, "seconds", "at most 86400"),
        ("pin", {"prompt": "a", "seconds": "long"}, "seconds", "number"),
        ("forget", {"prompt": "a", "branches": "all"}, "branches", "keep"),
        ("forget", {"prompt": "a", "branches": "forget"}, "branches", "messages"),
        ("unpin", {"messages": []}, "messages", "at least one"),
    ],
    ids=str,
)
def test_bad_bodies_name_the_field(
    api: Api, operation: str, body: dict[str, Any], param: str, text: str
) -> None:
    status = 404 if param == "model" else 400
    assert_error(api.post(operation, **body), status, param, text)


def test_what_is_not_there_is_said(api: Api) -> None:
    for operation, more in (("save", {"name": "a"}), ("pin", {"seconds": 3})):
        error = assert_error(api.post(operation, prompt="never sent " * 40, **more), 404, None, "send it as")
        assert error["code"] == "not_cached" and error["type"] == "not_found_error"
    loaded = api.ok("load", prompt="never sent " * 40)
    assert (loaded["cached_tokens"], loaded["load"]["outcome"]) == (0, "not_found")
    gone = api.ok("forget", prompt="never sent " * 40)
    assert (gone["checkpoints"], gone["segments"], gone["kept_tokens"]) == (0, 0, 0)
    assert_error(api.delete("a b"), 400, "name")
    assert HTTP.get(f"{api.url}/v1/cache/save", headers=api.headers).status_code == 405


def test_a_server_without_stores_names_the_flags(server: Running) -> None:
    assert server.get("/v1/cache").json() == {"object": "list", "data": []}
    for operation in ("save", "load"):
        body = {"name": "a", "prompt": "a"} if operation == "save" else {"name": "a"}
        error = assert_error(server.post(f"/v1/cache/{operation}", body), 400, None, "--persist DIR")
        assert error["code"] == "no_store" and "--kv-store" in error["message"]
    assert_error(HTTP.delete(f"{server.url}/v1/cache/a"), 404, "name")
    text = "the quick brown fox " * 30
    server.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert server.post("/v1/cache/pin", {"prompt": text, "seconds": 5}).json()["pinned_tokens"] > 0
    assert server.post("/v1/cache/forget", {"prompt": text}).json()["checkpoints"] > 0
    metrics = server.metrics()
    assert any("move=forgotten" in name and value > 0 for name, value in metrics.items())


def test_a_server_that_caches_nothing_says_so(tmp_path: Path) -> None:
    with running_server(tmp_path, caching=False) as running:
        error = assert_error(running.post("/v1/cache/pin", {"prompt": "a", "seconds": 1}), 400, None)
        assert error["code"] == "caching_disabled"


def test_a_caller_who_hangs_up_does_not_stop_what_was_begun(api: Api) -> None:
    prompt = [7 + n % 90 for n in range(700)]
    api.complete(prompt)
    api.ok("save", name="gone", prompt=prompt)
    host, port = api.url.removeprefix("http://").split(":")
    body = b'{"name": "gone"}'
    head = f"POST /v1/cache/forget HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: {api.headers['authorization']}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
    deadline = time.monotonic() + 20
    while "gone" in api.names():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert cached(api.complete(prompt)) == 0
    api.ok("forget", prompt=prompt)


# ------------------------------------------------------------------ traffic
def test_traffic_with_everything_at_once(tmp_path: Path) -> None:
    """Answers stay what they are without a cache, whatever is saved, loaded and deleted meanwhile."""
    rng = random.Random(5)
    prompts = [[300 + rng.randrange(500) for _ in range(64)] for _ in range(3)]
    prompts = [p + [300 + rng.randrange(500) for _ in range(rng.randrange(30, 200))] for p in prompts * 2]

    async def everything(url: str, keys: list[str]) -> tuple[int, set[int]]:
        num_deleted, statuses = 0, set()
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as http:

            async def post(key: str, path: str, body: dict[str, Any]) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await http.post(f"{url}{path}", content=json.dumps(body), headers=headers)

            async def asks(key: str, rng: random.Random) -> None:
                for _ in range(12):
                    number = rng.randrange(len(prompts))
                    body = {"prompt": prompts[number], "max_tokens": 4, "temperature": 0}
                    answer = await post(key, "/v1/completions", body)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == expected[number]

            async def meddles(key: str, rng: random.Random) -> None:
                nonlocal num_deleted
                for _ in range(15):
                    number = rng.randrange(len(prompts))
                    name, prompt = f"chat-{number}", prompts[number]
                    operation, body = rng.choice(
                        [
                            ("save", {"name": name, "prompt": prompt}),
                            ("save", {"name": name, "prompt": prompt}),
                            ("load", {"prompt": prompt}),
                            ("load", {"name": name}),
                            ("pin", {"name": name, "seconds": 0.1}),
                            ("forget", {"name": name}),
                            ("forget", {"prompt": prompt}),
                        ]
                    )
                    answer = await post(key, f"/v1/cache/{operation}", body)
                    statuses.add(answer.status_code)
                    assert answer.status_code in (200, 404), answer.text
                    num_deleted += operation == "forget" and answer.status_code == 200

            await asyncio.gather(
                *(asks(key, random.Random(n)) for n, key in enumerate(keys * 2)),
                *(meddles(key, random.Random(100 + n)) for n, key in enumerate(keys * 2)),
            )
        return num_deleted, statuses

    with serving(None) as plain:
        options = {"max_tokens": 4, "cache_prompt": False}
        expected = [plain.complete(p, **options)["choices"][0]["text"] for p in prompts]
    with serving(tmp_path / "kv", KEYS, cache_bytes=24 << 20) as api:
        num_deleted, statuses = asyncio.run(everything(api.url, [ALICE, BOB]))
        assert num_deleted and 200 in statuses
    with serving(tmp_path / "kv", KEYS) as api:
        for number, prompt in enumerate(prompts):
            for key in (ALICE, BOB):
                answer = Api(api.url, key).complete(prompt, max_tokens=4)
                assert answer["choices"][0]["text"] == expected[number]
