"""Answers that follow a grammar: masks, formats, the loop, and what is refused."""

from __future__ import annotations

import builtins
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engines import Bench, running_engine
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.core.plan import SamplingParams
from milepost.engine.constraints import packed_bits, packed_size
from milepost.engine.messages import EngineError, GenerationRequest
from milepost.engine.structured import (
    Grammar,
    GrammarCompiler,
    choice_grammar,
    json_grammar,
    json_part,
    lark_grammar,
    regex_grammar,
    wrapped,
)
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError

TOKENIZER = Tokenizer(spec(), SETTINGS)
VOCAB_SIZE = TOKENIZER.vocab_size + 3
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE)
END = TOKENIZER.eos_token_ids[0]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"enum": ["fox", "dog"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


def allowed(mask: bytes) -> set[int]:
    assert len(mask) == packed_size(VOCAB_SIZE)
    bits = int.from_bytes(mask, "little")
    return {token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1}


def texts(ids: set[int]) -> set[str]:
    return {TOKENIZER.token_text(token_id) for token_id in ids}


# ---------------------------------------------------------------- masks


def test_a_mask_names_what_may_come_next() -> None:
    answer = COMPILER.compile(choice_grammar(["fox", "dog"], "guided_choice"))
    first = allowed(answer.allowed_tokens(0))
    assert {text[0] for text in texts(first)} == {"f", "d"}
    assert END not in first
    answer.accept(TOKENIZER.encode("fo"))
    assert texts(allowed(answer.allowed_tokens(len(TOKENIZER.encode("fo"))))) == {"x"}
    answer.accept(TOKENIZER.encode("x"))
    assert answer.is_complete


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    answer = COMPILER.compile(regex_grammar("a+", "guided_regex"))
    assert END not in allowed(answer.allowed_tokens(0))
    answer.accept(TOKENIZER.encode("a"))
    assert END in allowed(answer.allowed_tokens(1)) and not answer.is_complete


@given(st.lists(st.integers(1, 4), max_size=6), st.data())
def test_a_position_is_a_function_of_the_tokens_before_it(steps: list[int], data: st.DataObject) -> None:
    """Accepting, taking back and accepting again leads to the same mask."""
    ids = TOKENIZER.encode('{"x": -12, "name": "dog"}')
    answer = COMPILER.compile(json_grammar(POINT, "p"))
    masks = [answer.allowed_tokens(0)]
    for position, token_id in enumerate(ids, 1):
        answer.accept([token_id])
        if not answer.is_complete:
            masks.append(answer.allowed_tokens(position))
    again = COMPILER.compile(json_grammar(POINT, "p"))
    position = 0
    for step in steps:
        part = ids[position : position + step]
        again.accept(part)
        position += len(part)
        taken_back = data.draw(st.integers(0, position))
        again.rollback(taken_back)
        position -= taken_back
        if position < len(ids):
            assert again.allowed_tokens(position) == masks[position]
            assert not again.is_complete
        else:
            assert again.is_complete


def test_a_grammar_may_begin_behind_a_thought() -> None:
    think_end = next(t.token_id for t in TOKENIZER.control_tokens if t.content == "</think>")
    answer = COMPILER.compile(choice_grammar(["fox"], "p"), after=(think_end,))
    free = allowed(answer.allowed_tokens(0))
    assert len(free) == VOCAB_SIZE - 1 and END not in free
    thought = TOKENIZER.encode("the dog")
    answer.accept([*thought, think_end])
    assert {text[0] for text in texts(allowed(answer.allowed_tokens(len(thought) + 1)))} == {"f"}
    answer.rollback(1)
    assert allowed(answer.allowed_tokens(len(thought))) == free
    answer.accept([think_end, *TOKENIZER.encode("fox")])
    assert answer.is_complete


@pytest.mark.parametrize("vocab_size", [TOKENIZER.vocab_size, 448, 480, 481])
def test_a_mask_is_one_row_of_the_vocabulary(vocab_size: int) -> None:
    answer = GrammarCompiler(TOKENIZER, vocab_size).compile(choice_grammar(["fox"], "p"))
    assert len(answer.allowed_tokens(0)) == packed_size(vocab_size)
    think_end = next(t.token_id for t in TOKENIZER.control_tokens if t.content == "</think>")
    later = GrammarCompiler(TOKENIZER, vocab_size).compile(choice_grammar(["fox"], "p"), after=(think_end,))
    assert len(later.allowed_tokens(0)) == packed_size(vocab_size)


def test_packed_bits() -> None:
    assert packed_bits(3) == b"\x07\x00\x00\x00"
    assert packed_bits(33, [0, 32]) == b"\xfe\xff\xff\xff\x00\x00\x00\x00"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "objects"}, "p:"),
        ({"type": "object", "properties": {"a": {"type": "integr"}}}, "p.properties.a:"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "string", "pattern": "("}]}},
            "p.items.anyOf.1:",
        ),
        ({"$defs": {"a": {"type": "x"}}, "$ref": "#/$defs/a"}, "p.$defs.a:"),
        ({"$ref": "#/$defs/b"}, "p:"),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {}}}}, "p.properties.a:"),
    ],
)
def test_a_bad_schema_is_refused_where_it_is_bad(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError, match=re.escape(path)) as error:
        COMPILER.compile(json_grammar(schema, "p"))
    assert error.value.status == 400 and error.value.param == "p"


@pytest.mark.parametrize("make", [regex_grammar, lark_grammar])
def test_a_bad_regex_or_grammar_is_refused(make: Any) -> None:
    with pytest.raises(RequestError) as error:
        COMPILER.compile(make("start: (", "guided_x"))
    assert error.value.param == "guided_x"


def test_a_grammar_that_is_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match="characters"):
        COMPILER.compile(choice_grammar(["x" * 1000] * 300, "guided_choice"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RequestError, match="extra `guided`"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE).compile(regex_grammar("a", "p"))


@pytest.mark.parametrize("text", ["a/b", r"a\/b", "a\nb", r"\\/"])
def test_slashes_and_line_breaks_in_a_regex(text: str) -> None:
    (written,) = {"a/b": ["a/b"], r"a\/b": ["a/b"], "a\nb": ["a\nb"], r"\\/": ["\\/"]}[text]
    answer = COMPILER.compile(regex_grammar(text, "p"))
    answer.accept(TOKENIZER.encode(written))
    assert answer.failure is None and answer.is_complete


def test_gbnf_is_read_too() -> None:
    answer = COMPILER.compile(lark_grammar('root ::= "a" | "b"', "p"))
    assert texts(allowed(answer.allowed_tokens(0))) == {"a", "b"}


# ---------------------------------------------------------------- in the loop


def guided_request(
    bench: Bench, grammar: Grammar, *, seed: int = 0, prompt: str = "hello", **options: Any
) -> GenerationRequest:
    compiler = GrammarCompiler(bench.tokenizer, bench.worker.vocab_size)
    sampling = SamplingParams(temperature=1.0, seed=seed, min_tokens=options.pop("min_tokens", 0))
    sampling.stop_token_ids = list(bench.tokenizer.eos_token_ids)
    return GenerationRequest(
        array("I", bench.tokenizer.encode(prompt)),
        sampling,
        options.pop("max_tokens", 200),
        constraint=compiler.compile(grammar),
        **options,
    )


BOUNDED = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"enum": ["fox", "dog", "\u00e9\u65e5"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "words", "ok"],
    "additionalProperties": False,
}


def check_bounded(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["n", "words", "ok"]
    assert 0 <= value["n"] <= 999 and isinstance(value["ok"], bool)
    assert len(value["words"]) <= 3 and set(value["words"]) <= {"fox", "dog", "\u00e9\u65e5"}


@settings(max_examples=12)
@given(st.integers(0, 10_000))
def test_random_models_write_what_the_schema_says(seed: int) -> None:
    with running_engine() as bench:
        text, deltas = bench.run(guided_request(bench, json_grammar(BOUNDED, "p"), seed=seed))
    check_bounded(text)
    assert deltas[-1].finish_reason == "stop"


def test_the_answer_is_the_same_with_and_without_a_cache_and_when_preempted() -> None:
    prompts = [f"question {number}: the quick brown fox jumps over the lazy dog" for number in range(6)]

    def answers(bench: Bench) -> list[str]:
        requests = [
            guided_request(bench, json_grammar(BOUNDED, "p"), seed=number, prompt=prompt)
            for number, prompt in enumerate(prompts)
        ]
        queues = [bench.submit(request)[1] for request in requests]
        from tests.engine.engines import collect

        return [collect(events, timeout=60)[0] for events in queues]

    with running_engine() as bench:
        expected = answers(bench)
        assert answers(bench) == expected  # every prompt hits now
        assert any(record.reuse and record.reuse.num_cached_tokens for record in bench.recorder.records)
    with running_engine(caching=False) as bench:
        assert answers(bench) == expected
    # Pages for about two of the six requests: the others are preempted, or wait.
    with running_engine(cache_bytes=30 * 4096) as bench:
        assert answers(bench) == expected
        assert bench.engine.fresh_stats().result(10).counters.num_preemptions > 0
    for text in expected:
        check_bounded(text)


def test_a_complete_answer_ends_without_an_end_token_and_against_min_tokens() -> None:
    with running_engine() as bench:
        request = guided_request(bench, choice_grammar(["fox"], "p"), min_tokens=30)
        text, deltas = bench.run(request)
        assert (text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("fox", "stop", None)


def test_stop_strings_still_end_an_answer() -> None:
    with running_engine() as bench:
        text, deltas = bench.run(guided_request(bench, choice_grammar(["fox"], "p"), stop=("o",)))
        assert (text, deltas[-1].stop_reason) == ("f", "o")


def test_min_tokens_hold_where_the_grammar_can_go_on() -> None:
    with running_engine() as bench:
        request = guided_request(bench, regex_grammar("(ab)*", "p"), min_tokens=20, max_tokens=24)
        _, deltas = bench.run(request)
        assert sum(len(delta.tokens) for delta in deltas) >= 20


class Stuck:
    """A constraint that fails."""

    is_complete = False
    failure: str | None = None

    def allowed_rows(self, output_position: int, drafts: Sequence[int]) -> tuple[list[bytes], bool]:
        self.failure = "stuck" if output_position == 2 else None
        return [b""], False

    def accept(self, token_ids: Any) -> None:
        pass


def test_a_grammar_that_cannot_be_followed_costs_only_its_request() -> None:
    with running_engine() as bench:
        request = bench.request("{{bytes:one two three}}")
        request.constraint = Stuck()
        with pytest.raises(EngineError, match="grammar cannot be followed: stuck"):
            bench.run(request)
        assert bench.run(bench.request("{{fine}}"))[0] == "fine"


def test_parts_of_a_grammar() -> None:
    assert json_part("a", True)["json_schema"].keys() == {"x-guidance"}
    whole = wrapped('start: "<" @body ">"', json_grammar({"type": "integer"}, "p"))
    answer = COMPILER.compile(whole)
    answer.accept(TOKENIZER.encode("<7>"))
    assert answer.is_complete and answer.failure is None
