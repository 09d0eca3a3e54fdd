"""One fixture for every kind of store; services run in `make test-full`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.harness import FileHarness, Harness, MemoryHarness, RedisHarness
from tests.stores.services import Server, start_redis

KINDS = ["memory", "file", "redis"]
SERVICES = {"redis"}


def _parameters() -> list[object]:
    return [
        pytest.param(prefix + kind, marks=[pytest.mark.service] if kind in SERVICES else [])
        for prefix in ("", "guarded-")
        for kind in KINDS
    ]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(params=_parameters())
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    kind = request.param.removeprefix("guarded-")
    made: Harness
    if kind == "memory":
        made = MemoryHarness()
    elif kind == "file":
        made = FileHarness(tmp_path / "store")
    else:
        made = RedisHarness(request.getfixturevalue("redis_server").port)
    made.guarded = kind != request.param
    yield made
    made.close()
