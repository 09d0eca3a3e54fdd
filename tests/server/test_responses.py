"""The Responses API through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.engine.template_shapes import REASONING
from tests.server.serving import MATCH_UNIT, MAX_MODEL_LEN, Running, running_server

SCHEMA: Any = {
    "type": "object",
    "properties": {"q": {"enum": ["the sun", "a fox"]}},
    "required": ["q"],
    "additionalProperties": False,
}
FIND: Any = {"type": "function", "name": "find", "parameters": SCHEMA, "strict": True}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "the sun"}}\n</tool_call>'
ALL = f"<think>\nhm hm\n</think>\n\nwait\n{CALL}"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 200}


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("responses"), template=REASONING) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def says(server: Running, text: str) -> str:
    """A prompt that makes the worker write `text`."""
    key = f"case{len(server.worker.scripts)}."
    server.worker.scripts[key] = text
    return key


def events(server: Running, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    body = {**GREEDY, **body, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as response:
        blocks = response.read().decode().strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_an_answer(server: Running, client: openai.OpenAI) -> None:
    response = client.responses.create(input=says(server, "hello world"), instructions="be short", **GREEDY)
    assert response.output_text == "hello world" and response.status == "completed"
    assert response.object == "response" and response.model == "tiny" and response.error is None
    assert response.instructions == "be short" and response.id.startswith("resp_")
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == len(server.model.tokenizer.encode("hello world")) + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert response.model_extra is not None and response.model_extra["store"] is False
    again = client.responses.create(input=list(server.worker.scripts)[-1], instructions="be short", **GREEDY)
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


def test_the_same_prompt_as_chat(server: Running, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}],
        max_tokens=1,
    )
    for given in ("hello", [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]):
        response = client.responses.create(
            input=given, instructions="be short", model="tiny", max_output_tokens=16
        )
        assert response.usage is not None and chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_length(server: Running, client: openai.OpenAI) -> None:
    options = {**GREEDY, "max_output_tokens": 2}
    response = client.responses.create(input=says(server, "hello world and more"), **options)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_tools_reasoning_and_the_next_turn(server: Running, client: openai.OpenAI) -> None:
    prompt: list[Any] = [{"role": "user", "content": says(server, ALL)}]
    first = client.responses.create(input=prompt, tools=[FIND], **GREEDY)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = first.output
    assert reasoning.content[0].text == "hm hm" and reasoning.summary == []
    assert message.content[0].text == "wait" == first.output_text
    assert (call.name, json.loads(call.arguments)) == ("find", {"q": "the sun"})
    assert first.usage is not None and 0 < first.usage.output_tokens_details.reasoning_tokens
    assert first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    prompt += [item.model_dump(exclude_none=True) for item in first.output]
    prompt.append({"type": "function_call_output", "call_id": call.call_id, "output": "shines"})
    second = client.responses.create(input=prompt, tools=[FIND], **GREEDY)
    assert second.usage is not None
    processed = first.usage.total_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= processed // MATCH_UNIT * MATCH_UNIT


def test_streaming_says_the_same(server: Running, client: openai.OpenAI) -> None:
    prompt = says(server, ALL)
    whole = client.responses.create(input=prompt, tools=[FIND], **GREEDY)
    with client.responses.stream(input=prompt, tools=[FIND], **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    volatile = {"id", "call_id", "parsed_arguments"}

    def plain(items: Any) -> list[Any]:
        dumped = [item.model_dump(exclude=volatile, exclude_none=True) for item in items]
        for item in dumped:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return dumped

    assert plain(final.output) == plain(whole.output)
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    for kind in (
        "response.created",
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.completed",
    ):
        assert kind in kinds


def test_the_order_of_events(server: Running) -> None:
    found = events(server, {"input": says(server, ALL), "tools": [FIND]})
    names = [name for name, _ in found]
    assert all(name == data["type"] for name, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert found[0][1]["response"]["status"] == "in_progress" and found[0][1]["response"]["usage"] is None
    output = found[-1][1]["response"]["output"]
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    added = [data["item"] for name, data in found if name == "response.output_item.added"]
    assert done == output and [item["id"] for item in added] == [item["id"] for item in output]
    assert all(not item.get("content") and item.get("arguments", "") == "" for item in added)
    for index, item in enumerate(output):
        deltas = [
            data["delta"] for name, data in found if name.endswith(".delta") and data["output_index"] == index
        ]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text


def test_a_failure_in_a_stream(server: Running) -> None:
    server.worker.fail_next = 1
    found = events(server, {"input": "hello"})
    assert [name for name, _ in found][-2:] == ["error", "response.failed"]
    response = found[-1][1]["response"]
    assert response["status"] == "failed" and "planted failure" in response["error"]["message"]
    assert response["usage"]["input_tokens"] > 0


def test_demanded_forms(server: Running, client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1, "extra_body": {"seed": 4}}
    form: Any = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(input="hello", text=form, **options)
    assert json.loads(response.output_text)["q"] in ("the sun", "a fox")
    for choice in ("required", {"type": "function", "name": "find"}):
        response = client.responses.create(
            input="hello", tools=[FIND], tool_choice=choice, parallel_tool_calls=False, **options
        )
        (call,) = response.output
        assert call.type == "function_call" and json.loads(call.arguments)["q"] in ("the sun", "a fox")


def test_effort_none_switches_thinking_off(server: Running, client: openai.OpenAI) -> None:
    def count(effort: Any) -> int:
        options = {**GREEDY, "max_output_tokens": 1}
        usage = client.responses.create(input="hello", reasoning={"effort": effort}, **options).usage
        assert usage is not None
        return usage.input_tokens

    # This template writes an empty thought where thinking is off.
    assert count("none") > count("high")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": "high"}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "w " * 5000}, "input"),
    ],
)
def test_what_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {**GREEDY, "input": "hello", **body})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error


def test_unsupported_fields_that_ask_for_nothing_pass(server: Running) -> None:
    body = {"truncation": "disabled", "background": False, "store": True, "include": [], "user": "u"}
    response = server.post("/v1/responses", {**GREEDY, "input": "hello", **body, "max_output_tokens": 2})
    assert response.status_code == 200 and response.json()["store"] is False
    assert MAX_MODEL_LEN > response.json()["usage"]["input_tokens"] > 0
