"""Connecting to a Mooncake Store, with a library that does what a test says."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest

from milepost.errors import StoreError
from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions


class Pool:
    """Counts the clients that are being set up, and holds them up."""

    def __init__(self) -> None:
        self.codes = [1]
        self.is_open = threading.Event()
        self.num_set_up = self.num_at_once = self.most_at_once = 0
        self.clients: list[Any] = []

    def client(self) -> Any:
        return _Client(self)


class _Client:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.num_closed = 0

    def setup(self, *_: object) -> int:
        pool = self.pool
        if pool.codes:
            return pool.codes.pop(0)
        pool.num_at_once += 1
        pool.most_at_once = max(pool.most_at_once, pool.num_at_once)
        pool.is_open.wait(10)
        pool.num_at_once -= 1
        pool.clients.append(self)
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    module, package = ModuleType("mooncake.store"), ModuleType("mooncake")
    module.MooncakeDistributedStore = made.client  # type: ignore[attr-defined]
    module.ReplicateConfig = type("ReplicateConfig", (), {})  # type: ignore[attr-defined]
    package.store = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(MooncakeConnection, "_master_answers", lambda self: True)
    monkeypatch.setattr("milepost.stores.master_watch.MasterWatch.is_there", lambda self: True)
    return made


def connect() -> tuple[MooncakeConnection, list[float]]:
    now = [0.0]
    return MooncakeConnection(MooncakeOptions("127.0.0.1:9", 0, 1 << 20), clock=lambda: now[0]), now


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(connection: MooncakeConnection) -> Any:
    try:
        with connection.use() as client:
            return client
    except StoreError:
        return None


def test_one_attempt_at_a_time(pool: Pool) -> None:
    """However long one takes: a second client would replace one in use, and its memory."""
    connection, now = connect()
    for _ in range(5):
        assert ask(connection) is None
        now[0] += 60.0
    wait_for(lambda: pool.num_at_once)
    pool.is_open.set()
    wait_for(lambda: ask(connection) is not None)
    assert pool.most_at_once == 1 and len(pool.clients) == 1
    connection.close()
    assert pool.clients[0].num_closed == 1


def test_closed_while_it_connects(pool: Pool) -> None:
    connection, now = connect()
    assert ask(connection) is None
    wait_for(lambda: pool.num_at_once)
    connection.close()
    pool.is_open.set()
    wait_for(lambda: pool.clients and pool.clients[0].num_closed == 1)
    now[0] += 60.0
    assert ask(connection) is None
    assert len(pool.clients) == 1


def test_a_failed_attempt_is_repeated(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.is_open.set()
    connection, now = connect()
    with monkeypatch.context() as patch:
        patch.setattr(_Client, "register_buffer", lambda *_: 1)
        assert ask(connection) is None
        wait_for(lambda: pool.clients and not connection._is_connecting)
    assert pool.clients[0].num_closed == 1
    assert ask(connection) is None, "not before its time"
    now[0] += 60.0
    wait_for(lambda: ask(connection) is not None)
    connection.close()
