"""`milepost cache`: what it shows, finds and removes, beside a store that is in use."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from tests.stores.segments import FINGERPRINT, IDENTITY, OTHER_FINGERPRINT, SECONDS, chain, keys, segment
from typer.testing import CliRunner

from milepost.cli.cache import app
from milepost.errors import MilepostError
from milepost.stores.file import FileStore
from milepost.stores.folder import disk_bytes
from milepost.stores.segment_format import Identity

runner = CliRunner()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    made = FileStore(tmp_path / "store", IDENTITY, budget_bytes=1 << 24)
    made.save(chain("path", 3), deadline_seconds=SECONDS)
    other = FileStore(tmp_path / "store", Identity(OTHER_FINGERPRINT), budget_bytes=1 << 24)
    other.save(
        [segment("other model", identity=Identity(OTHER_FINGERPRINT), record_bytes=9000)],
        deadline_seconds=SECONDS,
    )
    return made


def run(store: FileStore, command: str, *options: str, status: int = 0) -> str:
    # A terminal that is wide enough for whole words.
    result = runner.invoke(app, [command, str(store._folder.root), *options], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def damage(store: FileStore, key: bytes, offset: int) -> None:
    path = store.path_of(key)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def found(store: FileStore, segments) -> list[bool]:
    return [bool(each) for each in store.lookup(keys(segments), deadline_seconds=SECONDS)]


def test_ls(store: FileStore) -> None:
    output = run(store, "ls")
    assert "4 segments" in output
    for each in chain("path", 3):
        assert each.header.key.hex()[:12] in output
    assert "(start)" in output and "64-96" in output and "history" in output
    assert "1 segment in" in run(store, "ls", "--fingerprint", OTHER_FINGERPRINT[:6])
    assert "3 more" in run(store, "ls", "--limit", "1")
    rows = json.loads(run(store, "ls", "--json"))
    assert sorted(row["position"] for row in rows) == [32, 32, 64, 96]
    assert {row["fingerprint"] for row in rows} == {FINGERPRINT, OTHER_FINGERPRINT}
    damage(store, chain("path", 3)[0].header.key, 100)
    assert "does not match its checksum" in run(store, "ls")


def test_stat(store: FileStore) -> None:
    output = run(store, "stat")
    assert FINGERPRINT[:16] in output and "3 history" in output
    document = json.loads(run(store, "stat", "--json"))
    assert document["bytes"] == store.used_bytes and document["segments"] == 4
    ours = next(row for row in document["models"] if row["fingerprint"] == FINGERPRINT)
    assert (ours["segments"], ours["tokens"], ours["longest_prefix"]) == (3, 96, 96)
    assert ours["bytes"] == 3 * disk_bytes(512 + 3007)
    store.remove(keys(chain("path", 1)), deadline_seconds=SECONDS)
    assert "2 segments build on ones that are gone" in run(store, "stat")


@pytest.mark.parametrize("command", ["ls", "stat"])
def test_tables_are_whole_at_80_columns(
    store: FileStore, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers as large as a big folder has them; only hashes may end in dots."""
    monkeypatch.setattr("milepost.cli.cache.format_size", lambda num_bytes: "1023.9 GiB")
    monkeypatch.setattr("milepost.cli.cache._age", lambda seconds: "59 m")
    monkeypatch.setattr("milepost.cli.cache._tokens", lambda start, position: "1,048,544-1,048,576")
    result = runner.invoke(app, [command, str(store._folder.root)], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line for line in lines if line.startswith("model"))
    columns = {
        "ls": ["model", "segment", "after", "tokens", "size", "reason", "last used"],
        "stat": ["model", "segments", "size", "tokens", "longest", "damaged", "last used", "reasons"],
    }[command]
    assert re.split(r"  +", header.strip()) == columns
    cells = [line for line in lines if re.match("[0-9a-f]{5}", line)]
    assert len(cells) == {"ls": 4, "stat": 2}[command]
    for line in cells:
        assert "1023.9 GiB" in line and "59 m" in line
        assert command == "stat" or "1,048,544-1,048,576" in line
    assert "3 history" in result.output if command == "stat" else result.output.count("history") == 4


def test_verify_reads_every_byte(store: FileStore) -> None:
    assert "4 segments are sound, 0 corrupt" in run(store, "verify")
    path = chain("path", 3)
    damage(store, path[1].header.key, 600)
    damage(store, path[2].header.key, 8)
    target = store.path_of(segment("elsewhere").header.key)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(store.path_of(path[0].header.key).read_bytes())
    output = run(store, "verify", status=1)
    assert "2 segments are sound, 2 corrupt, 1 of another format version" in output
    assert "payload does not match" in output and "belongs at" in output
    assert "removed" in run(store, "verify", "--remove")
    assert not target.exists()
    # Another version's may be of use to another version.
    assert "2 segments are sound, 0 corrupt, 1 of another" in run(store, "verify")


def test_gc_removes_what_is_of_no_use(store: FileStore) -> None:
    path = chain("path", 3)
    assert "0 of 4 segments removed" in run(store, "gc")
    damage(store, path[0].header.key, 100)
    assert "3 of 4 segments would go" in run(store, "gc", "--dry-run")
    assert store.path_of(path[2].header.key).exists()
    assert "3 of 4 segments removed" in run(store, "gc")
    assert not store.path_of(path[2].header.key).exists()
    # The store beside it goes on, and its account is right.
    assert store.save(path, deadline_seconds=SECONDS) == [True] * 3
    assert store.used_bytes == 3 * disk_bytes(512 + 3007) + disk_bytes(512 + 27007)


def test_gc_keeps_the_most_recent(store: FileStore) -> None:
    store.load(keys(chain("path", 3)), deadline_seconds=SECONDS)
    output = run(store, "gc", "--keep", f"{2 * disk_bytes(512 + 3007)}")
    assert "2 of 4 segments removed" in output
    assert found(store, chain("path", 3)) == [True, True, False]


def test_gc_by_age_and_by_model(store: FileStore) -> None:
    path = chain("path", 3)
    old = time.time_ns() - 3600 * 10**9
    os.utime(store.path_of(path[2].header.key), ns=(old, old))
    assert "1 of 4 segments removed" in run(store, "gc", "--unused-for", "30m")
    assert found(store, path) == [True, True, False]
    assert "0 of 3" in run(store, "gc", "--unused-for", "30m")
    # An old parent takes its children along.
    os.utime(store.path_of(path[0].header.key), ns=(old, old))
    assert "2 of 3 segments removed" in run(store, "gc", "--unused-for", "30m")
    assert "1 of 1 segments removed" in run(store, "gc", "--fingerprint", OTHER_FINGERPRINT[:10])
    assert "0 of 0" in run(store, "gc")


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("x")
    for command in ("ls", "stat", "verify", "gc"):
        result = runner.invoke(app, [command, str(tmp_path)])
        assert isinstance(result.exception, MilepostError)
        assert "holds no stored segments" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("options", [("--keep", "many"), ("--unused-for", "long"), ("--unused-for", "7")])
def test_wrong_options_are_named(store: FileStore, options: tuple[str, str]) -> None:
    result = runner.invoke(app, ["gc", str(store._folder.root), *options])
    assert isinstance(result.exception, MilepostError) and options[0] in str(result.exception)
