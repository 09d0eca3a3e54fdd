"""The torch-free layers import, and `import milepost` stays light, where the heavy libraries are absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
LIGHT_PACKAGES = ("core", "stores", "sim")
LIGHT_MODULES = ("milepost", "milepost.config", "milepost.errors")
HEAVY = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "jinja2",
)
BLOCK_HEAVY = f"import sys\nfor name in {HEAVY!r}:\n    sys.modules[name] = None\n"


def light_modules() -> list[str]:
    names = list(LIGHT_MODULES)
    for package in LIGHT_PACKAGES:
        for path in sorted((SRC / "milepost" / package).rglob("*.py")):
            parts = path.relative_to(SRC).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_light_modules_import_without_heavy_libraries() -> None:
    names = light_modules()
    assert "milepost.core.scheduler" in names
    imports = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    done = run_python(BLOCK_HEAVY + imports)
    assert done.returncode == 0, done.stderr


def test_the_block_bites() -> None:
    done = run_python(BLOCK_HEAVY + "import torch")
    assert done.returncode != 0
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", ["milepost", "milepost.core.scheduler", "milepost.cli"])
def test_import_loads_no_heavy_library(name: str) -> None:
    """Where the libraries are present they are still not touched: `milepost --help` answers at once."""
    done = run_python(f"import sys, {name}\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
