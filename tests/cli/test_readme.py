"""The quick start of README.md, run as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cli.test_serve import serving

pytest.importorskip("torch")

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--cache-bytes", "64MiB") as (address, _, _):
        yield address


def test_two_turns_with_the_official_client(url: str) -> None:
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert script is not None and shown is not None and ADDRESS in script[1]
    done = subprocess.run(
        [sys.executable, "-c", script[1].replace(ADDRESS, url)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # How long the model's first answer is may depend on the machine's kernels.
    first, second = done.stdout.splitlines()
    wanted_first, wanted_second = shown[1].splitlines()
    assert first == wanted_first
    assert second.split(",")[1] == wanted_second.split(",")[1]


def test_the_first_question(url: str) -> None:
    command = re.search(r"curl -s (\S+) .* -d '(\{.*?\n\})'", README, re.DOTALL)
    assert command is not None and command[1].startswith(ADDRESS)
    answer = httpx.post(
        command[1].replace(ADDRESS, url), json=json.loads(command[2]), timeout=60, trust_env=False
    )
    assert answer.status_code == 200
    assert "4711" in answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["milepost"]["reuse"]["reason"] in ("too_short", "cold")
