"""Messages to token ids, and the positions where later prompts will share them.

Positions come from rendering the conversation with sentinel continuations and taking common prefixes
of token ids, so they hold for any template: one that repeats a date, strips earlier thinking or
moves the tools around simply yields shorter prefixes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milepost.engine.built_in_templates import built_in_templates
from milepost.engine.kimi_answers import STRUCTURE_TOKENS
from milepost.engine.markers import Marker
from milepost.engine.params import check_text_length
from milepost.engine.shield import Shield, new_mark
from milepost.engine.template import ChatTemplate, ChatTemplates
from milepost.engine.tokenizer import ControlToken, Tokenizer
from milepost.engine.written_json import read_arguments
from milepost.errors import RequestError

FIRST_MESSAGE_BOUNDARIES = 2
LAST_MESSAGE_BOUNDARIES = 6
"""Message ends that are looked for. A long transcript has hundreds, each costs a rendering, and those in
the middle were among the last ones in earlier turns."""

SENTINEL_TEXTS = ("Alpha", "7 ~beta")
"""Two texts that share no first character, so that their common prefix is the template's own."""
MERGING_TEXTS = ("\n\n~", "**~")
"""Answers that may begin so: the tokens of a header that ends in white space or signs are then others."""

THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Fields that templates take the thoughts of an answer from."""

Message = dict[str, Any]
Sliceable = TypeVar("Sliceable", str, "array[int]")
Variant = tuple[list[Message], list[Any] | None]
"""Messages and tools of one sentinel rendering."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt and the token positions worth keeping, each with its reason (`history`, `message`,
    `marker`; a position may have a marker beside another reason)."""

    token_ids: array[int]
    wanted: list[tuple[int, str]]


@dataclass(slots=True)
class EncodedText:
    """Rendered text and its ids.

    Attributes:
        ends: characters up to the end of each control token, from 0.
        counts: token ids up to there.
    """

    text: str
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    ends: list[int] = field(default_factory=lambda: [0])
    counts: list[int] = field(default_factory=lambda: [0])


class ChatRenderer:
    """Renders conversations with a model's chat template.

    Control tokens come from the template only. The one exception: in text and thoughts of *assistant*
    messages the added tokens that are not special (`<think>`, `<tool_call>`) are read as tokens, because
    the model wrote them as tokens and templates look for them there. Templates that take answers apart
    (`ChatTemplate.split_answer`) do without the exception, and it never covers the marks of the Kimi
    formats where the server takes answers apart.

    Attributes:
        reads_generated_answers: whether an answer may come back as it was generated, marks included.
            False where answers are taken apart before a client sees them; their text is then only text.
    """

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        self.reads_generated_answers = True
        self._tokenizer = tokenizer
        self._templates = templates
        self.longest_control = max((len(t.content) for t in tokenizer.control_tokens), default=0)
        self._mark = new_mark()
        self._shield = Shield(tokenizer.control_tokens, self._mark)
        self._assistant_shield = self._shield_except(lambda token: not token.special)
        self._parsed_shield = self._shield_except(
            lambda token: not token.special and token.content not in STRUCTURE_TOKENS
        )

    def _shield_except(self, is_kept: Callable[[ControlToken], bool]) -> Shield:
        tokens = self._tokenizer.control_tokens
        stopped = [token for token in tokens if not is_kept(token)]
        return Shield(stopped, self._mark, kept=filter(is_kept, tokens))

    @classmethod
    def from_directory(
        cls, directory: Path, tokenizer: Tokenizer, template_file: Path | None = None
    ) -> ChatRenderer:
        """With the template found in a model directory, or the one built in for its family.

        Args:
            template_file: used instead of either.

        Raises:
            CheckpointFileError: a template that is none, or control tokens it needs are not named.
        """
        if template_file is not None:
            return cls(tokenizer, ChatTemplates.from_file(template_file, tokenizer.named_tokens))
        templates = ChatTemplates.from_directory(directory, tokenizer.settings, tokenizer.named_tokens)
        return cls(tokenizer, templates or built_in_templates(directory, tokenizer))

    @property
    def has_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_source(self) -> str:
        """Jinja text of the templates; empty without one."""
        return self._templates.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        find_boundaries: bool = True,
        markers: Sequence[Marker] = (),
        max_model_len: int | None = None,
    ) -> RenderedPrompt:
        """Token ids of a conversation and the positions to keep.

        Args:
            markers: where the caller wants a checkpoint; looked up together with the other boundaries.
            max_model_len: what cannot have fewer tokens is refused before it is tokenized.

        Raises:
            RequestError: no template, or the template refuses the conversation, or it is too long.
        """
        if not messages:
            raise RequestError("messages", "must hold at least one message")
        template = self._templates.choose(with_tools=bool(tools))
        conversation = _Conversation(
            template,
            messages,
            [self.prepare(message, template) for message in messages],
            self._shield.value(list(tools)) if tools else None,
            self._shield.value(dict(variables or {})),
            self,
        )
        prompt = conversation.prompt(add_generation_prompt, max_model_len)
        wanted = conversation.boundaries(prompt, markers) if find_boundaries else []
        return RenderedPrompt(prompt.token_ids, wanted)

    def check_length(self, rendered: str, max_model_len: int) -> None:
        """Raises: RequestError: the text between the control tokens has too many tokens, however cut."""
        bytes_per_token = self._tokenizer.bytes_per_token
        if len(rendered) <= max_model_len * bytes_per_token:
            return
        num_control = sum(end - start for start, end, _ in self._tokenizer.find_control(rendered))
        num_marks = rendered.count(self._mark) * len(self._mark)
        num_chars = len(rendered) - num_control - num_marks
        check_text_length("messages", num_chars, bytes_per_token, max_model_len)

    def encode(self, rendered: str) -> EncodedText:
        """Ids of rendered text: control tokens where the template put them, marks taken out."""
        encoded = EncodedText(rendered)
        for start, end, token_id in self._tokenizer.find_control(rendered):
            self._append_text(encoded, rendered[encoded.ends[-1] : start])
            encoded.token_ids.append(token_id)
            encoded.ends.append(end)
            encoded.counts.append(len(encoded.token_ids))
        self._append_text(encoded, rendered[encoded.ends[-1] :])
        return encoded

    def end_of_piece(self, rendered: str, start: int, inside: int) -> int:
        """Character behind the first control token from `start` on that ends behind `inside`."""
        for _, end, _ in self._tokenizer.find_control(rendered[start:]):
            if start + end > inside:
                return start + end
        return len(rendered)

    def _append_text(self, encoded: EncodedText, text: str) -> None:
        if text:
            encoded.token_ids.extend(self._tokenizer.encode_array(text.replace(self._mark, "")))

    def prepare(self, message: Mapping[str, Any], template: ChatTemplate) -> Message:
        """A message as the template sees it: control tokens spelled in it are shielded.

        Raises:
            RequestError: it has no content; only an answer needs none.
        """
        role = message["role"]
        prepared: Message = {
            key: self._shield.value(value)
            for key, value in message.items()
            if key not in ("role", "content", "tool_calls")
        }
        content = message.get("content")
        if content is None and role != "assistant":
            raise RequestError("messages", f"a message of role {role!r} needs content")
        content = "" if content is None else content
        prepared["content"] = self._shield.value(content)
        if message.get("tool_calls"):
            prepared["tool_calls"] = [self._tool_call(call) for call in message["tool_calls"]]
        if role == "assistant":
            prepared.update(self._answer(message, content, template))
        prepared["role"] = role
        if role == "developer" and not template.knows_developer:
            # The newer name of the same role; templates that do not know it treat it as anything.
            prepared["role"] = "system"
        return prepared

    def _answer(self, message: Mapping[str, Any], content: Any, template: ChatTemplate) -> Message:
        """Fields of an assistant message in which control tokens may stand."""
        if template.split_answer is None:
            texts = {key: message[key] for key in THINKING_KEYS if message.get(key) is not None}
            shield = self._assistant_shield if self.reads_generated_answers else self._parsed_shield
            return {key: shield.value(value) for key, value in {**texts, "content": content}.items()}
        is_parsed = message.get("reasoning_content") or message.get("tool_calls")
        if is_parsed or not self.reads_generated_answers or not isinstance(content, str):
            return {}
        return template.split_answer(content, self._shield.string) or {}

    def _tool_call(self, call: Mapping[str, Any]) -> Message:
        function = call.get("function")
        prepared: Message = self._shield.value({key: item for key, item in call.items() if key != "function"})
        if isinstance(function, Mapping):
            given = function.get("arguments")
            shown = {key: item for key, item in function.items() if key != "arguments"}
            prepared["function"] = self._shield.value(shown)
            if "arguments" in function:
                read = read_arguments(given, self._shield.value) if isinstance(given, str) else None
                prepared["function"]["arguments"] = self._shield.value(given) if read is None else read
        elif function is not None:
            prepared["function"] = self._shield.value(function)
        return prepared


@dataclass(slots=True)
class _Conversation:
    """One request while its boundaries are being found.

    Attributes:
        given: the messages as the caller wrote them.
        messages: the same, prepared for the template.
    """

    template: ChatTemplate
    given: Sequence[Mapping[str, Any]]
    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    renderer: ChatRenderer

    def prompt(self, add_generation_prompt: bool, max_model_len: int | None = None) -> EncodedText:
        rendered = self._render(self.messages, self.tools, add_generation_prompt)
        if max_model_len is not None:
            self.renderer.check_length(rendered, max_model_len)
        return self.renderer.encode(rendered)

    def _render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        return self.template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=self.variables
        )

    def boundaries(self, prompt: EncodedText, markers: Sequence[Marker]) -> list[tuple[int, str]]:
        """Positions in `prompt`, ascending; where `message` and `history` meet, `history` is kept."""
        found: dict[int, str] = {}
        for position in self._message_positions(prompt):
            found[position] = "message"
        for position in self._history_positions(prompt):
            found[position] = "history"
        marked = {(self._marker_position(prompt, marker), "marker") for marker in markers}
        return sorted((position, reason) for position, reason in {*found.items(), *marked} if position > 0)

    def _shared(self, prompt: EncodedText, variants: Sequence[Variant]) -> int:
        """Token ids at the start of `prompt` that every variant shares; 0 if the template refuses one."""
        shared = len(prompt.token_ids)
        for messages, tools in variants:
            try:
                other = self._render(messages, tools, False)
            except RequestError:
                return 0
            shared = min(shared, self._shared_with(prompt, other))
        return shared

    def _shared_with(self, prompt: EncodedText, other: str) -> int:
        """Common prefix of ids. Up to the last control token well inside the common text they are equal;
        of what follows only the piece around the difference is encoded, if they differ in it."""
        num_chars = common_prefix(prompt.text, other)
        known = max(0, bisect_right(prompt.ends, num_chars - self.renderer.longest_control) - 1)
        end, count = prompt.ends[known], prompt.counts[known]
        for stop in (self.renderer.end_of_piece(other, end, num_chars), len(other)):
            rest = self.renderer.encode(other[end:stop]).token_ids
            shared = common_prefix(prompt.token_ids[count : count + len(rest)], rest)
            if shared < len(rest):
                break
        return count + shared

    def _history_positions(self, prompt: EncodedText) -> list[int]:
        """What the next user turn and the next tool result will share with this prompt."""
        positions = self._next_user_turn(prompt)
        if self.tools or any(message["role"] == "tool" for message in self.messages):
            calls = [self._tool_turn("", text) for text in SENTINEL_TEXTS]
            # An answer may say something before it calls; some templates then write another header.
            saying = [
                self._tool_turn(text, SENTINEL_TEXTS[0]) for text in (SENTINEL_TEXTS[1], *MERGING_TEXTS)
            ]
            positions += self._with_and_without(prompt, calls, saying)
        return positions

    def _next_user_turn(self, prompt: EncodedText) -> list[int]:
        """Where nearly every next user turn parts from this prompt, and where the others do, if elsewhere."""
        usual = [self._user_turn(text) for text in SENTINEL_TEXTS]
        return self._with_and_without(prompt, usual, [self._user_turn(text) for text in MERGING_TEXTS])

    def _with_and_without(
        self, prompt: EncodedText, usual: Sequence[Variant], others: Sequence[Variant]
    ) -> list[int]:
        """What the usual variants share, and what all of them do; 0 where the template refuses one."""
        shared = self._shared(prompt, usual)
        return sorted({shared, min(shared, self._shared(prompt, others))})

    def _user_turn(self, answer: str) -> Variant:
        answered = (
            [] if self.messages[-1]["role"] == "assistant" else [{"role": "assistant", "content": answer}]
        )
        return [*self.messages, *answered, {"role": "user", "content": answer}], self.tools

    def _tool_turn(self, said: str, name: str) -> Variant:
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}
        calling = {"role": "assistant", "content": said, "tool_calls": [call]}
        result = {"role": "tool", "content": name, "name": name, "tool_call_id": "call_0"}
        return [*self.messages, calling, result], self.tools

    def _message_positions(self, prompt: EncodedText) -> list[int]:
        positions = self._preamble_positions(prompt)
        ends = range(1, len(self.messages))
        if len(ends) > FIRST_MESSAGE_BOUNDARIES + LAST_MESSAGE_BOUNDARIES:
            chosen = [*ends[:FIRST_MESSAGE_BOUNDARIES], *ends[-LAST_MESSAGE_BOUNDARIES:]]
        else:
            chosen = list(ends)
        return positions + [self._end_of_messages(prompt, end) for end in chosen]

    def _end_of_messages(self, prompt: EncodedText, num_messages: int) -> int:
        """What prompts share that have the same first messages; the next one's header included."""
        following = self.messages[num_messages]
        # The prompt itself is one continuation; another that begins differently is enough.
        begins = str(following.get("content", "")).lstrip()[:1]
        text = next(text for text in SENTINEL_TEXTS if text[0] != begins)
        changed = [*self.messages[:num_messages], _with_text(following, text)]
        return self._shared(prompt, [(changed, self.tools)])

    def _marker_position(self, prompt: EncodedText, marker: Marker) -> int:
        """Token position of a marker; 0 if what it names does not exist here, or is not shown."""
        if marker.part_of == "tool":
            return self._end_of_tool(prompt, marker.index)
        if not 0 <= marker.index < len(self.messages):
            return 0
        if marker.num_chars is None:
            num_messages = marker.index + 1
            is_last = num_messages == len(self.messages)
            if is_last:
                return self._next_user_turn(prompt)[0]
            return self._end_of_messages(prompt, num_messages)
        message = self.given[marker.index]
        kept = str(message.get("content") or "")[: marker.num_chars]
        variants: list[Variant] = []
        for text in SENTINEL_TEXTS:
            changed = self.renderer.prepare({**message, "content": kept + text}, self.template)
            messages = [*self.messages[: marker.index], changed, *self.messages[marker.index + 1 :]]
            variants.append((messages, self.tools))
        return self._shared(prompt, variants)

    def _end_of_tool(self, prompt: EncodedText, index: int) -> int:
        tools = self.tools or []
        if not 0 <= index < len(tools):
            return 0
        # Where this one is the last, another one follows, and the other way round.
        following = [] if index + 1 < len(tools) else [_sentinel_tool(SENTINEL_TEXTS[0])]
        return self._shared(prompt, [(self.messages, [*tools[: index + 1], *following])])

    def _preamble_positions(self, prompt: EncodedText) -> list[int]:
        """Ends of what stands before the first message's text: declarations of tools, a system prompt
        the template brings along, and the given system prompt where it is written before the tools."""
        first = self.messages[0]
        if first["role"] not in ("system", "developer"):
            return [
                self._shared(prompt, [([_with_text(first, text)], self.tools) for text in SENTINEL_TEXTS])
            ]
        if not self.tools:
            return []
        turns: list[Message] = [{"role": "user", "content": text} for text in SENTINEL_TEXTS]
        other_system = [
            ([_with_text(first, text), turn], self.tools)
            for text, turn in zip(SENTINEL_TEXTS, turns, strict=True)
        ]
        other_tools = [
            ([first, turn], [_sentinel_tool(text)]) for text, turn in zip(SENTINEL_TEXTS, turns, strict=True)
        ]
        return [self._shared(prompt, other_system), self._shared(prompt, other_tools)]


def _with_text(message: Message, text: str) -> Message:
    """The message with another text and nothing that depends on the old one."""
    return {
        **{key: value for key, value in message.items() if key in ("role", "name", "tool_call_id")},
        "content": text,
    }


def _sentinel_tool(text: str) -> Message:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}}


def common_prefix(left: Sliceable, right: Sliceable) -> int:
    """Number of leading items (ids, characters) that are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
