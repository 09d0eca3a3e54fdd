"""What the benchmarks share: a calibration loop, repeated timing, tables, results with machine and commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
REPETITIONS = 9

# A table that goes into a file or a pipe must not be folded to 80 columns.
console = Console(width=None if sys.stdout.isatty() else 160)


def calibration_ms(repetitions: int = REPETITIONS) -> float:
    """Best time of a fixed loop of dictionary, list and integer work, in milliseconds.

    Two machines, or one machine at two times, are compared by dividing by it.
    """

    def loop() -> int:
        table: dict[int, list[int]] = {}
        total = 0
        for number in range(20_000):
            table.setdefault(number & 1023, []).append(number)
            total += len(table) ^ number
        return total

    return best_ms(loop, repetitions)


def times_ms(function: Callable[[], object], repetitions: int = REPETITIONS) -> list[float]:
    """Wall-clock milliseconds of each call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def best_ms(function: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Smallest time of several calls: what the code costs when nothing else gets in the way."""
    return min(times_ms(function, repetitions))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a reader needs to judge a number."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = torch.__version__
        facts["torch_threads"] = torch.get_num_threads()
    return facts


def commit() -> str:
    """Commit of the working tree, with a plus sign if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def print_machine(calibration: float) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    console.print(f"commit {commit()}; {facts}; calibration loop {calibration:.2f} ms", soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Numbers right-aligned; floats with as many digits as their size needs."""
    console.print(f"\n{title}", highlight=False)
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def write_json(path: Path, benchmark: str, calibration: float, results: Any) -> None:
    """Results with everything needed to compare them later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": benchmark,
        "commit": commit(),
        "machine": machine(),
        "calibration_ms": calibration,
        "results": results,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console.print(f"results in {path}", highlight=False)
