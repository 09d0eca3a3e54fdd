"""Prompts that people paste into the page: read, turned into tokens, compared."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from milepost.engine.markers import MarkerList
from milepost.engine.params import checked_token_ids
from milepost.engine.serving import ServingModel
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError
from milepost.server.conversation import checked_messages, checked_tools

TOKENS_BEFORE = 60
TOKENS_AFTER = 30
MAX_CHARACTER_TOKENS = 4
"""Tokens that one character may be made of."""
CUT = "\ufffd"
"""What stands for a character of which a part is missing."""


class PromptBody(BaseModel):
    """A prompt to look up: text or token ids, a conversation, or what somebody pasted.

    Attributes:
        pasted: a request body or its `messages` as JSON, or the text of one user message.
        read_as: "auto" = JSON if it begins like it; "message" = one user message whatever it looks like;
            "text" = a raw prompt without a chat template.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[int] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    pasted: str | None = None
    read_as: Literal["auto", "message", "text"] = "auto"


class PairBody(BaseModel):
    """Two prompts to compare."""

    model_config = ConfigDict(extra="forbid")

    first: PromptBody
    second: PromptBody


def read_prompt(body: PromptBody) -> PromptBody:
    """`body` with `prompt` or `messages`.

    Raises:
        RequestError: none of the three or more than one is given, or nothing can be made of `pasted`.
    """
    given = [each for each in (body.prompt, body.messages, body.pasted) if each is not None]
    if len(given) != 1:
        raise RequestError("prompt", "give either `prompt` or `messages`")
    if body.pasted is None:
        return body
    if not body.pasted.strip():
        raise RequestError("pasted", "there is nothing to look up: paste a message or a request first")
    if body.read_as == "text":
        return PromptBody(prompt=body.pasted)
    begins_like_json = body.pasted.lstrip()[0] in "[{"
    if body.read_as == "message" or not begins_like_json:
        return PromptBody(messages=[{"role": "user", "content": body.pasted}])
    return _from_json(body.pasted)


def _from_json(text: str) -> PromptBody:
    try:
        found = from_json(text)
    except ValueError as error:
        raise RequestError(
            "pasted", f"begins like JSON but is none: {error}. Mend it, or read it as one user message"
        ) from None
    if isinstance(found, list):
        return _from_list(found)
    fields = {
        name: found[name] for name in ("tools", "chat_template_kwargs", "cache_salt") if found.get(name)
    }
    if isinstance(found.get("messages"), list):
        system = found.get("system")
        opening = [] if system is None else [{"role": "system", "content": system}]
        return _checked({"messages": [*opening, *found["messages"]], **fields})
    if isinstance(found.get("prompt"), str | list):
        return _checked({"prompt": found["prompt"], **fields})
    raise RequestError(
        "pasted", "this JSON object has no `messages` (a list) and no `prompt` (text, or a list of token ids)"
    )


def _from_list(found: list[Any]) -> PromptBody:
    if not found:
        raise RequestError("pasted", "this list is empty; paste the messages of a conversation")
    if all(isinstance(item, dict) for item in found):
        return PromptBody(messages=found)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        return PromptBody(prompt=found)
    raise RequestError("pasted", "a list must hold messages (objects with `role` and `content`) or token ids")


def _checked(fields: dict[str, Any]) -> PromptBody:
    try:
        return PromptBody.model_validate(fields)
    except ValueError as error:
        reason = str(error).splitlines()[1:2]
        name = reason[0].split(".")[0] if reason else "a field"
        raise RequestError("pasted", f"`{name}` of this JSON object has the wrong type") from None


def prompt_tokens(model: ServingModel, body: PromptBody) -> array[int]:
    """The prompt as the model would get it.

    Raises:
        RequestError: there is none, or it cannot be rendered.
    """
    if body.messages is not None:
        tokens = model.chat.render(
            checked_messages(body.messages, MarkerList()),
            checked_tools(body.tools, MarkerList()),
            variables=body.chat_template_kwargs,
            find_boundaries=False,
            max_model_len=model.max_model_len,
        ).token_ids
    elif isinstance(body.prompt, str):
        tokens = model.encode_prompt(body.prompt)
    else:
        tokens = array("I", checked_token_ids("prompt", body.prompt or [], model.vocab_size))
    if not tokens:
        raise RequestError("prompt", "is empty")
    return tokens


@dataclass(frozen=True, slots=True)
class Passage:
    """Text around a token, cut between whole characters.

    Attributes:
        marked: the token's own characters; "" behind the last one.
    """

    before: str
    marked: str
    after: str


def passage(tokenizer: Tokenizer, tokens: array[int], position: int) -> Passage:
    """What stands around the token at `position`."""

    def text(start: int, end: int) -> str:
        return tokenizer.decode(tokens[max(0, start) : end].tolist())

    start, end = position, min(position + 1, len(tokens))
    while start > max(0, position - MAX_CHARACTER_TOKENS) and text(start, end + 3).startswith(CUT):
        start -= 1
    while end < min(len(tokens), position + MAX_CHARACTER_TOKENS) and text(start, end).endswith(CUT):
        end += 1
    return Passage(
        text(start - TOKENS_BEFORE, start).lstrip(CUT),
        text(start, end),
        text(end, end + TOKENS_AFTER).rstrip(CUT),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two prompts part.

    Attributes:
        num_common_tokens: at the beginning of both.
        num_reusable_tokens: the most that the second one can take from the first: whole match units, and at
            least one token of it is computed.
        first, second: the place where each parts from the other.
    """

    num_first_tokens: int
    num_second_tokens: int
    num_common_tokens: int
    num_reusable_tokens: int
    first: Passage
    second: Passage


def compare(model: ServingModel, first: array[int], second: array[int]) -> Comparison:
    """See `Comparison`."""
    common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        common += 1
    unit = model.cache.match_unit
    return Comparison(
        num_first_tokens=len(first),
        num_second_tokens=len(second),
        num_common_tokens=common,
        num_reusable_tokens=min(common, len(second) - 1) // unit * unit,
        first=passage(model.tokenizer, first, common),
        second=passage(model.tokenizer, second, common),
    )
