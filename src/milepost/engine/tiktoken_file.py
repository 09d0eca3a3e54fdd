"""`tiktoken.model`, the tokenizer file of the Kimi family, as the content of a tokenizer.json.

The file lists byte strings with ranks and no merges. The merges follow from it: the last step by
which ranked merging builds a token joins two tokens of lower rank.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milepost.errors import CheckpointFileError

FILE_NAME = "tiktoken.model"
NUM_CONTROL_IDS = 256
"""Ids behind the ranks that are control tokens; those without a name are reserved."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How the family cuts text into words: Han runs; words split at case changes, with an English
contraction; up to three digits; punctuation; white space."""


def tokenizer_spec(path: Path, settings: Mapping[str, Any], alphabet: Mapping[str, int]) -> dict[str, Any]:
    """What a tokenizer.json of this tokenizer would hold.

    Args:
        settings: tokenizer_config.json; its `added_tokens_decoder` names the control tokens.
        alphabet: see `tokenizer.byte_alphabet`.

    Raises:
        CheckpointFileError: the file is no list of base64 tokens and ranks, or the settings name no tokens.
    """
    ranks = read_ranks(path)
    spell = {byte: char for char, byte in alphabet.items()}

    def spelled(piece: bytes) -> str:
        return "".join(spell[byte] for byte in piece)

    merges = []
    for piece, rank in ranks.items():
        parts = _parts_below(piece, rank, ranks) if len(piece) > 1 else []
        if len(parts) == 2:
            merges.append([spelled(parts[0]), spelled(parts[1])])
    return {
        "version": "1.0",
        "added_tokens": _control_tokens(len(ranks), settings),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            # A word that is a token is that token, whether or not merging would find it.
            "ignore_merges": True,
            "vocab": {spelled(piece): rank for piece, rank in ranks.items()},
            "merges": merges,
        },
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank, ascending; ranks are the token ids and have no gaps.

    Raises:
        CheckpointFileError: the file is truncated or something else.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            piece = base64.b64decode(encoded, validate=True)
            if int(rank) != len(ranks) or piece in ranks or not piece:
                raise ValueError("ranks must count up from 0 over distinct tokens")
        except (ValueError, binascii.Error) as error:
            raise CheckpointFileError(f"{path}, line {number}: not a token and its rank: {error}") from None
        ranks[piece] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointFileError(f"{path}: has no token for byte {missing[0]}; the file is not complete")
    return ranks


def _parts_below(piece: bytes, limit: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What ranked merging makes of `piece` with tokens of rank below `limit` only."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while len(parts) > 1:
        best, where = limit, -1
        for index in range(len(parts) - 1):
            rank = ranks.get(parts[index] + parts[index + 1], limit)
            if rank < best:
                best, where = rank, index
        if where < 0:
            break
        parts[where : where + 2] = [parts[where] + parts[where + 1]]
    return parts


def _control_tokens(first_id: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    named = settings.get("added_tokens_decoder") or {}
    if not isinstance(named, Mapping) or not all(
        isinstance(entry, Mapping) and isinstance(entry.get("content"), str) for entry in named.values()
    ):
        raise CheckpointFileError(
            "tokenizer_config.json: added_tokens_decoder must hold objects with a text `content`, one per id"
        )
    tokens = []
    for token_id in range(first_id, first_id + NUM_CONTROL_IDS):
        entry = named.get(str(token_id)) or {}
        tokens.append(
            {
                "id": token_id,
                "content": entry.get("content", f"<|reserved_token_{token_id}|>"),
                "special": bool(entry.get("special", True)),
                "lstrip": bool(entry.get("lstrip")),
                "rstrip": bool(entry.get("rstrip")),
                "single_word": bool(entry.get("single_word")),
                "normalized": False,
            }
        )
    return tokens
