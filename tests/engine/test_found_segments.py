"""What start-up says about a folder of segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.engine import stores
from milepost.engine.stores import found_text
from milepost.stores.folder import LockTimeoutError, SegmentFolder, object_path

MINE, OTHER = "a" * 64, "b" * 64


def fill(folder: Path, fingerprint: str, count: int, num_bytes: int = 1 << 20) -> None:
    for number in range(count):
        path = folder / object_path(fingerprint, (0, 1), f"key {number}".encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * num_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SegmentFolder(tmp_path / "cache").close()
    return tmp_path / "cache"


def test_an_empty_folder(folder: Path) -> None:
    assert found_text(folder, MINE) == f"found no segments of this model in {folder}"


def test_segments_of_this_model_and_of_others(folder: Path) -> None:
    fill(folder, MINE, 1)
    assert found_text(folder, MINE) == f"found 1 segment (1.0 MiB) of this model in {folder}"
    fill(folder, MINE, 3)
    fill(folder, OTHER, 2, 1 << 19)
    assert found_text(folder, MINE) == (
        f"found 3 segments (3.0 MiB) of this model in {folder}, and 2 segments (1.0 MiB) of other models or "
        "settings, which it cannot use"
    )
    assert "no segments of this model" in found_text(folder, "c" * 64)


def test_a_busy_folder_keeps_nobody_from_starting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(opened: SegmentFolder) -> None:
        raise LockTimeoutError("somebody else is in it")

    monkeypatch.setattr(stores, "scan", scan)
    assert found_text(folder, MINE) == f"what {folder} holds was not counted: somebody else is in it"


def test_a_folder_that_could_not_be_made(tmp_path: Path) -> None:
    """On a full disk the store makes it later."""
    assert found_text(tmp_path / "none", MINE).startswith(f"what {tmp_path / 'none'} holds was not counted: ")
