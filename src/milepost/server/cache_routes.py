"""`/v1/cache/...`: conversations by name or by prompt, within what the caller may share."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse

from milepost.engine.manifests import checked_name
from milepost.engine.named import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_PIN_SECONDS,
    MAX_TIMEOUT_SECONDS,
    NamedConversations,
)
from milepost.engine.named_messages import Meant, Removed
from milepost.engine.serving import ServingModel, cache_domain
from milepost.errors import RequestError
from milepost.server.access import caller_of
from milepost.server.chat_run import Conversation, conversation, render
from milepost.server.completion_routes import prompt_token_ids
from milepost.server.docs import json_body
from milepost.server.generation import Service, check_model
from milepost.server.schema import Body, ChatBody, CompletionBody, parse_body, warn_unknown

KEEP, FORGET = "keep", "forget"
SYSTEM_ROLES = ("system", "developer")
STAND_IN = [{"role": "user", "content": "\u2042"}]
"""Another conversation's first message: what its prompt shares with one is public."""

router = APIRouter()


class CacheBody(BaseModel):
    """A conversation: by `name`, by `messages` as for chat, or by `prompt` as for completions."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    name: str | None = None
    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    prompt: Any = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def check(self) -> None:
        """
        Raises:
            RequestError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                warn_unknown(name)
        check_salt(self.cache_salt)
        if self.name is not None:
            checked_name(self.name)
        if self.messages is not None and self.prompt is not None:
            raise RequestError("prompt", "give either `messages` or `prompt`")
        if self.timeout is not None and not 0 < self.timeout <= MAX_TIMEOUT_SECONDS:
            raise RequestError(
                "timeout", f"must be above 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds, not {self.timeout}"
            )

    @property
    def has_prompt(self) -> bool:
        return self.messages is not None or self.prompt is not None

    @property
    def timeout_seconds(self) -> float:
        return DEFAULT_TIMEOUT_SECONDS if self.timeout is None else self.timeout


class PinBody(CacheBody):
    """`POST /v1/cache/pin`."""

    seconds: float | None = None


class ForgetBody(CacheBody):
    """`POST /v1/cache/forget`."""

    branches: str | None = None


def check_salt(cache_salt: str | None) -> None:
    """The rule of the generation endpoints.

    Raises:
        RequestError: too long, or empty.
    """
    Body(cache_salt=cache_salt).check_extras()


@router.post("/v1/cache/save", openapi_extra=json_body(CacheBody))
async def save(request: Request) -> JSONResponse:
    """See that the stores have what is cached of a conversation, and remember it under `name`."""
    body = await parse_body(CacheBody, request)
    meant = await _meant(request, body, may_have_both=True)
    if body.name is None:
        raise RequestError("name", "is missing: save it under which name?")
    saved = await _named(request).save(meant, body.name, body.timeout_seconds)
    return JSONResponse(
        {
            "name": saved.name,
            "saved_tokens": saved.saved_tokens,
            "cached_tokens": saved.cached_tokens,
            "stores": saved.tokens_by_store,
            "segments": saved.num_segments,
            "bytes": saved.num_bytes,
        }
    )


@router.post("/v1/cache/load", openapi_extra=json_body(CacheBody))
async def load(request: Request) -> JSONResponse:
    """Bring what the stores have of a conversation into memory, ahead of its next request."""
    body = await parse_body(CacheBody, request)
    loaded = await _named(request).load(await _meant(request, body), body.timeout_seconds)
    return JSONResponse(
        {
            "name": body.name,
            "loaded_tokens": loaded.note.num_tokens,
            "cached_tokens": loaded.cached_tokens,
            "load": loaded.note.as_dict(),
        }
    )


@router.post("/v1/cache/pin", openapi_extra=json_body(PinBody))
async def pin(request: Request) -> JSONResponse:
    """Give the deepest checkpoint of a conversation up last for `seconds`."""
    body = await parse_body(PinBody, request)
    if body.seconds is None or not 0 < body.seconds <= MAX_PIN_SECONDS:
        raise RequestError("seconds", f"must be above 0 and at most {MAX_PIN_SECONDS:g}")
    position = await _named(request).pin(await _meant(request, body), body.seconds)
    return JSONResponse({"name": body.name, "pinned_tokens": position, "seconds": body.seconds})


@router.post("/v1/cache/unpin", openapi_extra=json_body(CacheBody))
async def unpin(request: Request) -> JSONResponse:
    """End a pin."""
    body = await parse_body(CacheBody, request)
    position = await _named(request).unpin(await _meant(request, body))
    return JSONResponse({"name": body.name, "unpinned_tokens": position})


@router.post("/v1/cache/forget", openapi_extra=json_body(ForgetBody))
async def forget(request: Request) -> JSONResponse:
    """Remove a conversation from memory and stores, as far as nobody else shares it."""
    body = await parse_body(ForgetBody, request)
    with_branches = _with_branches(body.branches)
    meant = await _meant(request, body)
    removed = await _named(request).forget(
        meant, with_branches=with_branches, timeout_seconds=body.timeout_seconds
    )
    return _removed(meant, removed)


@router.delete("/v1/cache/{conversation}")
async def forget_name(
    request: Request, conversation: str, cache_salt: str | None = None, branches: str | None = None
) -> JSONResponse:
    """Remove a name and its conversation from memory and stores, as far as nobody else shares it."""
    check_salt(cache_salt)
    meant = dataclasses.replace(_whose(request, cache_salt), name=checked_name(conversation))
    removed = await _named(request).forget(meant, with_branches=_with_branches(branches))
    return _removed(meant, removed)


@router.get("/v1/cache")
async def names(request: Request, cache_salt: str | None = None) -> JSONResponse:
    """Names of the caller's saved conversations."""
    check_salt(cache_salt)
    entries = await _named(request).names(_whose(request, cache_salt).names_domain)
    data = [
        {"object": "conversation", "name": e.name, "saved_tokens": e.saved_tokens, "created": int(e.created)}
        for e in entries
    ]
    return JSONResponse({"object": "list", "data": data})


def _named(request: Request) -> NamedConversations:
    named: NamedConversations = request.app.state.named
    return named


def _with_branches(branches: str | None) -> bool:
    if branches not in (None, KEEP, FORGET):
        raise RequestError("branches", f'must be "{KEEP}" or "{FORGET}", not {branches!r:.80}')
    return branches == FORGET


def _removed(meant: Meant, removed: Removed) -> JSONResponse:
    return JSONResponse(
        {
            "name": meant.name,
            "forgotten_tokens": removed.num_tokens - removed.num_kept_tokens,
            "kept_tokens": removed.num_kept_tokens,
            "kept_for": removed.kept_for,
            "checkpoints": removed.num_checkpoints,
            "segments": removed.num_segments,
        }
    )


def _whose(request: Request, cache_salt: str | None) -> Meant:
    """Keys that share prefixes have names of their own all the same."""
    caller = caller_of(request)
    return Meant(
        cache_domain(cache_salt, caller.key, is_separate=caller.is_separate),
        names=cache_domain(cache_salt, caller.key, is_separate=bool(caller.owner)),
    )


async def _meant(request: Request, body: CacheBody, *, may_have_both: bool = False) -> Meant:
    """The conversation a body stands for.

    Raises:
        RequestError: names the field.
    """
    service: Service = request.app.state.service
    body.check()
    check_model(service, body.model)
    if not service.model.cache.enable_prefix_caching:
        raise RequestError(
            None, "this server caches nothing (--no-enable-prefix-caching)", code="caching_disabled"
        )
    if body.name is None and not body.has_prompt:
        raise RequestError("name", "give `name`, `messages` or `prompt`")
    if body.name is not None and body.has_prompt and not may_have_both:
        raise RequestError("name", "give either a name, or `messages` or `prompt`")
    whose = dataclasses.replace(_whose(request, body.cache_salt), name=body.name)
    if not body.has_prompt:
        return whose
    tokens, public_tokens = await asyncio.to_thread(_tokens, service.model, body)
    return dataclasses.replace(whose, tokens=tokens, public_tokens=public_tokens)


def _tokens(model: ServingModel, body: CacheBody) -> tuple[array[int], int | None]:
    """Token ids as the generation endpoint would make them, and how many of them others have as well."""
    if body.prompt is not None:
        asked = CompletionBody(
            prompt=body.prompt, add_special_tokens=body.add_special_tokens, parse_special=body.parse_special
        )
        prompts = prompt_token_ids(model, asked)
        if len(prompts) != 1:
            raise RequestError("prompt", f"must be one prompt, not {len(prompts)}")
        return prompts[0], None
    chat = ChatBody(
        messages=body.messages,
        tools=body.tools,
        tool_choice="none" if body.tool_choice == "none" else None,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt,
        cache_prompt=False,  # no boundaries are looked for
    )
    given = conversation(chat)
    given.found.markers.clear()
    tokens = render(model, chat, given).prompt.token_ids
    if len(tokens) >= model.max_model_len:
        raise RequestError(
            "messages",
            f"the conversation has {len(tokens)} tokens; at most {model.max_model_len - 1} fit",
            code="context_length_exceeded",
        )
    return tokens, _public_tokens(model, chat, given, tokens)


def _public_tokens(
    model: ServingModel, chat: ChatBody, given: Conversation, tokens: array[int]
) -> int | None:
    """Tokens another conversation with the same tools and system prompt begins with; None if the template
    cannot tell."""
    roles = [message["role"] for message in given.messages]
    num_system = next((i for i, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    other = Conversation([*given.messages[:num_system], *STAND_IN], given.tools, given.found)
    try:
        begins = render(model, chat, other).prompt.token_ids
    except RequestError:
        return None
    pairs = enumerate(zip(tokens, begins, strict=False))
    return next((i for i, (mine, others) in pairs if mine != others), min(len(tokens), len(begins)))
