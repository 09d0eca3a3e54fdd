"""The examples of docs/clients.md run as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.serving import Running

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
SECTIONS = {
    title: re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


def here(code: str, server: Running) -> str:
    """The example with this server's address and model."""
    return code.replace("http://127.0.0.1:8000", server.url).replace("milepost-tiny", "tiny")


@pytest.mark.parametrize("title", ["openai", "anthropic"])
def test_python_examples(server: Running, capsys: pytest.CaptureFixture[str], title: str) -> None:
    ((language, code),) = SECTIONS[title]
    assert language == "python"
    exec(compile(here(code, server), title, "exec"), {})
    text, cached = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text and int(cached) >= 0


def test_the_curl_example(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    ((_, code),) = SECTIONS["curl"]
    done = subprocess.run(["bash", "-c", here(code, server)], capture_output=True, text=True, check=True)
    assert '"finish_reason"' in done.stdout


def test_every_client_of_the_table_has_a_section() -> None:
    rows = re.findall(r"^\| ([\w ,()]+?) \| [\d.]+ \|", PAGE, re.MULTILINE)
    names = {re.split(r"[ ,(]", row)[0] for row in rows}
    assert len(rows) >= 6 and names <= {title.split()[0] for title in SECTIONS}
