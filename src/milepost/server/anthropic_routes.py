"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API over the same engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from milepost.engine.params import OutputLimit
from milepost.engine.parts import CallArguments, CallBegun, Part, Reasoning
from milepost.engine.serving import ServingModel
from milepost.errors import RequestError
from milepost.server.anthropic_input import MessagesBody, chat_body, conversation
from milepost.server.chat_run import ChatRun, ask, render
from milepost.server.docs import json_body
from milepost.server.errors import ANTHROPIC_PATH, error_object, shaped_for
from milepost.server.generation import Choice, Service, check_model
from milepost.server.middleware import request_id
from milepost.server.schema import parse_body
from milepost.server.streams import EventFormat, encode_named_event, respond

SIGNATURE = "unsigned"
"""Thinking blocks carry a signature in this API; here nobody checks one."""

router = APIRouter()


@router.post(ANTHROPIC_PATH, openapi_extra=json_body(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    service: Service = request.app.state.service
    body = await parse_body(MessagesBody, request)
    body.check_extras()
    check_model(service, body.model)
    if body.max_tokens is None:
        raise RequestError("max_tokens", "is missing")
    if body.max_tokens < 1:
        raise RequestError("max_tokens", f"must be at least 1, not {body.max_tokens}")
    given = conversation(body)
    if given.messages[-1]["role"] == "assistant":
        raise RequestError("messages", "must not end with an answer: beginnings of answers cannot be given")
    message_id = f"msg_{request_id(request)}"
    # What does not fit the context is cut off there, as in the API this follows.
    limit = OutputLimit(None, "max_tokens", "messages", default=body.max_tokens)
    run = await ask(service, request, chat_body(body), given, limit=limit, label=message_id)
    reply = _Message(service.model, body.max_tokens, run, message_id)
    return await respond(
        request,
        run.generation.streams,
        reply,
        is_stream=bool(body.stream),
        event_format=ANTHROPIC_EVENTS,
    )


@router.post(f"{ANTHROPIC_PATH}/count_tokens", openapi_extra=json_body(MessagesBody))
async def count_tokens(request: Request) -> JSONResponse:
    """Count the tokens of the prompt that such a conversation becomes."""
    service: Service = request.app.state.service
    body = await parse_body(MessagesBody, request)
    body.check_extras()
    check_model(service, body.model)
    options = chat_body(body)
    options.cache_prompt = False  # no positions worth keeping are looked for
    question = await asyncio.to_thread(render, service.model, options, conversation(body))
    return JSONResponse({"input_tokens": len(question.prompt.token_ids)})


class _Message:
    """Turns parts into the objects of the Messages API."""

    def __init__(self, model: ServingModel, max_tokens: int, run: ChatRun, message_id: str) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._run = run
        self._choice: Choice = run.generation.choices[0]
        self._id = message_id

    async def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        blocks = _Blocks()
        async with aclosing(self._run.updates()) as updates:
            async for _, _, parts in updates:
                for part in parts:
                    blocks.add(part)
        return {
            **self._envelope(blocks.finished()),
            **self._ending(),
            "usage": self._usage(),
            "milepost": self._run.generation.milepost(),
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream; the last but one carries the usage."""
        blocks = _Blocks()
        is_begun = False
        async with aclosing(self._run.updates()) as updates:
            async for _, _, parts in updates:
                if not is_begun:
                    is_begun = True
                    start = {**self._envelope([]), "stop_reason": None, "stop_sequence": None}
                    yield {"type": "message_start", "message": {**start, "usage": self._usage()}}
                for part in parts:
                    for event in blocks.add(part):
                        yield event
        for event in blocks.end():
            yield event
        yield {
            "type": "message_delta",
            "delta": self._ending(),
            "usage": self._usage(),
            "milepost": self._run.generation.milepost(),
        }
        yield {"type": "message_stop"}

    def last_event(self) -> dict[str, Any] | None:
        return None

    def _envelope(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
        }

    def _ending(self) -> dict[str, Any]:
        choice = self._choice
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(
            choice.finish_reason or "", "end_turn"
        )
        if reason == "max_tokens" and len(choice.token_ids) < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Every prompt token counts once: read from the cache, kept by a marker of this request, or input."""
        prompt = self._run.generation.prompts[0]
        unit = self._model.geometry.match_unit
        marked = [position // unit * unit for position, reason in prompt.wanted if reason == "marker"]
        reuse = self._choice.reuse
        num_read = 0 if reuse is None else reuse.num_cached_tokens
        num_created = max(0, max(marked, default=0) - num_read)
        return {
            "input_tokens": len(prompt.token_ids) - num_read - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_read,
            "output_tokens": len(self._choice.token_ids),
        }


class _Blocks:
    """Content blocks as they grow, and the events that tell of it."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False

    def add(self, part: Part) -> list[dict[str, Any]]:
        """Take in a part; the events of it."""
        if isinstance(part, CallArguments):
            self._arguments += part.text
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})]
        if isinstance(part, CallBegun):
            block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            return [*self.end(), self._start(block)]
        kind, key = ("thinking", "thinking") if isinstance(part, Reasoning) else ("text", "text")
        events = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            empty = {"type": kind, key: "", **({"signature": ""} if kind == "thinking" else {})}
            events = [*self.end(), self._start(empty)]
        self._blocks[-1][key] += part.text
        return [*events, self._delta({"type": f"{kind}_delta", key: part.text})]

    def end(self) -> list[dict[str, Any]]:
        """Close the block that is open."""
        if not self._is_open:
            return []
        self._is_open = False
        block, events = self._blocks[-1], []
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
            self._arguments = ""
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def finished(self) -> list[dict[str, Any]]:
        """All blocks, the last one closed."""
        self.end()
        return self._blocks

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._is_open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """The arguments as this API hands them out; what is no JSON object stands in it as it was written."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"unparsed": text}
    return value if isinstance(value, dict) else {"unparsed": text}


def _error_event(error: BaseException) -> dict[str, Any]:
    status, body = error_object(error)
    return shaped_for(ANTHROPIC_PATH, status, body)


ANTHROPIC_EVENTS = EventFormat(encode_named_event, _error_event, b"")
