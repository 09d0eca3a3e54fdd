"""A process that ends without closing its engine ends like any other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SCRIPT = """
from milepost.engine.serving import ServingOptions, load_serving_model, warm_up
model = load_serving_model(None, ServingOptions(cache_bytes=64 << 20))
model.engine.start()
warm_up(model)
print("answered", flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        pytest.param("", 0, id="end"),
        pytest.param("raise ValueError('planted')", 1, id="exception"),
        pytest.param("raise SystemExit(3)", 3, id="exit", marks=pytest.mark.slow),
        pytest.param("model.close()", 0, id="closed", marks=pytest.mark.slow),
    ],
)
def test_leaving_with_a_running_engine(ending: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == "answered\n", done.stderr
    assert done.returncode == status, done.stderr
    assert "terminate" not in done.stderr and "leaked" not in done.stderr, done.stderr
    if status != 1:
        assert done.stderr == ""
