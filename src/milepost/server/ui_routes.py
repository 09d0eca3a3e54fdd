"""`/ui`: a page that shows what the cache holds and why requests hit or miss. No build step, no network.

The page itself says nothing and is open; its data concern every caller and are guarded like the cache
routes. A probe looks into the caller's own tenant domain only.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from functools import lru_cache, partial
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse

from milepost.core.explain import reuse_report
from milepost.core.hashing import KeyChain
from milepost.core.inspection import view_cache, view_requests
from milepost.core.request import CacheDomain, ReuseReport
from milepost.core.scheduler import Scheduler
from milepost.engine.engine import Engine
from milepost.engine.serving import ServingModel, cache_domain
from milepost.errors import RequestError
from milepost.server.access import caller_of
from milepost.server.docs import json_body
from milepost.server.generation import Service
from milepost.server.pasted import (
    Comparison,
    PairBody,
    PromptBody,
    compare,
    passage,
    prompt_tokens,
    read_prompt,
)
from milepost.server.schema import parse_body
from milepost.server.why import SENTENCES, divergence_shown

router = APIRouter()

MAX_SHOWN_CHECKPOINTS = 400
MAX_SHOWN_REQUESTS = 200
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@lru_cache(maxsize=1)
def _page() -> str:
    return (resources.files("milepost") / "assets" / "ui" / "index.html").read_text(encoding="utf-8")


@router.get("/ui", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page."""
    return HTMLResponse(await asyncio.to_thread(_page), headers=_HEADERS)


@router.get("/ui/state", include_in_schema=False)
async def state(request: Request) -> JSONResponse:
    """Everything the page draws, as of between two steps."""
    service: Service = request.app.state.service
    model = service.model
    view = await asyncio.wrap_future(model.engine.look(partial(_view, model.engine)))
    stats = model.engine.stats()
    counters = stats.counters
    view["model"] = {
        "name": model.name,
        "exactness": model.exactness,
        "match_unit": model.cache.match_unit,
        "max_model_len": model.max_model_len,
        "checkpoint_bytes": model.geometry.checkpoint_bytes,
        "unit_bytes": model.geometry.unit_bytes,
    }
    view["memory"] = {
        "budget_bytes": stats.budget_bytes,
        "used_bytes": stats.used_bytes,
        "page_bytes": stats.page_bytes,
        "state_bytes": stats.state_bytes,
        "running_state_bytes": stats.running_state_bytes,
    }
    view["totals"] = {
        "queried_tokens": counters.num_queried_tokens,
        "hit_tokens": counters.num_hit_tokens,
        "requests_by_reason": dict(counters.misses_by_reason),
        "missed_tokens_by_reason": dict(counters.missed_tokens_by_reason),
        "evictions": sum(counters.evictions.values()),
        "restored_checkpoints": counters.num_restored_checkpoints,
        "states_by_reason": stats.states_by_reason,
    }
    view["finished"] = request.app.state.recent.views()
    view["sentences"] = dict(SENTENCES)
    return JSONResponse(view, headers={"cache-control": "no-store"})


def _view(engine: Engine, scheduler: Scheduler, now: float) -> dict[str, Any]:
    cache = view_cache(scheduler.cache, now, limit=MAX_SHOWN_CHECKPOINTS)
    requests = view_requests(
        scheduler.requests, scheduler.siblings, scheduler.transfers, limit=MAX_SHOWN_REQUESTS
    )
    return {
        "cache": dataclasses.asdict(cache),
        "requests": [
            {**dataclasses.asdict(each), "label": engine.label(each.request_id)} for each in requests
        ],
    }


@router.post("/ui/probe", include_in_schema=False, openapi_extra=json_body(PromptBody))
async def probe(request: Request) -> JSONResponse:
    """Where a prompt would hit in the caller's own domain now, and why not further. Changes nothing."""
    service: Service = request.app.state.service
    body = read_prompt(await parse_body(PromptBody, request))
    caller = caller_of(request)
    domain = cache_domain(body.cache_salt, caller.key, is_separate=caller.is_separate)
    tokens = await asyncio.to_thread(prompt_tokens, service.model, body)

    def look(scheduler: Scheduler, now: float) -> ReuseReport:
        return _report(scheduler, tokens, domain)

    report = await asyncio.wrap_future(service.model.engine.look(look))
    tokenizer = service.model.tokenizer
    text = tokenizer.decode
    reused = report.num_cached_tokens
    split = divergence_shown(report.reason, report.divergence_position)
    return JSONResponse(
        {
            **dataclasses.asdict(report),
            "reused_text": text(tokens[:reused].tolist())[-400:],
            "next_text": text(tokens[reused : reused + 40].tolist()),
            "sentence": SENTENCES[report.reason],
            "divergence": None if split is None else dataclasses.asdict(passage(tokenizer, tokens, split)),
        },
        headers={"cache-control": "no-store"},
    )


def _report(scheduler: Scheduler, tokens: array[int], domain: CacheDomain) -> ReuseReport:
    cache = scheduler.cache
    chain = KeyChain(tokens, domain, cache.match_unit)
    return reuse_report(cache, cache.match(chain, len(tokens)), chain, len(tokens))


@router.post("/ui/compare", include_in_schema=False, openapi_extra=json_body(PairBody))
async def compare_prompts(request: Request) -> JSONResponse:
    """Where two prompts part, as the model would get them. Looks at no cache."""
    service: Service = request.app.state.service
    body = await parse_body(PairBody, request)

    def work() -> Comparison:
        return compare(service.model, _side(service.model, "first", body.first),
                       _side(service.model, "second", body.second))  # fmt: skip

    found = await asyncio.to_thread(work)
    return JSONResponse(dataclasses.asdict(found), headers={"cache-control": "no-store"})


def _side(model: ServingModel, name: str, body: PromptBody) -> array[int]:
    try:
        return prompt_tokens(model, read_prompt(body))
    except RequestError as error:
        raise RequestError(
            f"{name}.{error.param}" if error.param else name,
            f"the {name} prompt: {error}",
            code=error.code,
            status=error.status,
        ) from None
