"""One fixture for every kind of store; services run in `make test-full`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.harness import FileHarness, Harness, MemoryHarness

KINDS = ["memory", "file"]


@pytest.fixture(params=[*KINDS, *(f"guarded-{kind}" for kind in KINDS)])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    kind = request.param.removeprefix("guarded-")
    made = MemoryHarness() if kind == "memory" else FileHarness(tmp_path / "store")
    made.guarded = kind != request.param
    yield made
    made.close()
