"""One server for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.serving import Running, running_server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server with an empty cache; whatever a test does, nothing may be left behind."""
    shared_server.wait_idle()
    assert shared_server.model.engine.reset_prefix_cache().result(10)
    yield shared_server
    shared_server.worker.gate.set()
    shared_server.wait_idle()
