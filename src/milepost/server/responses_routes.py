"""`POST /v1/responses`: the stateless part of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.params import OutputLimit
from milepost.engine.parts import CallArguments, CallBegun, Part, Reasoning
from milepost.engine.serving import ServingModel
from milepost.errors import RequestError
from milepost.server.chat_run import ChatRun, ask
from milepost.server.docs import json_body
from milepost.server.errors import error_object
from milepost.server.generation import Service, check_model
from milepost.server.middleware import request_id
from milepost.server.responses_input import ResponsesBody, chat_body, conversation
from milepost.server.schema import parse_body
from milepost.server.streams import EventFormat, encode_named_event, respond

router = APIRouter()


@router.post("/v1/responses", openapi_extra=json_body(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation, as OpenAI's Responses API does. Nothing is kept but the prefix cache."""
    service: Service = request.app.state.service
    body = await parse_body(ResponsesBody, request)
    body.check_extras()
    check_model(service, body.model)
    response_id = f"resp_{request_id(request)}"
    limit = OutputLimit(body.max_output_tokens, "max_output_tokens", "input")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError("max_output_tokens", f"must be at least 1, not {body.max_output_tokens}")
    run = await ask(service, request, chat_body(body), conversation(body), limit=limit, label=response_id)
    reply = _Answer(service.model, body, run, response_id)
    return await respond(
        request,
        run.generation.streams,
        reply,
        is_stream=bool(body.stream),
        event_format=EventFormat(encode_named_event, reply.error_event, b""),
    )


class _Answer:
    """Turns parts into items, and the events that tell of them."""

    def __init__(self, model: ServingModel, body: ResponsesBody, run: ChatRun, response_id: str) -> None:
        self._model = model
        self._body = body
        self._run = run
        self._id = response_id
        self._created_at = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._failure: dict[str, Any] | None = None

    async def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        async with aclosing(self._run.updates()) as updates:
            async for _, _, parts in updates:
                for part in parts:
                    for _ in self._add(part):
                        pass
        for _ in self._end():
            pass
        return self._response(self._status())

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream; the last one carries the whole response."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        async with aclosing(self._run.updates()) as updates:
            async for _, _, parts in updates:
                for part in parts:
                    for event in self._add(part):
                        yield event
        for event in self._end():
            yield event
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def error_event(self, error: BaseException) -> dict[str, Any]:
        """What a stream that fails says first."""
        found = error_object(error)[1]["error"]
        self._failure = {"code": "server_error", "message": found["message"]}
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    def last_event(self) -> dict[str, Any] | None:
        return self._event("response.failed", response=self._response("failed"))

    # ------------------------------------------------------------------ items

    def _add(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, CallArguments):
            self._items[-1]["arguments"] += part.text
            return [self._item_event("response.function_call_arguments.delta", delta=part.text)]
        if isinstance(part, CallBegun):
            call = {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": ""}
            return [*self._end(), *self._begin("fc", call)]
        is_reasoning = isinstance(part, Reasoning)
        kind = "reasoning" if is_reasoning else "message"
        events = []
        if not self._is_open or self._items[-1]["type"] != kind:
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item: dict[str, Any] = {"type": kind, "summary": [], "content": []}
            if not is_reasoning:
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "role": "assistant", "content": []}
            events = [*self._end(), *self._begin("rs" if is_reasoning else "msg", item)]
            self._items[-1]["content"].append(content)
            events.append(self._part_event("response.content_part.added", part=dict(content)))
        self._items[-1]["content"][-1]["text"] += part.text
        if is_reasoning:
            return [*events, self._part_event("response.reasoning_text.delta", delta=part.text)]
        return [*events, self._part_event("response.output_text.delta", delta=part.text, logprobs=[])]

    def _begin(self, prefix: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        number = f"{prefix}_{self._id.removeprefix('resp_')}_{len(self._items)}"
        self._items.append({"id": number, "status": "in_progress", **item})
        self._is_open = True
        shown = {
            key: list(value) if isinstance(value, list) else value for key, value in self._items[-1].items()
        }
        return [self._item_event("response.output_item.added", has_id=False, item=shown)]

    def _end(self) -> list[dict[str, Any]]:
        """Close the item that is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = "incomplete" if self._status() == "incomplete" else "completed"
        events = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._item_event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][-1]
            if item["type"] == "reasoning":
                events.append(self._part_event("response.reasoning_text.done", text=part["text"]))
            else:
                events.append(self._part_event("response.output_text.done", text=part["text"], logprobs=[]))
            events.append(self._part_event("response.content_part.done", part=dict(part)))
        return [*events, self._item_event("response.output_item.done", has_id=False, item=item)]

    # ------------------------------------------------------------------ events and the response

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, *, has_id: bool = True, **fields: Any) -> dict[str, Any]:
        if has_id:
            fields = {"item_id": self._items[-1]["id"], **fields}
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._item_event(kind, content_index=0, **fields)

    def _status(self) -> str:
        return "incomplete" if self._run.generation.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        is_over = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": self._failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model.name,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "milepost": self._run.generation.milepost() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._run.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._run.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
