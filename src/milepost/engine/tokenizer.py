"""Text <-> token ids, with control tokens kept apart from text.

A control token is any entry of `added_tokens` in tokenizer.json (turn markers, BOS, `<think>`).
Text is encoded by a twin tokenizer that does not know them, so that no string a user sends can
become one; `encode_with_control` matches them and is meant for rendered templates only.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from milepost.engine import tiktoken_file
from milepost.engine.length_bound import longest_bytes_per_token
from milepost.errors import CheckpointFileError, RequestError

ENCODE_CACHE_BYTES = 8 << 20
"""Of texts and their ids that are remembered: a conversation is encoded again at every turn."""
ENCODE_CACHE_ENTRY_BYTES = 400
"""Of one entry, besides its text and its ids: short messages are mostly this."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """An added token. `special`: left out of generated text (turn markers are, `<think>` is not)."""

    token_id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: visible latin-1 characters stand for themselves, the other
    bytes, in order, for the code points from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


class Tokenizer:
    """A byte-level BPE tokenizer read from tokenizer.json.

    Attributes:
        bytes_per_token: bytes of text one token can stand for at most; 0 = unknown.

    Args:
        spec: the parsed tokenizer.json.
        settings: the parsed tokenizer_config.json (`{}` if there is none).
        extra_eos_token_ids: ids from generation_config.json or config.json that end an answer.

    Raises:
        CheckpointFileError: if the file is not a tokenizer this reader can take apart.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        settings: dict[str, Any] | None = None,
        *,
        extra_eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.settings = settings or {}
        if not _is_byte_level(spec.get("decoder")):
            decoder = spec.get("decoder")
            kind = decoder.get("type") if isinstance(decoder, dict) else decoder
            raise CheckpointFileError(
                f"tokenizer.json: decoder is {kind!r}; only byte-level BPE tokenizers can be served"
            )
        self.control_tokens = tuple(
            ControlToken(
                entry["id"],
                entry["content"],
                bool(entry.get("special")),
                bool(entry.get("lstrip")),
                bool(entry.get("rstrip")),
                bool(entry.get("single_word")),
            )
            for entry in _added_tokens(spec)
        )
        self._control_by_id = {token.token_id: token for token in self.control_tokens}
        self._control_by_content = {token.content: token for token in self.control_tokens}
        self._full = _build(spec)
        self._text = _build(_without_control_tokens(spec, self.control_tokens))
        self._pattern = _control_pattern(self.control_tokens)
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._cache_bytes = 0
        self.bytes_per_token = longest_bytes_per_token(
            spec, self._text.get_vocab(with_added_tokens=False), self._alphabet
        )
        vocab = self._full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.named_tokens = _named_tokens(self.settings)
        eos = self._control_by_content.get(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(sorted({*extra_eos_token_ids, *([eos.token_id] if eos else [])}))
        self._leading_ids, self._trailing_ids = self._added_around_text()

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json (or tiktoken.model), tokenizer_config.json and the end-of-answer ids of
        the configs.

        Raises:
            CheckpointFileError: a file is missing or is not what its name says.
        """
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        path = directory / "tokenizer.json"
        if path.is_file():
            spec = read_json(path)
        elif (directory / tiktoken_file.FILE_NAME).is_file():
            spec = tiktoken_file.tokenizer_spec(
                directory / tiktoken_file.FILE_NAME, settings, byte_alphabet()
            )
        else:
            raise CheckpointFileError(
                f"{path}: no such file. A model directory needs tokenizer.json (the `tokenizers` format) or "
                f"{tiktoken_file.FILE_NAME} next to config.json; no text becomes token ids without it"
            )
        tokenizer = cls(spec, settings, extra_eos_token_ids=_eos_ids_of_configs(directory))
        limit = _declared_vocab_size(directory) or tokenizer.vocab_size
        for token_id in tokenizer.eos_token_ids:
            if token_id >= limit:
                raise CheckpointFileError(
                    f"{directory}: eos_token_id {token_id} lies beyond the vocabulary of {limit} tokens; "
                    "correct it in generation_config.json, config.json or tokenizer_config.json"
                )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. A control token spelled out in `text` is encoded as ordinary characters.

        Raises:
            RequestError: the vocabulary cannot spell part of the text.
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> array[int]:
        """As `encode`; the array is shared with later calls and must not be changed."""
        with self._lock:
            ids = self._cache.get(text)
            if ids is not None:
                self._cache.move_to_end(text)
                return ids
        ids = array("I", self._encode_text(text))
        with self._lock:
            if text not in self._cache:
                self._cache[text] = ids
                self._cache_bytes += _entry_bytes(text, ids)
                while self._cache_bytes > ENCODE_CACHE_BYTES:
                    self._cache_bytes -= _entry_bytes(*self._cache.popitem(last=False))
        return ids

    def encode_with_control(self, text: str) -> list[int]:
        """Ids of `text`, control tokens included: for templates, never for what a user wrote."""
        ids: list[int] = []
        for segment in self.split_control(text):
            if isinstance(segment, int):
                ids.append(segment)
            else:
                ids.extend(self.encode_array(segment))
        return ids

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of a raw prompt; `add_special_tokens` puts what the tokenizer puts around a text (BOS)."""
        ids = self.encode_with_control(text) if parse_special else self.encode(text)
        return [*self._leading_ids, *ids, *self._trailing_ids] if add_special_tokens else ids

    def split_control(self, text: str) -> list[str | int]:
        """`text` cut at its control tokens; those become ids."""
        parts: list[str | int] = []
        done = 0
        for start, end, token_id in self.find_control(text):
            if start > done:
                parts.append(text[done:start])
            parts.append(token_id)
            done = end
        if done < len(text):
            parts.append(text[done:])
        return parts

    def find_control(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token id) of every control token in `text`: leftmost, longest."""
        if self._pattern is None:
            return
        for match in self._pattern.finditer(text):
            token = self._control_by_content.get(match[0]) or self._control_by_content[match[0].strip()]
            yield match.start(), match.end(), token.token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token. Ids without an entry have none (padding rows of the embedding)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether generated text leaves this token out."""
        token = self._control_by_id.get(token_id)
        return token is not None and token.special

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and self.is_special(token_id))
        ).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """How one token is shown in log-probabilities."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spell(self, token_id: int) -> bytes:
        control = self._control_by_id.get(token_id)
        if control is not None:
            return control.content.encode()
        piece = self._full.id_to_token(token_id)
        if piece is None:
            return b""
        if all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        return piece.encode()

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can carry half of a surrogate pair; UTF-8 and the tokenizer cannot.
            text = text.encode("utf-8", errors="replace").decode()
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        if not self._control_by_id.keys().isdisjoint(ids):
            raise RequestError(
                "prompt", "the text spells a control token that this vocabulary cannot write otherwise"
            )
        return ids

    def _added_around_text(self) -> tuple[list[int], list[int]]:
        bare = self._full.encode("a", add_special_tokens=False).ids
        full = self._full.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:start], full[start + len(bare) :]


def _entry_bytes(text: str, ids: array[int]) -> int:
    """A character takes up to four bytes, by the widest of the text."""
    width = 1 if text.isascii() else 4
    return ENCODE_CACHE_ENTRY_BYTES + width * len(text) + ids.itemsize * len(ids)


def _added_tokens(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises: CheckpointFileError: an entry is no token."""
    entries = spec.get("added_tokens") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        is_token = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        if not is_token or type(entry.get("id")) is not int:
            raise CheckpointFileError(
                "tokenizer.json: added_tokens must be a list of objects with a whole number `id` and a text "
                f"`content`, not {entry!r:.80}"
            )
    return list(entries)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and any(map(_is_byte_level, parts))
    return decoder.get("type") == "ByteLevel"


def _build(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointFileError(f"tokenizer.json: not readable as a tokenizer: {error}") from None
    built.no_truncation()
    built.no_padding()
    return built


def _without_control_tokens(spec: dict[str, Any], control: Sequence[ControlToken]) -> dict[str, Any]:
    """The same tokenizer for text only. The entries leave the vocabulary too, where a merge or a
    whole-word look-up could still reach them; the other ids stay as they are."""
    names = {token.content for token in control}
    model = dict(spec.get("model") or {})
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {piece: index for piece, index in model["vocab"].items() if piece not in names}
        if isinstance(model.get("merges"), list):
            model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
        if model.get("unk_token") in names:
            model["unk_token"] = None
    return {**spec, "added_tokens": [], "post_processor": None, "model": model}


def _merged(merge: str | list[str]) -> str:
    return "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)


def _control_pattern(control: Sequence[ControlToken]) -> re.Pattern[str] | None:
    """One alternative per token, longest first. Without groups the search skips to a first character."""
    if not control:
        return None
    alternatives = []
    for token in sorted(control, key=lambda token: -len(token.content)):
        body = re.escape(token.content)
        if token.single_word:
            body = rf"(?<!\w){body}(?!\w)"
        alternatives.append((r"\s*" if token.lstrip else "") + body + (r"\s*" if token.rstrip else ""))
    return re.compile("|".join(alternatives))


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` ... of tokenizer_config.json, as strings: templates use these names."""
    named = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                named[key] = value
    return named


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory.

    Raises:
        CheckpointFileError: unreadable, no JSON, or no object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointFileError(f"{path}: must hold a JSON object")
    return parsed


def _declared_vocab_size(directory: Path) -> int | None:
    """Rows of the embedding as config.json has them; None if it says nothing usable."""
    path = directory / "config.json"
    size = _decoder_value(read_json(path), "vocab_size") if path.is_file() else None
    return size if type(size) is int else None


def _decoder_value(config: dict[str, Any], key: str) -> Any:
    """From the top of a config, or from the text part of a multimodal one."""
    if config.get(key) is not None:
        return config[key]
    text = config.get("text_config")
    return text.get(key) if isinstance(text, dict) else None


def _eos_ids_of_configs(directory: Path) -> list[int]:
    """generation_config.json decides if it names any; config.json otherwise."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _decoder_value(read_json(path), "eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise CheckpointFileError(
                f"{path}: eos_token_id must be a token id or a list of them, not {value!r}"
            )
        if ids:
            return ids
    return []
