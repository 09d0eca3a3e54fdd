"""Sends batches of cache events over ZeroMQ, from a thread of its own, and replays missed ones.

Wire format (vLLM's): PUB frames [topic, 8-byte big-endian sequence number, payload]. A replay client
sends [empty, 8-byte first sequence number] to the ROUTER socket and gets [empty, number, payload] for
every batch still kept from there on, then [empty, -1, empty].
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from milepost.config import install_command
from milepost.errors import ConfigError

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("milepost.engine")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_MILLISECONDS = 200
CLOSE_SECONDS = 5.0
_MAX_HWM = 2**31 - 1
_EXAMPLE = "tcp://127.0.0.1:5557"
_WAKE_ADDRESS = "inproc://milepost-kv-events"


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, with vLLM's names.

    Attributes:
        endpoint: where to bind; `*` as host is everywhere, which the default is not.
        replay_endpoint: where clients ask for missed batches; None = nowhere.
        buffer_steps: batches kept for them.
        hwm: batches ZeroMQ keeps for a slow subscriber before it drops new ones.
        topic: first frame.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """
    Raises:
        ConfigError: no JSON object, or an unknown or wrong field, by its name.
    """
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError("kv_events_config", f"{error}; give a JSON object such as "
                          '{"endpoint": "tcp://127.0.0.1:5557"}') from None  # fmt: skip
    if config.publisher != "zmq":
        raise ConfigError("kv_events_config", f"publisher is {config.publisher!r}; only 'zmq' exists")
    for name, value, most in (
        ("buffer_steps", config.buffer_steps, _MAX_HWM - 1),
        ("hwm", config.hwm, _MAX_HWM),
    ):
        if not 0 <= value <= most:
            raise ConfigError("kv_events_config", f"{name} must be from 0 to {most}, not {value}")
    for name, text in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint or "")):
        if "\0" in text:
            raise ConfigError("kv_events_config", f"{name} has a NUL character; write it like {_EXAMPLE}")
    return config


class ZmqPublisher:
    """Owns the sockets. `publish` may be called from one thread and never blocks it."""

    def __init__(self, config: KvEventsConfig) -> None:
        """
        Raises:
            ConfigError: pyzmq is not installed, or an endpoint cannot be bound.
        """
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "kv_events_config", f"needs pyzmq; install it with: {install_command('events')}"
            ) from None
        self._zmq = zmq
        self._config = config
        self._context = zmq.Context()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._sockets: list[zmq.Socket[Any]] = []
        try:
            self._pub = self._bound(zmq.PUB, config.endpoint, config.hwm)
            # A router drops what is over its mark: all that is kept, and the end, has room for one client.
            room = config.buffer_steps + 1
            self._replay = (
                self._bound(zmq.ROUTER, config.replay_endpoint, room) if config.replay_endpoint else None
            )
            self._woken = self._bound(zmq.PULL, _WAKE_ADDRESS)
            self._waker = self._socket(zmq.PUSH)
            self._waker.connect(_WAKE_ADDRESS)
        except ConfigError:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="milepost-kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where subscribers connect (a port chosen by the system included)."""
        return str(self._pub.getsockopt_string(self._zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        return str(self._replay.getsockopt_string(self._zmq.LAST_ENDPOINT)) if self._replay else None

    def publish(self, payload: bytes) -> None:
        self._queue.put(payload)
        self._wake()

    def close(self) -> None:
        """Send what waits, then close the sockets."""
        self._queue.put(None)
        self._wake()
        self._thread.join(CLOSE_SECONDS)

    def _wake(self) -> None:
        try:
            self._waker.send(b"", self._zmq.NOBLOCK)
        except self._zmq.Again:
            return  # it has plenty of reasons to wake up already

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        self._sockets.append(socket)
        return socket

    def _bound(self, kind: int, endpoint: str, hwm: int | None = None) -> zmq.Socket[Any]:
        socket = self._socket(kind)
        if hwm is not None:
            # Marks hold for what is bound later.
            socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError("kv_events_config", f"cannot bind {endpoint}: {error}") from None
        return socket

    # ------------------------------------------------------------------ in the publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(POLL_MILLISECONDS))
                if self._woken in ready:
                    self._woken.recv()
                if self._send_all():
                    return
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
        except Exception:
            log.exception("cache events are not published any more")
        finally:
            self._close_sockets()

    def _send_all(self) -> bool:
        """Send what waits; True when there is to be no more."""
        while True:
            try:
                payload = self._queue.get_nowait()
            except queue.Empty:
                return False
            if payload is None:
                return True
            number, self._next_number = self._next_number, self._next_number + 1
            self._kept.append((number, payload))
            self._pub.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), payload))

    def _answer_replay(self, replay: zmq.Socket[Any]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a replay request has %d frames; expected are [identity, empty, number]", len(frames))
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()
