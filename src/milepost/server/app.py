"""The application and its life: listening, model loaded, engine up, routes, draining, engine down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from milepost import __version__
from milepost.engine.aio import AsyncEngine
from milepost.engine.named import NamedConversations
from milepost.engine.serving import ServingModel, warm_up
from milepost.errors import ConfigError, MilepostError
from milepost.server import (
    anthropic_routes,
    cache_routes,
    chat_routes,
    completion_routes,
    render_routes,
    responses_routes,
    ui_routes,
    utility_routes,
)
from milepost.server.access import Access
from milepost.server.errors import install_error_handlers
from milepost.server.generation import Service
from milepost.server.metrics import ServerMetrics
from milepost.server.middleware import Gate
from milepost.server.options import ServerOptions
from milepost.server.peer_app import PeerServer, open_peer_server
from milepost.server.peer_metrics import PeerCollector
from milepost.server.recent import RecentRequests
from milepost.server.state import Phase, ServerState
from milepost.server.tracing import RequestTracer, otlp_exporter
from milepost.stores.sockets import bound_socket

log = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
ENDING_SECONDS = 3
"""For requests that were ended to send their last event."""
POLL_SECONDS = 0.05
NUM_TEXT_THREADS = 4
"""They render and tokenize, so that the event loop does not."""

Load = Callable[[], ServingModel]
"""Makes the model. Runs in a thread of its own, while the server listens already."""


class Startup:
    """Brings a model up behind a server that listens; takes it down again.

    Attributes:
        failure: why there is no model.
        ready: set when requests are answered, or never will be.
    """

    def __init__(self, load: Load, options: ServerOptions, state: ServerState) -> None:
        self._load = load
        self._options = options
        self._state = state
        self._model: ServingModel | None = None
        self._front: AsyncEngine | None = None
        self._tracer: RequestTracer | None = None
        self._peers: PeerServer | None = None
        self.failure: BaseException | None = None
        self.ready = asyncio.Event()

    def begin(self, app: FastAPI) -> None:
        """Start loading; returns at once."""
        loop = asyncio.get_running_loop()

        def bring_up() -> None:
            try:
                model = self._load()
                model.engine.start()
                self._model = model
                warm_up(model)
                if model.offer is not None:
                    self._peers = open_peer_server(model.offer)
            except BaseException as error:
                self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server was stopped meanwhile
                loop.call_soon_threadsafe(self._finish, app)

        threading.Thread(target=bring_up, name="milepost-loading", daemon=True).start()

    def _finish(self, app: FastAPI) -> None:
        model = self._model
        try:
            if self.failure is None and model is not None:
                self._connect(app, model)
        except Exception as error:
            self.failure = error
        self.ready.set()

    def _connect(self, app: FastAPI, model: ServingModel) -> None:
        app.state.metrics = ServerMetrics(model, self._state)
        if self._peers is not None:
            app.state.metrics.registry.register(PeerCollector(self._peers.app, app.state.metrics.labels))
        model.engine.add_observer(app.state.metrics)
        app.state.recent = RecentRequests(time.time)
        model.engine.add_observer(app.state.recent)
        if self._options.otlp_traces_endpoint is not None:
            self._tracer = RequestTracer(model.name, otlp_exporter(self._options.otlp_traces_endpoint))
            model.engine.add_observer(self._tracer)
        self._front = AsyncEngine(
            model.engine,
            max_unread_deltas=self._options.max_unread_deltas,
            request_timeout=self._options.request_timeout,
        )
        self._state.check_room = self._front.check_room
        app.state.service = Service(model, self._front, int(time.time()), self._options)
        app.state.named = NamedConversations(model.engine, model.geometry, model.max_model_len)
        if self._state.phase is Phase.LOADING:
            self._state.phase = Phase.READY

    @property
    def model(self) -> ServingModel | None:
        """The model, once its engine runs."""
        return self._model

    async def end(self) -> None:
        """Stop the engine and give the memory back."""
        if self._front is not None:
            self._front.close()
        if self._peers is not None:
            await asyncio.to_thread(self._peers.close)
        if self._model is not None:
            await asyncio.to_thread(self._model.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def text_threads() -> ThreadPoolExecutor:
    """`NUM_TEXT_THREADS` threads that all run: a server that grows one under load has leaked it."""
    pool = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="milepost-text")
    # The pool starts a thread only if none is free: each waits here until the last one came.
    together = threading.Barrier(NUM_TEXT_THREADS)
    for _ in range(NUM_TEXT_THREADS):
        pool.submit(together.wait)
    return pool


def build_app(load: Load, options: ServerOptions | None = None, state: ServerState | None = None) -> FastAPI:
    """The HTTP application. It loads and starts the model while it answers 503, and closes it at the end."""
    options = options or ServerOptions()
    state = state or ServerState()
    state.drain_seconds = options.drain_seconds

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The loop shuts it down when it closes, after the model that is ended through it.
        asyncio.get_running_loop().set_default_executor(text_threads())
        startup = app.state.startup = Startup(load, options, state)
        startup.begin(app)
        try:
            yield
        finally:
            await startup.end()

    # Their scripts would come from another host; `/docs` is our own.
    app = FastAPI(title="Milepost", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.phase = state
    app.state.service = None
    install_error_handlers(app)
    app.include_router(utility_routes.router)
    app.include_router(completion_routes.router)
    app.include_router(chat_routes.router)
    app.include_router(anthropic_routes.router)
    app.include_router(cache_routes.router)
    app.include_router(responses_routes.router)
    app.include_router(render_routes.router)
    app.include_router(ui_routes.router)
    app.add_middleware(Gate, state=state, access=Access(options), options=options)
    return app


def bind(host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> socket.socket:
    """A socket bound to the address; port 0 = any free one.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    try:
        return bound_socket(host, port)
    except OSError as error:
        is_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        field = "host" if is_address else "port"
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(field, what + _bind_hint(error, port)) from None


def _bind_hint(error: OSError, port: int) -> str:
    """What can be done about a port that is not to be had."""
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else 0
        return (
            f"; take another one (--port {other}, or PORT={other} with make), or stop the program that has "
            f"it, perhaps an earlier milepost (`ss -ltnp sport = :{port}` or `lsof -i :{port}` names it)"
        )
    if error.errno == errno.EACCES:
        return "; ports below 1024 are the system's: take one from --port 1024 on"
    return ""


class EngineDied(MilepostError):
    """The engine stopped by itself, and so did the server."""


class Server(uvicorn.Server):
    """Serves a model on a bound socket.

    It listens before the model is loaded; until then requests get 503. The first SIGTERM or SIGINT stops
    the admission, lets open requests go on for `drain_seconds` and ends the process; the second one ends
    it at once.

    Args:
        on_listening: called with the base URL once requests are answered.
        on_draining: called with the number of open requests when the server begins to stop.
    """

    def __init__(
        self,
        load: Load,
        listener: socket.socket,
        on_listening: Callable[[str], None] | None = None,
        options: ServerOptions | None = None,
        on_draining: Callable[[int], None] | None = None,
    ) -> None:
        self._options = options or ServerOptions()
        self._state = ServerState()
        self._app = build_app(load, self._options, self._state)
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, timeout_graceful_shutdown=ENDING_SECONDS
        )
        super().__init__(config)
        self._listener = listener
        self._on_listening = on_listening
        self._on_draining = on_draining
        self._red_since: float | None = None

    def serve_until_stopped(self) -> None:
        """Until a signal arrives or `should_exit` is set; then open requests are finished.

        Raises:
            MilepostError: the model could not be loaded, or its engine died.
        """
        self.run(sockets=[self._listener])
        startup: Startup = self._app.state.startup
        if startup.failure is not None:
            raise startup.failure
        if self._red_since is not None and startup.model is not None:
            raise EngineDied(f"the engine stopped: {startup.model.engine.failure}")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        startup: Startup = self._app.state.startup
        await startup.ready.wait()
        if startup.failure is not None:
            self.should_exit = True
        elif self._on_listening is not None:
            host, port = self._listener.getsockname()[:2]
            self._on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        model = self._app.state.startup.model
        if model is not None and model.engine.failure is not None:
            now = time.monotonic()
            if self._red_since is None:
                self._red_since = now
                log.error("the engine has stopped; this process ends in %g s", self._options.red_seconds)
            if now - self._red_since >= self._options.red_seconds:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.phase = Phase.DRAINING
        if self._on_draining is not None:
            self._on_draining(self._state.num_open)
        deadline = time.monotonic() + self._options.drain_seconds
        while self._state.num_open and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        model = self._app.state.startup.model
        if model is not None:
            model.engine.end_requests()
        self._announcing.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handlers for both signals while serving; unlike in the base class they are not raised again,
        since they were the wish to stop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        startup: Startup | None = getattr(self._app.state, "startup", None)
        if self.should_exit or startup is None or not startup.ready.is_set():
            # Asked twice, or nothing was served yet. Threads may be anywhere: no clean-up is waited for.
            os.write(2, b"stopped at once\n")
            os._exit(128 + sig)
        self.should_exit = True
