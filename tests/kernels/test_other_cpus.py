"""The native kernels on CPUs this machine is not, and under sanitizers.

`make native-checks` builds what runs here: a self-check program (native/check) for this CPU and for
aarch64, and the Python module with the address and undefined-behaviour sanitizers. Older x86 CPUs and
aarch64 are emulated by QEMU, which knows AVX2 but no AVX-512.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
SANITIZED = BUILD / "asan" / "site"
IS_X86 = platform.machine() == "x86_64"
needs_x86 = pytest.mark.skipif(not IS_X86, reason="an x86 program")

Hashes = dict[tuple[str, str], str]
"""(instruction set, case) -> hash of the result."""


def built(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} is missing; `make native-checks` builds it")
    return path


def emulator(architecture: str) -> str:
    name = f"qemu-{architecture}"
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing (Debian: apt install qemu-user)")
    return name


@cache
def hashes(target: str, *launcher: str) -> Hashes:
    """What the self-check prints; it fails by itself where cuts, threads or the caller's settings matter."""
    program = built(BUILD / f"check-{target}" / "kernel_check")
    done = subprocess.run([*launcher, str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(isa, case): value for isa, case, value in lines}


def of(isa: str, found: Hashes) -> dict[str, str]:
    return {case: value for (name, case), value in found.items() if name == isa}


def test_this_cpu_passes_the_self_check() -> None:
    found = hashes("host")
    isas = {isa for isa, _ in found}
    assert "baseline" in isas
    fused = [of(isa, found) for isa in ("avx2", "avx512") if isa in isas]
    assert all(each == fused[0] for each in fused)
    for isa in isas:
        # One case moves numbers without a sum; all others end in bits of their own.
        values = of(isa, found)
        assert len(set(values.values())) == len(values) > 20
        if isa != "baseline":
            assert sum(values[case] == of("baseline", found)[case] for case in values) < len(values) / 2


@needs_x86
@pytest.mark.parametrize(
    ("cpu", "expected"),
    [("qemu64", ["baseline"]), ("Nehalem", ["baseline"]), ("max", ["baseline", "avx2"])],
)
def test_older_x86_cpus_choose_what_they_have_and_give_the_same_bits(cpu: str, expected: list[str]) -> None:
    here = hashes("host")
    if "avx2" in expected and not of("avx2", here):
        pytest.skip("this CPU has no AVX2 to compare with")
    found = hashes("host", emulator("x86_64"), "-cpu", cpu)
    assert list(dict.fromkeys(isa for isa, _ in found)) == expected
    for isa in expected:
        assert of(isa, found) == of(isa, here)


def test_aarch64_gives_the_bits_of_the_baseline() -> None:
    found = hashes("aarch64", emulator("aarch64"))
    assert {isa for isa, _ in found} == {"baseline"}
    assert of("baseline", found) == of("baseline", hashes("host"))


IMPORT = """
import numpy, milepost_kernels as k
x = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
out = numpy.empty((3, 3), numpy.float32)
k.linear(x, k.pack(x), out)
assert (out == x @ x.T).all()
print(",".join(k.available_isas()), k.isa(), k.numerics_id())
"""


@needs_x86
@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("Nehalem", ["baseline", "baseline", "unfused"]),
        ("max", ["baseline,avx2", "avx2", "fused"]),
    ],
)
def test_the_installed_module_loads_on_older_cpus(cpu: str, expected: list[str]) -> None:
    pytest.importorskip("milepost_kernels")
    command = [emulator("x86_64"), "-cpu", cpu, sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    isas, isa, numerics = done.stdout.split()
    assert [isas, isa, numerics.split("-")[-1]] == expected


# ------------------------------------------------------------------ whole runs of the tests


def run_python(arguments: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MILEPOST_REQUIRE": "", **changes}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "MILEPOST_NATIVE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )


def run_tests(*arguments: str, **changes: str) -> None:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    marks = ["-m", "not slow and not service and not oracle"]
    done = run_python([*command, *marks, *arguments], **changes)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_models_run_and_are_exact_on_a_forced_path(isa: str) -> None:
    """Everything above the kernels, in a process that MILEPOST_ISA keeps from anything wider."""
    kernels = pytest.importorskip("milepost_kernels")
    if isa not in kernels.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    run_tests("tests/runner/test_families.py", "tests/runner/test_selftest.py", MILEPOST_ISA=isa)


def sanitizers() -> dict[str, str]:
    """Environment under which the sanitized module can be loaded by a Python that is not sanitized."""
    built(SANITIZED / "milepost_kernels")
    compiler = os.environ.get("CXX", "c++")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        if not os.path.isabs(found.stdout.strip()):
            pytest.skip(f"{compiler} has no {name}")
        libraries.append(found.stdout.strip())
    return {
        "LD_PRELOAD": ":".join(libraries),
        "PYTHONPATH": os.pathsep.join([str(SANITIZED), str(ROOT / "src")]),
        # Python keeps much until it ends; that is no leak of the kernels.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


BEYOND = """
import numpy, milepost_kernels as k
assert k.__file__.startswith({site!r}), k.__file__
x = numpy.ones((64, 16), numpy.float32)
beyond = numpy.lib.stride_tricks.as_strided(x, (65, 16), (64, 4))
out = numpy.empty(({rows}, 16), numpy.float32)
k.rms_norm(beyond if {plant} else x, numpy.ones(16, numpy.float32), 1e-5, out)
print("survived")
"""


@pytest.mark.parametrize("plant", [False, True])
def test_the_sanitizers_see_one_row_too_many(plant: bool) -> None:
    source = BEYOND.format(site=str(SANITIZED), plant=plant, rows=65 if plant else 64)
    done = run_python(["-c", source], **sanitizers())
    if plant:
        assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr
    else:
        assert done.stdout.strip() == "survived", done.stderr


def test_the_kernels_tests_pass_under_sanitizers() -> None:
    run_tests("tests/kernels", **sanitizers())
