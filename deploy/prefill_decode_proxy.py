"""An example: one address in front of replicas that compute prompts and replicas that write answers.

    milepost serve --role prefill --port 8401 --serve-kv 127.0.0.1:9401 --kv-store peer://127.0.0.1:9402
    milepost serve --role decode --port 8402 --serve-kv 127.0.0.1:9402 --kv-store peer://127.0.0.1:9401
    python deploy/prefill_decode_proxy.py --port 8400 \
        --prefill http://127.0.0.1:8401 --decode http://127.0.0.1:8402

A request goes to a prefill replica first, for one token, and then, as it came, to a decode replica, which
loads the prompt's pages and states from the cache of the first. Nothing depends on the first step: if it
fails, hangs or takes too long, the decode replica computes the prompt. Turns of one conversation go to the
same replicas, as long as they are well.

Needs starlette, uvicorn and httpx (`pip install 'milepost[server]' httpx`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Patience:
    """How long a request waits for its prompt to be computed.

    Attributes:
        prefill_seconds: in all; a prompt that takes longer is computed by the decode replica.
        silence_seconds: a replica that computes answers `/health` meanwhile; one that does not within this
            time hangs, and is given up.
        rest_seconds: for how long a replica that was given up is asked for nothing.
    """

    prefill_seconds: float = 120.0
    silence_seconds: float = 3.0
    rest_seconds: float = 10.0


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


class Prefiller:
    """Has prompts computed by replicas that may be slow, hang or be gone."""

    def __init__(self, client: httpx.AsyncClient, replicas: Sequence[str], patience: Patience) -> None:
        self._client = client
        self._replicas = replicas
        self._patience = patience
        self._rests_until = dict.fromkeys(replicas, 0.0)

    async def compute(self, request: Request, body: dict[str, Any]) -> None:
        """Returns when the prompt was computed, or when that is not worth waiting for any more."""
        now = time.monotonic()
        well = [each for each in self._replicas if self._rests_until[each] <= now]
        if not well:
            return
        replica = choose(well, conversation_of(body))
        url = replica + request.url.path
        asked = self._client.post(url, json=prefill_body(request.url.path, body), headers=_headers(request))
        asking = asyncio.ensure_future(asked)
        try:
            async with asyncio.timeout(self._patience.prefill_seconds):
                await self._watch(replica, asking)
            if asking.result().status_code != 200:
                log.warning("%s answers %d; the decode replica computes", url, asking.result().status_code)
        except (httpx.HTTPError, TimeoutError) as error:
            log.warning("%s: %r; the decode replica computes", url, error)
            self._rests_until[replica] = time.monotonic() + self._patience.rest_seconds
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _watch(self, replica: str, asking: asyncio.Future[httpx.Response]) -> None:
        """Until there is an answer.

        Raises:
            httpx.HTTPError: the replica is not well.
        """
        silence = self._patience.silence_seconds
        while not (await asyncio.wait({asking}, timeout=silence))[0]:
            async with asyncio.timeout(silence):
                (await self._client.get(f"{replica}/health")).raise_for_status()
        asking.result()


def build(prefill: Sequence[str], decode: Sequence[str], patience: Patience | None = None) -> Starlette:
    """The proxy as an ASGI application."""
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), trust_env=False)
    prefiller = Prefiller(client, prefill, patience or Patience())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

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
                await prefiller.compute(request, body)
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
    usual = Patience()
    parser.add_argument(
        "--prefill-seconds", type=float, default=usual.prefill_seconds, metavar="S",
        help="longest wait for a prompt (default: %(default)g); then the decode replica computes it",
    )  # fmt: skip
    parser.add_argument(
        "--silence-seconds", type=float, default=usual.silence_seconds, metavar="S",
        help="a prefill replica that does not answer /health for so long is given up (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    patience = Patience(options.prefill_seconds, options.silence_seconds)
    proxy = build(options.prefill, options.decode, patience)
    uvicorn.run(proxy, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
