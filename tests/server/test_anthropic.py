"""The Messages API through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.engine.template_shapes import REASONING
from tests.server.serving import MATCH_UNIT, MAX_MODEL_LEN, Running, running_server

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 4
FIND: Any = {
    "name": "find",
    "description": "finds things",
    "input_schema": {
        "type": "object",
        "properties": {"q": {"enum": ["the sun", "a fox"]}},
        "required": ["q"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "the sun"}}\n</tool_call>'
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 200}
GREEDY: dict[str, Any] = {**OPTIONS, "extra_body": {"temperature": 0}}
"""For the client, which has no argument for the temperature any more."""
RAW: dict[str, Any] = {**OPTIONS, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("messages"), template=REASONING) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def says(server: Running, text: str) -> dict[str, Any]:
    """A user message that makes the worker write `text`."""
    key = f"case{len(server.worker.scripts)}."
    server.worker.scripts[key] = text
    return {"role": "user", "content": key}


def events(server: Running, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(event name, data) of a raw stream."""
    body = {**RAW, **body, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.read().decode().strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


# ---------------------------------------------------------------- answers


def test_an_answer(server: Running, client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[says(server, "hello world")], system="be short", **GREEDY)
    assert message.type == "message" and message.role == "assistant" and message.model == "tiny"
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "hello world"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt = client.messages.count_tokens(
        messages=[{"role": "user", "content": list(server.worker.scripts)[-1]}],
        system="be short",
        model="tiny",
    )
    usage = message.usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == prompt.input_tokens
    assert usage.output_tokens == len(server.model.tokenizer.encode("hello world")) + 1


@pytest.mark.parametrize(
    ("options", "reason", "sequence", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, None),
        ({"stop_sequences": [" wor"]}, "stop_sequence", " wor", "hello"),
        ({"max_tokens": 10 * MAX_MODEL_LEN}, "end_turn", None, "hello world"),
    ],
)
def test_how_an_answer_ends(
    server: Running,
    client: anthropic.Anthropic,
    options: dict[str, Any],
    reason: str,
    sequence: str | None,
    text: str | None,
) -> None:
    messages: Any = [says(server, "hello world")]
    message = client.messages.create(messages=messages, **{**GREEDY, **options, "timeout": 60})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert text is None or message.content[0].text == text


def test_the_end_of_the_context(server: Running, client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "word " * 480}]
    options = {**GREEDY, "max_tokens": 10 * MAX_MODEL_LEN, "timeout": 60}
    prompt = client.messages.count_tokens(messages=messages, model="tiny").input_tokens
    assert prompt < MAX_MODEL_LEN
    message = client.messages.create(messages=messages, **options)
    assert message.stop_reason in ("model_context_window_exceeded", "end_turn")
    assert message.usage.output_tokens <= MAX_MODEL_LEN - prompt


def test_tools_and_thinking(server: Running, client: anthropic.Anthropic) -> None:
    text = f"<think>\nhm\n</think>\n\nwait\n{CALL}"
    messages: list[Any] = [says(server, text)]
    first = client.messages.create(messages=messages, tools=[FIND], **GREEDY)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thinking, said, call = first.content
    assert thinking.thinking == "hm" and thinking.signature and said.text == "wait"
    assert call.name == "find" and call.input == {"q": "the sun"}
    assert first.stop_reason == "tool_use"
    with client.messages.stream(messages=messages, tools=[FIND], **GREEDY) as stream:
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in first.content
    ]
    assert final.stop_reason == "tool_use"
    # The answer goes back with its result: all of the first turn is reused.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "shines"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tools=[FIND], **GREEDY)
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens >= total // MATCH_UNIT * MATCH_UNIT


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
def test_demanded_calls(server: Running, client: anthropic.Anthropic, choice: Any) -> None:
    message = client.messages.create(
        messages=[{"role": "user", "content": "hello"}],
        tools=[FIND],
        tool_choice={**choice, "disable_parallel_tool_use": True} if choice["type"] == "any" else choice,
        **OPTIONS,
        extra_body={"seed": 5},
    )
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.content[0].input["q"] in ("the sun", "a fox")


def test_tool_choice_none_hides_the_tools(server: Running, client: anthropic.Anthropic) -> None:
    options: Any = {"messages": [{"role": "user", "content": "hello"}], "model": "tiny"}
    without = client.messages.count_tokens(**options).input_tokens
    hidden = client.messages.count_tokens(**options, tools=[FIND], tool_choice={"type": "none"}).input_tokens
    assert hidden == without < client.messages.count_tokens(**options, tools=[FIND]).input_tokens


def test_thinking_reaches_the_template(server: Running, client: anthropic.Anthropic) -> None:
    def count(thinking: Any) -> int:
        return client.messages.count_tokens(
            messages=[{"role": "user", "content": "hello"}], model="tiny", thinking=thinking
        ).input_tokens

    # This template writes an empty thought where thinking is off.
    assert count({"type": "disabled"}) > count({"type": "enabled", "budget_tokens": 1024})


def test_text_documents_are_text(server: Running, client: anthropic.Anthropic) -> None:
    def count(block: Any) -> int:
        messages: Any = [{"role": "user", "content": [block]}]
        return client.messages.count_tokens(messages=messages, model="tiny").input_tokens

    source = {"type": "text", "media_type": "text/plain", "data": LONG}
    assert count({"type": "document", "source": source}) == count({"type": "text", "text": LONG})


def test_a_schema_for_the_answer(server: Running) -> None:
    body = {
        **RAW,
        "messages": [{"role": "user", "content": "hello"}],
        "output_config": {"format": {"type": "json_schema", "schema": {"enum": ["fox"]}}},
    }
    content = server.post("/v1/messages", body).json()["content"]
    assert content == [{"type": "text", "text": '"fox"'}]


# ---------------------------------------------------------------- caching


def test_cache_control_places_a_checkpoint_and_usage_tells(server: Running, client: Any) -> None:
    server.wait_idle()
    assert server.model.engine.reset_prefix_cache().result(10)
    system: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    def usage(question: str) -> Any:
        return client.messages.create(
            system=system, messages=[{"role": "user", "content": question}], **{**GREEDY, "max_tokens": 1}
        ).usage

    first, second = usage("what is the capital?"), usage("does the dog sleep?")
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens >= 3 * MATCH_UNIT
    assert first.cache_creation_input_tokens % MATCH_UNIT == 0
    assert 0 < first.input_tokens < 50
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0


@pytest.mark.parametrize("where", ["tool", "message", "result", "call", "all"])
def test_markers_may_stand_anywhere(server: Running, client: Any, where: str) -> None:
    mark: Any = {"type": "ephemeral"}

    def marked(name: str) -> dict[str, Any]:
        return {"cache_control": mark} if name == where else {}

    call = {"type": "tool_use", "id": "call_1", "name": "find", "input": {"q": "a fox"}, **marked("call")}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "yes", **marked("result")}
    message = client.messages.create(
        tools=[{**FIND, **marked("tool")}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": LONG, **marked("message")}]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ],
        extra_body={"cache_control": mark} if where == "all" else {},
        **{**OPTIONS, "max_tokens": 1},
    )
    usage = message.usage
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens > 0


# ---------------------------------------------------------------- streams


def test_the_order_of_events(server: Running) -> None:
    text = f"<think>\nhm\n</think>\n\nwait\n{CALL}"
    found = events(server, {"messages": [says(server, text)], "tools": [FIND]})
    names = [name for name, _ in found]
    assert all(name == data["type"] for name, data in found)
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    start = found[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    open_index, kinds = None, []
    for name, data in found[1:-2]:
        if name == "content_block_start":
            assert open_index is None and data["index"] == len(kinds)
            open_index = data["index"]
            kinds.append(data["content_block"]["type"])
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
        else:
            assert name == "content_block_delta" and data["index"] == open_index
    assert open_index is None and kinds == ["thinking", "text", "tool_use"]
    delta = found[-2][1]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 10
    assert delta["milepost"]["reuse"]["prompt_tokens"] > 0


def test_an_error_in_a_stream(server: Running, client: anthropic.Anthropic) -> None:
    server.worker.fail_next = 1
    found = events(server, {"messages": [{"role": "user", "content": "hello"}]})
    assert [name for name, _ in found] == ["error"]
    assert found[0][1]["error"]["type"] == "api_error"
    server.worker.fail_next = 1
    with pytest.raises(anthropic.APIStatusError, match="planted failure"):
        for _ in client.messages.create(
            messages=[{"role": "user", "content": "hello"}], stream=True, **GREEDY
        ):
            pass


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 3}],
                    }
                ]
            },
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "must not end",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 7}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]},
            "system[0].cache_control.type",
        ),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "w " * 5000}]}, str(MAX_MODEL_LEN)),
    ],
)
def test_what_is_refused(server: Running, body: dict[str, Any], text: str) -> None:
    response = server.post(
        "/v1/messages", {**RAW, "messages": [{"role": "user", "content": "hello"}], **body}
    )
    error = response.json()
    assert response.status_code == 400 and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert text in error["error"]["message"]


def test_errors_are_the_clients_own(server: Running, client: anthropic.Anthropic) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=hello, **{**GREEDY, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(messages=hello, **{**GREEDY, "max_tokens": -5})
    server.worker.fail_next = 1
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(messages=hello, **GREEDY)
    assert failed.value.body["error"]["type"] == "api_error"
