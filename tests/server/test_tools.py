"""Reasoning and tool calls over HTTP, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.template_shapes import REASONING
from tests.server.serving import Running, running_server

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "the sun"}}\n</tool_call>'
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: Any) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("thinker"), template=REASONING) as server:
        yield server


def user(text: str) -> dict[str, str]:
    """What the worker "predicts" stands in double braces."""
    return {"role": "user", "content": text}


def says(server: Running, text: str) -> dict[str, str]:
    """A user message that makes the worker write `text`, control tokens as tokens."""
    server.worker.scripts[f"key{len(server.worker.scripts)}."] = text
    return user(list(server.worker.scripts)[-1])


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.index == len(message["tool_calls"]):
                    assert call.id and call.type == "function" and call.function.name
                    message["tool_calls"].append({"name": call.function.name, "arguments": ""})
                else:
                    assert call.id is None and call.function.name is None
                message["tool_calls"][call.index]["arguments"] += call.function.arguments or ""
    return message


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "arguments"),
    [
        (f"<think>\nhm\n</think>\n\nwait\n{CALL}", "hm", "wait", ['{"q": "the sun"}']),
        (f"{CALL}\n{CALL}", "", "", ['{"q": "the sun"}'] * 2),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes", []),
        ("<tool_call>\nno call\n</tool_call>", "", "<tool_call>\nno call\n</tool_call>", []),
    ],
)
def test_answers_are_taken_apart(
    thinker: Running, text: str, reasoning: str, content: str, arguments: list[str]
) -> None:
    client = thinker.client()
    messages = [says(thinker, text)]
    answer = client.chat.completions.create(messages=messages, tools=[FIND], **GREEDY)
    message, finish = answer.choices[0].message, "tool_calls" if arguments else "stop"
    assert (message.content or "") == content
    assert (getattr(message, "reasoning_content", None) or "") == reasoning
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert (details is None) == (not reasoning)
    assert details is None or 0 < (details.reasoning_tokens or 0) < answer.usage.completion_tokens
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    assert [call.function.arguments for call in message.tool_calls or ()] == arguments
    assert answer.choices[0].finish_reason == finish
    chunks = list(client.chat.completions.create(messages=messages, tools=[FIND], stream=True, **GREEDY))
    assert joined(chunks) == {
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"name": "find", "arguments": text} for text in arguments],
    }
    assert chunks[-1].choices[0].finish_reason == finish
    if arguments:
        assert message.content is None or content
        assert sum(bool(c.choices[0].delta.tool_calls) for c in chunks) > len(arguments)


def test_a_tool_conversation_reuses_all_of_every_turn(thinker: Running) -> None:
    """The parsed answer, sent back, is the tokens the model wrote: the next turn computes what is new."""
    client = thinker.client()
    messages: list[Any] = [says(thinker, f"<think>\nhm\n</think>\n\nwait\n{CALL}")]
    first = client.chat.completions.create(messages=messages, tools=[FIND], **GREEDY)
    message = first.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "content": "shines", "tool_call_id": message["tool_calls"][0]["id"]}
    second = client.chat.completions.create(messages=[*messages, message, result], tools=[FIND], **GREEDY)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    processed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens >= processed // 16 * 16
    assert second.model_extra is not None
    assert second.model_extra["milepost"]["reuse"]["retokenized_at"] is None


def test_without_tools_a_call_is_text(thinker: Running) -> None:
    client = thinker.client()
    messages = [says(thinker, CALL)]
    for options in ({}, {"tools": [FIND], "tool_choice": "none"}):
        answer = client.chat.completions.create(messages=messages, **options, **GREEDY)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_cover_every_token_of_a_parsed_answer(thinker: Running) -> None:
    client = thinker.client()
    messages = [says(thinker, f"<think>\nhm\n</think>\n\nwait\n{CALL}")]
    options: dict[str, Any] = {"messages": messages, "tools": [FIND], "logprobs": True, **GREEDY}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None and whole.choices[0].logprobs is not None
    tokens = [entry.token for entry in whole.choices[0].logprobs.content or ()]
    assert len(tokens) == whole.usage.completion_tokens
    chunks = client.chat.completions.create(stream=True, **options)
    streamed = [
        entry.token
        for chunk in chunks
        for choice in chunk.choices
        for entry in (choice.logprobs.content or () if choice.logprobs else ())
    ]
    assert streamed == tokens


def test_an_answer_cut_off_in_a_call_ends_with_length(thinker: Running) -> None:
    client = thinker.client()
    options = {**GREEDY, "max_tokens": 40}
    answer = client.chat.completions.create(messages=[says(thinker, CALL)], tools=[FIND], **options)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "length"
    assert '{"q": "the sun"}'.startswith(call.function.arguments)
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_stop_strings_see_the_plain_text(thinker: Running) -> None:
    client = thinker.client()
    answer = client.chat.completions.create(
        messages=[says(thinker, "<think>\nhm\n</think>\n\nyes and no")], stop=[" and"], **GREEDY
    )
    assert answer.choices[0].message.content == "yes"
    answer = client.chat.completions.create(
        messages=[says(thinker, "<think>\nhm\n</think>\n\nyes and no")], stop=["</think>"], **GREEDY
    )
    assert answer.choices[0].message.content == ""
    assert getattr(answer.choices[0].message, "reasoning_content", None) == "hm\n"


def test_the_newer_name_of_reasoning_in_the_history(thinker: Running) -> None:
    def cached(field: str) -> int:
        history = [
            user("a question"),
            {"role": "assistant", "content": "", field: "the fox", "tool_calls": [CALLED]},
        ]
        messages = [*history, {"role": "tool", "content": "x", "tool_call_id": "call_1"}]
        body = {"messages": messages, "tools": [FIND], "max_tokens": 1}
        return thinker.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]

    assert cached("reasoning") == cached("reasoning_content") > cached("ignored")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_if_that_is_all_the_caller_takes(thinker: Running, stream: bool) -> None:
    options: dict[str, Any] = {"messages": [says(thinker, f"{CALL}\n{CALL}")], "tools": [FIND], **GREEDY}
    answer = thinker.client().chat.completions.create(parallel_tool_calls=False, stream=stream, **options)
    if stream:
        assert len(joined(list(answer))["tool_calls"]) == 1
    else:
        assert len(answer.choices[0].message.tool_calls) == 1


def test_reasoning_effort_reaches_the_template(thinker: Running) -> None:
    def count(**extra: Any) -> int:
        body = {"messages": [user("a question")], "max_tokens": 1, **extra}
        return thinker.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]

    # This template writes an empty thought where thinking is off.
    assert count(reasoning_effort="none") > count(reasoning_effort="low") == count()
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    assert count(reasoning_effort="none", **thinks) == count()


CALLED = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
