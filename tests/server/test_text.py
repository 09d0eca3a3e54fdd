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
