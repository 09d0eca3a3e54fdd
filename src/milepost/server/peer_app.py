"""Gives segments of this process's cache to peers that know the secret; see `stores.peer_protocol`.

An application of its own on a port of its own: clients of the API never reach it, and peers nothing else.
It runs on a thread with its own loop, so that bulk bytes never stand in the way of tokens.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import TypeVar

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from milepost.engine.stores import PeerOffer
from milepost.errors import StoreError
from milepost.stores.buffers import copy_into
from milepost.stores.objects import Clock, Deadline
from milepost.stores.peer_nixl import NixlStage
from milepost.stores.peer_options import AUTO, bound, nixl_hint
from milepost.stores.peer_protocol import (
    CONTENT_TYPE,
    FRAME,
    HELLO,
    LOAD,
    LOOKUP,
    MAX_REQUEST_BYTES,
    NIXL,
    PROTOCOL_VERSION,
    RELEASE,
    WIRE,
    Ask,
    Hello,
    Release,
    SegmentSource,
    Staged,
)
from milepost.stores.port import Buffer
from milepost.stores.staging import Leases, StagingArea

T = TypeVar("T")
Place = tuple[int, int]
"""Offset in the staging area, and bytes."""

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
SEND_SECONDS = 5.0
"""A peer that takes no byte for longer loses the connection."""
BODY_SECONDS = 5.0
MAX_CONNECTIONS = 128
_SEND_BYTES = 1 << 20
_NUM_THREADS = 4
_START_SECONDS = 10.0
_ask = msgspec.msgpack.Decoder(Ask)
_release = msgspec.msgpack.Decoder(Release)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class PeerCounts:
    """What peers were given. Written by the peers' threads, read by any.

    Attributes:
        num_segments: by transport; sent, or staged to be read.
        num_bytes: of these.
        num_refused: requests without the secret.
        num_late_leases: staged segments that nobody released in time.
    """

    num_segments: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    num_refused: int = 0
    num_late_leases: int = 0


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PeerApp:
    """The ASGI application.

    Args:
        secret: what peers must send; None = everybody who reaches the port may read.
        area: everything passes through it, so that its size bounds what is on its way.
        stage: what to tell peers that can read `area` themselves; None = they cannot.
    """

    def __init__(
        self,
        source: SegmentSource,
        area: StagingArea,
        *,
        secret: str | None,
        stage: NixlStage | None = None,
        clock: Clock = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._source = source
        self._area = area
        self._secret = None if secret is None else sha256(secret.encode()).digest()
        # Whoever reads the area needs the agent behind it for as long.
        self._stage_for_nixl = stage
        self._hello = Hello(PROTOCOL_VERSION, str(uuid.uuid4())) if stage is None else stage.hello
        self._clock = clock
        self._leases = Leases(area, lease_seconds, clock)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="peer")
        self.counts = PeerCounts()

    @property
    def staged_bytes(self) -> int:
        """Bytes on their way to peers."""
        return self._area.used_bytes

    def close(self) -> None:
        """Threads end after what they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check(scope)
            body = await _body(receive)
            await self._answer(scope["path"], body, send)
        except _Refusal as refusal:
            await _send_whole(send, refusal.status, str(refusal).encode(), "text/plain; charset=utf-8")
        except StoreError as error:
            await _send_whole(send, 503, str(error).encode(), "text/plain; charset=utf-8")
        except TimeoutError:
            log.info("a peer takes nothing; its connection is closed")

    def _check(self, scope: Scope) -> None:
        sent = Headers(scope=scope).get("authorization", "")
        if self._secret is not None:
            kind, _, secret = sent.partition(" ")
            digest = sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
            if kind.lower() != "bearer" or not hmac.compare_digest(digest, self._secret):
                self.counts.num_refused += 1
                raise _Refusal(401, "the secret is not the one of this replica")
        if scope["path"] not in (HELLO, LOOKUP, LOAD, RELEASE):
            raise _Refusal(404, "there is no such path")
        if scope["method"] != "POST":
            raise _Refusal(405, "use POST")

    async def _answer(self, path: str, body: bytes, send: Send) -> None:
        if path == RELEASE:
            done = self._leases.close(_decoded(_release, body).lease)
            await _send_whole(send, 200, _encode(done))
            return
        ask = _decoded(_ask, body)
        if (problem := ask.problem) is not None:
            raise _Refusal(400, problem)
        own = self._source.identity
        if (ask.fingerprint, ask.shard) != (own.fingerprint, own.shard):
            raise _Refusal(
                409,
                f"this replica is {own.fingerprint[:16]}, shard {own.shard}, not {ask.fingerprint[:16]}, "
                f"shard {ask.shard}",
            )
        deadline = Deadline(ask.seconds, self._clock)
        if path == HELLO:
            await _send_whole(send, 200, _encode(self._hello))
        elif path == LOOKUP:
            heads = await self._in_thread(lambda: self._heads(ask.keys, deadline))
            await _send_whole(send, 200, heads)
        elif ask.transport == NIXL:
            if not self._hello.nixl:
                raise _Refusal(400, "this replica has no NIXL")
            await _send_whole(
                send, 200, _encode(await self._in_thread(lambda: self._lend(ask.keys, deadline)))
            )
        else:
            await self._send_frames(ask.keys, deadline, send)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    # ------------------------------------------------------------ in threads that may wait

    def _heads(self, keys: Sequence[bytes], deadline: Deadline) -> bytes:
        heads = self._source.heads(keys, deadline_seconds=deadline.remaining_seconds)
        return _encode([None if head is None else bytes(head) for head in heads])

    def _lend(self, keys: Sequence[bytes], deadline: Deadline) -> Staged:
        places = self._stage(keys, deadline, NIXL)
        lease = self._leases.open([place[0] for place in places if place is not None])
        return Staged(self._hello.instance, lease, places)

    def _stage(self, keys: Sequence[bytes], deadline: Deadline, transport: str) -> list[Place | None]:
        """Copies of the first objects, as many as find room; waits for the first one's."""
        self.counts.num_late_leases += self._leases.close_late()
        places: list[Place | None] = []
        try:
            while not places and not deadline.passed:
                if needed := self._copy_some(keys, deadline, transport, places):
                    # Nothing is pinned while it waits.
                    self._wait_for(needed, deadline)
        except BaseException:
            for place in places:
                if place is not None:
                    self._area.give_back(place[0])
            raise
        return places

    def _copy_some(
        self, keys: Sequence[bytes], deadline: Deadline, transport: str, places: list[Place | None]
    ) -> int:
        """Fill `places`; returns the bytes there must be room for first, if it filled none."""
        seconds = deadline.remaining_seconds
        with self._source.reading(keys, self._area.largest_hole, deadline_seconds=seconds) as objects:
            for pieces in objects:
                num_bytes = 0 if pieces is None else _length(pieces)
                if pieces is None or num_bytes > self._area.num_bytes:
                    places.append(None)
                    continue
                offset = self._area.take(num_bytes)
                if offset is None:
                    return 0 if places else num_bytes
                places.append((offset, num_bytes))
                self._copy(pieces, offset)
                self.counts.num_segments[transport] += 1
                self.counts.num_bytes[transport] += num_bytes
        return 0

    def _wait_for(self, num_bytes: int, deadline: Deadline) -> None:
        def is_enough() -> bool:
            return self._area.largest_hole >= num_bytes

        while not deadline.passed:
            step = Deadline(min(0.5, deadline.remaining_seconds), self._clock)
            if self._area.wait_for_room(step, is_enough):
                return
            self.counts.num_late_leases += self._leases.close_late()

    def _copy(self, pieces: Sequence[Buffer], offset: int) -> None:
        for piece in pieces:
            source = memoryview(piece).cast("B")
            copy_into(self._area.view[offset : offset + source.nbytes], source)
            offset += source.nbytes

    # ------------------------------------------------------------ over the connection

    async def _send_frames(self, keys: Sequence[bytes], deadline: Deadline, send: Send) -> None:
        done = 0
        await _send_start(send, 200)
        while done < len(keys) and not deadline.passed:
            try:
                places = await self._in_thread(partial(self._stage, keys[done:], deadline, WIRE))
            except StoreError as error:
                log.debug("a peer got %d of %d segments: %s", done, len(keys), error)
                break
            if not places:
                break
            left = [place[0] for place in places if place is not None]
            try:
                for place in places:
                    await self._send_frame(place, send)
                    if place is not None:
                        left.remove(place[0])
                        self._area.give_back(place[0])
            finally:
                for offset in left:
                    self._area.give_back(offset)
            done += len(places)
        await _send_part(send, b"", more=False)

    async def _send_frame(self, place: Place | None, send: Send) -> None:
        if place is None:
            await _send_part(send, FRAME.pack(0))
            return
        offset, num_bytes = place
        await _send_part(send, FRAME.pack(num_bytes))
        for at in range(offset, offset + num_bytes, _SEND_BYTES):
            end = min(at + _SEND_BYTES, offset + num_bytes)
            await _send_part(send, bytes(self._area.view[at:end]))


class PeerServer:
    """Serves a `PeerApp` on a bound socket, which it closes, from a thread of its own."""

    def __init__(self, app: PeerApp, listener: socket.socket) -> None:
        self.app = app
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="milepost-peers", daemon=True)

    def start(self) -> None:
        """
        Raises:
            StoreError: it does not begin to serve.
        """
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise StoreError("peers cannot be served")
            time.sleep(0.005)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """End open answers, which peers take as misses."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_START_SECONDS)
        self._listener.close()
        self.app.close()

    def _run(self) -> None:
        with suppress(KeyboardInterrupt, SystemExit):
            self._server.run(sockets=[self._listener])


def open_peer_server(offer: PeerOffer) -> PeerServer:
    """Begin to serve peers; the caller closes it, before the engine.

    Raises:
        ConfigError: the address cannot be bound. StoreError: NIXL has to be there and is not.
    """
    serving = offer.serving
    listener = bound(serving)
    area = StagingArea(serving.area_bytes)
    stage = None
    if serving.transport != WIRE:
        try:
            stage = NixlStage(area, serving.host, serving.secret, str(uuid.uuid4()))
        except (ImportError, StoreError) as error:
            if serving.transport != AUTO:
                listener.close()
                raise nixl_hint(error) from None
    server = PeerServer(PeerApp(offer.source, area, secret=serving.secret, stage=stage), listener)
    server.start()
    log.info(
        "peers are served at %s:%d, %s, over %s", *server.address,
        "with a secret" if serving.secret is not None else "without a secret",
        "the connection" if stage is None else "NIXL where they have it, else over the connection",
    )  # fmt: skip
    return server


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Refusal(400, "the body ends early")
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > MAX_REQUEST_BYTES:
                    raise _Refusal(413, f"more than {MAX_REQUEST_BYTES} bytes")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise _Refusal(408, "the body does not come") from None


async def _send_start(send: Send, status: int, kind: str = CONTENT_TYPE, length: int | None = None) -> None:
    headers = [(b"content-type", kind.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    """
    Raises:
        TimeoutError: the peer takes nothing; the server then closes the connection.
    """
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _send_whole(send: Send, status: int, data: bytes, kind: str = CONTENT_TYPE) -> None:
    await _send_start(send, status, kind, len(data))
    await _send_part(send, data, more=False)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Refusal(400, f"the body cannot be read: {error}"[:200]) from None


def _length(pieces: Sequence[Buffer]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)
