"""House rules that a machine can check. Every check is a function over source text, so that the last
test can show each of them a planted violation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "milepost"
CORE = SRC / "core"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
MAX_CORE_FUNCTION_LINES = 70
IMPURE_MODULES = frozenset({"time", "random", "secrets", "uuid", "datetime"})
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
# One module owns rounding; everywhere else in the core a name says which way a number goes.
DIVISION_OWNER = CORE / "units.py"

Check = Callable[[str], Iterator[str]]


def file_length(source: str) -> Iterator[str]:
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{num_lines} lines, {MAX_FILE_LINES} allowed"


def _function_length(source: str, limit: int) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > limit:
                yield f"line {node.lineno}: {node.name} has {num_lines} lines, {limit} allowed"


def function_length(source: str) -> Iterator[str]:
    yield from _function_length(source, MAX_FUNCTION_LINES)


def core_function_length(source: str) -> Iterator[str]:
    yield from _function_length(source, MAX_CORE_FUNCTION_LINES)


def bare_block_size(source: str) -> Iterator[str]:
    """`block_size` says neither whose block nor in which unit; the upstream names carry both."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string == "block_size":
            yield f"line {token.start[0]}: bare block_size"


def unfinished(source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), start=1):
        if found := UNFINISHED.search(line):
            yield f"line {number}: {found.group()}"


def impure(source: str) -> Iterator[str]:
    """No clock, no randomness, no environment: the same calls give the same plan, always."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "os" and any(a.name in {"environ", "getenv", "urandom"} for a in node.names):
                yield f"line {node.lineno}: from os import environ"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = []
            if node.attr in {"environ", "getenv", "urandom"}:
                yield f"line {node.lineno}: os.{node.attr}"
        else:
            continue
        for name in names:
            if name.split(".")[0] in IMPURE_MODULES:
                yield f"line {node.lineno}: import {name}"


def raw_division(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.FloorDiv | ast.Mod):
            yield f"line {node.lineno}: raw // or %, use core/units.py"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "divmod":
            yield f"line {node.lineno}: divmod, use core/units.py"


def set_iteration(source: str) -> Iterator[str]:
    """The order of a set depends on hashes; whatever orders work must not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.For | ast.comprehension):
            iterated = node.iter
            is_set = isinstance(iterated, ast.Set | ast.SetComp)
            if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
                is_set = iterated.func.id in {"set", "frozenset"}
            if is_set:
                yield f"line {iterated.lineno}: iterates over a set"


def _sources(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python file under {folder}"
    return files


def _findings(check: Check, files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {finding}"
        for path in files
        for finding in check(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("check", [file_length, function_length, bare_block_size, unfinished])
def test_all_sources(check: Check) -> None:
    assert _findings(check, _sources(SRC)) == []


@pytest.mark.parametrize("check", [core_function_length, impure, set_iteration])
def test_core_sources(check: Check) -> None:
    assert _findings(check, _sources(CORE)) == []


def test_rounding_in_the_core_is_named() -> None:
    assert _findings(raw_division, [path for path in _sources(CORE) if path != DIVISION_OWNER]) == []


def test_benchmarks_and_training_follow_the_naming_rule() -> None:
    files = [path for folder in ("bench", "training") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert _findings(bare_block_size, files) == []


LONG_BODY = "    pass\n" * 100


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (file_length, "\n" * (MAX_FILE_LINES + 1)),
        (function_length, "def f():\n" + LONG_BODY),
        (core_function_length, "async def f():\n" + LONG_BODY[: 9 * MAX_CORE_FUNCTION_LINES]),
        (bare_block_size, "def f(block_size): ...\n"),
        (bare_block_size, "x.block_size = 3\n"),
        (unfinished, "# TODO later\n"),
        (unfinished, "raise NotImplementedError\n"),
        (impure, "import time\n"),
        (impure, "from random import Random\n"),
        (impure, "import datetime as d\n"),
        (impure, "import os\nx = os.environ['A']\n"),
        (impure, "from os import getenv\n"),
        (raw_division, "a = b // c\n"),
        (raw_division, "a %= b\n"),
        (raw_division, "a, b = divmod(c, d)\n"),
        (set_iteration, "for a in {1, 2}: pass\n"),
        (set_iteration, "x = [a for a in set(y)]\n"),
    ],
)
def test_each_check_bites(check: Check, source: str) -> None:
    assert list(check(source)) != []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (file_length, "\n" * MAX_FILE_LINES),
        (core_function_length, "def f():\n" + LONG_BODY[: 9 * (MAX_CORE_FUNCTION_LINES - 1)]),
        (bare_block_size, "hash_block_size = mamba_block_size = scheduler_block_size = 1  # block_size\n"),
        (impure, "import os.path\nfrom milepost.core.timeline import x\n"),
        (raw_division, "a = b / c\n"),
        (set_iteration, "for a in sorted({1, 2}): pass\n"),
    ],
)
def test_each_check_lets_the_rest_pass(check: Check, source: str) -> None:
    assert list(check(source)) == []
