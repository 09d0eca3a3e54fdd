"""Chat templates for families that publish none as a file.

Kimi-Linear ships no template and K3's is a program; both formats are written here as Jinja, chosen
by the `model_type` of config.json. The control tokens they write must be named in the model's own
tokenizer files: none is assumed, a missing one is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.engine.kimi_answers import split_k3_answer, split_linear_answer
from milepost.engine.template import ChatTemplate, ChatTemplates, SplitAnswer
from milepost.engine.tokenizer import Tokenizer, read_json
from milepost.errors import CheckpointFileError, RequestError

TEMPLATE_DIRECTORY = Path(__file__).resolve().parent.parent / "assets" / "templates"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One built-in template.

    Attributes:
        file_name: below `TEMPLATE_DIRECTORY`.
        tokens: control tokens that every conversation needs.
        split_answer: see `ChatTemplate`.
        tool_tokens: control tokens that tool calls need besides.
    """

    file_name: str
    tokens: tuple[str, ...]
    split_answer: SplitAnswer
    tool_tokens: tuple[str, ...] = ()


CHAT_FORMATS: Mapping[str, ChatFormat] = {
    "kimi_linear": ChatFormat(
        "kimi_linear.jinja",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        split_linear_answer,
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "kimi_k3": ChatFormat(
        "kimi_k3.jinja", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), split_k3_answer
    ),
}
"""model_type -> format."""


class BuiltInTemplate(ChatTemplate):
    """A template that refuses what the tokenizer has no control token for."""

    def __init__(self, chat_format: ChatFormat, tokenizer: Tokenizer) -> None:
        """
        Raises:
            CheckpointFileError: the tokenizer names no token that every conversation needs.
        """
        known = {token.content for token in tokenizer.control_tokens}
        for content in chat_format.tokens:
            if content not in known:
                raise CheckpointFileError(
                    f"tokenizer_config.json: `added_tokens_decoder` names no {content!r}, which this model's "
                    "chat format writes; add its id, or a chat_template.jinja of your own"
                )
        self._missing_for_tools = [name for name in chat_format.tool_tokens if name not in known]
        source = (TEMPLATE_DIRECTORY / chat_format.file_name).read_text(encoding="utf-8")
        super().__init__(source, tokenizer.named_tokens)
        self.split_answer = chat_format.split_answer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if self._missing_for_tools and any(message.get("tool_calls") for message in messages):
            missing = self._missing_for_tools[0]
            raise RequestError(
                "messages", f"tool calls cannot be written: tokenizer_config.json names no {missing!r}"
            )
        return super().render(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=variables
        )


def built_in_templates(directory: Path, tokenizer: Tokenizer) -> ChatTemplates:
    """The built-in template of the model's family; none for families that publish theirs as a file.

    Raises:
        CheckpointFileError: a control token it writes is not named by the tokenizer.
    """
    path = directory / "config.json"
    model_type = read_json(path).get("model_type") if path.is_file() else None
    chat_format = CHAT_FORMATS.get(model_type) if isinstance(model_type, str) else None
    if chat_format is None:
        return ChatTemplates({})
    return ChatTemplates({"default": BuiltInTemplate(chat_format, tokenizer)})
