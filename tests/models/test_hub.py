"""Hub ids: a local directory comes first, and every way to fail says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.checkpoints import write_checkpoint

from milepost.errors import CheckpointFileError
from milepost.models import describe, load_model
from milepost.models.hub import is_hub_id, model_directory, model_name


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub that answers what the test puts in; calls are recorded behind it."""
    answers: list[Any] = []
    module = ModuleType("huggingface_hub")

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        answer = answers.pop(0)
        answers.append((name, revision, allow_patterns))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", True), ("owner/name-1.5_b@main", True), ("owner", False), ("/owner/name", False),
        ("a/b/c", False), ("../name", False), ("./name", False), ("owner/", False), ("~/name", False),
    ],
)  # fmt: skip
def test_what_looks_like_an_id(text: str, expected: bool) -> None:
    assert is_hub_id(text) == expected


def test_an_id_is_fetched(hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = write_checkpoint(tmp_path / "cache" / "copy")
    hub.append(copy)
    assert describe("owner/name@1234").num_layers == 5
    name, revision, patterns = hub.pop()
    assert (name, revision) == ("owner/name", "1234")
    assert {"*.safetensors", "*.json", "tiktoken.model"} <= set(patterns) and "*.bin" not in patterns
    hub.append(copy)
    assert load_model("owner/name").vocab_size == 131
    assert hub.pop()[:2] == ("owner/name", None)


def test_a_local_directory_comes_first(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "owner" / "name")
    assert model_directory("owner/name") == Path("owner/name")
    assert hub == []


@pytest.mark.parametrize("path", ["owner", "/no/such/model"])
def test_what_is_no_id_is_a_missing_directory(hub: list[Any], path: str) -> None:
    with pytest.raises(CheckpointFileError, match="is not a directory"):
        model_directory(path)


def test_a_hub_that_cannot_be_reached(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.append(OSError("no route to the hub.\nlong story"))
    with pytest.raises(CheckpointFileError, match=r"owner/name .*no route to the hub\. Give a directory"):
        load_model("owner/name")
    hub[:] = [OSError("no route to the hub.")]
    with pytest.raises(CheckpointFileError, match=r"hf download owner/name .*--offline saves the attempt"):
        load_model("owner/name@1234")


def test_a_hub_that_is_not_to_be_asked(
    hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.append(OSError("no copy."))
    with pytest.raises(CheckpointFileError, match="no copy. Give a directory .* leave out --offline"):
        load_model("owner/name")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointFileError, match="huggingface_hub is not installed"):
        describe("owner/name")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local copy of a hub model lies in a directory named by its commit, which nobody knows it by."""
    monkeypatch.chdir(tmp_path)
    assert model_name("owner/name") == model_name("owner/name@1234") == "owner/name"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert model_name("owner/name") == "name"
    monkeypatch.chdir(tmp_path / "owner" / "name")
    assert model_name(".") == "name"


def test_offline_asks_nobody(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the hub extra is not installed")
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    for command in (["info", "owner/name"], ["complete", "hi", "--model", "owner/name"]):
        done = subprocess.run(
            [sys.executable, "-m", "milepost", *command, "--offline"],
            capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "owner/name" in done.stderr and "disabled" in " ".join(done.stderr.split()), done.stderr


def test_drafters_that_ship_with_the_package_have_names(hub: list[Any]) -> None:
    for name in ("eagle3", "dspark"):
        assert (model_directory(f"milepost-tiny/{name}") / "config.json").exists() and not hub
    with pytest.raises(CheckpointFileError, match=r"nothing does not come .* milepost-tiny/eagle3 do"):
        model_directory("milepost-tiny/nothing")
    assert hub == [], "nobody else has one by that name"


def test_the_embedded_model_has_a_name() -> None:
    assert (model_directory("milepost-tiny") / "config.json").is_file()
