"""One fixture for every kind of store; services run in `make test-full`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.harness import FileHarness, Harness, MemoryHarness


@pytest.fixture(params=["memory", "file"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    made = MemoryHarness() if request.param == "memory" else FileHarness(tmp_path / "store")
    yield made
    made.close()
