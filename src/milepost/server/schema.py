"""Request bodies. Unknown fields are kept so that unsupported ones can be refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from milepost.engine.params import SamplingOptions
from milepost.errors import RequestError

log = logging.getLogger(__name__)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_adapter": (),
    "lora_name": (),
    "lora_path": (),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prompt_embeds": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer and are not implemented -> values that ask for nothing."""

HARMLESS = frozenset(
    {
        "add_special_tokens", "api_key", "length_penalty", "metadata", "parallel_tool_calls",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
        "session_id", "spaces_between_special_tokens", "store", "user", "verbosity",
    }
)  # fmt: skip
"""Fields of other servers that may be ignored in silence."""

MAX_CACHE_SALT_CHARS = 128
MAX_CACHE_KEY_CHARS = 512
MAX_CACHE_PRIORITY = 4
"""A step doubles what a checkpoint is worth, so this is a factor of 16 either way."""
MAX_WARNED_FIELDS = 256
"""Unknown names that are remembered, so that each is logged once; clients choose them, so not more."""
_warned: set[str] = set()


def check_unknown_fields(
    fields: Mapping[str, Any] | None,
    harmless: Container[str],
    unsupported: Mapping[str, Container[Any]],
    hint: Callable[[str], str] = lambda name: "",
) -> None:
    """Fields a body has beyond those that are known: refused if they would change the answer, else logged.

    Args:
        unsupported: field -> the values that mean what is done anyway.
        hint: what to say about a refused field besides that it is.

    Raises:
        RequestError: names the field.
    """
    for name, value in (fields or {}).items():
        if value is None or name in harmless:
            continue
        if name not in unsupported:
            warn_unknown(name)
        elif value not in unsupported[name]:
            message = f"`{name}` is not supported by this server{hint(name)}"
            raise RequestError(name, message, code="unsupported_field")


def warn_unknown(name: str) -> None:
    """Log a field that is ignored, once."""
    if len(_warned) < MAX_WARNED_FIELDS and name[:64] not in _warned:
        _warned.add(name[:64])
        log.warning("request field %r is unknown and ignored", name[:64])


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """The two names by which templates know whether to think."""
    return {"thinking": thinks, "enable_thinking": thinks}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """Fields that both generation endpoints share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool | None = None
    cache_priority: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def check_extras(self) -> None:
        """Refuse what would change the answer and is not implemented.

        Raises:
            RequestError: names the field.
        """
        check_unknown_fields(self.model_extra, HARMLESS, UNSUPPORTED)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "is only allowed together with `stream: true`")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise RequestError("cache_salt", f"must have between 1 and {MAX_CACHE_SALT_CHARS} characters")
        if self.prompt_cache_key is not None and len(self.prompt_cache_key) > MAX_CACHE_KEY_CHARS:
            raise RequestError("prompt_cache_key", f"must have at most {MAX_CACHE_KEY_CHARS} characters")
        if self.cache_priority is not None and abs(self.cache_priority) > MAX_CACHE_PRIORITY:
            raise RequestError(
                "cache_priority",
                f"must be between -{MAX_CACHE_PRIORITY} and {MAX_CACHE_PRIORITY}, not {self.cache_priority}",
            )
        if self.priority is not None and not -(1 << 31) <= self.priority < 1 << 31:
            raise RequestError("priority", "must be a 32-bit integer; lower values run first")

    def sampling_options(self, num_logprobs: int | None) -> SamplingOptions:
        """The part that is about sampling."""
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            num_logprobs=num_logprobs,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionBody(Body):
    """`POST /v1/completions`. `parse_special`: read control tokens spelled out in a text prompt."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    prompt_cache_breakpoints: list[int] | None = None


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None
    reasoning_effort: str | None = None

    def template_variables(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, and what `reasoning_effort` means to templates."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        effort: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort |= thinking_variables(False)
        return {**effort, **(self.chat_template_kwargs or {})}

    def check_extras(self) -> None:
        if (self.model_extra or {}).get("prompt_cache_breakpoints") is not None:
            raise RequestError(
                "prompt_cache_breakpoints",
                "token positions are for /v1/completions; in a conversation put `cache_control` on messages, "
                "content parts or tools",
                code="unsupported_field",
            )
        super().check_extras()


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a `prompt`, or `messages` as for chat."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    tokens: list[int]


BodyType = TypeVar("BodyType", bound=BaseModel)


async def parse_body(kind: type[BodyType], request: Request) -> BodyType:
    """The request's body, whatever its content type says.

    Raises:
        RequestError: no JSON, no object, or a field of the wrong type (named).
    """
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(None, f"the body is not valid JSON: {first['ctx']['error']}") from None
        raise _wrong_type(error, from_json(await request.body())) from None


def _wrong_type(error: ValidationError, body: Any) -> RequestError:
    """What is wrong with the first field that is: the deepest place in it, and all that may stand there."""
    found = error.errors(include_url=False, include_input=False)
    field = next(iter(found[0]["loc"]), None)
    if field is None:
        return RequestError(None, f"the body {_expected(found[0]['msg'])}")
    places = [(_place(each, body), _expected(each["msg"])) for each in found if each["loc"][0] == field]
    deepest = max((place for place, _ in places), key=len)
    texts = list(dict.fromkeys(text for place, text in places if place == deepest))
    message = " or ".join([texts[0], *(text.removeprefix("must be ") for text in texts[1:])])
    return RequestError(str(field), f"{deepest[0]}{''.join(deepest[1:])}: {message}")


def _place(detail: ErrorDetails, body: Any) -> tuple[str, ...]:
    """Names and indices that lead there. A union adds the name of its branch to pydantic's; callers do not
    know it, and nothing in the body has it."""
    names: list[str] = []
    node = body
    for part in detail["loc"]:
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            names.append(f"[{part}]")
            node = node[part]
        elif isinstance(node, dict) and (part in node or not names):
            names.append(f".{part}" if names else str(part))
            node = node.get(part)
    return tuple(names)


def _expected(text: str) -> str:
    return text.replace("Input should be", "must be", 1)
