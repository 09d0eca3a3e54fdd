"""`milepost serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

START_SECONDS = 300


class KilledServer(Exception):
    """The server was gone before it had answered."""


class Served:
    """One process; `end` it."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "milepost", "serve", "--port", "0", *arguments]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
        self.url = self._wait_until_ready()
        self.client = httpx.Client(timeout=60, trust_env=False)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"listening on (http://\S+)", self._log.read_text(errors="replace"))
            if found is not None:
                try:
                    if httpx.get(f"{found[1]}/health", trust_env=False, timeout=5).status_code == 200:
                        return found[1]
                except httpx.TransportError:
                    pass
            assert self.process.poll() is None, self._log.read_text(errors="replace")
            time.sleep(0.02)
        raise AssertionError(f"not ready in time: {self._log.read_text(errors='replace')}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.process.wait()
        self.client.close()

    def complete(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Answer ids and reused tokens.

        Raises:
            KilledServer: the connection broke.
        """
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        try:
            answer = self.client.post(f"{self.url}/v1/completions", json=body)
        except httpx.TransportError as error:
            raise KilledServer from error
        assert answer.status_code == 200, answer.text
        content = answer.json()
        cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        return content["choices"][0]["token_ids"], cached
