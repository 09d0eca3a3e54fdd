"""Memory that threads give back is not kept by each of them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_HEAPS = """
import ctypes, sys, threading
from milepost.cli.serve import share_heaps

if "share" in sys.argv:
    share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(6)

def allocate():
    libc.malloc(50_000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def num_heaps(path: Path, *arguments: str, **environment: str) -> int:
    """Heaps of a process with six threads."""
    command = [sys.executable, "-c", COUNT_HEAPS, str(path), *arguments]
    subprocess.run(command, check=True, env={"PYTHONPATH": ":".join(sys.path), **environment})
    return path.read_text().count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps per thread are glibc's")
def test_threads_share_heaps(tmp_path: Path) -> None:
    path = tmp_path / "heaps.xml"
    assert num_heaps(path) > 3
    assert num_heaps(path, "share") <= 2
    assert num_heaps(path, "share", MALLOC_ARENA_MAX="5") > 3
