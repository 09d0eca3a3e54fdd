"""tiktoken.model gives the ids that ranked merging gives."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, SPECIAL, spec

from milepost.engine.tiktoken_file import read_ranks
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import CheckpointFileError

BASE = Tokenizer(spec(), SETTINGS)
# Tokens of the trained tokenizer in order of their ids, which is the order of its merges.
PIECES = [
    BASE.token_bytes(i) for i in range(BASE.vocab_size) if i not in {t.token_id for t in BASE.control_tokens}
]
RANKS = {piece: rank for rank, piece in enumerate(PIECES)}


def write(directory: Path, pieces: list[bytes] = PIECES) -> Path:
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate(pieces)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = write(tmp_path_factory.mktemp("kimi"))
    import json

    named = {str(len(PIECES) + i): {"content": name, "special": True} for i, name in enumerate(SPECIAL)}
    settings = {"added_tokens_decoder": named, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_directory(directory)


def words(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    for _, (start, end) in tokenizer._text.pre_tokenizer.pre_tokenize_str(text):
        yield text[start:end]


def merged(word: bytes) -> list[int]:
    """The definition: the word if it is a token, else repeatedly the adjacent pair of lowest rank."""
    if word in RANKS:
        return [RANKS[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [
            (RANKS[a + b], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in RANKS
        ]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(
    st.lists(
        st.one_of(st.text(max_size=6), st.sampled_from([" the", "user", " dog", "\n\n", "123456"])),
        max_size=8,
    )
)
def test_ids_are_those_of_ranked_merging(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = [i for word in words(tokenizer, text) for i in merged(word.encode())]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello World's end", ["Hello", " World's", " end"]),
        ("camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("1234567", ["123", "456", "7"]),
        ("\u4f60\u597dabc\u4e16\u754c", ["\u4f60\u597d", "abc", "\u4e16\u754c"]),
        ("wait... what?!\n\nyes", ["wait", "...", " what", "?!\n\n", "yes"]),
        ("a  b", ["a", " ", " b"]),
        ("end  \n x", ["end", "  \n", " x"]),
        ("I'LL", ["I'LL"]),
    ],
)
def test_words(tokenizer: Tokenizer, text: str, expected: list[str]) -> None:
    assert list(words(tokenizer, text)) == expected


def test_control_tokens(tokenizer: Tokenizer) -> None:
    first = len(PIECES)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.encode_with_control("<|im_user|>") == [first + SPECIAL.index("<|im_user|>")]
    assert tokenizer.encode_with_control(f"<|reserved_token_{first + 200}|>") == [first + 200]
    assert tokenizer.eos_token_ids == (first + SPECIAL.index("<|im_end|>"),)
    assert max(tokenizer.encode("<|im_user|>")) < first


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"!!! 0\n", "line 1"),
        (b"YQ==\n", "line 1"),
        (b"YQ== 1\n", "line 1"),
        (b"YQ== 0\nYQ== 1\n", "line 2"),
        (b"YQ== 0\n", "no token for byte 0"),
        (b"", "no token for byte 0"),
    ],
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointFileError, match=text):
        read_ranks(path)
