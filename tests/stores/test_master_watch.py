"""Whether a server is there, against a real listening process's socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from milepost.stores.master_watch import MasterWatch


class Master:
    """A server that accepts and says nothing."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []

    def accept(self) -> None:
        self._listener.settimeout(5)
        self._connections.append(self._listener.accept()[0])

    def drop(self) -> None:
        """Close what is connected, not the server."""
        for connection in self._connections:
            # A reset, so that the port is free at once.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        self._connections = []

    def end(self) -> None:
        self.drop()
        self._listener.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.end()


def wait_until(watch: MasterWatch, wanted: bool) -> None:
    end = time.monotonic() + 5
    while watch.is_there() != wanted:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_master_that_dies_is_gone_and_one_that_comes_back_is_there(master: Master) -> None:
    clock = Clock()
    watch = MasterWatch(f"127.0.0.1:{master.port}", clock)
    assert watch.is_there()
    master.accept()
    assert watch.is_there()
    master.end()
    wait_until(watch, False)
    again = Master(master.port)
    assert not watch.is_there()  # it is not looked for at every call
    clock.now += 0.3
    assert watch.is_there()
    again.end()
    watch.close()


def test_one_connection_serves_all_questions(master: Master) -> None:
    watch = MasterWatch(f"127.0.0.1:{master.port}", Clock())
    assert all(watch.is_there() for _ in range(50))
    master.accept()
    with pytest.raises(TimeoutError):
        master._listener.settimeout(0.05)
        master._listener.accept()
    watch.close()


def test_a_master_that_closes_idle_connections_is_there(master: Master) -> None:
    watch = MasterWatch(f"127.0.0.1:{master.port}", Clock())
    for _ in range(3):
        assert watch.is_there()
        master.accept()
        master.drop()
        time.sleep(0.01)
    assert watch.is_there()
    watch.close()


def test_nothing_is_there_after_closing(master: Master) -> None:
    watch = MasterWatch(f"127.0.0.1:{master.port}", Clock())
    assert watch.is_there()
    watch.close()
    assert not watch.is_there()
