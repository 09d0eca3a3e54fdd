"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.markers import DEFAULT_TTL, SECONDS_BY_TTL, checked_breakpoints
from milepost.engine.messages import OutputDelta
from milepost.engine.params import OutputLimit, check_text_length, checked_token_ids, prompt_too_long
from milepost.engine.serving import ServingModel
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError
from milepost.server.docs import json_body
from milepost.server.generation import Choice, Generation, Prompt, Service, begin, check_model
from milepost.server.guided import constrained, demanded_form
from milepost.server.middleware import request_id
from milepost.server.prompt_scores import (
    echoed_logprobs,
    num_prompt_logprobs,
    prompt_logprobs,
    scores_only,
)
from milepost.server.schema import CompletionBody, parse_body
from milepost.server.streams import merged, respond

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

router = APIRouter()


@router.post("/v1/completions", openapi_extra=json_body(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue a text or token ids."""
    service: Service = request.app.state.service
    body = await parse_body(CompletionBody, request)
    body.check_extras()
    check_model(service, body.model)
    scored = num_prompt_logprobs(body)
    max_tokens = 1 if scores_only(body) else body.max_tokens
    completion_id = f"cmpl-{request_id(request)}"
    limit = OutputLimit(max_tokens, default=DEFAULT_MAX_TOKENS)
    with service.front.preparing():
        prompts = await asyncio.to_thread(checked_prompts, service.model, body)
        generation = begin(
            service,
            request,
            body,
            prompts,
            num_logprobs=body.logprobs,
            limit=limit,
            label=completion_id,
            prompt_logprobs=scored,
        )
    answer = _Completion(service.model, body, generation, completion_id)
    return await respond(request, generation.streams, answer, is_stream=bool(body.stream))


def checked_prompts(model: ServingModel, body: CompletionBody) -> list[Prompt]:
    """The prompts of a request with what their answers must follow. Takes a while: not for the event loop.

    Raises:
        RequestError: names the field.
    """
    new_constraint = constrained(model, demanded_form(body))
    prompts = [Prompt(ids, new_constraint=new_constraint) for ids in prompt_token_ids(model, body)]
    wanted = checked_breakpoints(body.prompt_cache_breakpoints, [len(p.token_ids) for p in prompts])
    if wanted:
        prompts[0].wanted = wanted
        prompts[0].pin_seconds = SECONDS_BY_TTL[DEFAULT_TTL]
    return prompts


def prompt_token_ids(model: ServingModel, body: CompletionBody) -> list[array[int]]:
    """The prompts of a request: a text, a list of texts, token ids, or a list of those.

    Raises:
        RequestError: anything else, or an empty prompt.
    """
    prompt = body.prompt
    if prompt is None:
        raise RequestError("prompt", "is missing")
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        prompts = prompt
    elif isinstance(prompt, list):
        prompts = [prompt]
    else:
        raise RequestError(
            "prompt", "must be a string, a list of strings, token ids, or a list of token id lists"
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError("prompt", f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed")
    result = []
    for item in prompts:
        if isinstance(item, str):
            if not body.parse_special:
                check_text_length("prompt", len(item), model.tokenizer.bytes_per_token, model.max_model_len)
            item = model.tokenizer.encode_prompt(
                item,
                add_special_tokens=body.add_special_tokens is not False,
                parse_special=bool(body.parse_special),
            )
        if len(item) >= model.max_model_len:
            raise prompt_too_long("prompt", str(len(item)), model.max_model_len)
        result.append(array("I", checked_token_ids("prompt", item, model.vocab_size)))
    return result


class _Completion:
    """Turns deltas into the objects of the completions API."""

    def __init__(
        self, model: ServingModel, body: CompletionBody, generation: Generation, completion_id: str
    ) -> None:
        self._model = model
        self._body = body
        self._generation = generation
        self._envelope = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        generation = self._generation
        sampled = [OutputDelta() for _ in generation.choices]
        async with aclosing(merged(generation.streams)) as deltas:
            async for index, received in deltas:
                delta = self._kept(received)
                generation.choices[index].add(delta)
                sampled[index].tokens.extend(delta.tokens)
                sampled[index].text_offsets.extend(delta.text_offsets)
        return {
            **self._envelope,
            "choices": [self._whole_choice(choice, sampled[choice.index]) for choice in generation.choices],
            "usage": generation.usage(),
            "milepost": generation.milepost(),
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream; the last one carries `milepost`, and usage if asked for."""
        generation = self._generation
        options = self._body.stream_options
        continuous = options is not None and options.include_usage and options.continuous_usage_stats
        wants_every_token = continuous or self._body.logprobs is not None or bool(self._body.return_token_ids)
        num_open = len(generation.choices)
        begun = [False] * num_open
        async with aclosing(merged(generation.streams)) as deltas:
            async for index, received in deltas:
                delta = self._kept(received)
                choice = generation.choices[index]
                choice.add(delta)
                num_open -= delta.finish_reason is not None
                if not (begun[index] or received.tokens or delta.finish_reason):
                    continue  # the prompt is being read
                text = ("" if begun[index] else self._echo(choice)) + delta.text
                if not (text or delta.finish_reason or (wants_every_token and delta.tokens)):
                    continue
                is_first, begun[index] = not begun[index], True
                chunk = self._choice(choice, text, delta, is_first=is_first)
                chunk["finish_reason"], chunk["stop_reason"] = delta.finish_reason, delta.stop_reason
                if self._body.return_token_ids:
                    chunk["token_ids"] = delta.token_ids
                event = {**self._envelope, "choices": [chunk]}
                if options is not None and options.include_usage:
                    event["usage"] = generation.usage() if continuous else None
                elif num_open == 0:
                    event["milepost"] = generation.milepost()
                yield event
        last = self.last_event()
        if last is not None:
            yield last

    def last_event(self) -> dict[str, Any] | None:
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return None
        return {
            **self._envelope,
            "choices": [],
            "usage": self._generation.usage(),
            "milepost": self._generation.milepost(),
        }

    def _kept(self, delta: OutputDelta) -> OutputDelta:
        """Without what was only sampled because an answer has at least one token."""
        if self._body.max_tokens != 0:
            return delta
        finish_reason = None if delta.finish_reason is None else "length"
        return OutputDelta(finish_reason=finish_reason, reuse=delta.reuse, prompt_scores=delta.prompt_scores)

    def _first_choice(self, choice: Choice) -> Choice:
        """The one of the same prompt that has its scores."""
        return next(c for c in self._generation.choices if c.prompt_index == choice.prompt_index)

    def _logprobs(self, choice: Choice, sampled: OutputDelta, *, is_first: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokenizer = self._model.tokenizer
        generated = completion_logprobs(tokenizer, sampled)
        if not self._body.echo:
            return generated
        begin = len(self._echo(choice))
        generated["text_offset"] = [begin + offset for offset in generated["text_offset"]]
        if not is_first:
            return generated
        echoed = echoed_logprobs(
            tokenizer,
            self._generation.prompts[choice.prompt_index].token_ids,
            self._first_choice(choice).prompt_scores,
            self._body.logprobs,
        )
        return {name: values + generated[name] for name, values in echoed.items()}

    def _echo(self, choice: Choice) -> str:
        if not self._body.echo:
            return ""
        return self._model.tokenizer.decode(self._generation.prompts[choice.prompt_index].token_ids)

    def _whole_choice(self, choice: Choice, sampled: OutputDelta) -> dict[str, Any]:
        return self._choice(choice, self._echo(choice) + choice.text, sampled, is_first=True)

    def _choice(self, choice: Choice, text: str, sampled: OutputDelta, *, is_first: bool) -> dict[str, Any]:
        result: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, sampled, is_first=is_first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(
                self._model.tokenizer, self._first_choice(choice).prompt_scores, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            result["token_ids"] = choice.token_ids
            if is_first:
                result["prompt_token_ids"] = self._generation.prompts[choice.prompt_index].token_ids.tolist()
        return result


def completion_logprobs(tokenizer: Tokenizer, sampled: OutputDelta) -> dict[str, Any]:
    """The completions API's parallel lists."""
    top = []
    for token in sampled.tokens:
        best = {tokenizer.token_text(token_id): logprob for token_id, logprob in token.top_logprobs}
        best[tokenizer.token_text(token.token_id)] = token.logprob or 0.0
        top.append(best)
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in sampled.tokens],
        "token_logprobs": [token.logprob for token in sampled.tokens],
        "top_logprobs": top,
        "text_offset": sampled.text_offsets,
    }
