"""Structured output with the embedded model, through the real worker."""

from __future__ import annotations

import json
from array import array

import pytest

from milepost.core.plan import SamplingParams
from milepost.engine.blocking import answer
from milepost.engine.messages import GenerationRequest
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.engine.structured import json_grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    loaded = load_serving_model(None, ServingOptions(cache_bytes=64 << 20, match_unit=16))
    loaded.engine.start()
    yield loaded
    loaded.close()


def ask(model: ServingModel, seed: int, *, uses_cache: bool) -> str:
    sampling = SamplingParams(temperature=1.0, seed=seed, stop_token_ids=list(model.tokenizer.eos_token_ids))
    prompt = array("I", model.tokenizer.encode_prompt("Describe a person as JSON, please: " * 4))
    request = GenerationRequest(
        prompt,
        sampling,
        max_tokens=150,
        uses_cache=uses_cache,
        constraint=model.grammars.compile(json_grammar(SCHEMA, "p")),
    )
    return "".join(delta.text for delta in answer(model.engine, request))


@pytest.mark.parametrize("seed", range(3))
def test_answers_follow_the_schema_with_and_without_the_cache(model: ServingModel, seed: int) -> None:
    text = ask(model, seed, uses_cache=True)
    value = json.loads(text)
    assert set(value) == {"name", "age"} and len(value["name"]) <= 8 and value["age"] <= 99
    assert ask(model, seed, uses_cache=True) == text
    assert ask(model, seed, uses_cache=False) == text
