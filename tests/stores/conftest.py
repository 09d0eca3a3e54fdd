"""One fixture for every kind of store; services run in `make test-full`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.harness import FileHarness, Harness, MemoryHarness, MooncakeHarness, RedisHarness
from tests.stores.services import Server, start_mooncake, start_redis

BOUNDED_KINDS = ["memory", "file", "redis"]
"""These keep to a bound in bytes themselves."""
SERVICES = {"redis", "mooncake"}
# Mooncake's ports listen on all interfaces: its tests run in a network of their own (test_mooncake.py).
KINDS = ["mooncake"] if os.environ.get("MILEPOST_STORE_KIND") == "mooncake" else BOUNDED_KINDS


def _parameters(kinds: list[str]) -> list[object]:
    return [
        pytest.param(prefix + kind, marks=[pytest.mark.service] if kind in SERVICES else [])
        for prefix in ("", "guarded-")
        for kind in kinds
    ]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_mooncake(tmp_path_factory.mktemp("mooncake"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_connections(mooncake_master: Server) -> Iterator[list[object]]:
    """Two clients of one pool, as of two replicas."""
    from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions

    options = MooncakeOptions(f"127.0.0.1:{mooncake_master.port}", 96 << 20, buffer_bytes=32 << 20)
    connections = [MooncakeConnection(options) for _ in range(2)]
    yield connections
    for connection in connections:
        connection.close()


@pytest.fixture(params=_parameters(KINDS))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    yield from _harness(request, tmp_path)


@pytest.fixture(params=_parameters(BOUNDED_KINDS))
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    yield from _harness(request, tmp_path)


def _harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    kind = request.param.removeprefix("guarded-")
    made: Harness
    if kind == "memory":
        made = MemoryHarness()
    elif kind == "file":
        made = FileHarness(tmp_path / "store")
    elif kind == "redis":
        made = RedisHarness(request.getfixturevalue("redis_server").port)
    else:
        made = MooncakeHarness(request.getfixturevalue("mooncake_connections"))
    made.guarded = kind != request.param
    yield made
    made.close()
