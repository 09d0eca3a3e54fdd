"""What both generation endpoints do with a prompt: requests, usage, and the `milepost` object."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from milepost.core.plan import ScoredToken
from milepost.engine.aio import AnswerStream, AsyncEngine
from milepost.engine.constraints import Constraint
from milepost.engine.messages import DraftCounts, GenerationRequest, OutputDelta, ReuseExplanation
from milepost.engine.params import (
    OutputLimit,
    checked_choices,
    checked_max_tokens,
    checked_stop,
    sampling_params,
)
from milepost.engine.roles import check_answer_length
from milepost.engine.serving import ServingModel, cache_domain
from milepost.errors import RequestError
from milepost.server.access import caller_of
from milepost.server.options import ServerOptions
from milepost.server.schema import Body
from milepost.server.tracing import sound_trace_parent


@dataclass(slots=True)
class Service:
    """What routes need: the model and the asyncio front of its engine."""

    model: ServingModel
    front: AsyncEngine
    started_at: int
    options: ServerOptions = field(default_factory=ServerOptions)


@dataclass(slots=True)
class Prompt:
    """Token ids, and the positions worth keeping; `marker` ones are given up last for `pin_seconds`.

    Attributes:
        marks: control tokens that whoever parses the answers looks for; see `GenerationRequest`.
        new_constraint: makes what each answer must follow.
    """

    token_ids: array[int]
    wanted: list[tuple[int, str]] = field(default_factory=list)
    pin_seconds: float = 0.0
    marks: Mapping[int, str] | None = None
    new_constraint: Callable[[], Constraint] | None = None


@dataclass(slots=True)
class Choice:
    """An answer as it grows.

    Attributes:
        prompt_index: which of the request's prompts it answers.
    """

    index: int
    prompt_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reuse: ReuseExplanation | None = None
    drafting: DraftCounts | None = None
    prompt_scores: list[ScoredToken] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.prompt_scores.extend(delta.prompt_scores)
        if delta.reuse is not None:
            self.reuse = delta.reuse
        self.drafting = delta.drafting


@dataclass(slots=True)
class Generation:
    """One HTTP request: its prompts, its choices and their streams (same order)."""

    prompts: list[Prompt]
    choices: list[Choice]
    streams: list[AnswerStream]
    seed: int

    def usage(self) -> dict[str, Any]:
        """Token counts so far. A prompt counts once however many choices it has; what of it was
        cached is what its first choice found."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_completion = sum(len(choice.token_ids) for choice in self.choices)
        num_cached = sum(choice.reuse.num_cached_tokens for choice in self._first_choices() if choice.reuse)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def milepost(self) -> dict[str, Any]:
        """The extra object of a response: reuse of the first choice, of every choice if there are
        more, the seed that repeats the answer, and what became of guessed tokens, over all choices."""
        explained = [choice for choice in self.choices if choice.reuse is not None]
        result: dict[str, Any] = {"reuse": None, "seed": self.seed}
        if explained and explained[0].reuse is not None:
            result["reuse"] = explained[0].reuse.as_dict()
        drafting = [choice.drafting for choice in self.choices if choice.drafting is not None]
        if drafting:
            result["speculation"] = sum(drafting, DraftCounts()).as_dict()
        if len(self.choices) > 1:
            result["choices"] = [
                {"index": choice.index, "reuse": choice.reuse.as_dict()}
                for choice in explained
                if choice.reuse
            ]
        return result

    def _first_choices(self) -> list[Choice]:
        first: dict[int, Choice] = {}
        for choice in self.choices:
            first.setdefault(choice.prompt_index, choice)
        return list(first.values())


def check_model(service: Service, name: str | None) -> None:
    """The `model` field, which may be left out.

    Raises:
        RequestError: 404 for another model, 400 for an adapter of this one.
    """
    served = service.model.name
    if name is None or name == served:
        return
    if name.startswith(f"{served}:"):
        raise RequestError(
            "model", "LoRA adapters are not supported by this server", code="unsupported_field"
        )
    raise RequestError(
        "model",
        f"the model `{name[:200]}` does not exist; this server has `{served}`",
        code="model_not_found",
        status=404,
    )


def begin(
    service: Service,
    request: Request,
    body: Body,
    prompts: Sequence[Prompt],
    *,
    num_logprobs: int | None,
    limit: OutputLimit,
    label: str,
    prompt_logprobs: int | None = None,
) -> Generation:
    """Check the options of a request and hand every choice to the engine.

    Args:
        prompt_logprobs: scores of the prompt, which its first choice brings.

    Raises:
        RequestError: names the field.
    """
    model = service.model
    n = checked_choices(body.n, len(prompts))
    stop = checked_stop(body.stop)
    options = model.defaults.applied(body.sampling_options(num_logprobs))
    if limit.default is None:
        limit = replace(limit, default=model.defaults.max_tokens)
    seed = model.seeds.next() if body.seed is None else body.seed
    caller = caller_of(request)
    priority = body.priority or 0
    if priority < 0 and not caller.is_admin:
        raise RequestError(
            "priority",
            "below 0 would overtake other API keys; it needs one given with --admin-api-key",
            code="admin_key_needed",
            status=403,
        )
    domain = cache_domain(body.cache_salt, caller.key, is_separate=caller.is_separate)
    requests: list[GenerationRequest] = []
    choices: list[Choice] = []
    for prompt_index, prompt in enumerate(prompts):
        max_tokens = checked_max_tokens(
            limit, len(prompt.token_ids), model.max_model_len, options.min_tokens or 0
        )
        check_answer_length(service.options.role, max_tokens, limit.param)
        for choice_index in range(n):
            index = len(choices)
            choices.append(Choice(index, prompt_index))
            requests.append(
                GenerationRequest(
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling_params(
                        options,
                        seed=seed,
                        eos_token_ids=model.tokenizer.eos_token_ids,
                        vocab_size=model.vocab_size,
                        choice_index=choice_index,
                    ),
                    max_tokens=max_tokens,
                    stop=stop,
                    include_stop_str_in_output=bool(body.include_stop_str_in_output),
                    skip_special_tokens=body.skip_special_tokens is not False,
                    priority=priority,
                    domain=domain,
                    wanted=prompt.wanted,
                    conversation=body.prompt_cache_key,
                    uses_cache=body.cache_prompt is not False,
                    retention_priority=body.cache_priority or 0,
                    pin_seconds=prompt.pin_seconds,
                    marks=prompt.marks,
                    constraint=None if prompt.new_constraint is None else prompt.new_constraint(),
                    prompt_logprobs=prompt_logprobs if choice_index == 0 else None,
                    owner=caller.owner,
                    trace_parent=sound_trace_parent(request.headers.get("traceparent")),
                    label=label if len(prompts) * n == 1 else f"{label}/{index}",
                )
            )
    streams = [service.front.submit(request) for request in requests]
    return Generation(list(prompts), choices, streams, seed)
