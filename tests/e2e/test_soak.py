"""The soak, in a network of its own: Mooncake's data ports listen on all interfaces."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores.services import own_network

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def available() -> list[str]:
    """The shared stores that this machine can start."""
    found = []
    if importlib.util.find_spec("redis") and shutil.which("redis-server"):
        found.append("redis")
    if importlib.util.find_spec("mooncake"):
        found.append("mooncake")
    return found


@pytest.mark.slow
@pytest.mark.timeout(7300)
def test_a_soak() -> None:
    """`make soak` runs for thirty minutes; the full suite for half of one."""
    if os.environ.get("MILEPOST_REQUIRE", "") == "all":
        assert available() == ["redis", "mooncake"]
    command = [
        *own_network(), sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
        # It would keep every warning of every fault.
        "-p", "no:logging", str(HERE / "soak_cases.py"),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "MILEPOST_SOAK_SHARED": " ".join(available()),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and " passed" in lines[-1], done.stdout[-6000:] + done.stderr[-2000:]
