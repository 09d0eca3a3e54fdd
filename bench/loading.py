"""How long a checkpoint takes to be ready, against reading its bytes.

    python bench/loading.py                          # a random checkpoint of 1 GB
    python bench/loading.py MODEL --repetitions 5

Both run in fresh processes, in turns: reading every file into one buffer, and `load_model` (imports are not
counted: they do not depend on the size). Native kernels pack weights on every CPU they may use; `--cpus 1`
leaves them one. *cold*: the files' pages are dropped from the page cache before
(Linux, clean pages only); *warm*: they are in it. What drops out is how much faster than the disk, and than
memory, weights are checked, converted and packed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, ROOT, calibration_ms, console, print_machine, print_table, write_json
from make_model import make_size

BUFFER_BYTES = 8 << 20
SIZE = "qwen-1gb"
KINDS = ("read", "load")


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def drop_cached(files: list[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path]) -> int:
    """Reads every byte; returns how many."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    total = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def timed(kind: str, directory: Path) -> dict[str, float]:
    """Seconds of one read or load in this process."""
    if kind == "load":
        import torch

        from milepost.kernels.api import select_kernels
        from milepost.models import load_model

        torch.set_num_threads(1)
        kernels = select_kernels()

        def work() -> object:
            return load_model(directory, kernels=kernels)

    else:
        files = weight_files(directory)

        def work() -> object:
            return read_all(files)

    wall, cpu = time.perf_counter(), time.process_time()
    kept = work()
    times = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    del kept
    return times


def measure(directory: Path, repetitions: int, num_cpus: int | None) -> dict[str, Any]:
    """Samples of both kinds, cold and warm, in turns; the first round warms up and is left out."""
    if num_cpus is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cpus])
    files = weight_files(directory)
    samples: dict[str, list[dict[str, float]]] = {}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for repetition in range(repetitions + 1):
        for cache in ("cold", "warm"):
            for kind in KINDS:
                if cache == "cold":
                    drop_cached(files)
                command = [sys.executable, __file__, str(directory), "--child", kind]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                if repetition:
                    samples.setdefault(f"{kind} {cache}", []).append(json.loads(done.stdout))
    return {"bytes": sum(path.stat().st_size for path in files), "samples": samples}


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Load over read, from medians."""
    samples = result["samples"]
    return {
        f"{cache} {clock}": median(s[clock] for s in samples[f"load {cache}"])
        / max(median(s[clock] for s in samples[f"read {cache}"]), 1e-9)
        for cache in ("cold", "warm")
        for clock in ("wall_s", "cpu_s")
    }


def report(result: dict[str, Any]) -> None:
    size = result["bytes"]
    rows = []
    for name, samples in sorted(result["samples"].items()):
        wall = median(sample["wall_s"] for sample in samples)
        rows.append([name, wall, median(sample["cpu_s"] for sample in samples), size / wall / 1e9])
    print_table(f"{size / 1e9:.2f} GB of weights", ["", "wall s", "processor s", "GB/s"], rows)
    print_table("load / read", ["", "ratio"], [[name, ratio] for name, ratio in ratios(result).items()])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="default: a random one of 1 GB, then removed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cpus", type=int, help="use so many of the CPUs (Linux)")
    parser.add_argument("--json", type=Path, default=RESULTS / "loading.json")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(timed(options.child, options.model)))
        return 0
    calibration = calibration_ms()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or make_size(Path(folder) / SIZE, SIZE)
        result = measure(directory, options.repetitions, options.cpus)
    report(result)
    print_machine(calibration)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    console.print(f"{cpus} CPUs to pack weights on", highlight=False)
    write_json(options.json, "loading", calibration, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
