"""Values that know their text, in templates of other families: filters, attributes and comparisons."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.engine import written_json
from milepost.engine.chat import ChatRenderer
from milepost.engine.template import ChatTemplates
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
ARGUMENTS = '{"city":"Rome", "text": "x", "n":1e3,"m": 1.50, "deep": {"z" : [1,null], "e": "R\\u00f6m"}}'


def shown(source: str, arguments: Any) -> str:
    chat = ChatRenderer(TOKENIZER, ChatTemplates({"default": source}, {}))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return TOKENIZER.decode(chat.render([message], find_boundaries=False).token_ids)


CALL = "{%- set call = messages[0].tool_calls[0] -%}{%- set a = call.function.arguments -%}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", ARGUMENTS),
        ("{{ call.function | tojson }}", '{"name": "f", "arguments": ' + ARGUMENTS + "}"),
        ("{{ {'parameters': [a]} | tojson }}", '{"parameters": [' + ARGUMENTS + "]}"),
        ("{{ a.n | tojson }} {{ a.n | string }} {{ a.n }}", "1e3 1e3 1e3"),
        ("{{ a.m }} {{ a.m * 2 }} {{ a.m > 1 }} {{ a.n is number }}", "1.50 3.0 True True"),
        ("{{ a.deep | tojson }}", '{"z" : [1,null], "e": "R\\u00f6m"}'),
        ("{{ a.deep.e }} {{ a.text }} {{ a['city'] }}", "Röm x Rome"),
        ("{% for k, v in a | items %}{{ k }};{% endfor %}", "city;text;n;m;deep;"),
        ("{{ a is mapping }} {{ a is string }} {{ a.deep is mapping }}", "True False True"),
        ("{{ a.deep | tojson(separators=(',', ':')) }}", '{"z":[1,null],"e":"Röm"}'),
        ("{{ {'b': 1, 'a': a.deep.z} | tojson(sort_keys=true) }}", '{"a": [1, null], "b": 1}'),
        ("{{ a.deep.z | tojson(indent=1) }}", "[\n 1,\n null\n]"),
        ("{{ a.deep.z | tojson(indent=0) }}", "[\n1,\nnull\n]"),
        ("{{ a.deep | tojson(ensure_ascii=true) }}", '{"z": [1, null], "e": "R\\u00f6m"}'),
    ],
)
def test_what_templates_do_with_arguments(source: str, expected: str) -> None:
    assert shown(CALL + source, ARGUMENTS) == expected


def test_text_that_is_no_object_stays_text() -> None:
    for text in ("", "[1]", "1e3", "{", '{"a":}', "{'a': 1}", '"x"', "[" * 9000):
        assert shown(CALL + "{{ a }}", text) == text
        assert shown(CALL + "{{ a is string }}", text) == "True"


def test_signs_of_control_tokens_do_not_stop_it_from_being_read() -> None:
    """`[BOS]` can be made of this text by leaving letters out; a mark inside would break the JSON."""
    text = '{"list": [1, 2], "said": "B, O and S", "more": [3]}'
    assert shown(CALL + "{{ a.list[1] }} {{ a | tojson }}", text) == "2 " + text


def test_a_placeholder_cannot_be_guessed_from_outside() -> None:
    value = written_json.read_arguments('{"a":1}', lambda item: item)
    other = {"x": [value, "0-0", f"{written_json._NAME[:-1]}-0"], "y": value}
    assert written_json.dump(other) == json.dumps(other).replace('{"a": 1}', '{"a":1}')


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.booleans(), st.sampled_from([None, 1])
)
def test_values_are_those_of_the_json_module(
    value: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    read = written_json.read_arguments(text, lambda item: item)
    assert read == json.loads(text)
    assert written_json.dump(read) == written_json.as_written(read) == text
    assert dict(written_json.members(read)) == json.loads(text)
    assert written_json.dump({"a": [read]}) == '{"a": [' + text + "]}"
