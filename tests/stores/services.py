"""Servers that tests start on loopback and stop by their own process."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


class Server:
    """A program that listens on a port of 127.0.0.1; `command` makes its command line from the port."""

    def __init__(self, command: Callable[[int], list[str]], folder: Path) -> None:
        self._command = command
        self._log = folder / "server.log"
        self._folder = folder
        self.port = free_port()
        self.start()
        # Also if the test that started it fails before it stops it.
        atexit.register(self.kill)

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), stdout=log, stderr=log, cwd=self._folder
            )
        wait_for_port(self.port, self.process, self._log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def own_network() -> list[str]:
    """A prefix that runs a command where only loopback exists; empty where that is not allowed."""
    for flags in ("-n", "-rn"):
        command = ["unshare", flags, "bash", "-c", 'ip link set lo up && exec "$@"', "bash"]
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
                return command
        except (OSError, subprocess.TimeoutExpired):
            continue
    return []


def start_redis(folder: Path, *options: str) -> Server:
    """Skips if there is no redis-server; under MILEPOST_REQUIRE=all a skip is a failure."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")

    def command(port: int) -> list[str]:
        fixed = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        return [program, *fixed, *options]

    return Server(command, folder)


def start_mooncake(folder: Path, *options: str) -> Server:
    """A master; skips if Mooncake is not installed, as above."""
    mooncake = pytest.importorskip("mooncake", reason="the mooncake extra is not installed")
    program = Path(mooncake.__file__).parent / "mooncake_master"

    def command(port: int) -> list[str]:
        return [
            str(program),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--enable_http_metadata_server=false",
            "--default_kv_lease_ttl=1000",
            "--rpc_thread_num=2",
            "--logtostderr=1",
            *options,
        ]

    return Server(command, folder)
