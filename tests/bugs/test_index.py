"""Every reported fault has a test here or an owner, and every test that is listed exists."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OWNERS = frozenset({"speculation", "tiers", "distribution"})


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of one file, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def problems(ids: list[str], index: dict[str, Any], root: Path) -> Iterator[str]:
    """What is wrong with an index of `ids`; test paths are relative to `root`."""
    if len(set(ids)) != len(ids):
        yield "an id is listed twice"
    for missing in [name for name in ids if name not in index]:
        yield f"{missing} has neither a test nor an owner"
    for name, entry in index.items():
        if name not in ids:
            yield f"{name} is not in the bug list"
        if unknown := set(entry) - {"owner", "tests"}:
            yield f"{name}: unknown fields {sorted(unknown)}"
        if not entry.get("owner") and not entry.get("tests"):
            yield f"{name} has neither a test nor an owner"
        if "owner" in entry and entry["owner"] not in OWNERS:
            yield f"{name}: unknown owner {entry['owner']!r}"
        for test in entry.get("tests", ()):
            file, _, function = test.partition("::")
            if not (root / file).is_file():
                yield f"{name}: there is no file {file}"
            elif function not in functions_of(root / file):
                yield f"{name}: {file} has no test {function}"


def read_ids() -> list[str]:
    return (HERE / "ids.txt").read_text(encoding="utf-8").split()


def read_index() -> dict[str, Any]:
    return tomllib.loads((HERE / "index.toml").read_text(encoding="utf-8"))


def test_every_id_is_mapped_to_tests_that_exist_or_to_an_owner() -> None:
    assert list(problems(read_ids(), read_index(), ROOT)) == []


def test_every_scenario_of_this_folder_is_mapped() -> None:
    mapped = {test for entry in read_index().values() for test in entry.get("tests", ())}
    here = {
        f"tests/bugs/{path.name}::{name}"
        for path in sorted(HERE.glob("test_*.py"))
        if path.name != Path(__file__).name
        for name in functions_of(path)
    }
    assert here - mapped == set()


def test_the_list_is_complete() -> None:
    ids = read_ids()
    assert ids == sorted(ids)
    assert (len(ids), ids[0], ids[-1]) == (64, "B01", "B86")


GOOD = {"B01": {"owner": "tiers"}, "B02": {"tests": ["tests/bugs/test_index.py::test_the_list_is_complete"]}}


@pytest.mark.parametrize(
    ("ids", "changes", "found"),
    [
        (["B01", "B02"], {}, None),
        (["B01", "B02", "B03"], {}, "B03 has neither a test nor an owner"),
        (["B01", "B02", "B02"], {}, "an id is listed twice"),
        (["B01"], {}, "B02 is not in the bug list"),
        (["B01", "B02"], {"B01": {}}, "B01 has neither a test nor an owner"),
        (["B01", "B02"], {"B01": {"owner": "somebody"}}, "B01: unknown owner 'somebody'"),
        (["B01", "B02"], {"B01": {"owner": "tiers", "test": []}}, "B01: unknown fields ['test']"),
        (["B01", "B02"], {"B01": {"tests": ["tests/no.py::test_a"]}}, "B01: there is no file tests/no.py"),
        (
            ["B01", "B02"],
            {"B01": {"tests": ["tests/bugs/test_index.py::problems"]}},
            "B01: tests/bugs/test_index.py has no test problems",
        ),
    ],
)
def test_the_check_bites(ids: list[str], changes: dict[str, Any], found: str | None) -> None:
    assert list(problems(ids, {**GOOD, **changes}, ROOT)) == ([found] if found else [])
