"""Chat templates: finding one in a model directory and rendering it in a sandbox."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from milepost.engine import written_json
from milepost.engine.kimi_answers import GeneratedCall
from milepost.errors import CheckpointFileError, RequestError

MAX_RENDERED_CHARS = 1 << 26
MAX_RENDER_SECONDS = 30.0

SplitAnswer = Callable[[str, Callable[[str], str]], dict[str, Any] | None]
"""(text of an answer, what makes a piece safe) -> fields of the message, or None if it is just text."""


class _GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks text for training; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return written_json.dump(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _as_written(value: Any) -> str:
    """A call without arguments has none, which is JSON's empty object."""
    absent = value is None or isinstance(value, Undefined)
    return "{}" if absent else written_json.as_written(value)


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    """`pieces` until they are too long or take too long: a template may loop over what clients send."""
    deadline = time.monotonic() + MAX_RENDER_SECONDS
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise TemplateError(f"it makes more than {MAX_RENDERED_CHARS:,} characters of it")
        if time.monotonic() > deadline:
            raise TemplateError(f"it takes longer than {MAX_RENDER_SECONDS:g} s")
        yield piece


class ChatTemplate:
    """One Jinja chat template with the functions published templates expect.

    Attributes:
        source: the Jinja text.
        knows_developer: whether the role `developer` appears in it.
        split_answer: takes an answer apart that comes back as generated. With it the template alone
            writes control tokens in assistant messages too; None = it looks for them in their text.

    Args:
        source: Jinja text.
        named_tokens: `bos_token` and the like, visible to the template.

    Raises:
        CheckpointFileError: the text is no Jinja template.
    """

    split_answer: SplitAnswer | None = None

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.filters["as_written"] = _as_written
        environment.filters["members"] = written_json.members
        environment.tests["as_generated"] = lambda value: isinstance(value, GeneratedCall)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._named_tokens = dict(named_tokens or {})
        self.source = source
        self.knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointFileError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as text.

        Raises:
            RequestError: the template refuses these messages, or fails on them.
        """
        given = {
            **self._named_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return "".join(_bounded(self._template.generate(given)))
        except Exception as error:  # a template may fail in any way on input it did not foresee
            raise RequestError(
                "messages", f"the model's chat template cannot render this conversation: {error}"
            ) from None


class ChatTemplates:
    """The templates of a model: a default one and perhaps one for requests with tools."""

    def __init__(
        self, sources: Mapping[str, str | ChatTemplate], named_tokens: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            sources: name -> Jinja text, or a template made from one.
        """
        self._templates = {
            name: ChatTemplate(source, named_tokens) if isinstance(source, str) else source
            for name, source in sources.items()
        }

    @classmethod
    def from_file(cls, path: Path, named: Mapping[str, str]) -> ChatTemplates:
        """One template for all requests.

        Raises:
            CheckpointFileError: names the file if it holds none.
        """
        try:
            return cls({"default": path.read_text(encoding="utf-8")}, named)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointFileError(f"{path}: not readable as UTF-8 text: {error}") from None
        except CheckpointFileError as error:
            raise CheckpointFileError(f"{path}: {error}") from None

    @classmethod
    def from_directory(
        cls, directory: Path, settings: Mapping[str, Any], named: Mapping[str, str]
    ) -> ChatTemplates:
        """chat_template.jinja if there is one, else `chat_template` of tokenizer_config.json
        (a string, or a list of named templates). A model without one cannot chat, only complete.

        Raises:
            CheckpointFileError: names the file that holds none.
        """
        path = directory / "chat_template.jinja"
        if path.is_file():
            return cls.from_file(path, named)
        path = directory / "tokenizer_config.json"
        sources = _declared_sources(path, settings.get("chat_template"))
        try:
            return cls(sources, named)
        except CheckpointFileError as error:
            raise CheckpointFileError(f"{path}: {error}") from None

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def source(self) -> str:
        """Jinja text of all of them."""
        return "\n".join(template.source for template in self._templates.values())

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a request.

        Raises:
            RequestError: the model has none.
        """
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise RequestError(
            "messages",
            "this model has no chat template; use /v1/completions, or add chat_template.jinja to the model",
            code="no_chat_template",
        )


def _declared_sources(path: Path, declared: Any) -> dict[str, str]:
    entries = [{"name": "default", "template": declared}] if isinstance(declared, str) else declared or []
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in entries
    ):
        raise CheckpointFileError(
            f"{path}: chat_template must be a text, or a list of objects with the texts `name` and `template`"
        )
    return {entry["name"]: entry["template"] for entry in entries}
