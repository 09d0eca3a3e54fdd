"""An example: one address in front of replicas that compute prompts and replicas that write answers.

    milepost serve --role prefill --port 8401 --serve-kv 127.0.0.1:9401 --kv-store peer://127.0.0.1:9402
    milepost serve --role decode --port 8402 --serve-kv 127.0.0.1:9402 --kv-store peer://127.0.0.1:9401
    python deploy/prefill_decode_proxy.py --port 8400 \
        --prefill http://127.0.0.1:8401 --decode http://127.0.0.1:8402

A request goes to a prefill replica first, for one token, and then, as it came, to a decode replica, which
loads the prompt's pages and states from the cache of the first. Nothing depends on the first step: if it
fails, the decode replica computes the prompt. Turns of one conversation go to the same replicas.

Needs starlette, uvicorn and httpx (`pip install 'milepost[server]' httpx`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

log = logging.getLogger("prefill-decode-proxy")

LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Path -> the field that bounds its answer."""
ALL_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
ONLY_FOR_ANSWERS = ("stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo")
FORWARDED = ("authorization", "x-api-key", "content-type", "x-request-id", "traceparent", "anthropic-version")
NOT_RETURNED = ("content-length", "transfer-encoding", "connection", "content-encoding")
PREFILL_SECONDS = 600.0


def prefill_body(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request that has its prompt computed: one token, in one piece."""
    left_out = (*ALL_LIMITS, *ONLY_FOR_ANSWERS)
    return {**{name: value for name, value in body.items() if name not in left_out}, LIMITS[path]: 1}


def conversation_of(body: dict[str, Any]) -> str:
    """What its later turns have in common: the name a caller gave, or how it begins."""
    begin = body.get("messages") or body.get("input") or body.get("prompt") or ""
    if isinstance(begin, list):
        begin = begin[: 2 if begin and isinstance(begin[0], dict) else 64]
    elif isinstance(begin, str):
        begin = begin[:256]
    named = body.get("prompt_cache_key")
    return json.dumps(named if named is not None else begin, sort_keys=True)


def choose(replicas: Sequence[str], conversation: str) -> str:
    """Always the same one for a conversation, and few others if a replica is added (rendezvous hashing)."""
    return max(replicas, key=lambda each: hashlib.sha256(f"{each}\n{conversation}".encode()).digest())


def build(prefill: Sequence[str], decode: Sequence[str]) -> Starlette:
    """The proxy as an ASGI application."""
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), trust_env=False)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    async def compute_prompt(request: Request, body: dict[str, Any]) -> None:
        url = choose(prefill, conversation_of(body)) + request.url.path
        try:
            answer = await client.post(
                url,
                json=prefill_body(request.url.path, body),
                headers=_headers(request),
                timeout=PREFILL_SECONDS,
            )
            if answer.status_code != 200:
                log.warning("%s answers %d; the decode replica computes", url, answer.status_code)
        except httpx.HTTPError as error:
            log.warning("%s: %r; the decode replica computes", url, error)

    async def forward(request: Request) -> Response:
        content = await request.body()
        conversation = ""
        if request.method == "POST" and request.url.path in LIMITS:
            try:
                body = json.loads(content)
            except ValueError:
                body = None  # the decode replica says what is wrong
            if isinstance(body, dict):
                conversation = conversation_of(body)
                await compute_prompt(request, body)
        url = choose(decode, conversation) + request.url.path
        query = f"?{request.url.query}" if request.url.query else ""
        asked = client.build_request(request.method, url + query, content=content, headers=_headers(request))
        try:
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError as error:
            log.warning("%s: %r", url, error)
            message = {"message": "no decode replica answers", "type": "server_error", "code": "unavailable"}
            return JSONResponse({"error": message}, status_code=502)
        headers = {name: value for name, value in answer.headers.items() if name not in NOT_RETURNED}
        return StreamingResponse(
            answer.aiter_bytes(), answer.status_code, headers, background=BackgroundTask(answer.aclose)
        )

    methods = ["GET", "POST", "DELETE", "HEAD"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


def _headers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in FORWARDED if name in request.headers}


def main() -> None:
    parser = argparse.ArgumentParser(description="A proxy for prefill and decode replicas.")
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        build(options.prefill, options.decode), host=options.host, port=options.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
