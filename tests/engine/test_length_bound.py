"""A text that is refused for its length alone could never have fitted."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.engine.length_bound import NFC_FACTOR, fewest_tokens
from milepost.engine.params import check_text_length
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError

TINY = Tokenizer(spec(), SETTINGS)
EMBEDDED = Tokenizer.from_directory(EMBEDDED_MODEL)


def with_normalizer(normalizer: dict[str, Any] | None) -> Tokenizer:
    return Tokenizer({**spec(), "normalizer": normalizer}, SETTINGS)


NFC = with_normalizer({"type": "NFC"})


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=400) | st.text(alphabet="the quick\n é한e\u0301\u1fbe\u0308\u0301", max_size=400)
)
@pytest.mark.parametrize("tokenizer", [TINY, EMBEDDED, NFC], ids=["tiny", "embedded", "nfc"])
def test_the_bound_never_exceeds_what_tokenizing_gives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.bytes_per_token > 0
    assert fewest_tokens(len(text), tokenizer.bytes_per_token) <= len(tokenizer.encode(text))


def test_the_bound_is_reached_by_the_longest_entry() -> None:
    longest = max(
        (EMBEDDED.token_text(i) for i in range(EMBEDDED.vocab_size) if not EMBEDDED.is_special(i)),
        key=lambda text: len(text.encode()),
    )
    assert len(longest.encode()) == EMBEDDED.bytes_per_token
    assert len(EMBEDDED.encode(longest)) == 1


def test_nfc_shortens_less_than_assumed() -> None:
    """Over all characters: the longest canonical spelling against the shortest one."""
    spelled: dict[str, int] = {}
    singles: dict[str, int] = {}
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        composed = unicodedata.normalize("NFC", char)
        if len(composed) == 1:
            singles[composed] = max(singles.get(composed, 0), len(char.encode()))
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        parts = unicodedata.normalize("NFD", chr(code))
        if len(parts) > 1:
            composed = unicodedata.normalize("NFC", parts)
            length = sum(singles.get(part, len(part.encode())) for part in parts)
            spelled[composed] = max(spelled.get(composed, 0), length)
    worst = max(length / len(composed.encode()) for composed, length in spelled.items())
    assert 3 < worst < NFC_FACTOR


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": False,
                    },
                ],
            }
        },
    ],
    ids=lambda change: str(change)[:50],
)
def test_tokenizers_that_drop_text_have_no_bound(change: dict[str, Any]) -> None:
    assert Tokenizer({**spec(), **change}, SETTINGS).bytes_per_token == 0
    check_text_length("prompt", 10**9, 0, 10)


def test_a_vocabulary_without_some_byte_has_no_bound() -> None:
    """Bytes without an entry leave no token, so that a long text may have none at all."""
    changed = spec()
    char = next(c for c in changed["model"]["vocab"] if len(c) == 1 and c not in "abc")
    vocab = {piece: i for piece, i in changed["model"]["vocab"].items() if char not in piece}
    merges = [m for m in changed["model"].get("merges", []) if char not in "".join(m)]
    changed["model"] = {**changed["model"], "vocab": vocab, "merges": merges}
    changed["added_tokens"] = [t for t in changed["added_tokens"] if t["id"] not in vocab.values()]
    assert Tokenizer(changed, SETTINGS).bytes_per_token == 0


def test_the_error_names_field_size_and_limit() -> None:
    with pytest.raises(RequestError, match="2000000 characters, at least 125000 tokens") as raised:
        check_text_length("messages", 2_000_000, 16, 8192)
    assert raised.value.param == "messages" and raised.value.code == "context_length_exceeded"
    check_text_length("messages", 8191 * 16, 16, 8192)
    with pytest.raises(RequestError):
        check_text_length("messages", 8191 * 16 + 1, 16, 8192)
