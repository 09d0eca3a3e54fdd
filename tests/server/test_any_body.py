"""Whatever a body holds, the answer is an answer or an error that says why, in the form of its API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.serving import Running

from milepost.server.anthropic_input import MessagesBody
from milepost.server.responses_input import ResponsesBody
from milepost.server.schema import ChatBody, CompletionBody

WORDS = [
    "user", "assistant", "system", "tool", "text", "type", "role", "content", "function", "name", "auto",
    "required", "none", "any", "json_schema", "json_object", "schema", "enabled", "ephemeral", "input_text",
    "tool_use", "tool_result", "thinking", "tool_use_id", "id", "input", "call_id", "arguments", "output",
    "function_call", "function_call_output", "reasoning", "summary", "message", "cache_control", "format",
    "parameters", "input_schema", "properties", "object", "string", "tool_calls", "custom", "x", "",
]  # fmt: skip
words = st.sampled_from(WORDS)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
HELLO = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "hello", "max_tokens": 1}),
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 1, "tools": [TOOL]}),
    "/v1/messages": (MessagesBody, {"messages": HELLO, "max_tokens": 1}),
    "/v1/messages/count_tokens": (MessagesBody, {"messages": HELLO}),
    "/v1/responses": (ResponsesBody, {"input": "hello", "max_output_tokens": 1}),
    "/v1/chat/completions/render": (ChatBody, {"messages": HELLO}),
    "/tokenize": (ChatBody, {"messages": HELLO}),
}
UNBOUNDED = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "stream", "min_tokens")


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_a_server_error(server: Running, path: str, data: st.DataObject) -> None:
    kind, good = ROUTES[path]
    names = sorted(set(kind.model_fields) - set(UNBOUNDED))
    changed = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    body = {**good, **{name: data.draw(values, label=name) for name in changed}}
    response = server.post(path, body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        found = response.json()
        assert ("type" in found) == path.startswith("/v1/messages")
        assert found["error"]["message"] and found["error"]["type"].endswith("_error")
