"""The application and its life: engine up, routes, engine down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from milepost import __version__
from milepost.engine.aio import AsyncEngine
from milepost.engine.serving import ServingModel
from milepost.errors import ConfigError
from milepost.server import chat_routes, completion_routes, utility_routes
from milepost.server.errors import install_error_handlers
from milepost.server.generation import Service
from milepost.server.metrics import ServerMetrics

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
GRACE_SECONDS = 3.0
ENDING_SECONDS = 3
"""For requests that were ended to send their last event."""


def build_app(model: ServingModel) -> FastAPI:
    """The HTTP application over a model whose engine is not started yet; it starts and closes it."""
    metrics = ServerMetrics(model)
    model.engine.add_observer(metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        model.engine.start()
        front = AsyncEngine(model.engine)
        app.state.service = Service(model, front, int(time.time()))
        try:
            yield
        finally:
            front.close()
            await asyncio.to_thread(model.close)

    app = FastAPI(title="Milepost", version=__version__, lifespan=lifespan)
    app.state.metrics = metrics
    install_error_handlers(app)
    app.include_router(utility_routes.router)
    app.include_router(completion_routes.router)
    app.include_router(chat_routes.router)
    return app


def bind(host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> socket.socket:
    """A socket bound to the address; port 0 = any free one.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        is_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        field = "host" if is_address else "port"
        raise ConfigError(field, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


class Server(uvicorn.Server):
    """Serves a model on a bound socket.

    Args:
        on_listening: called with the base URL once requests are answered.
        grace_seconds: how long open requests may go on after a signal; then they end with an error.
    """

    def __init__(
        self,
        model: ServingModel,
        listener: socket.socket,
        on_listening: Callable[[str], None] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        config = uvicorn.Config(
            build_app(model),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(grace_seconds) + ENDING_SECONDS,
        )
        super().__init__(config)
        self._engine = model.engine
        self._grace_seconds = grace_seconds
        self._listener = listener
        self._on_listening = on_listening

    def serve_until_stopped(self) -> None:
        """Until a signal arrives or `should_exit` is set; then open requests get `grace_seconds`."""
        # uvicorn hands the interrupt on once everything is shut down: it was the wish to stop.
        with contextlib.suppress(KeyboardInterrupt):
            self.run(sockets=[self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._grace_seconds, self._engine.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            host, port = self._listener.getsockname()[:2]
            self._on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
