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


def tokens(line: str) -> tuple[int, str]:
    """Reused tokens and the reason. How long the answers before are may depend on the machine's kernels."""
    found = re.fullmatch(r"\d+ prompt tokens, (\d+) reused: (\w+)", line)
    assert found is not None, line
    return int(found[1]), found[2]


def test_two_turns_and_two_after_restarts_with_the_official_client(url: str, tmp_path: Path) -> None:
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = [text.splitlines() for text in re.findall(r"```text\n(.*?)```", README, re.DOTALL)]
    assert len(scripts) == 3 and ADDRESS in scripts[0] and [len(lines) for lines in shown] == [2, 4]
    moved = 'client = client.copy(base_url=input() + "/v1", max_retries=0)\n'
    session = subprocess.Popen(
        [sys.executable, "-u", "-c", moved.join(scripts).replace(ADDRESS, url)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert session.stdin is not None and session.stdout is not None
    try:
        printed = [session.stdout.readline().rstrip() for _ in range(2)]
        assert printed[0] == shown[0][0]
        assert tokens(printed[1]) == tokens(shown[0][1])
        for expected in (shown[1][:2], shown[1][2:]):
            # The page says that a load can come too late; it must not here.
            with serving("--persist", str(tmp_path), "--kv-load-policy", "always") as (address, _, _):
                session.stdin.write(f"{address}\n")
                session.stdin.flush()
                printed = [session.stdout.readline().rstrip() for _ in range(2)]
            assert tokens(printed[0])[1] == tokens(expected[0])[1]
            num_reused = tokens(printed[0])[0]
            assert printed[1] == expected[1].replace(str(tokens(expected[0])[0]), str(num_reused))
        assert num_reused > 192
        assert session.wait(30) == 0
    finally:
        session.kill()


def test_the_first_question(url: str) -> None:
    command = re.search(r"curl -s (\S+) .* -d '(\{.*?\n\})'", README, re.DOTALL)
    assert command is not None and command[1].startswith(ADDRESS)
    answer = httpx.post(
        command[1].replace(ADDRESS, url), json=json.loads(command[2]), timeout=60, trust_env=False
    )
    assert answer.status_code == 200
    assert "4711" in answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["milepost"]["reuse"]["reason"] in ("too_short", "cold")
