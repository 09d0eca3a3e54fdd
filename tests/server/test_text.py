"""Text over HTTP: streamed and whole answers, positions of tokens, what follows an error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.serving import Running

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
PROMPT = f"{{{{bytes:na\u00efve {FAMILY} smile}}}}"


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("stop", [None, "smile", "n", " \U0001f468"])
@pytest.mark.parametrize("n", [1, 3])
def test_positions_of_tokens(server: Running, n: int, stop: str | None) -> None:
    """Each token's text begins where it says, in streams as in whole answers."""
    body = {"prompt": PROMPT, "logprobs": 0, "temperature": 0, "max_tokens": 99, "n": n, "stop": stop}
    whole = server.post("/v1/completions", body).json()["choices"]
    chunks = [chunk for event in events(server, "/v1/completions", body) for chunk in event["choices"]]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name in ("tokens", "text_offset"):
            joined = [item for chunk in mine for item in chunk["logprobs"][name]]
            assert joined == choice["logprobs"][name]
        full = f"na\u00efve {FAMILY} smile"
        # One byte per token: a token stands where its code point does.
        starts = [number for number, char in enumerate(full) for _ in char.encode()]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[: len(starts)] == starts[: len(offsets)]


def test_echo_moves_the_positions(server: Running) -> None:
    body = {"prompt": "{{bytes:\u00e9b}}", "echo": True, "temperature": 0, "max_tokens": 9}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text == "{{bytes:\u00e9b}}\u00e9b"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_after_an_error(server: Running, path: str) -> None:
    prompt = {"prompt": "{{x}}"} if path == "/v1/completions" else {"messages": [_user("{{x}}")]}
    for options, num_events in (({}, 1), ({"stream_options": {"include_usage": True}}, 2)):
        server.worker.fail_next = 1
        found = events(server, path, {**prompt, **options})
        assert len(found) == num_events
        assert "planted failure" in found[0]["error"]["message"]
    last = found[-1]
    assert server.post(path, prompt).status_code == 200
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] > 0 and last["usage"]["completion_tokens"] == 0


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stop", [None, ["e", "\ufffd"], ["the", " \u00e9"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_sampled_answers_are_the_same_streamed(server: Running, path: str, stop: list[str] | None) -> None:
    """Random tokens, broken code points among them; several choices; text, tokens and log-probabilities."""
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [_user("hello")]}
    logprobs: dict[str, Any] = {"logprobs": 1} if "prompt" in prompt else {"logprobs": True}
    for seed in range(8):
        body = {
            **prompt, **logprobs, "n": 3, "seed": seed, "temperature": 1.5, "max_tokens": 24, "stop": stop,
            "return_token_ids": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        found = events(server, path, body)
        del body["stream_options"]
        whole = server.post(path, body).json()
        assert (
            found[-1]["choices"] == []
            and found[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        )
        for choice in whole["choices"]:
            mine = [c for event in found for c in event["choices"] if c["index"] == choice["index"]]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            streamed = [c["text"] if "text" in c else c["delta"].get("content", "") for c in mine]
            assert "".join(streamed) == text
            assert [i for c in mine for i in c.get("token_ids", [])] == choice["token_ids"]
            assert _logprobs(mine) == _logprobs([choice])
            assert len(_logprobs([choice])) == len(choice["token_ids"])
            for name in ("finish_reason", "stop_reason"):
                assert mine[-1][name] == choice[name]


def _logprobs(choices: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for choice in choices:
        logprobs = choice["logprobs"]
        if logprobs and "content" in logprobs:
            found += [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
        elif logprobs:
            found += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    return found
