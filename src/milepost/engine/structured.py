"""Answers that follow a grammar, by llguidance (the extra `guided`).

Grammars are compiled outside of the engine thread; in the loop a mask is read per step and token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milepost.engine.constraints import is_allowed, packed_bits
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError

WHITESPACE = "( |\\r?\\n[ \\t]{0,40})?"
"""Between the tokens of JSON: a space, or a line break and indentation. A model that finds nothing better
writes white space for ever where it may."""
MAX_GRAMMAR_CHARS = 1 << 18
"""Of everything a request asks for; what is larger takes seconds to compile."""
KEPT_GRAMMARS = 64
BODY = "body"
"""Name of the grammar of the answer proper inside of what a chat format writes around it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's form.

    Attributes:
        parts: named grammars: `{"name", "json_schema" | "lark_grammar"}`. The first one is the start, the
            others are what it refers to with `@name`.
        param: request field it came from, for errors.
        schema_params: name of a part -> request field of its JSON schema.
    """

    parts: tuple[dict[str, Any], ...]
    param: str
    schema_params: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps({"grammars": self.parts}, ensure_ascii=False)

    @property
    def name(self) -> str:
        """How a Lark grammar around it refers to it."""
        return f"@{self.parts[0]['name']}"


def wrapped(lark: str, *inner: Grammar) -> Grammar:
    """A Lark grammar around others."""
    parts = tuple(part for grammar in inner for part in grammar.parts)
    params = {name: param for grammar in inner for name, param in grammar.schema_params.items()}
    return Grammar(({"lark_grammar": lark}, *parts), inner[0].param, params)


def json_part(name: str, schema: Any) -> dict[str, Any]:
    """A part of a grammar: JSON by a schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"name": name, "json_schema": {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}}


def json_grammar(schema: Mapping[str, Any], param: str) -> Grammar:
    """JSON by a schema."""
    return Grammar((json_part(BODY, schema),), param, {BODY: param})


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """One of some texts."""
    lark = "start: " + " | ".join(lark_text(choice) for choice in choices)
    return Grammar(({"name": BODY, "lark_grammar": lark},), param)


def regex_grammar(regex: str, param: str) -> Grammar:
    """All of the answer matches a regular expression."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", regex, flags=re.DOTALL).replace("\n", "\\n")
    return Grammar(({"name": BODY, "lark_grammar": f"start: /{escaped}/"},), param)


def lark_grammar(text: str, param: str) -> Grammar:
    """A grammar in Lark's notation, or in GBNF's.

    Raises:
        RequestError: it is neither.
    """
    from_any = _llguidance(param)[1]
    try:
        lark = from_any(text)
    except Exception as error:  # the converter raises whatever it trips over
        raise RequestError(param, f"is no grammar: {error}") from None
    return Grammar(({"name": BODY, "lark_grammar": lark},), param)


def lark_text(text: str) -> str:
    """A literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """
        Args:
            vocab_size: ids the model can sample.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, grammar: Grammar, *, after: Sequence[int] = ()) -> GuidedAnswer:
        """The constraint for one answer.

        Args:
            after: the grammar begins behind these tokens (the end of a thought); empty = at once.

        Raises:
            RequestError: the grammar is none, or llguidance is not installed.
        """
        matcher_type = _llguidance(grammar.param)[0].LLMatcher
        text = grammar.text()
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                grammar.param,
                f"makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed",
            )
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(grammar.param)
            matcher = self._compiled.get(text)
            if matcher is not None:
                self._compiled.move_to_end(text)
        if matcher is None:
            matcher = matcher_type(self._vocabulary, text, log_level=0)
            if matcher.is_error():
                raise self._refusal(grammar, _first_line(matcher.get_error()))
            matcher.compute_bitmask()  # the first one is the slowest, and copies share what it found
            with self._lock:
                self._compiled[text] = matcher
                while len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        everything_but_the_end = packed_bits(self._vocab_size, self._tokenizer.eos_token_ids)
        return GuidedAnswer(matcher, tuple(after), everything_but_the_end)

    def _make_vocabulary(self, param: str) -> Any:
        library = _llguidance(param)[0]
        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise RequestError(param, "needs a model whose tokenizer names the end of an answer")
        return library.LLTokenizer(
            library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)),
            n_vocab=self._vocab_size,
            eos_token=ends,
        )

    def _refusal(self, grammar: Grammar, message: str) -> RequestError:
        """The error, at the place inside a schema where it arises if it is found."""
        for part in grammar.parts:
            param = grammar.schema_params.get(part.get("name", ""))
            if param is not None and self._error_of(part["json_schema"], {}) is not None:
                path, found = self._locate(part["json_schema"], part["json_schema"])
                return RequestError(param, f"{'.'.join((param, *path))}: {found or message}")
        return RequestError(grammar.param, f"cannot be followed: {message}")

    def _locate(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[list[str], str | None]:
        for name, inner in _subschemas(schema):
            if self._error_of(inner, root) is not None:
                path, message = self._locate(inner, root)
                return [*name, *path], message
        return [], self._error_of(schema, root)

    def _error_of(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        text = Grammar((json_part(BODY, {**definitions, **schema}),), "").text()
        matcher = _llguidance("")[0].LLMatcher(self._vocabulary, text, log_level=0)
        return _first_line(matcher.get_error()) if matcher.is_error() else None


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """The schemas directly inside of one, each with its path."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, Mapping):
            yield from (([key, str(name)], item) for name, item in inner.items() if isinstance(item, Mapping))
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        if isinstance(inner, list):
            yield from (([key, str(n)], item) for n, item in enumerate(inner) if isinstance(item, Mapping))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield [key], schema[key]


class GuidedAnswer:
    """Implements `Constraint` with one matcher."""

    def __init__(self, template: Any, after: tuple[int, ...], everything_but_the_end: bytes) -> None:
        """
        Args:
            template: a matcher that has read nothing; it is copied.
        """
        self._template = template
        self._matcher = template.deep_copy()
        self._after = after
        self._unguided = everything_but_the_end
        self._token_ids: list[int] = []
        self._begin: int | None = None if after else 0
        self.is_complete = False
        self.failure: str | None = None

    def fresh(self) -> GuidedAnswer:
        """The same rules for another answer."""
        return GuidedAnswer(self._template, self._after, self._unguided)

    def allowed_rows(self, output_position: int, drafts: Sequence[int]) -> tuple[list[bytes], bool]:
        rows = [self.allowed_tokens(output_position)]
        num_read = 0
        is_unfit = False
        while self.failure is None and num_read < len(drafts):
            is_unfit = not is_allowed(rows[-1], drafts[num_read])
            if is_unfit:
                break
            self.accept(drafts[num_read : num_read + 1])
            num_read += 1
            if self.is_complete or self.failure is not None:
                break
            row = self.allowed_tokens(output_position + num_read)
            if self.failure is None:
                rows.append(row)
        if num_read and self.failure is not None:
            # Where drafts lead, not where the answer stands.
            self._read_again(num_read)
        else:
            self.rollback(num_read)
        return rows, is_unfit

    def allowed_tokens(self, output_position: int) -> bytes:
        """The first of `allowed_rows`."""
        if output_position != len(self._token_ids):
            self.failure = f"token {output_position} is asked for, {len(self._token_ids)} are known"
            return b""
        if self._begin is None:
            return self._unguided
        # The library's row may have a word more than the vocabulary.
        mask: bytes = self._matcher.compute_bitmask()[: len(self._unguided)]
        if self._matcher.is_error() or not any(mask):
            self.failure = _first_line(self._matcher.get_error()) or "no token can follow"
            return b""
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self._begin is None:
                if tuple(self._token_ids[-len(self._after) :]) == self._after:
                    self._begin = len(self._token_ids)
            elif not self._matcher.consume_token(token_id):
                self.failure = _first_line(self._matcher.get_error())
                return
        self.is_complete = self._begin is not None and bool(self._matcher.is_stopped())

    def rollback(self, num_tokens: int) -> None:
        """The last tokens are taken back."""
        if not num_tokens:
            return
        if num_tokens > len(self._token_ids):
            raise ValueError(f"{num_tokens} tokens cannot be taken back, {len(self._token_ids)} are known")
        del self._token_ids[-num_tokens:]
        if self._begin is not None:
            left = len(self._token_ids)
            self._matcher.rollback(min(num_tokens, left + num_tokens - self._begin))
            if left < self._begin:
                self._begin = None
        self.is_complete = False

    def _read_again(self, num_tokens: int) -> None:
        """Takes the last tokens back after a failure, which a matcher does not recover from."""
        known = self._token_ids[: len(self._token_ids) - num_tokens]
        self._matcher = self._template.deep_copy()
        self._token_ids = []
        self._begin = None if self._after else 0
        self.failure = None
        self.accept(known)


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token.token_id for token in tokenizer.control_tokens]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _first_line(message: str) -> str:
    """llguidance appends its whole state to some errors."""
    return message.partition("\n<state>")[0].partition("\nTokens:")[0].strip()[:500]


def _llguidance(param: str) -> tuple[Any, Any]:
    """The library and its converter of grammars.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import llguidance
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError:
        raise RequestError(
            param,
            "structured output needs llguidance, which this server lacks; the extra `guided` brings it",
            code="unsupported_field",
        ) from None
    return llguidance, any_to_lark
