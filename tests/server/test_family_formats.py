"""Answers in the formats of the Kimi families over HTTP: taken apart, and reused when they come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from tests.server.serving import MATCH_UNIT, Running, running_server

SCHEMA = {"type": "object", "properties": {"q": {"enum": ["the sun"]}}, "required": ["q"]}
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
THOUGHT = "numbers 0 1 2 3 4 5 6 7 8 9 and text with newlines"
SAID = "the quick brown fox jumps over the lazy dog"
ANSWERS = {
    "kimi_linear": (
        f"{SAID}<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        '<|tool_call_argument_begin|>{"q": "the sun"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi_k3": (
        f"{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>{SAID}<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>the sun<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>"
    ),
}
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 300}


@pytest.fixture(scope="module", params=ANSWERS)
def family(request: Any, tmp_path_factory: Any) -> Iterator[tuple[str, Running]]:
    with running_server(tmp_path_factory.mktemp(request.param), family=request.param) as server:
        server.worker.scripts["what shines?"] = ANSWERS[request.param]
        yield request.param, server
        server.wait_idle()


def covers(processed: int) -> int:
    """The least a next turn reuses of so many processed tokens."""
    return processed // MATCH_UNIT * MATCH_UNIT


@pytest.mark.parametrize("stream", [False, True])
def test_chat(family: tuple[str, Running], stream: bool) -> None:
    name, server = family
    messages: list[Any] = [{"role": "user", "content": f"what shines? {stream}"}]
    body = {"messages": messages, "tools": [FIND], **GREEDY}
    if stream:
        with server.client().chat.completions.stream(**body) as events:
            first = events.get_final_completion()
    else:
        first = server.client().chat.completions.create(**body)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == SAID
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("find", '{"q": "the sun"}')
    assert (call.id == "functions.find:0") == (name == "kimi_linear")
    history: dict[str, Any] = {"role": "assistant", "content": SAID, "tool_calls": [call.model_dump()]}
    for called in history["tool_calls"]:
        called.pop("index", None)
        called["function"].pop("parsed_arguments", None)
    if name == "kimi_k3":
        assert message.model_extra is not None and message.model_extra["reasoning_content"] == THOUGHT
        history["reasoning_content"] = THOUGHT
    result = {"role": "tool", "content": "it does", "tool_call_id": call.id}
    second = server.client().chat.completions.create(
        messages=[*messages, history, result], tools=[FIND], **GREEDY
    )
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    whole = server.post("/v1/chat/completions", {**body, "max_tokens": 300}).json()["usage"]
    assert second.usage.prompt_tokens_details.cached_tokens >= covers(whole["total_tokens"] - 1)


def test_messages(family: tuple[str, Running]) -> None:
    name, server = family
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    options: Any = {
        "model": "tiny",
        "max_tokens": 300,
        "tools": [{"name": "find", "input_schema": SCHEMA}],
        "extra_body": {"temperature": 0},
    }
    messages: list[Any] = [{"role": "user", "content": "what shines? say it"}]
    first = client.messages.create(messages=messages, **options)
    kinds = [block.type for block in first.content]
    assert kinds == (["thinking"] if name == "kimi_k3" else []) + ["text", "tool_use"]
    call: Any = first.content[-1]
    assert call.input == {"q": "the sun"} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "it does"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    usage = client.messages.create(messages=messages, **options).usage
    processed = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens - 1
    assert usage.cache_read_input_tokens >= covers(processed)


def test_demanded_calls_and_forms(family: tuple[str, Running]) -> None:
    _, server = family
    body = {"messages": [{"role": "user", "content": "hello"}], "model": "tiny", "max_tokens": 600, "seed": 2}
    variables = {"chat_template_kwargs": {"thinking": False}}
    called = server.post(
        "/v1/chat/completions",
        {**body, **variables, "tools": [FIND], "tool_choice": "required", "parallel_tool_calls": False},
    ).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    (call,) = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"q": "the sun"}
    form = {"structured_outputs": {"choice": ["fox", "dog"]}}
    said = server.post("/v1/chat/completions", {**body, **variables, **form}).json()["choices"][0]
    assert said["finish_reason"] == "stop" and said["message"]["content"] in ("fox", "dog")
