"""Prompt log-probabilities over HTTP, in both forms; scoring only; what reuse says about them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.server.serving import HTTP, Running
from tests.server.test_errors import assert_error
from tests.server.test_life import LONG

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the fox — and é 🦊 sleeps"


def ask(server: Running, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body.setdefault("temperature", 0)
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_echo_with_logprobs_has_the_prompt_and_the_answer(server: Running) -> None:
    body = ask(server, prompt=PROMPT, echo=True, logprobs=2, max_tokens=4, return_token_ids=True)
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    tokenizer = server.model.tokenizer
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert {len(lists) for lists in logprobs.values()} == {len(ids)}
    assert choice["text"].startswith(PROMPT)
    for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in text:
            assert choice["text"][offset:].startswith(text)
    for token, value, best in zip(
        *(logprobs[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert best[token] == value and len(best) <= 3
        assert max(best.values()) >= value
    assert body["usage"]["completion_tokens"] == 4


def test_scores_are_what_the_model_says_about_each_token(server: Running) -> None:
    """Against generation: the prompt cut before each token, and that token's log-probability."""
    ids = server.model.tokenizer.encode(PROMPT)
    scored = ask(server, prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    for position in (1, 5, len(ids) - 1):
        body = {
            "prompt": ids[:position], "logprobs": 0, "max_tokens": 1,
            "logit_bias": {str(ids[position]): 100}, "return_token_ids": True,
        }  # fmt: skip
        choice = ask(server, **body)["choices"][0]
        assert choice["token_ids"] == [ids[position]]
        assert scored["token_logprobs"][position] == pytest.approx(choice["logprobs"]["token_logprobs"][0])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_max_tokens_zero_only_scores(server: Running, stream: bool) -> None:
    body = {"prompt": [LONG, PROMPT], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    if not stream:
        answer = ask(server, **body)
        choices, usage = answer["choices"], answer["usage"]
    else:
        body["stream_options"] = {"include_usage": True}
        with HTTP.stream("POST", server.url + COMPLETIONS, json=body) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        usage = events[-1]["usage"]
        choices = sorted((e["choices"][0] for e in events[:-1]), key=lambda c: c["index"])
        assert len(choices) == 2
    assert [choice["text"] for choice in choices] == [LONG, PROMPT]
    assert all(choice["finish_reason"] == "length" for choice in choices)
    sizes = [len(server.model.tokenizer.encode(text)) for text in (LONG, PROMPT)]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == sizes
    assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == sum(sizes)


def test_a_stream_begins_with_the_whole_prompt(server: Running) -> None:
    whole = ask(server, prompt=LONG, echo=True, logprobs=1, max_tokens=5)["choices"][0]
    body = {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 5, "stream": True, "temperature": 0}
    with HTTP.stream("POST", server.url + COMPLETIONS, json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[0]["text"].startswith(LONG)
    for name, values in whole["logprobs"].items():
        joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        assert joined == values, name


def test_the_form_of_vllm(server: Running) -> None:
    choice = ask(server, prompt=PROMPT, prompt_logprobs=2, max_tokens=1)["choices"][0]
    ids = server.model.tokenizer.encode(PROMPT)
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    for token_id, entries in zip(ids[1:], scores[1:], strict=True):
        own = entries[str(token_id)]
        assert own["decoded_token"] == server.model.tokenizer.token_text(token_id)
        better = [e for e in entries.values() if e["logprob"] > own["logprob"]]
        assert own["rank"] > len(better) and 2 <= len(entries) <= 3
        assert sorted(e["rank"] for e in entries.values())[:2] == [1, 2]
    assert choice["text"] and choice["logprobs"] is None


def test_chats_have_it_beside_the_choices(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "return_token_ids": True}
    answer = ask(server, CHAT, **body, prompt_logprobs=0)
    ids = answer["prompt_token_ids"]
    assert [None if s is None else list(s) for s in answer["prompt_logprobs"]] == [
        None,
        *([str(i)] for i in ids[1:]),
    ]
    assert "prompt_logprobs" not in ask(server, CHAT, **body)


def test_several_choices_share_the_scores_of_the_first(server: Running) -> None:
    answer = ask(server, prompt=PROMPT, echo=True, logprobs=0, n=3, max_tokens=2, temperature=1, seed=3)
    size = len(server.model.tokenizer.encode(PROMPT))
    heads = [choice["logprobs"]["token_logprobs"][:size] for choice in answer["choices"]]
    assert heads[0] == heads[1] == heads[2] and heads[0][1] is not None
    assert not any(math.isnan(value) for value in heads[0][1:])


def test_they_are_computed_never_reused_and_leave_a_prefix_behind(server: Running) -> None:
    first = ask(server, prompt=LONG, max_tokens=1)
    scored = ask(server, prompt=LONG, echo=True, logprobs=0, max_tokens=0)
    reuse = scored["milepost"]["reuse"]
    assert reuse["reason"] == "prompt_logprobs" and reuse["cached_tokens"] == 0
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    metrics = server.metrics()
    name = "milepost:prefix_cache_misses_total{reason=prompt_logprobs}"
    assert metrics[name] >= first["usage"]["prompt_tokens"]
    other = "a prompt that only was scored: " + LONG
    ask(server, prompt=other, prompt_logprobs=0, max_tokens=1)
    again = ask(server, prompt=other, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["milepost"]["reuse"]["reason"] == "hit"


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "`echo` or `prompt_logprobs`"),
        (COMPLETIONS, {"max_tokens": 0, "logprobs": 1}, "max_tokens", "`echo`"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
        (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs", "integer"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streams"),
        (COMPLETIONS, {"echo": True, "logprobs": 1, "n": 2, "stream": True}, "echo", "streams"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs", "between 0 and 20"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streams"),
        (CHAT, {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_served(
    server: Running, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    assert_error(server.post(path, {**base, **body}), 400, param, text)
