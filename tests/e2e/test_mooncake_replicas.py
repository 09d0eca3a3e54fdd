"""Two replicas share one pool; the deaths of its master, of an owner and of a replica cost hits only.

Mooncake's data ports listen on all interfaces, so the cases run in a process and a network of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores.services import own_network

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize(("kind", "chosen"), [("mooncake", ""), ("redis", "not owner")])
def test_replicas_over_one_pool(kind: str, chosen: str, tmp_path: Path) -> None:
    """Nobody owns a part of a Redis server."""
    pytest.importorskip(kind, reason=f"the {kind} extra is not installed")
    command = [
        *own_network(), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--basetemp", str(tmp_path / "inner"), "-k", chosen, str(HERE / "mooncake_replica_cases.py"),
    ]  # fmt: skip
    environment = {**os.environ, "MILEPOST_STORE_KIND": kind, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(timeout=540)
        finally:
            # The master and the replicas as well, however this ends.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    text = (tmp_path / "output").read_text(errors="replace")
    lines = text.splitlines()
    assert process.returncode == 0 and " passed" in lines[-1], text[-8000:]
    assert "skipped" not in lines[-1], text[-2000:]
