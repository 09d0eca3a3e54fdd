"""How few tokens a text can have: a bound that costs no tokenizing.

Every token of a byte-level BPE vocabulary stands for at most as many bytes as its longest entry has, so
a text of B bytes has at least B / longest tokens. That holds where each byte of the text ends up in some
token; a tokenizer that drops or rewrites text in other ways than NFC has no bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NFC_FACTOR = 4
"""NFC shortens UTF-8 by less: U+1FBE U+0308 U+0301 (7 bytes) becomes U+0390 (2 bytes)."""
KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Split", "Sequence")


def longest_bytes_per_token(spec: dict[str, Any], vocabulary: Iterable[str], alphabet: dict[str, int]) -> int:
    """Bytes of text one token can stand for at most; 0 = unknown.

    Args:
        spec: the parsed tokenizer.json.
        vocabulary: its entries without added tokens, in the byte alphabet.
        alphabet: character -> byte.
    """
    factor = _shortening(spec.get("normalizer"))
    model = spec.get("model") or {}
    entries = set(vocabulary)
    if not factor or model.get("type", "BPE") != "BPE" or not _keeps_text(spec.get("pre_tokenizer")):
        return 0
    if not entries.issuperset(alphabet):
        return 0  # a byte without an entry leaves no token
    return factor * max(map(len, entries))


def fewest_tokens(num_chars: int, bytes_per_token: int) -> int:
    """Tokens that a text of so many characters has at least; a character has at least one byte."""
    return -(-num_chars // bytes_per_token) if bytes_per_token else 0


def _shortening(normalizer: dict[str, Any] | None) -> int:
    if normalizer is None:
        return 1
    if normalizer.get("type") == "NFC":
        return NFC_FACTOR
    if normalizer.get("type") == "Sequence":
        factor = 1
        for part in normalizer.get("normalizers") or ():
            factor *= _shortening(part)
        return factor
    return 0


def _keeps_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer.get("type") not in KEEPING_PRE_TOKENIZERS or pre_tokenizer.get("behavior") == "Removed":
        return False
    return all(map(_keeps_text, pre_tokenizer.get("pretokenizers") or ()))
