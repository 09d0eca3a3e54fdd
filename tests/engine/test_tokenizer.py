"""Text and control tokens stay apart; bytes come back."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.kimi_tokenizers import write_directory
from tests.engine.tiny_tokenizer import (
    NOT_SPECIAL,
    SETTINGS,
    SPECIAL,
    spec,
    tokenizer_spec,
    write_model_directory,
)
from tokenizers import Tokenizer as Oracle

from milepost.engine import tokenizer as tokenizer_module
from milepost.engine.tokenizer import Tokenizer, byte_alphabet
from milepost.errors import CheckpointFileError

TOKENIZER = Tokenizer(spec(), SETTINGS)
ORACLE = Oracle.from_str(tokenizer_spec())
CONTROL = {token.token_id for token in TOKENIZER.control_tokens}

pieces = st.one_of(
    st.text(max_size=8), st.sampled_from([*SPECIAL, *NOT_SPECIAL, "<|im_", "end|>", "<", "|>", " the"])
)
texts = st.lists(pieces, max_size=8).map("".join)


@given(texts)
def test_with_control_tokens_it_agrees_with_the_library(text: str) -> None:
    assert TOKENIZER.encode_with_control(text) == ORACLE.encode(text, add_special_tokens=False).ids


@given(texts)
def test_plain_text_never_gives_a_control_token_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert CONTROL.isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", [*SPECIAL, *NOT_SPECIAL])
def test_whole_word_lookup_cannot_reach_a_control_token(text: str) -> None:
    """With `ignore_merges` a word that is in the vocabulary is one token, merges or not."""
    tokenizer = Tokenizer(spec(ignore_merges=True))
    assert CONTROL.isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20))
def test_decoding_agrees_with_the_library(ids: list[int]) -> None:
    for skip in (False, True):
        assert TOKENIZER.decode(ids, skip_special_tokens=skip) == ORACLE.decode(ids, skip_special_tokens=skip)


def test_byte_alphabet_is_a_bijection_onto_bytes() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert all(alphabet[char] == ord(char) for char in "aZ0!~")


def test_half_a_surrogate_pair_is_not_fatal() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83d")) == "a?"


def test_lstrip_and_rstrip_tokens_swallow_white_space_as_in_the_library() -> None:
    changed = spec()
    for entry in changed["added_tokens"]:
        if entry["content"] == "<think>":
            entry["lstrip"] = entry["rstrip"] = True
        if entry["content"] == "<tool_call>":
            entry["single_word"] = True
    oracle = Oracle.from_str(json.dumps(changed))
    tokenizer = Tokenizer(changed)
    for text in ("a  <think>  b", "<think>", "a <tool_call>b", "a <tool_call> b"):
        assert tokenizer.encode_with_control(text) == oracle.encode(text, add_special_tokens=False).ids


def test_bos_comes_from_the_post_processor() -> None:
    oracle = Oracle.from_str(tokenizer_spec())
    from tokenizers.processors import TemplateProcessing

    oracle.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    tokenizer = Tokenizer(json.loads(oracle.to_str()))
    bare = tokenizer.encode("hello")
    assert tokenizer.encode_prompt("hello") == [0, *bare]
    assert tokenizer.encode_prompt("hello", add_special_tokens=False) == bare
    assert tokenizer.encode_prompt("[BOS]", add_special_tokens=False, parse_special=True) == [0]


def test_encoded_text_is_remembered_and_not_shared_by_reference() -> None:
    first = TOKENIZER.encode("remember me")
    first.append(99)
    assert TOKENIZER.encode("remember me") == first[:-1]


def test_directory(tmp_path) -> None:
    tokenizer = Tokenizer.from_directory(write_model_directory(tmp_path))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.named_tokens["pad_token"] == "[PAD]"
    assert tokenizer.is_special(2) and not tokenizer.is_special(tokenizer.encode_with_control("<think>")[0])


def test_missing_tokenizer_names_the_file(tmp_path) -> None:
    with pytest.raises(CheckpointFileError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"decoder": {"type": "ByteLevel"}}'])
def test_a_broken_tokenizer_file_is_a_clear_error(tmp_path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("value", ["x", [2, "x"], 2.5, True, -1])
def test_an_eos_token_id_that_is_none_is_a_clear_error(tmp_path, value) -> None:
    write_model_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointFileError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("where", ["config.json", "text_config", "generation_config.json", "no config"])
def test_an_eos_token_id_beyond_the_vocabulary_is_a_clear_error(tmp_path, where: str) -> None:
    write_model_directory(tmp_path)
    size = Tokenizer.from_directory(tmp_path).vocab_size
    config, generation = {"vocab_size": size + 5}, {}
    if where != "generation_config.json":
        (tmp_path / "generation_config.json").unlink()
    if where == "no config":
        generation, config = {"eos_token_id": [2, size]}, {}
    elif where == "generation_config.json":
        generation = {"eos_token_id": [2, size + 5]}
    else:
        config["eos_token_id"] = size + 5
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values:
            wrapped = {"text_config": values} if where == "text_config" else values
            (tmp_path / name).write_text(json.dumps(wrapped))
    with pytest.raises(
        CheckpointFileError, match=r"eos_token_id \d+ lies beyond the vocabulary of \d+ tokens"
    ):
        Tokenizer.from_directory(tmp_path)


def test_an_eos_token_id_may_be_a_padding_row_or_stand_in_the_text_part(tmp_path) -> None:
    """Embeddings are often larger than the tokenizer; multimodal configs keep the id inside."""
    write_model_directory(tmp_path)
    size = Tokenizer.from_directory(tmp_path).vocab_size
    (tmp_path / "generation_config.json").unlink()
    inside = {"vocab_size": size + 8, "eos_token_id": size + 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inside}))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == (2, size + 2)


ODD = [True, -1, 1.5, "x", [None], [[]], ["x"], {"x": 1}, [{"id": "1", "content": "x"}], [{"id": 1}]]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("key", ["added_tokens", "decoder", "model", "pre_tokenizer"])
def test_odd_parts_of_a_tokenizer_file_are_clear_errors(key: str, value) -> None:
    with pytest.raises(CheckpointFileError, match=r"tokenizer\.json"):
        Tokenizer({**spec(), key: value})


@pytest.mark.parametrize("value", [True, 1.5, "x", ["x"], {"5": "x"}, {"5": {"content": 1}}], ids=repr)
def test_odd_names_of_control_tokens_are_clear_errors(tmp_path, value) -> None:
    write_directory(tmp_path, "kimi_k3")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": value}))
    with pytest.raises(CheckpointFileError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.from_directory(tmp_path)


def test_nesting_too_deep_to_read_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointFileError, match=r"tokenizer\.json: not readable"):
        Tokenizer.from_directory(tmp_path)


def test_other_kinds_of_tokenizers_are_refused_by_name() -> None:
    changed = spec()
    changed["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(CheckpointFileError, match="WordPiece"):
        Tokenizer(changed)


@pytest.mark.parametrize("size", [20, 1_000, 75_000])
@pytest.mark.parametrize("letter", ["a", "\u4f60"])
def test_what_is_remembered_is_bounded(size: int, letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes that are really taken, whether texts are many or long."""
    monkeypatch.setattr(tokenizer_module, "ENCODE_CACHE_BYTES", 1 << 18)
    made = Tokenizer(spec(), SETTINGS)
    num_texts = max(5, 100_000 // size)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(num_texts):
            made.encode_array(f"{number} {letter * (size - 8)}")
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.3 * (1 << 18)
    assert made._cache_bytes == sum(map(tokenizer_module._entry_bytes, made._cache, made._cache.values()))
    if size < 10_000:
        assert len(made._cache) > 10, "it remembers something"
