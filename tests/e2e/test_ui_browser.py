"""The page in a real browser: it draws what the server says, at any width, without an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import httpx
import pytest
from tests.e2e.processes import Served

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=5000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(["--cache-bytes", "16MiB"], tmp_path_factory.mktemp("ui") / "log")
    try:
        for number in range(8):
            system = "You are the first of many helpers, and you answer in short sentences. " * 4
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Number {number}: " + "what is this about? " * 10},
            ]
            body = {"messages": messages, "max_tokens": 8}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200
        yield server
    finally:
        server.end()


def drawn(browser: str, url: str, profile: Path, width: int) -> str:
    """The document after the page has drawn itself."""
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},1000", "--dump-dom"]
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Uncaught" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [390, 1300])
def test_the_tree_is_drawn(browser: str, served: Served, tmp_path: Path, width: int) -> None:
    state = httpx.get(f"{served.url}/ui/state", timeout=60, trust_env=False).json()
    document = drawn(browser, f"{served.url}/ui", tmp_path / "profile", width)
    marks = re.findall(r'class="point" data-count="(\d+)"', document)
    assert sum(map(int, marks)) == len(state["cache"]["checkpoints"]) > 4
    for each in state["finished"]:
        assert f'<span title="{each["label"]}"><span class="soft num">#{each["request_id"]} ' in document
        assert each["sentence"] in document
    assert "milepost-tiny" in document
    assert re.search(r"exactness: (exact|numeric)", document)
    assert "hit rate, since the start" in document
    finished = document[document.index('id="finished"') :]
    below = re.search(r'<div class="below"( hidden="")?>', finished)
    assert below is not None and below[1] is None, "nothing says that the list goes on"
    assert 'id="login" hidden' in document


def test_a_server_with_keys_asks_for_one(browser: str, tmp_path: Path) -> None:
    server = Served(["--cache-bytes", "16MiB", "--api-key", "secret"], tmp_path / "log")
    try:
        document = drawn(browser, f"{server.url}/ui", tmp_path / "profile", 1000)
    finally:
        server.end()
    assert 'id="login">' in document
    assert "no API key" in document


class OnlyThePage(BaseHTTPRequestHandler):
    """A server that ended once the page was there: whatever else is asked gets no answer."""

    def do_GET(self) -> None:
        if self.path == "/ui":
            content = (resources.files("milepost") / "assets" / "ui" / "index.html").read_bytes()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Not on stderr."""


def test_a_server_that_is_gone_is_said_with_its_address(browser: str, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OnlyThePage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        document = drawn(browser, f"{url}/ui", tmp_path / "profile", 1000)
    finally:
        server.shutdown()
        server.server_close()
    assert f"The server cannot be reached at {url}. Is it still running?" in document
