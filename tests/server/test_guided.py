"""Structured output over HTTP: response_format, structured_outputs, guided_*, tool_choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.template_shapes import REASONING
from tests.server.serving import Running, running_server

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
OPEN = {"type": "function", "function": {"name": "open", "parameters": {**SCHEMA, "required": ["n"]}}}
SAMPLED: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 150}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("guided"), template=REASONING) as server:
        yield server
        server.wait_idle()


def check(text: str | None) -> None:
    value = json.loads(text or "")
    assert set(value) == {"n", "ok"} and 0 <= value["n"] <= 99 and isinstance(value["ok"], bool)


def test_response_format(server: Running) -> None:
    client = server.client()
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(messages=MESSAGES, response_format=form, n=3, **SAMPLED)
    for choice in answer.choices:
        check(choice.message.content)
        assert choice.finish_reason == "stop"
    assert len({choice.message.content for choice in answer.choices}) > 1
    chunks = client.chat.completions.create(messages=MESSAGES, response_format=form, stream=True, **SAMPLED)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content


def test_any_object_and_the_pydantic_helper(server: Running) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        n: int
        ok: bool

    client = server.client()
    form: Any = {"type": "json_object"}
    body = {"messages": MESSAGES, "response_format": form, "seed": 1, "max_tokens": 600, "temperature": 2}
    answer = server.post("/v1/chat/completions", body).json()["choices"][0]
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    assert answer["message"]["content"].lstrip().startswith("{")
    point = client.chat.completions.parse(messages=MESSAGES, response_format=Point, **SAMPLED)
    assert isinstance(point.choices[0].message.parsed, Point)


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"structured_outputs": {"choice": ["fox", "dog"]}}, {"fox", "dog"}),
        ({"guided_choice": ["fox", "dog"]}, {"fox", "dog"}),
        ({"structured_outputs": {"regex": "(ab|cd)e"}}, {"abe", "cde"}),
        ({"guided_regex": "(ab|cd)e"}, {"abe", "cde"}),
        ({"guided_grammar": 'root ::= "x" | "yz"'}, {"x", "yz"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, {"x", "yz"}),
        ({"guided_json": {"enum": ["fox"]}}, {'"fox"'}),
        ({"structured_outputs": {"json": json.dumps({"enum": [7]}), "disable_fallback": True}}, {"7"}),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_name(server: Running, path: str, extra: dict[str, Any], texts: set[str] | None) -> None:
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = server.post(path, {**prompt, **extra, **SAMPLED})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert texts is None or text in texts


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"find", "open"}), ({"type": "function", "function": {"name": "open"}}, {"open"})],
)
def test_demanded_tool_calls(server: Running, choice: Any, names: set[str]) -> None:
    client = server.client()
    for seed in range(4):
        answer = client.chat.completions.create(
            messages=MESSAGES,
            tools=[FIND, OPEN],
            tool_choice=choice,
            parallel_tool_calls=False,
            **{**SAMPLED, "seed": seed},
        )
        message = answer.choices[0].message
        assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls or ()
        assert call.function.name in names
        assert 0 <= json.loads(call.function.arguments)["n"] <= 99


def test_a_form_of_the_content_leaves_the_choice_to_call(server: Running) -> None:
    """What the model wants to write decides: a call, or an object by the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    body = {"tools": [FIND], "response_format": form, **SAMPLED}
    arguments = '{"n": 7, "ok": true}'
    server.worker.scripts["please call"] = (
        f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>'
    )
    server.worker.scripts["please talk"] = "no object at all"

    def ask(text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        answer = server.post("/v1/chat/completions", {**body, "messages": messages}).json()
        return answer["choices"][0]

    called = ask("please call")
    assert called["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in called["message"]["tool_calls"]] == [arguments]
    said = ask("please talk")
    assert said["finish_reason"] == "stop"
    check(said["message"]["content"])


def test_a_thought_that_the_prompt_opens_is_free(server: Running, tmp_path: Any) -> None:
    opened = REASONING.replace(
        "{{- '<|im_assistant|>assistant\\n' -}}\n  {%- if enable",
        "{{- '<|im_assistant|>assistant\\n<think>\\n' -}}\n  {%- if enable",
    )
    assert opened != REASONING
    with running_server(tmp_path, template=opened) as thinker:
        thinker.worker.scripts["question"] = "hm hm\n</think>\n\nno json at all"
        body = {
            "messages": [{"role": "user", "content": "question"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
            **SAMPLED,
        }
        message = thinker.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "hm hm"
        check(message["content"])


@pytest.mark.parametrize(
    ("extra", "param", "text"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "JSON schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"type": "x"}}}},
                }
            },
            "response_format.json_schema.schema",
            "response_format.json_schema.schema.properties.a: Invalid type",
        ),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_regex": "("}, "guided_regex", "cannot be followed"),
        ({"guided_regex": 7}, "guided_regex", "must be a text"),
        ({"guided_grammar": "{{{"}, "guided_grammar", "is no grammar"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        ({"structured_outputs": 3}, "structured_outputs", "object"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": "some"}, "tool_choice", "required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [FIND]},
            "tool_choice",
            "'x'",
        ),
        ({"tool_choice": {"type": "function"}, "tools": [FIND]}, "tool_choice", "must be"),
    ],
)
def test_what_is_refused(server: Running, extra: dict[str, Any], param: str, text: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **extra, **SAMPLED})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert text in error["message"]
