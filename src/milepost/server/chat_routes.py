"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from milepost.core.plan import SampledToken
from milepost.engine.messages import OutputDelta
from milepost.engine.params import MAX_LOGPROBS, OutputLimit
from milepost.engine.parts import CallBegun, Content, ParsedAnswer, Part, Reasoning
from milepost.engine.serving import ServingModel
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError
from milepost.server.chat_run import ChatRun, ask, conversation
from milepost.server.docs import json_body
from milepost.server.generation import Choice, Service, check_model
from milepost.server.middleware import request_id
from milepost.server.prompt_scores import prompt_logprobs
from milepost.server.schema import ChatBody, parse_body
from milepost.server.streams import respond

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await parse_body(ChatBody, request)
    body.check_extras()
    check_model(service, body.model)
    num_logprobs = checked_num_logprobs(body)
    completion_id = f"chatcmpl-{request_id(request)}"
    run = await ask(
        service,
        request,
        body,
        conversation(body),
        limit=output_limit(body),
        label=completion_id,
        num_logprobs=num_logprobs,
    )
    answer = _ChatCompletion(service.model, body, run, completion_id)
    return await respond(request, run.generation.streams, answer, is_stream=bool(body.stream))


def output_limit(body: ChatBody) -> OutputLimit:
    """By whichever name it was given."""
    if body.max_completion_tokens is not None:
        return OutputLimit(body.max_completion_tokens, "max_completion_tokens", "messages")
    return OutputLimit(body.max_tokens, "max_tokens", "messages")


def checked_num_logprobs(body: ChatBody) -> int | None:
    """Log-probabilities per token; None = none are asked for.

    Raises:
        RequestError: names the field.
    """
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs", "needs `logprobs: true`")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                "top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}"
            )
    return (body.top_logprobs or 0) if body.logprobs else None


class _ChatCompletion:
    """Turns deltas into the objects of the chat API."""

    def __init__(self, model: ServingModel, body: ChatBody, run: ChatRun, completion_id: str) -> None:
        self._model = model
        self._body = body
        self._run = run
        self._generation = run.generation
        self._envelope = {"id": completion_id, "created": int(time.time()), "model": model.name}

    async def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        generation = self._generation
        sampled: list[list[SampledToken]] = [[] for _ in generation.choices]
        async with aclosing(self._run.updates()) as updates:
            async for choice, delta, _ in updates:
                sampled[choice.index].extend(delta.tokens)
        result = {
            **self._envelope,
            "object": "chat.completion",
            "choices": [self._choice(choice, sampled[choice.index]) for choice in generation.choices],
            "usage": self._run.usage(),
            "milepost": generation.milepost(),
        }
        if self._body.prompt_logprobs is not None:
            scores = generation.choices[0].prompt_scores
            result["prompt_logprobs"] = prompt_logprobs(
                self._model.tokenizer, scores, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            result["prompt_token_ids"] = generation.prompts[0].token_ids.tolist()
        return result

    def _choice(self, choice: Choice, sampled: list[SampledToken]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "index": choice.index,
            "message": _message(self._run.answers[choice.index]),
            "logprobs": self._logprobs(sampled),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            result["token_ids"] = choice.token_ids
        return result

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream; the last one carries `milepost`, and usage if asked for."""
        generation = self._generation
        options = self._body.stream_options
        continuous = options is not None and options.include_usage and options.continuous_usage_stats
        wants_every_token = continuous or bool(self._body.logprobs) or bool(self._body.return_token_ids)
        envelope = {**self._envelope, "object": "chat.completion.chunk"}
        num_open = len(generation.choices)
        begun = [False] * num_open
        async with aclosing(self._run.updates()) as updates:
            async for choice, delta, parts in updates:
                if not begun[choice.index]:
                    begun[choice.index] = True
                    yield self._opening(envelope, choice, continuous)
                num_open -= delta.finish_reason is not None
                if parts or delta.finish_reason or (wants_every_token and delta.tokens):
                    event = {**envelope, "choices": [self._chunk(choice, delta, parts)]}
                    if options is not None and options.include_usage:
                        event["usage"] = self._run.usage() if continuous else None
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
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": self._run.usage(),
            "milepost": self._generation.milepost(),
        }

    def _opening(self, envelope: dict[str, Any], choice: Choice, continuous: bool) -> dict[str, Any]:
        opening = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
        }
        event = {**envelope, "choices": [{**opening, "logprobs": None}]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            event["usage"] = self._run.usage() if continuous else None
        if self._body.return_token_ids:
            event["prompt_token_ids"] = self._generation.prompts[0].token_ids.tolist()
        return event

    def _chunk(self, choice: Choice, delta: OutputDelta, parts: list[Part]) -> dict[str, Any]:
        result: dict[str, Any] = {
            "index": choice.index,
            "delta": _message_delta(parts),
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": choice.finish_reason,
        }
        if delta.finish_reason is not None:
            result["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            result["token_ids"] = delta.token_ids
        return result

    def _logprobs(self, sampled: list[SampledToken]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        tokenizer = self._model.tokenizer
        return {
            "content": [
                {
                    **_token_entry(tokenizer, token.token_id, token.logprob or 0.0),
                    "top_logprobs": [_token_entry(tokenizer, *entry) for entry in token.top_logprobs],
                }
                for token in sampled
            ]
        }


def _message(answer: ParsedAnswer) -> dict[str, Any]:
    """The message of a whole answer. Fields that not every model has are there only if they say something."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = message["reasoning"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def _message_delta(parts: list[Part]) -> dict[str, Any]:
    """The same for a part of an answer: joined, deltas are the message."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            for name in ("reasoning_content", "reasoning"):
                delta[name] = delta.get(name, "") + part.text
        elif isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {
                "index": part.index,
                "id": part.call_id,
                "type": "function",
                "function": function,
            }
        else:
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta or {"content": ""}


def _token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(data)}
