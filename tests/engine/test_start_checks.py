"""What keeps a server from starting is said before its weights are read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from milepost.engine.serving import ServingOptions, load_serving_model
from milepost.engine.stores import StoreOptions
from milepost.errors import ConfigError, MilepostError, StoreError


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr("milepost.models.loading.load_model", read)


def check(error: type[MilepostError], match: str, **stores: object) -> None:
    with pytest.raises(error, match=match):
        load_serving_model(None, ServingOptions(stores=StoreOptions(**stores)))


def _other_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder: Path) -> None:
    (folder.parent / "real").mkdir()
    folder.symlink_to("real")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_other_files, "other files"),
        (_open_to_all, "give a folder of your own"),
        (_link, "symbolic link"),
        (Path.touch, "not a folder"),
    ],
)
@pytest.mark.parametrize("as_store", [False, True])
def test_a_folder_that_cannot_be_used(
    make: Callable[[Path], None], match: str, as_store: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    make(folder)
    if as_store:
        check(StoreError, match, kv_stores=(f"file://{folder}?bytes=1GiB",))
    else:
        check(StoreError, f"store persist: .*{match}", persist=folder)


def test_a_folder_that_is_given_twice(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    check(
        ConfigError, "'file' .*1,073,741,824 bytes.* and 'persist' .*5,242,880 bytes.* one and the same",
        kv_stores=(f"file://{folder}?bytes=1GiB",), persist=folder, persist_bytes=5 << 20,
    )  # fmt: skip
    assert not folder.exists()


def test_a_slip_of_the_unit_costs_no_folder(tmp_path: Path) -> None:
    check(
        ConfigError,
        "persist_bytes: 1000 bytes hold no segment.*at least 1MiB",
        persist=tmp_path,
        persist_bytes=1000,
    )


def test_a_folder_whose_name_has_a_nul(tmp_path: Path) -> None:
    check(ConfigError, "persist: .*control character", persist=tmp_path / "a\0b")
    check(ConfigError, "kv_store: .*control character", kv_stores=(f"file://{tmp_path}/a%00b",))
    check(
        ConfigError, "peer_token_file: cannot read", serve_kv="127.0.0.1:0", peer_token_file=tmp_path / "a\0"
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 3601.0])
def test_a_time_for_loads_that_is_none(seconds: float) -> None:
    check(ConfigError, "kv_load_seconds: must be above 0 and at most 3600", load_seconds=seconds)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_taken(name: str) -> None:
    pytest.importorskip("zmq", reason="the events extra is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        others = {"endpoint": "tcp://127.0.0.1:*", name: address}
        text = ", ".join(f'"{key}": "{value}"' for key, value in others.items())
        config = f'{{"enable_kv_cache_events": true, {text}}}'
        check(ConfigError, "kv_events_config", kv_events_config=config)
