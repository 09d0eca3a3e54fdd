"""`POST /v1/completions/render` and `/v1/chat/completions/render`: what a request becomes, without an answer.

Routers ask for it, to know the tokens that a prefix is looked up by.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from milepost.engine.params import OutputLimit, checked_max_tokens, checked_stop, sampling_params
from milepost.engine.serving import ServingModel
from milepost.server.chat_routes import checked_num_logprobs, output_limit
from milepost.server.chat_run import conversation, render
from milepost.server.completion_routes import DEFAULT_MAX_TOKENS, checked_prompts
from milepost.server.docs import json_body
from milepost.server.generation import Prompt, Service, check_model
from milepost.server.middleware import request_id
from milepost.server.schema import Body, ChatBody, CompletionBody, parse_body

router = APIRouter()


@router.post("/v1/completions/render", openapi_extra=json_body(CompletionBody))
async def render_completion(request: Request) -> JSONResponse:
    """One object for each prompt of a completion request."""
    service: Service = request.app.state.service
    body = await parse_body(CompletionBody, request)
    body.check_extras()
    check_model(service, body.model)
    prompts = await asyncio.to_thread(checked_prompts, service.model, body)
    limit = OutputLimit(body.max_tokens, default=DEFAULT_MAX_TOKENS)
    label = f"cmpl-{request_id(request)}"
    return JSONResponse(
        [
            _rendered(service.model, body, prompt, limit, body.logprobs, f"{label}-{index}")
            for index, prompt in enumerate(prompts)
        ]
    )


@router.post("/v1/chat/completions/render", openapi_extra=json_body(ChatBody))
async def render_chat(request: Request) -> JSONResponse:
    """The prompt of a chat request, with the positions where checkpoints are wanted."""
    service: Service = request.app.state.service
    body = await parse_body(ChatBody, request)
    body.check_extras()
    check_model(service, body.model)
    num_logprobs = checked_num_logprobs(body)
    question = await asyncio.to_thread(render, service.model, body, conversation(body))
    label = f"chatcmpl-{request_id(request)}"
    return JSONResponse(
        _rendered(service.model, body, question.prompt, output_limit(body), num_logprobs, label)
    )


def _rendered(
    model: ServingModel, body: Body, prompt: Prompt, limit: OutputLimit, num_logprobs: int | None, label: str
) -> dict[str, Any]:
    options = body.sampling_options(num_logprobs)
    sampling = sampling_params(
        options,
        seed=body.seed or 0,
        eos_token_ids=model.tokenizer.eos_token_ids,
        vocab_size=model.vocab_size,
    )
    max_tokens = checked_max_tokens(
        limit, len(prompt.token_ids), model.max_model_len, options.min_tokens or 0
    )
    fields = dataclasses.asdict(sampling)
    fields["logprobs"] = fields.pop("num_logprobs")
    fields["seed"] = body.seed
    del fields["choice_index"]
    return {
        "request_id": label,
        "model": model.name,
        "token_ids": prompt.token_ids.tolist(),
        "sampling_params": {
            **fields,
            "n": body.n or 1,
            "max_tokens": max_tokens,
            "stop": list(checked_stop(body.stop)),
        },
        "features": None,
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "milepost": {
            "checkpoints": [
                {
                    "position": position,
                    "match_unit_position": position // model.geometry.match_unit * model.geometry.match_unit,
                    "reason": reason,
                }
                for position, reason in prompt.wanted
            ]
        },
    }
