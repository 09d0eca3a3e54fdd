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
    [("", 0), ("raise ValueError('planted')", 1), ("raise SystemExit(3)", 3), ("model.close()", 0)],
    ids=["end", "exception", "exit", "closed"],
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
