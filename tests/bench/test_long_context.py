"""A long prompt: bounded memory, and time per token that grows with what attention reads only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from milepost.kernels.native_library import native_library  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent


def run(num_tokens: int, path: Path, *arguments: str) -> dict[str, Any]:
    script = str(ROOT / "bench" / "long_context.py")
    command = [sys.executable, script, "--tokens", str(num_tokens), "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads(path.read_text(encoding="utf-8"))["results"]  # type: ignore[no-any-return]


def check(result: dict[str, Any], num_tokens: int) -> None:
    parts = result["parts"]
    assert result["num_processed"] == parts[-1]["end"] == num_tokens and len(parts) == 8
    # Pages, states and the steps' own buffers; not what was read so far.
    assert result["mapped_bytes"] <= result["cache_bytes"]
    assert parts[-1]["rss_bytes"] <= result["rss_before_bytes"] + result["cache_bytes"] + (64 << 20)
    assert result["num_cached"] >= num_tokens - 31


def test_a_few_thousand_tokens(tmp_path: Path) -> None:
    check(run(4096, tmp_path / "result.json"), 4096)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(native_library().module is None, reason="plain torch would take hours")
def test_128k_tokens(tmp_path: Path) -> None:
    result = run(131_072, tmp_path / "result.json", "--threads", "2")
    check(result, 131_072)
    parts = result["parts"]
    # Other work runs on the same cores, so that even CPU time varies; halves vary less than single parts.
    other = [part["other_ms"] for part in parts]
    assert sum(other[4:]) < 1.6 * sum(other[:4])
    # Tokens of the second half read three times as many earlier ones as those of the first.
    attention = [part["attention_ms"] for part in parts]
    assert 2.2 < sum(attention[4:]) / sum(attention[:4]) < 4.0
