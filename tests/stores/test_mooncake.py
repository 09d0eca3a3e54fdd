"""The Mooncake tier, in a network namespace of its own where the system allows one.

Its data ports listen on all interfaces, so what uses a real pool is in `mooncake_cases.py` and, with the
contract of all stores, runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores.services import own_network

pytestmark = pytest.mark.service

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


DEATHS = "death or died or dies or hanging or without_a_master"


@pytest.mark.parametrize(
    ("kind", "module", "chosen"),
    [
        ("mooncake", "test_contract.py", ""),
        ("mooncake-ssd", "test_contract.py", ""),
        ("mooncake", "mooncake_cases.py", DEATHS),
        ("mooncake", "mooncake_cases.py", f"not ({DEATHS})"),
    ],
)
def test_with_a_real_pool(kind: str, module: str, chosen: str, tmp_path: Path) -> None:
    pytest.importorskip("mooncake", reason="the mooncake extra is not installed")
    command = [
        *own_network(), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--basetemp", str(tmp_path / "inner"), "-k", chosen, str(HERE / module),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "MILEPOST_STORE_KIND": kind,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and " passed" in lines[-1], done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in lines[-1], done.stdout[-2000:]
