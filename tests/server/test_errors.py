"""Bad input gets an OpenAI-style error that names the field, and costs nothing."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tests.server.serving import HTTP, MAX_MODEL_LEN, Running, running_server

from milepost.errors import RequestError, naming
from milepost.server import schema
from milepost.server.errors import error_object, shaped_for

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def assert_error(response: httpx.Response, status: int, param: str | None, text: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert text.lower() in error["message"].lower(), error
    if param is not None:
        assert error["message"].count(f"{param}: ") <= 1 and param in error["message"], error
    return error


def part(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, **fields}]}]


BAD_COMPLETIONS = [
    ({}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": 7}, "prompt", "must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "integers"),
    ({"prompt": ["a", 1]}, "prompt", "integers"),
    ({"prompt": [1.5]}, "prompt", "integers"),
    ({"prompt": [True]}, "prompt", "integers"),
    ({"prompt": [-1]}, "prompt", "out of range"),
    ({"prompt": [10**6]}, "prompt", "out of range"),
    ({"prompt": [2**40]}, "prompt", "out of range"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": [5] * MAX_MODEL_LEN}, "prompt", str(MAX_MODEL_LEN)),
    ({"prompt": "word " * 5000}, "prompt", str(MAX_MODEL_LEN)),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "a", "max_tokens": -3}, "max_tokens", "at least 1"),
    ({"prompt": "a", "max_tokens": MAX_MODEL_LEN}, "max_tokens", str(MAX_MODEL_LEN)),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens", "negative"),
    ({"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "top_p": 1.5}, "top_p", "between"),
    ({"prompt": "a", "top_k": -2}, "top_k", "positive"),
    ({"prompt": "a", "min_p": 2}, "min_p", "between"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "between"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", "between"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "out of range"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "between"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias", ""),
    ({"prompt": "a", "seed": "x"}, "seed", "integer"),
    ({"prompt": "a", "n": 0}, "n", "between 1 and 128"),
    ({"prompt": "a", "n": 1000}, "n", "between 1 and 128"),
    ({"prompt": ["a"] * 20, "n": 100}, "n", "1024 answers"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "between 0 and 20"),
    ({"prompt": "a", "stop": ""}, "stop", "empty"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop", "empty"),
    ({"prompt": "a", "stop": ["x"] * 65}, "stop", "at most 64"),
    ({"prompt": "a", "stop": 5}, "stop", "string"),
    ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "out of range"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt", "characters"),
    ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt", "characters"),
    ({"prompt": "a", "priority": 2**40}, "priority", "32-bit"),
    ({"prompt": "a", "guided_json": 7}, "guided_json", "JSON schema"),
    ({"prompt": "a", "lora_request": {"name": "x"}}, "lora_request", "not supported"),
    ({"prompt": "a", "model": "tiny:adapter"}, "model", "LoRA"),
]

BAD_CHATS = [
    ({}, "messages", "at least one"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hello"}, "messages", "array"),
    ({"messages": ["hello"]}, "messages[0]", "object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "one of"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": part("image_url", image_url={"url": "x"})}, "messages[0].content[1].type", "image_url"),
    ({"messages": part("input_audio", input_audio={})}, "messages[0].content[1].type", "input_audio"),
    ({"messages": part("text", text=7)}, "messages[0].content[1].text", "string"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0].type", "not supported"),
    ({"messages": [{**HELLO[0], "name": 5}]}, "messages[0].name", "string"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls", "list"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
        "string",
    ),
    ({"messages": HELLO, "tools": [{"type": "custom"}]}, "tools[0].type", "function"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", ""),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"messages": HELLO, "audio": {"voice": "x"}}, "audio", "not supported"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs", "boolean"),
    ({"messages": HELLO, "max_completion_tokens": 10**6}, "max_completion_tokens", str(MAX_MODEL_LEN)),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": [{"role": "user", "content": "w " * 5000}]}, "messages", str(MAX_MODEL_LEN)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "param", "text"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completions(server: Running, body: dict[str, Any], param: str, text: str, stream: bool) -> None:
    assert_error(server.post(COMPLETIONS, {**body, "stream": stream}), 400, param, text)


@pytest.mark.parametrize(("body", "param", "text"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_bad_chats(server: Running, body: dict[str, Any], param: str, text: str) -> None:
    assert_error(server.post(CHAT, body), 400, param, text)


def test_nothing_was_computed_for_any_of_them(server: Running) -> None:
    computed = server.worker.num_computed
    for body, _, _ in BAD_COMPLETIONS:
        server.post(COMPLETIONS, body)
    assert server.worker.num_computed == computed


def test_stream_options_need_a_stream(server: Running) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert_error(server.post(COMPLETIONS, body), 400, "stream_options", "stream")


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"temperature": "hot"}, "temperature", "temperature: must be a valid number"),
        (CHAT, {"stop": 5}, "stop", "stop: must be a valid string or a valid array"),
        (CHAT, {"stop": ["a", 5]}, "stop", "stop[1]: must be a valid string"),
        (CHAT, {"stop_token_ids": [1, "a"]}, "stop_token_ids", "stop_token_ids[1]: must be a valid integer"),
        (CHAT, {"logit_bias": {"7": "a"}}, "logit_bias", "logit_bias.7: must be a valid number"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options",
         "stream_options.include_usage: must be a valid boolean"),
        (CHAT, {"messages": "hello"}, "messages", "messages: must be a valid array"),
        (CHAT, {"stop": ["str", {"str": 1}]}, "stop", "stop[1]: must be a valid string"),
        ("/detokenize", {}, "tokens", "tokens: Field required"),
        ("/detokenize", {"tokens": {}}, "tokens", "tokens: must be a valid array"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_its_place(
    server: Running, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"messages": HELLO} | fields if path == CHAT else fields
    error = assert_error(server.post(path, body), 400, param)
    assert error["message"] == message


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none(server: Running, value: str) -> None:
    raw = f'{{"prompt": "a", "temperature": {value}}}'
    assert_error(httpx.post(server.url + COMPLETIONS, content=raw), 400, "temperature")


def test_the_official_client_sees_its_own_exceptions(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * 3000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("param", "message", "body"),
    [
        ("top_p", "must be between 0 and 1", "top_p: must be between 0 and 1"),
        ("suffix", "`suffix` is not supported", "`suffix` is not supported"),
        ("prompt", "the prompt is empty", "the prompt is empty"),
        ("a.b", "a.b.c: no keyword", "a.b.c: no keyword"),
        ("logprobs", "needs `top_logprobs`", "logprobs: needs `top_logprobs`"),
        ("n", "must be an integer", "n: must be an integer"),
        ("role", "must be user, not 'role'", "role: must be user, not 'role'"),
        ("role", 'must be user, not "role"', 'role: must be user, not "role"'),
        ("tools", "this model's tools cannot be shown to the model's template", None),
        (None, "the body is too large", None),
    ],
)
def test_every_message_names_its_field_once(param: str | None, message: str, body: str | None) -> None:
    assert naming(param, message) == (body or message)
    error = RequestError(param, message)
    assert error_object(error)[1]["error"]["message"] == (body or message)
    assert shaped_for("/v1/messages", *error_object(error))["error"]["message"] == (body or message)


def test_what_a_user_of_the_official_client_prints_names_the_field(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", top_p=7)
    assert "top_p: must be between 0 and 1" in str(wrong.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}'])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(server: Running, path: str, content: bytes) -> None:
    assert_error(httpx.post(server.url + path, content=content), 400, None)


def test_the_content_type_does_not_matter(server: Running) -> None:
    response = httpx.post(
        server.url + COMPLETIONS,
        content=b'{"prompt": "{{x}}", "temperature": 0}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert response.json()["choices"][0]["text"] == "x"


def test_unknown_routes_and_methods(server: Running) -> None:
    assert_error(server.get("/v1/nothing"), 404, None, "/v1/nothing: Not Found; /docs lists the routes")
    assert_error(server.get(CHAT), 405, None)


@pytest.mark.parametrize(
    ("method", "path", "meant", "base"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions", "http://HOST:PORT/v1"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions", "http://HOST:PORT/v1"),
        ("POST", "/api/v1/completions", "/v1/completions", "http://HOST:PORT/v1"),
        ("POST", "/v1//chat/completions", "/v1/chat/completions", "http://HOST:PORT/v1"),
        ("GET", "/models", "/v1/models", "http://HOST:PORT/v1"),
        ("GET", "/v1/health", "/health", ""),
        ("GET", "/v1/ui/state", "/ui/state", ""),
    ],
)
def test_a_wrong_base_url_is_recognised(
    server: Running, method: str, path: str, meant: str, base: str
) -> None:
    response = HTTP.request(method, server.url + path, json={} if method == "POST" else None)
    error = assert_error(response, 404, None, f"did you mean {meant}?")
    assert base in error["message"]


@pytest.mark.parametrize("path", ["/messages", "/v1/v1/messages", "/anthropic/v1/messages"])
def test_a_wrong_base_url_of_anthropics_client(server: Running, path: str) -> None:
    response = HTTP.post(server.url + path, json={})
    body = response.json()
    assert response.status_code == 404
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert "did you mean /v1/messages? " in body["error"]["message"]
    assert "http://HOST:PORT, without /v1" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/no/such/thing", "/" + "v1/" * 40 + "models"])
def test_nothing_is_guessed_about_other_paths(server: Running, path: str) -> None:
    assert "did you mean" not in assert_error(server.get(path), 404, None)["message"]
    assert "/docs lists its routes, and /ui" in assert_error(server.get("/"), 404, None)["message"]


def test_harmless_and_unknown_fields_are_accepted(server: Running) -> None:
    extra = {"user": "u", "metadata": {}, "store": False, "suffix": None, "response_format": {"type": "text"}}
    body = {"messages": HELLO, "max_tokens": 2, **extra, "no_such_field": 1, "tool_choice": "auto"}
    assert server.post(CHAT, body).status_code == 200


def test_names_of_unknown_fields_are_not_collected_without_bound(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_warned", set())
    for number in range(0, 2000, 100):
        extra = {f"unknown_{number + index}_{'x' * 100}": 1 for index in range(100)}
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1, **extra}).status_code == 200
    assert len(schema._warned) <= schema.MAX_WARNED_FIELDS
    assert max(map(len, schema._warned)) <= 64


def test_a_template_argument_may_have_any_name(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"self": 1}}
    assert server.post(CHAT, body).status_code == 200


def test_tokenize_and_detokenize(server: Running) -> None:
    assert_error(server.post("/tokenize", {}), 400, "prompt", "either")
    assert_error(server.post("/tokenize", {"prompt": "a", "messages": HELLO}), 400, "prompt", "either")
    assert_error(server.post("/detokenize", {"tokens": [10**6]}), 400, "tokens", "out of range")
    assert_error(server.post("/detokenize", {"tokens": "x"}), 400, "tokens")
    assert_error(server.post("/detokenize", {}), 400, "tokens")
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_a_model_without_a_chat_template(tmp_path) -> None:
    with running_server(tmp_path, template=None) as server:
        error = assert_error(server.post(CHAT, {"messages": HELLO}), 400, "messages", "no chat template")
        assert error["code"] == "no_chat_template"
        assert server.post(COMPLETIONS, {"prompt": "{{x}}", "temperature": 0}).status_code == 200


def test_a_failed_step_is_a_500_and_the_next_request_works(server: Running) -> None:
    server.worker.fail_next = 1
    error = assert_error(server.post(COMPLETIONS, {"prompt": "{{x}}"}), 500, None, "planted failure")
    assert error["type"] == "server_error"
    server.worker.fail_next = 1
    with httpx.stream("POST", server.url + COMPLETIONS, json={"prompt": "{{x}}", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "planted failure" in lines[0] and '"error"' in lines[0]
    assert lines[-1] == "data: [DONE]"
    assert server.post(COMPLETIONS, {"prompt": "{{x}}", "temperature": 0}).json()["choices"][0]["text"] == "x"


def test_a_stopped_engine_is_red(tmp_path) -> None:
    with running_server(tmp_path) as server:
        assert server.get("/health").status_code == 200
        server.worker.fail_next = 1000
        while server.post(COMPLETIONS, {"prompt": "{{x}}"}).status_code == 500:
            pass
        assert_error(server.post(COMPLETIONS, {"prompt": "{{x}}"}), 503, None, "planted failure")
        assert_error(server.get("/health"), 503, None, "planted failure")
        assert_error(server.post("/reset_prefix_cache", {}), 503, None)
        assert server.metrics()["milepost:engine_healthy"] == 0
