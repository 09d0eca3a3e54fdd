"""The application and its life: engine up, routes, engine down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from milepost import __version__
from milepost.engine.aio import AsyncEngine
from milepost.engine.serving import ServingModel
from milepost.server import chat_routes, completion_routes, utility_routes
from milepost.server.errors import install_error_handlers
from milepost.server.generation import Service
from milepost.server.metrics import ServerMetrics

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

log = logging.getLogger(__name__)


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


class Server(uvicorn.Server):
    """A uvicorn server that tells when it listens, and where (port 0 = any free one)."""

    def __init__(
        self,
        model: ServingModel,
        host: str,
        port: int,
        on_listening: Callable[[str, int], None] | None = None,
    ) -> None:
        config = uvicorn.Config(
            build_app(model),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_listening(host, port)


def serve(
    model: ServingModel,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    on_listening: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until interrupted."""
    Server(model, host, port, on_listening).run()
