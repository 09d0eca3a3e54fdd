"""Sampling options as callers write them -> `SamplingParams`, or an error that names the field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milepost.core.plan import SamplingParams
from milepost.engine.length_bound import fewest_tokens
from milepost.errors import RequestError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_ANSWERS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
"""Every token's text is compared with all of them, in the engine thread."""
GREEDY_BELOW_TEMPERATURE = 1e-5
SEED_LIMIT = 1 << 63


@dataclass(slots=True)
class SamplingOptions:
    """What a caller may set; None or the default = not set. Names are those of the HTTP fields."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = field(default_factory=list)
    ignore_eos: bool = False


def random_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbelow(SEED_LIMIT)


def sampling_params(
    options: SamplingOptions,
    *,
    seed: int,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    choice_index: int = 0,
) -> SamplingParams:
    """Checked parameters of one choice.

    Raises:
        RequestError: names the field.
    """
    temperature = _number("temperature", options.temperature, 1.0, 0.0, math.inf)
    stop_ids = [_token_id("stop_token_ids", item, vocab_size) for item in options.stop_token_ids]
    if not options.ignore_eos:
        stop_ids.extend(eos_token_ids)
    top_k = -1 if options.top_k is None else options.top_k
    if top_k < -1:
        raise RequestError("top_k", f"must be a positive number of tokens, or 0 or -1 for off, not {top_k}")
    top_p = _number("top_p", options.top_p, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestError("top_p", "must be above 0; 1 is off")
    repetition_penalty = _number("repetition_penalty", options.repetition_penalty, 1.0, 0.0, math.inf)
    if repetition_penalty == 0.0:
        raise RequestError("repetition_penalty", "must be above 0; 1 is off")
    min_tokens = options.min_tokens or 0
    if min_tokens < 0:
        raise RequestError("min_tokens", f"must not be negative, but is {min_tokens}")
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW_TEMPERATURE else temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=_number("min_p", options.min_p, 0.0, 0.0, 1.0),
        presence_penalty=_number("presence_penalty", options.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", options.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(options.logit_bias, vocab_size),
        seed=seed % SEED_LIMIT,
        choice_index=choice_index,
        num_logprobs=_num_logprobs(options.num_logprobs),
        min_tokens=min_tokens,
        stop_token_ids=sorted(set(stop_ids)),
    )


def checked_token_ids(param: str, token_ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Token ids a caller sent.

    Raises:
        RequestError: empty, or an id the model does not have.
    """
    if not token_ids:
        raise RequestError(param, "the prompt is empty; send at least one token")
    return [_token_id(param, item, vocab_size) for item in token_ids]


def checked_stop(stop: Any) -> tuple[str, ...]:
    """The `stop` field: absent, one string, or a list of strings.

    Raises:
        RequestError: anything else, an empty string, or too many.
    """
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise RequestError("stop", "must be a string or a list of strings")
    if not all(strings):
        raise RequestError("stop", "must not hold an empty string")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    num_chars = sum(map(len, strings))
    if num_chars > MAX_STOP_CHARS:
        raise RequestError(
            "stop", f"holds {num_chars} characters; at most {MAX_STOP_CHARS} are allowed over all strings"
        )
    return tuple(strings)


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """The caller's limit of output tokens.

    Attributes:
        param: field it came from.
        prompt_param: field that holds the prompt.
        default: without a limit; None = what is left of the context.
    """

    max_tokens: int | None
    param: str = "max_tokens"
    prompt_param: str = "prompt"
    default: int | None = None


def checked_max_tokens(
    limit: OutputLimit, num_prompt_tokens: int, max_model_len: int, min_tokens: int
) -> int:
    """Output tokens of a request.

    Raises:
        RequestError: prompt and output do not fit `max_model_len`, or `min_tokens` exceeds the limit.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise prompt_too_long(limit.prompt_param, f"{num_prompt_tokens}", max_model_len)
    max_tokens = limit.max_tokens
    if max_tokens is None:
        max_tokens = room if limit.default is None else min(room, max(limit.default, min_tokens))
    if max_tokens < 1:
        raise RequestError(limit.param, f"must be at least 1, not {max_tokens}")
    if max_tokens > room:
        raise RequestError(
            limit.param,
            f"{max_tokens} output tokens and a prompt of {num_prompt_tokens} tokens exceed the maximum "
            f"context length of {max_model_len} tokens; ask for at most {room}",
            code="context_length_exceeded",
        )
    if min_tokens > max_tokens:
        raise RequestError("min_tokens", f"{min_tokens} is more than the {max_tokens} tokens allowed at most")
    return max_tokens


def prompt_too_long(param: str, num_tokens: str, max_model_len: int) -> RequestError:
    """The error of a prompt that leaves no room for an answer."""
    return RequestError(
        param,
        f"the prompt has {num_tokens} tokens; with at least one generated token it must fit the "
        f"maximum context length of {max_model_len} tokens",
        code="context_length_exceeded",
    )


def check_text_length(param: str, num_chars: int, bytes_per_token: int, max_model_len: int) -> None:
    """Before a text is tokenized, which takes time and memory: whether it can fit at all.

    Args:
        bytes_per_token: see `Tokenizer.bytes_per_token`.

    Raises:
        RequestError: it has too many tokens, however it is cut.
    """
    fewest = fewest_tokens(num_chars, bytes_per_token)
    if fewest >= max_model_len:
        raise prompt_too_long(param, f"{num_chars} characters, at least {fewest}", max_model_len)


def checked_choices(n: int | None, num_prompts: int = 1) -> int:
    """The `n` field.

    Raises:
        RequestError: not between 1 and `MAX_CHOICES`, or too many answers over all prompts.
    """
    count = 1 if n is None else n
    if not 1 <= count <= MAX_CHOICES:
        raise RequestError("n", f"must be between 1 and {MAX_CHOICES}, not {count}")
    if count * num_prompts > MAX_ANSWERS:
        raise RequestError(
            "n", f"{count} choices for {num_prompts} prompts are too many; {MAX_ANSWERS} answers are allowed"
        )
    return count


def _number(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not math.isfinite(value):
        raise RequestError(param, f"must be a finite number, not {value}")
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise RequestError(param, f"must be {bounds}, not {value}")
    return float(value)


def _token_id(param: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(param, f"token ids must be integers, not {value!r}")
    if not 0 <= value < vocab_size:
        raise RequestError(
            param, f"token id {value} is out of range; this model has ids 0 to {vocab_size - 1}"
        )
    return value


def _num_logprobs(value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise RequestError("logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {value}")
    return value


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    checked = {}
    for key, value in (bias or {}).items():
        try:
            token_id = int(key)
        except ValueError:
            raise RequestError("logit_bias", f"keys must be token ids, not {key!r}") from None
        checked[_token_id("logit_bias", token_id, vocab_size)] = _number(
            "logit_bias", value, 0.0, -100.0, 100.0
        )
    return checked
