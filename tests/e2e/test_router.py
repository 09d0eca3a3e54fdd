"""vllm-router sends each conversation to the replica that holds it, led by our cache events."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from tests.e2e.processes import Served

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]
UNIT = 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def routed(tmp_path: Path) -> Iterator[tuple[list[Served], str]]:
    """Two replicas and a router in front of them."""
    beside = Path(sys.executable).parent / "vllm-router"
    router = str(beside) if beside.exists() else shutil.which("vllm-router")
    if router is None:
        pytest.skip("vllm-router is not installed")
    events = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    replicas: list[Served] = []
    process = None
    try:
        for number, endpoint in enumerate(events):
            replicas.append(
                Served(
                    [
                        "--served-model-name", "tiny", "--prefix-match-unit", str(UNIT),
                        "--kv-events-config", f'{{"endpoint": "{endpoint}"}}',
                    ],
                    tmp_path / f"replica-{number}.log",
                )
            )  # fmt: skip
        port = free_port()
        command = [
            router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
            "--worker-urls", *(replica.url for replica in replicas), "--policy", "kv_aware",
            "--kv-event-block-size", str(UNIT), "--kv-event-model", "tiny",
        ]  # fmt: skip
        for replica, endpoint in zip(replicas, events, strict=True):
            command += ["--kv-event-source", f"{replica.url}={endpoint}"]
        with (tmp_path / "router.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, tmp_path / "router.log")
        yield replicas, url
    finally:
        if process is not None:
            process.kill()
            process.wait()
        for replica in replicas:
            replica.end()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace"))


def complete(url: str, prompt: list[int]) -> int:
    """Reused tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_conversations_go_to_the_replica_that_holds_them(tmp_path: Path) -> None:
    rng = Random(1)
    prompts = [[rng.randrange(300, 2000) for _ in range(200)] for _ in range(6)]
    with routed(tmp_path) as (replicas, router):
        time.sleep(1.0)  # subscriptions
        homes = [number % 2 for number in range(len(prompts))]
        for prompt, home in zip(prompts, homes, strict=True):
            assert complete(replicas[home].url, prompt) == 0
        time.sleep(1.0)
        for prompt in prompts:
            follow_up = prompt + [rng.randrange(300, 2000) for _ in range(20)]
            assert complete(router, follow_up) >= 192, (tmp_path / "router.log").read_text()
        # After the reset of one replica the router must not count on it any more.
        answer = httpx.post(f"{replicas[0].url}/reset_prefix_cache", timeout=60, trust_env=False)
        assert answer.status_code == 200
        for prompt, home in zip(prompts, homes, strict=True):
            if home == 0:
                assert complete(replicas[1].url, prompt) == 0
        time.sleep(1.0)
        for prompt, home in zip(prompts, homes, strict=True):
            if home == 0:
                assert complete(router, prompt + [7] * 5) >= 192, (
                    "the router still goes to the emptied replica"
                )
