"""The import contracts of pyproject.toml hold, and each of them breaks when it is violated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")

ROOT = Path(__file__).resolve().parent.parent
# One violation per contract: contract name -> (file, line to add).
VIOLATIONS = {
    "Layers: top may import down, never up": ("errors.py", "import milepost.config"),
    "Layers inside core": ("core/units.py", "import milepost.core.plan"),
    "Core, stores and simulator import no heavy library": ("core/plan.py", "import numpy"),
    "The checkpoint rules have one caller": ("core/plan.py", "import milepost.core.checkpoints"),
    "Group managers do not know each other": (
        "core/groups/recurrent.py",
        "import milepost.core.groups.attention",
    ),
}


def lint_imports(src: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(src), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_contracts_are_kept() -> None:
    done = lint_imports(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in VIOLATIONS:
        assert f"{name} KEPT" in done.stdout


def test_planted_violations_break_each_contract(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    for path, line in VIOLATIONS.values():
        file = tmp_path / "src" / "milepost" / path
        file.write_text(file.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint_imports(tmp_path / "src")
    assert done.returncode != 0
    for name in VIOLATIONS:
        assert f"{name} BROKEN" in done.stdout, done.stdout


def test_an_unlisted_module_is_noticed(tmp_path: Path) -> None:
    """A new package must take its place in the layers before it can land."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (tmp_path / "src" / "milepost" / "helpers.py").write_text("", encoding="utf-8")
    done = lint_imports(tmp_path / "src")
    assert done.returncode != 0
    assert "milepost.helpers" in done.stdout + done.stderr
