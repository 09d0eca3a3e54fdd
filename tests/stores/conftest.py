"""One fixture for every kind of store; services run in `make test-full`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stores.harness import (
    FileHarness,
    Harness,
    MemoryHarness,
    MooncakeHarness,
    PeerHarness,
    RedisHarness,
)
from tests.stores.services import Server, free_port, start_mooncake, start_redis

BOUNDED_KINDS = ["memory", "file", "redis"]
"""These keep to a bound in bytes themselves."""
SERVICES = {"redis", "mooncake", "peer-nixl"}
# Mooncake's ports listen on all interfaces: its tests run in a network of their own (test_mooncake.py).
WITH_DISK = os.environ.get("MILEPOST_STORE_KIND") == "mooncake-ssd"
KINDS = ["mooncake"] if "MILEPOST_STORE_KIND" in os.environ else [*BOUNDED_KINDS, "peer", "peer-nixl"]


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
    server = start_mooncake(
        tmp_path_factory.mktemp("mooncake"), *(["--enable_offload=true"] if WITH_DISK else [])
    )
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_connections(
    mooncake_master: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[object]]:
    """Two clients of one pool, as of two replicas."""
    from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions

    options = MooncakeOptions(f"127.0.0.1:{mooncake_master.port}", 96 << 20, buffer_bytes=32 << 20)
    if WITH_DISK:
        folder = tmp_path_factory.mktemp("disk")
        on_disk = replace(options, ssd_path=str(folder), ssd_bytes=1 << 30, host=f"127.0.0.1:{free_port()}")
        connections = [MooncakeConnection(on_disk), MooncakeConnection(replace(options, segment_bytes=0))]
    else:
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
    elif kind.startswith("peer"):
        pytest.importorskip("uvicorn", reason="the server extra is not installed")
        if kind == "peer-nixl":
            pytest.importorskip("nixl_cu12", reason="the nixl extra is not installed")
        made = PeerHarness(nixl=kind == "peer-nixl")
    else:
        made = MooncakeHarness(request.getfixturevalue("mooncake_connections"))
    made.guarded = kind != request.param
    yield made
    made.close()
