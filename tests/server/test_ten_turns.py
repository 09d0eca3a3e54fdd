"""Promise P1 over HTTP with the embedded model: ten turns of a chat, for every shape of template.

In each turn at most (U - 1) + max(1, N - P) tokens are computed, where P is what the prompt of N tokens
shares with a sequence that was processed before, counted in the token ids the server reports.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.template_shapes import SHAPES
from tests.server.serving import HTTP

from milepost.engine.audit import AuditConfig
from milepost.engine.chat import ChatRenderer, common_prefix
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.engine.template import ChatTemplates
from milepost.server.app import Server, bind

UNIT = 32
WORDS = (Path(__file__).resolve().parents[1] / "data" / "the_tempest.txt").read_text(encoding="utf-8").split()
TOOLS = [
    {"type": "function", "function": {"name": name, "description": " ".join(WORDS[at : at + 30])}}
    for name, at in (("weather", 900), ("clock", 1200))
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "day": 3}'},
}
CASES = [
    (name, has_tools)
    for name in SHAPES
    for has_tools in (False, True)
    if not has_tools or "tool" in SHAPES[name]
]
BUILT_IN = "the model's own"


@contextmanager
def served(model: ServingModel) -> Iterator[str]:
    """The base URL of a server that runs until the block ends."""
    listening = threading.Event()
    address: list[str] = []

    def on_listening(url: str) -> None:
        address.append(url)
        listening.set()

    server = Server(lambda: model, bind(port=0), on_listening)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert listening.wait(30), "the server did not start"
    try:
        yield address[0]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def model() -> ServingModel:
    return load_serving_model(None, ServingOptions(cache_bytes=96 << 20, match_unit=UNIT, audit_hits=0.2))


@pytest.fixture(scope="module")
def url(model: ServingModel) -> Iterator[str]:
    with served(model) as address:
        yield address


def sentence(rng: random.Random, most: int = 60) -> str:
    at = rng.randrange(len(WORDS) - most)
    return " ".join(WORDS[at : at + rng.randrange(1, most)])


def next_messages(
    rng: random.Random, name: str, answer: str, turn: int, *, tools: bool
) -> list[dict[str, Any]]:
    """What a client appends: the answer and a question, or an answer that calls a tool and its result."""
    said: dict[str, Any] = {"role": "assistant", "content": answer}
    if name == "reasoning" and turn % 3 == 0:
        said["reasoning_content"] = sentence(rng, 20)
    if tools and turn % 3 == 1:
        result = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": sentence(rng)}
        return [{**said, "tool_calls": [CALL]}, result]
    return [said, {"role": "user", "content": sentence(rng)}]


@pytest.mark.parametrize(("name", "has_tools"), [(BUILT_IN, False), (BUILT_IN, True), *CASES])
def test_ten_turns(url: str, model: ServingModel, name: str, has_tools: bool) -> None:
    if name != BUILT_IN:
        templates = ChatTemplates({"default": SHAPES[name]}, model.tokenizer.named_tokens)
        model.chat = ChatRenderer(model.tokenizer, templates)
    rng = random.Random(f"{name} {has_tools}")
    assert model.engine.reset_prefix_cache().result(10)
    messages: list[dict[str, Any]] = [{"role": "user", "content": sentence(rng)}]
    if name != "strict":
        messages.insert(0, {"role": "system", "content": sentence(rng, 90)})
    processed: list[array[int]] = []
    num_cached = 0
    for turn in range(10):
        body = {
            "messages": messages, "max_tokens": rng.randrange(1, 24), "temperature": 0.8, "seed": turn,
            "return_token_ids": True, **({"tools": TOOLS} if has_tools else {}),
        }  # fmt: skip
        response = HTTP.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        prompt = array("I", answer["prompt_token_ids"])
        shared = max((common_prefix(old, prompt) for old in processed), default=0)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        computed = len(prompt) - cached
        assert computed <= UNIT - 1 + max(1, len(prompt) - shared), (
            f"turn {turn}: {computed} of {len(prompt)} tokens computed, {shared} were known; "
            f"{answer['milepost']['reuse']}"
        )
        num_cached += cached
        choice = answer["choices"][0]
        processed.append(array("I", [*prompt, *choice["token_ids"][:-1]]))
        messages += next_messages(rng, name, choice["message"]["content"], turn, tools=has_tools)
    if name not in ("reversed", "counted"):
        assert num_cached > 0.4 * sum(map(len, processed)), "nearly nothing was ever reused"


def test_the_hits_above_were_sound(url: str, model: ServingModel) -> None:
    """A fifth of them was computed again from the first token."""
    assert model.audit == AuditConfig(0.2, model.audit.logit_bound)
    counts = model.engine.audits()
    assert counts.num_mismatch == 0
    assert counts.num_equal + counts.num_within_bound > 0
