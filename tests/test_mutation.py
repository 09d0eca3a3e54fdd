"""The mutation tool: its changes are those meant, it tells killed from survived, and its page is current."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("mutate")
    sys.modules.pop("mutate", None)


def changes(mutate: ModuleType, source: str) -> dict[str, set[str]]:
    """Operator -> changed lines."""
    found: dict[str, set[str]] = {}
    for mutant in mutate.mutants_of(source):
        ast.parse(mutant.source)
        diff = mutate.diff_of(source, mutant.source).splitlines()
        line = " / ".join(line[1:].strip() for line in diff if line.startswith("+"))
        found.setdefault(mutant.operator, set()).add(line)
    return found


def test_changes_of_a_condition(mutate: ModuleType) -> None:
    source = "def f(a, b):\n    if a < b and not a:\n        return 3\n    return a\n"
    assert changes(mutate, source) == {
        "negated condition": {"if (not (a < b and (not a))):"},
        "deleted branch": {"pass"},
        "boolean operator": {"if (a < b or not a):"},
        "dropped clause": {"if (not a):", "if (a < b):"},
        "boundary": {"if (a <= b) and not a:"},
        "comparison": {"if (a >= b) and not a:"},
        "dropped not": {"if a < b and (a):"},
        "returned value": {"return None"},
        "constant": {"return (4)", "return (2)"},
        "dropped statement": {"pass"},
    }


def test_changes_of_arithmetic_and_loops(mutate: ModuleType) -> None:
    source = (
        "def f(values) -> int:\n    total = 0\n    for v in values:\n        total += min(v, 2 * v)\n"
        "        if v:\n            break\n    return total\n"
    )
    found = changes(mutate, source)
    assert found["swapped call"] == {"total += (max(v, 2 * v))"}
    assert found["arithmetic"] == {"total -= min(v, 2 * v)", "total += min(v, (2 // v))"}
    assert found["loop never entered"] == {"for v in (()):"}
    assert found["break and continue"] == {"continue"}
    assert found["returned value"] == {"return 0", "return (total) + 1"}


def test_what_cannot_change_behaviour_is_left_out(mutate: ModuleType) -> None:
    source = (
        '"""Text with 1."""\nPair = tuple[int, int]\nclass C:\n    __slots__ = ("a",)\n    b: int | None\n'
        '    def f(self) -> None:\n        """2."""\n        raise ValueError(f"{3} is wrong")\n'
    )
    assert changes(mutate, source) == {"dropped statement": {"pass"}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one module and one test."""
    package = tmp_path / "src" / "milepost"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rule.py").write_text("def larger(a, b):\n    return a if a > b else b\n")
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['slow', 'service']\naddopts = '--import-mode=importlib'\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_rule.py").write_text(
        "from milepost.rule import larger\n\n\n"
        "def test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"
    )
    return tmp_path


def run_alone(tree: Path, changed: str) -> str:
    """In a process of its own, as the tool does it: one that has not loaded the project."""
    (tree / "src" / "milepost" / "rule.py").write_text(changed)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "from pathlib import Path\nfrom mutate import Runner\n"
        f"print(Runner(Path({str(tree)!r}), 4).run(['tests/test_rule.py'])[::2])"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ("def larger(a, b):\n    return a if a > b else b\n", "('survived', '')"),
        ("def larger(a, b):\n    return a if a >= b else b\n", "('survived', '')"),
        (
            "def larger(a, b):\n    return a if a < b else b\n",
            "('killed', 'tests/test_rule.py::test_larger')",
        ),
        ("def larger(a, b):\n    while True:\n        pass\n", "('timeout', 'signal 24')"),
        ("larger = 1 / 0\n", "('killed', 'tests/test_rule.py')"),
    ],
)
def test_killed_survived_and_late(tree: Path, changed: str, verdict: str) -> None:
    assert run_alone(tree, changed) == verdict


def test_every_proof_in_the_page_is_about_the_code_as_it_is(mutate: ModuleType) -> None:
    """If this fails, a rule has changed: run `make mutation` and renew its block in docs/mutation.md."""
    proven = mutate.proven_equivalent(ROOT / mutate.PAGE)
    assert len(proven) >= 20
    possible = set()
    functions = {where for where, _ in proven}
    for module in {where.partition("::")[0] for where in functions}:
        source = (ROOT / "src" / "milepost" / module).read_text()
        for mutant in mutate.mutants_of(source):
            where = f"{module}::{mutant.function}"
            if where in functions:
                possible.add((where, mutate._unindented(mutate.diff_of(source, mutant.source))))
    assert proven - possible == set()


def test_the_tests_of_the_plan_exist(mutate: ModuleType) -> None:
    for module, tests in mutate.PLAN.items():
        assert (ROOT / "src" / "milepost" / module).exists()
        assert all((ROOT / test).exists() for test in tests)
