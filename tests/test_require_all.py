"""Under `MILEPOST_REQUIRE=all` a skipped oracle or service test, or a module that skips itself, fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "module": "pytest.importorskip('no_such_module_anywhere')\ndef test_it(): pass\n",
    "oracle": "@pytest.mark.oracle\ndef test_it(): pytest.skip('not here')\n",
    "service": "@pytest.mark.service\n@pytest.mark.skipif(True, reason='no')\ndef test_it(): pass\n",
    "plain": "@pytest.mark.skip(reason='other system')\ndef test_it(): pass\n",
    "expected": "@pytest.mark.oracle\n@pytest.mark.xfail\ndef test_it(): assert False\n",
}


def run_pytest(folder: Path, require: str) -> str:
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    oracle: x\n    service: x\n", encoding="utf-8"
    )
    for name, source in MODULES.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{source}", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    environment = {**os.environ, "MILEPOST_REQUIRE": require}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_skips_are_allowed_by_default(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "").splitlines()[-1].startswith("4 skipped, 1 xfailed")


def test_skips_fail_where_everything_is_required(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "all")
    assert output.splitlines()[-1].startswith("1 failed, 1 skipped, 1 xfailed, 2 errors")
    for name in ("module", "oracle", "service"):
        assert f"test_{name}.py" in output
    assert output.count("MILEPOST_REQUIRE=all:") >= 3
