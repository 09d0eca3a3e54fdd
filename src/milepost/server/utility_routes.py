"""Everything that is not generation: health, models, metrics, tokens, cache."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from milepost import __version__
from milepost.engine.markers import MarkerList
from milepost.engine.messages import EngineStopped
from milepost.engine.params import checked_token_ids
from milepost.engine.serving import ServingModel
from milepost.errors import RequestError
from milepost.server.conversation import checked_messages, checked_tools
from milepost.server.docs import PAGE_HEADERS, json_body, routes_page
from milepost.server.generation import Service, check_model
from milepost.server.schema import DetokenizeBody, TokenizeBody, parse_body
from milepost.server.state import ServerState

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are answered; 503 with the reason while the model is loaded and warmed up, while
    the server drains, and when the engine has stopped."""
    state: ServerState = request.app.state.phase
    state.check_admits()
    engine = _service(request).model.engine
    if not engine.is_healthy:
        raise EngineStopped(f"the engine has stopped: {engine.failure or 'it was closed'}")
    return Response(status_code=200)


@router.get("/version")
async def version() -> dict[str, str]:
    """Version of Milepost."""
    return {"version": __version__}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The routes as a page."""
    return HTMLResponse(routes_page(request.app.openapi()), headers=PAGE_HEADERS)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model this server has."""
    return {"object": "list", "data": [_model_card(_service(request))]}


@router.get("/v1/models/{model_name:path}")
async def one_model(request: Request, model_name: str) -> dict[str, Any]:
    """The card of one model."""
    service = _service(request)
    check_model(service, model_name)
    return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "milepost",
        "root": service.model.name,
        "parent": None,
        "max_model_len": service.model.max_model_len,
    }


@router.post("/tokenize", openapi_extra=json_body(TokenizeBody))
async def tokenize(request: Request) -> JSONResponse:
    """Token ids of a prompt or a conversation, as the generation endpoints would make them."""
    service = _service(request)
    body = await parse_body(TokenizeBody, request)
    check_model(service, body.model)
    ids = await asyncio.to_thread(_tokenized, service.model, body)
    result: dict[str, Any] = {"count": len(ids), "max_model_len": service.model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        result["token_strs"] = [service.model.tokenizer.token_text(token_id) for token_id in ids]
    return JSONResponse(result)


def _tokenized(model: ServingModel, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt", "give either `prompt` or `messages`")
    if body.prompt is not None:
        return model.tokenizer.encode_prompt(
            body.prompt, add_special_tokens=body.add_special_tokens, parse_special=body.parse_special
        )
    rendered = model.chat.render(
        checked_messages(body.messages, MarkerList()),
        checked_tools(body.tools, MarkerList()),
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
        find_boundaries=False,
    )
    return rendered.token_ids.tolist()


@router.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, str]:
    """Text of token ids, control tokens included."""
    service = _service(request)
    body = await parse_body(DetokenizeBody, request)
    check_model(service, body.model)
    ids = checked_token_ids("tokens", body.tokens, service.model.vocab_size) if body.tokens else []
    return {"prompt": service.model.tokenizer.decode(ids)}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Drop every cached prefix; `reset` is false if some are in use and stayed."""
    return {"reset": await _service(request).front.reset_prefix_cache()}
