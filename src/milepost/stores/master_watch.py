"""Whether a server is there, told without asking it anything."""

from __future__ import annotations

import contextlib
import socket
import threading

from milepost.stores.objects import Clock

_CONNECT_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""Seconds, seconds, number: a machine that is gone closes no connection."""


class MasterWatch:
    """An idle connection to a server; the system closes it when the server dies. Thread-safe.

    A server that hangs still counts as there.

    Args:
        address: host:port.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._clock = clock
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._next_attempt = 0.0
        self._is_closed = False

    def is_there(self) -> bool:
        """Takes at most half a second, and that only where nothing answers at all."""
        with self._lock:
            if self._socket is not None and _is_open(self._socket):
                return True
            self._drop()
            if self._is_closed or self._clock() < self._next_attempt:
                return False
            try:
                # A server may close what is idle for long, so a new connection decides.
                self._socket = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
            except OSError:
                self._next_attempt = self._clock() + _RETRY_SECONDS
                return False
            # With a time limit, reading would wait for it.
            self._socket.setblocking(False)
            _keep_alive(self._socket)
            return True

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
