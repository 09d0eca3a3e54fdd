"""What a request becomes: the same tokens as when it is answered."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.serving import MATCH_UNIT, MAX_MODEL_LEN, Running

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 3
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def test_a_chat_prompt_is_the_one_that_is_answered(server: Running) -> None:
    body = {
        "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "find"}}],
        "max_completion_tokens": 3,
        "temperature": 0.5,
        "stop": "x",
        "top_logprobs": 2,
        "logprobs": True,
    }
    rendered = server.post(f"{CHAT}/render", body).json()
    answered = server.post(CHAT, {**body, "return_token_ids": True}).json()
    assert rendered["token_ids"] == answered["prompt_token_ids"]
    assert rendered["model"] == "tiny" and rendered["request_id"].startswith("chatcmpl-")
    sampling = rendered["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["n"]) == (3, 0.5, 1)
    assert (sampling["stop"], sampling["logprobs"], sampling["seed"]) == (["x"], 2, None)
    assert sampling["stop_token_ids"] == list(server.model.tokenizer.eos_token_ids)


def test_wanted_checkpoints_are_named(server: Running) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": LONG, **mark}, {"type": "text", "text": "more"}]
    body = {"messages": [{"role": "system", "content": parts}, {"role": "user", "content": "hello"}]}
    rendered = server.post(f"{CHAT}/render", body).json()
    found = rendered["milepost"]["checkpoints"]
    assert {"marker", "history"} <= {entry["reason"] for entry in found}
    for entry in found:
        assert 0 < entry["position"] <= len(rendered["token_ids"])
        assert entry["match_unit_position"] == entry["position"] // MATCH_UNIT * MATCH_UNIT


@pytest.mark.parametrize("prompt", ["hello", ["hello", "the dog"], [5, 6, 7], [[5, 6], [7]]])
def test_completion_prompts(server: Running, prompt: Any) -> None:
    rendered = server.post(f"{COMPLETIONS}/render", {"prompt": prompt, "max_tokens": 5, "seed": 7}).json()
    whole = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}).json()
    assert [one["token_ids"] for one in rendered] == [
        choice["prompt_token_ids"] for choice in whole["choices"]
    ]
    assert {one["sampling_params"]["max_tokens"] for one in rendered} == {5}
    assert {one["sampling_params"]["seed"] for one in rendered} == {7}
    default = server.post(f"{COMPLETIONS}/render", {"prompt": prompt}).json()
    assert default[0]["sampling_params"]["max_tokens"] == 16


def test_breakpoints_of_a_completion(server: Running) -> None:
    body = {"prompt": list(range(20, 80)), "prompt_cache_breakpoints": [35]}
    (rendered,) = server.post(f"{COMPLETIONS}/render", body).json()
    assert rendered["milepost"]["checkpoints"] == [
        {"position": 35, "match_unit_position": 32, "reason": "marker"}
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "other"}, "model"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ],
)
def test_what_is_refused_is_what_would_be_refused(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    computed = server.worker.num_computed
    for route in (path, f"{path}/render"):
        response = server.post(route, body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param
    assert server.worker.num_computed == computed
