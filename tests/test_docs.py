"""What the documents quote exists: files, functions, make targets, commands, flags, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost.core import reasons

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "milepost"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE_SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"^([\w/.-]+\.py)::([\w.]+)$")
REPOSITORY_PATH = re.compile(
    r"^(?:\.ci|bench|docs|native|src|tests|tools|training)/[\w./-]*$|^[\w-]+\.(?:md|toml|txt)$"
)
# Written when the command runs, not part of the repository.
GENERATED = ("bench/results",)


def code_spans(text: str) -> list[str]:
    return CODE_SPAN.findall(FENCE.sub("", text))


def definitions(path: Path) -> set[str]:
    """Qualified names of functions, classes, methods and constants of a module."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
                # Routes are functions inside of a function that builds the application.
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.ClassDef):
                yield prefix + node.name
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield prefix + node.target.id

    return set(walk(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def missing_references(text: str) -> list[str]:
    """`path.py::name` spans, paths below src/milepost, whose file or name does not exist."""
    missing = []
    for span in code_spans(text):
        if found := REFERENCE.match(span):
            path = SRC / found.group(1)
            if not path.is_file() or found.group(2) not in definitions(path):
                missing.append(span)
    return missing


def missing_paths(text: str) -> list[str]:
    return [
        span
        for span in code_spans(text)
        if REPOSITORY_PATH.match(span) and not span.startswith(GENERATED) and not (ROOT / span).exists()
    ]


def test_architecture_follows_a_request_by_existing_names() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    references = [span for span in code_spans(text) if REFERENCE.match(span)]
    assert len(references) >= 20
    assert missing_references(text) == []
    assert text.count("\n") <= 150


def test_architecture_names_every_package() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    packages = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
    assert [name for name in packages if f"`{name}`" not in text] == []


def test_a_wrong_reference_is_found() -> None:
    text = "`core/scheduler.py::Scheduler.no_such_method` `core/nowhere.py::x` `core/units.py::floor_to`"
    assert missing_references(text) == [
        "core/scheduler.py::Scheduler.no_such_method",
        "core/nowhere.py::x",
    ]
    assert missing_paths("`docs/nothing.md` `docs/glossary.md` `some/other.py`") == ["docs/nothing.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    assert missing_references(text) == []
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_decisions_are_short() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:03}-" for number in range(1, len(pages) + 1)]
    assert [page.name for page in pages if page.read_text(encoding="utf-8").count("\n") > 40] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = (ROOT / name).read_text(encoding="utf-8")
    commands = [*code_spans(text), *(line for fence in FENCE.findall(text) for line in fence.splitlines())]
    quoted = {found.group(1) for line in commands if (found := re.match(r"make ([a-z-]+)", line))}
    assert "serve" in targets and quoted
    assert quoted - targets == set()


def test_every_reason_is_in_the_glossary() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    codes = [*reasons.CHECKPOINT_REASONS, reasons.HIT, *reasons.MISS_REASONS]
    assert [code for code in codes if f"| `{code}` |" not in text] == []


def test_command_reference_is_up_to_date() -> None:
    """Every command and option, with its help: `make docs` writes the page."""
    command = [sys.executable, str(ROOT / "tools" / "cli_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"docs/cli.md is out of date, run `make docs`\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_commands_and_options_exist(page: Path) -> None:
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    commands = {found.group() for span in code_spans(text) if (found := re.match(r"milepost [a-z]+", span))}
    assert [command for command in sorted(commands) if f"## {command}\n" not in reference] == []
    options = {span for span in code_spans(text) if re.fullmatch(r"--[a-z-]+", span)}
    assert [option for option in sorted(options) if f"`{option}`" not in reference] == []
