"""The plain-file tier: whose folder it uses, what a crash leaves, and several processes in one folder."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.stores.segments import BROKEN, IDENTITY, SECONDS, chain, keys, payload, segment

from milepost.errors import StoreError
from milepost.stores import file as file_module
from milepost.stores import folder as folder_module
from milepost.stores import outcomes as oc
from milepost.stores.file import FileStore
from milepost.stores.folder import LEDGER_NAME, disk_bytes
from milepost.stores.inspection import read_objects, scan

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20


def open_store(root: Path, budget_bytes: int = 64 * MIB, **options: object) -> FileStore:
    return FileStore(root, IDENTITY, budget_bytes=budget_bytes, **options)


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != LEDGER_NAME]


def bytes_below(root: Path) -> int:
    """What the files take at one moment: with the lock held, or a walk would count a file that goes and
    the one that takes its room."""
    fd = os.open(root / LEDGER_NAME, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        total = 0
        for path in files_below(root):
            total += disk_bytes(path.stat().st_size)
        return total
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the folder


def test_only_the_owner_reads_what_is_stored(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        root = tmp_path / "a" / "store"
        open_store(root).save(chain("private", 2), deadline_seconds=SECONDS)
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(StoreError, match="symbolic link"):
        open_store(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="can be written by others, .* give a folder of your own"):
        open_store(tmp_path / "open")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder"):
        open_store(tmp_path / "file")
    (target / "thesis.txt").write_text("do not evict me")
    with pytest.raises(StoreError, match="holds other files"):
        open_store(target)
    with pytest.raises(StoreError, match=str(tmp_path)):
        open_store(tmp_path / "file" / "below")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        open_store(tmp_path / "store")


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="bytes must be positive"):
        open_store(tmp_path / "store", budget_bytes=0)
    with pytest.raises(StoreError, match="always, rename, never"):
        open_store(tmp_path / "store", fsync="sometimes")
    assert not (tmp_path / "store").exists()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    segments = chain("removed", 2)
    store.save(segments, deadline_seconds=SECONDS)
    subprocess.run(["rm", "-r", str(tmp_path / "store")], check=True)
    assert store.load(keys(segments), deadline_seconds=SECONDS) == [None, None]
    assert store.save(segments, deadline_seconds=SECONDS) == [True, True]
    assert store.used_bytes == sum(disk_bytes(path.stat().st_size) for path in files_below(tmp_path))


def test_a_save_while_the_folder_is_being_removed_does_not_end_the_store(tmp_path: Path) -> None:
    """`rm -r` may take the ledger before a folder: what is left is refused, as long as it is there."""
    store = open_store(tmp_path / "store")
    segments = chain("removing", 3)
    assert store.save(segments[:1], deadline_seconds=SECONDS) == [True]
    (tmp_path / "store" / LEDGER_NAME).unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="holds other files"):
            store.save(segments[1:], deadline_seconds=SECONDS)
    shutil.rmtree(tmp_path / "store")
    assert store.save(segments, deadline_seconds=SECONDS) == [True, True, True]
    assert None not in store.load(keys(segments), deadline_seconds=SECONDS)


# ---------------------------------------------------------------- restarts and crashes


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    segments = [segment(("restart", index), record_bytes=30_000) for index in range(4)]
    budget = 4 * disk_bytes(512 + segments[0].header.payload_bytes)
    first = open_store(tmp_path / "store", budget)
    first.save(segments, deadline_seconds=SECONDS)
    first.load([segments[0].header.key], deadline_seconds=SECONDS)
    first.close()
    second = open_store(tmp_path / "store", budget)
    second.save([segment("one more", record_bytes=30_000)], deadline_seconds=SECONDS)
    found = second.lookup(keys(segments), deadline_seconds=SECONDS)
    assert [bool(each) for each in found] == [True, False, True, True]


def test_a_path_keeps_its_order_over_a_restart(tmp_path: Path) -> None:
    """Parents are known again from the files alone."""
    path = chain("path", 3, record_bytes=30_000)
    other = segment("other", record_bytes=30_000)
    budget = 4 * disk_bytes(512 + path[0].header.payload_bytes)
    open_store(tmp_path / "store", budget).save([*path, other], deadline_seconds=SECONDS)
    store = open_store(tmp_path / "store", budget)
    store.load([path[2].header.key], deadline_seconds=SECONDS)
    store.save([segment("new", record_bytes=30_000)], deadline_seconds=SECONDS)
    assert all(store.lookup(keys(path), deadline_seconds=SECONDS))
    assert store.lookup([other.header.key], deadline_seconds=SECONDS) == [None]


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segments = [segment(("shrink", index), record_bytes=30_000) for index in range(6)]
    open_store(tmp_path / "store").save(segments, deadline_seconds=SECONDS)
    budget = 2 * disk_bytes(512 + segments[0].header.payload_bytes)
    store = open_store(tmp_path / "store", budget)
    assert bytes_below(tmp_path / "store") <= budget
    found = store.lookup(keys(segments), deadline_seconds=SECONDS)
    assert [bool(each) for each in found] == [False] * 4 + [True] * 2
    assert "were given up, since the budget is" in caplog.text


def test_the_models_in_a_folder_share_its_budget(tmp_path: Path) -> None:
    from milepost.stores.segment_format import Identity

    other = Identity("ef" * 16)
    theirs = [segment(("theirs", index), record_bytes=30_000, identity=other) for index in range(3)]
    budget = 3 * disk_bytes(512 + theirs[0].header.payload_bytes)
    FileStore(tmp_path / "store", other, budget_bytes=budget).save(theirs, deadline_seconds=SECONDS)
    store = open_store(tmp_path / "store", budget)
    ours = chain("ours", 2, record_bytes=30_000)
    assert store.save(ours, deadline_seconds=SECONDS) == [True, True]
    assert bytes_below(tmp_path / "store") <= budget
    assert len(files_below(tmp_path / "store")) == 3


def test_a_torn_ledger_is_made_anew_from_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.save(chain("ledger", 3), deadline_seconds=SECONDS)
    used_bytes = store.used_bytes
    for content in (b"", b"x", b"y" * 100):
        (tmp_path / "store" / LEDGER_NAME).write_bytes(content)
        store.save([segment("present")], deadline_seconds=SECONDS)
        store.remove([segment("present").header.key], deadline_seconds=SECONDS)
        assert store.used_bytes == used_bytes


WRITER = """
import sys
from pathlib import Path
from tests.stores.segments import IDENTITY, chain
from milepost.stores.file import FileStore
store = FileStore(Path(sys.argv[1]), IDENTITY, budget_bytes=int(sys.argv[2]))
print("ready", flush=True)
for index in range(100000):
    store.save(chain((sys.argv[3], index), 4, record_bytes=60_000), deadline_seconds=20.0)
    print(index, flush=True)
"""


def start_writer(root: Path, budget_bytes: int, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), str(budget_bytes), name]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.parametrize("num_rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_nothing_half_written(tmp_path: Path, num_rounds: int) -> None:
    """Killed in the middle of batches: whole objects or none, within the budget, leftovers swept, and what
    had its name at the kill is there after the restart."""
    root, budget_bytes = tmp_path / "store", 3 * MIB
    source = random.Random(7)
    for round_number in range(num_rounds):
        writer = start_writer(root, budget_bytes, f"round {round_number}")
        time.sleep(source.uniform(0.01, 0.12))
        writer.kill()
        writer.wait()
        output = writer.stdout.read() if writer.stdout else ""
        assert bytes_below(root) <= budget_bytes
        durable = {path for path in files_below(root) if path.suffix != ".tmp"}
        store = open_store(root, budget_bytes)
        assert set(files_below(root)) == durable
        assert not list(root.rglob("*.tmp"))
        assert store.used_bytes == sum(disk_bytes(path.stat().st_size) for path in files_below(root))
        num_saved = len(output.splitlines())
        for index in range(max(0, num_saved - 3), num_saved):
            segments = chain((f"round {round_number}", index), 4, record_bytes=60_000)
            loaded = store.load(keys(segments), deadline_seconds=SECONDS)
            assert [payload(each) for each in loaded] == [payload(each) for each in segments]
        assert not any(outcome == oc.CORRUPT for _, outcome in store.outcomes.snapshot())
        store.close()


def test_a_living_writer_keeps_its_unfinished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    started, go_on = threading.Event(), threading.Event()

    def slow(fd: int, piece: memoryview, check: object, chunk_bytes: int = 0) -> None:
        started.set()
        assert go_on.wait(10)
        os.write(fd, piece)

    monkeypatch.setattr(file_module, "write_all", slow)
    one = segment("slow")
    results: list[list[bool]] = []
    thread = threading.Thread(target=lambda: results.append(store.save([one], deadline_seconds=SECONDS)))
    thread.start()
    assert started.wait(10)
    other = open_store(tmp_path / "store")
    assert len(list((tmp_path / "store").rglob("*.tmp"))) == 1
    # Its bytes are counted before they are written.
    assert other.used_bytes == disk_bytes(512 + one.header.payload_bytes)
    go_on.set()
    thread.join()
    assert results == [[True]]
    assert payload(other.load([one.header.key], deadline_seconds=SECONDS)[0]) == payload(one)


# ---------------------------------------------------------------- several processes


def test_processes_share_one_budget(tmp_path: Path) -> None:
    """Two writers and this reader: the bound holds whenever somebody looks, and all reads are whole."""
    root, budget_bytes = tmp_path / "store", 4 * MIB
    writers = {name: start_writer(root, budget_bytes, name) for name in ("a", "b")}
    newest: dict[str, int] = {}

    def follow(name: str) -> None:
        for line in writers[name].stdout or ():
            newest[name] = int(line)

    followers = [threading.Thread(target=follow, args=(name,)) for name in writers]
    for follower in followers:
        follower.start()
    reader = open_store(root, budget_bytes)
    num_hits = 0
    end = time.monotonic() + 30
    while min(newest.get(name, 0) for name in writers) < 12 or not num_hits:
        assert time.monotonic() < end
        assert bytes_below(root) <= budget_bytes
        for name, index in tuple(newest.items()):
            wanted = chain((name, index), 4, record_bytes=60_000)
            found = reader.load(keys(wanted), deadline_seconds=SECONDS)
            for stored, each in zip(found, wanted, strict=True):
                assert not stored or payload(stored) == payload(each)
            num_hits += sum(stored is not None for stored in found)
    for writer in writers.values():
        assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    for follower in followers:
        follower.join()
    assert not any(outcome == oc.CORRUPT for _, outcome in reader.outcomes.snapshot())
    survivor = open_store(root, budget_bytes)
    assert survivor.used_bytes == sum(disk_bytes(path.stat().st_size) for path in files_below(root))


def test_use_by_another_process_counts(tmp_path: Path) -> None:
    """Recency is in the files: an evictor asks them before it takes one."""
    segments = [segment(("both", index), record_bytes=30_000) for index in range(3)]
    budget = 3 * disk_bytes(512 + segments[0].header.payload_bytes)
    first, second = open_store(tmp_path / "store", budget), open_store(tmp_path / "store", budget)
    first.save(segments, deadline_seconds=SECONDS)
    second.load([segments[0].header.key], deadline_seconds=SECONDS)
    first.save([segment("more", record_bytes=30_000)], deadline_seconds=SECONDS)
    found = first.lookup(keys(segments), deadline_seconds=SECONDS)
    assert [bool(each) for each in found] == [True, False, True]


def test_what_others_wrote_is_found_when_room_is_needed(tmp_path: Path) -> None:
    theirs = [segment(("theirs", index), record_bytes=30_000) for index in range(3)]
    budget = 3 * disk_bytes(512 + theirs[0].header.payload_bytes)
    first, second = open_store(tmp_path / "store", budget), open_store(tmp_path / "store", budget)
    second.save(theirs, deadline_seconds=SECONDS)
    ours = segment("ours", record_bytes=30_000)
    assert first.save([ours], deadline_seconds=SECONDS) == [True]
    assert bytes_below(tmp_path / "store") <= budget
    found = second.lookup(keys([*theirs, ours]), deadline_seconds=SECONDS)
    assert [bool(each) for each in found] == [False, True, True, True]


def test_a_folder_that_others_changed_much_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every change: reading it takes time."""
    first, second = open_store(tmp_path / "store"), open_store(tmp_path / "store")
    scans: list[int] = []
    real = first._folder.scan
    monkeypatch.setattr(first._folder, "scan", lambda: (scans.append(1), real())[1])
    second.save([segment(("few", index), record_bytes=10) for index in range(30)], deadline_seconds=SECONDS)
    first.save([segment("mine", record_bytes=10)], deadline_seconds=SECONDS)
    assert scans == [] and len(first._index) == 1
    second.save([segment(("more", index), record_bytes=10) for index in range(70)], deadline_seconds=SECONDS)
    first.save([segment("mine too", record_bytes=10)], deadline_seconds=SECONDS)
    assert scans == [1] and len(first._index) == 102
    # A large folder is read less often: after an eighth of it changed.
    for index in range(10):
        second.save(chain((index,), 100, record_bytes=10), deadline_seconds=SECONDS)
    first.save([segment("again", record_bytes=10)], deadline_seconds=SECONDS)
    assert scans == [1, 1] and len(first._index) == 1103
    second.save([segment(("some", index), record_bytes=10) for index in range(70)], deadline_seconds=SECONDS)
    first.save([segment("and again", record_bytes=10)], deadline_seconds=SECONDS)
    assert scans == [1, 1]


def test_a_parent_of_another_process_is_protected(tmp_path: Path) -> None:
    parent, child = chain("split", 2, record_bytes=30_000)
    budget = 2 * disk_bytes(512 + parent.header.payload_bytes)
    first, second = open_store(tmp_path / "store", budget), open_store(tmp_path / "store", budget)
    second.save([parent, segment("other", record_bytes=30_000)], deadline_seconds=SECONDS)
    assert first.save([child], deadline_seconds=SECONDS) == [True]
    assert all(first.lookup(keys([parent, child]), deadline_seconds=SECONDS))


def test_an_object_that_is_evicted_while_it_is_read_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = segment("read", record_bytes=3 << 20)
    budget = disk_bytes(512 + one.header.payload_bytes)
    store, other = open_store(tmp_path / "store", budget), open_store(tmp_path / "store", budget)
    store.save([one], deadline_seconds=SECONDS)
    real = os.preadv
    evicted: list[bool] = []

    def slowly(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset and not evicted:
            evicted.extend(other.save([segment("next", record_bytes=3 << 20)], deadline_seconds=SECONDS))
        return real(fd, buffers, offset)

    monkeypatch.setattr(folder_module.os, "preadv", slowly)
    (loaded,) = store.load([one.header.key], deadline_seconds=SECONDS)
    assert evicted == [True] and not store.path_of(one.header.key).exists()
    assert payload(loaded) == payload(one)


def test_readers_are_not_blocked_and_writers_give_up_in_time(tmp_path: Path) -> None:
    """Another process stands still with the lock."""
    store = open_store(tmp_path / "store")
    segments = chain("lock", 3)
    store.save(segments[:2], deadline_seconds=SECONDS)
    fd = os.open(tmp_path / "store" / LEDGER_NAME, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert all(store.lookup(keys(segments[:2]), deadline_seconds=SECONDS))
        assert all(store.load(keys(segments[:2]), deadline_seconds=SECONDS))
        begin = time.monotonic()
        assert store.save(segments[2:], deadline_seconds=0.1) == [False]
        assert time.monotonic() - begin < 5
        assert store.outcomes.get(oc.SAVE, oc.TIMEOUT) == 1
        assert store.remove(keys(segments), deadline_seconds=0.05) == 0
    finally:
        os.close(fd)
    assert store.save(segments[2:], deadline_seconds=SECONDS) == [True]


# ---------------------------------------------------------------- faults of the disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "ftruncate", "rename", "mkdir"])
def test_a_full_disk_saves_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    store = open_store(tmp_path / "store")
    kept = segment("kept")
    store.save([kept], deadline_seconds=SECONDS)
    used_bytes = store.used_bytes

    def fails(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, call, fails)
        assert store.save(chain("unlucky", 2), deadline_seconds=SECONDS) == [False, False]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == 2
    assert caplog.messages == [f"file: {os.strerror(code)}: {tmp_path / 'store'}"]
    assert store.used_bytes == used_bytes
    assert len(files_below(tmp_path)) == 1
    assert store.save(chain("unlucky", 2), deadline_seconds=SECONDS) == [True, True]


FULL_DISK = """
import sys
from pathlib import Path
from milepost.stores import outcomes as oc
from milepost.stores.file import FileStore
from tests.stores.segments import IDENTITY, chain, keys, payload
store = FileStore(Path(sys.argv[1]) / "store", IDENTITY, budget_bytes=1 << 30)
segments = chain("full", 12, record_bytes=60_000)
saved = store.save(segments, deadline_seconds=20.0)
loaded = store.load(keys(segments), deadline_seconds=20.0)
assert [each is not None for each in loaded] == saved and True in saved and False in saved
assert all(not each or payload(each) == payload(want) for each, want in zip(loaded, segments))
assert store.outcomes.get(oc.SAVE, oc.FULL) == saved.count(False)
assert not list(Path(sys.argv[1]).rglob("*.tmp"))
store.remove(keys(segments), deadline_seconds=20.0)
assert store.save(segments[:3], deadline_seconds=20.0) == [True] * 3
"""


def test_a_small_disk_that_really_is_full(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    for flags in ("-m", "-rm"):
        isolate = ["unshare", flags, "bash", "-c", mount, str(tmp_path)]
        try:
            if subprocess.run([*isolate, "true"], capture_output=True, timeout=20).returncode == 0:
                break
        except (OSError, subprocess.TimeoutExpired):
            continue
    else:
        pytest.skip("this system lets nobody mount")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [*isolate, sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_lock_that_the_file_system_does_not_have_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(StoreError, match="No locks available"):
        open_store(tmp_path / "store")


def test_an_unreadable_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    one = segment("unreadable")
    store.save([one], deadline_seconds=SECONDS)

    def fails(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "preadv", fails)
        assert store.load([one.header.key], deadline_seconds=SECONDS) == [BROKEN]
        patch.setattr(file_module.os, "pread", fails)
        assert store.lookup([one.header.key], deadline_seconds=SECONDS) == [BROKEN]
    assert store.outcomes.get(oc.LOAD, oc.ERROR) == 1 and store.outcomes.get(oc.LOOKUP, oc.ERROR) == 1
    assert payload(store.load([one.header.key], deadline_seconds=SECONDS)[0]) == payload(one)


def put_in_place(path: Path, what: str, target: Path) -> None:
    """Something that is not a file of ours, under a name of ours."""
    if what == "link":
        path.symlink_to(target)
    elif what == "link to nothing":
        path.symlink_to(target.with_name("nothing"))
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(path.parent, os.O_RDONLY)  # a path may be too long for it
            try:
                bound.bind(f"/proc/self/fd/{here}/{path.name[-40:]}")
            finally:
                os.close(here)
        (path.parent / path.name[-40:]).rename(path)
    else:
        path.mkdir()


NO_FILES = ["link", "link to nothing", "pipe", "socket", "folder"]


@pytest.mark.parametrize("what", NO_FILES)
def test_something_else_in_the_place_of_an_object_is_a_miss_and_is_not_opened(
    tmp_path: Path, what: str
) -> None:
    store = open_store(tmp_path / "store")
    one = segment("place")
    store.save([one], deadline_seconds=SECONDS)
    used = store.used_bytes
    path = store.path_of(one.header.key)
    path.rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    put_in_place(path, what, tmp_path / "elsewhere")
    assert store.lookup([one.header.key], deadline_seconds=SECONDS) == [None]
    assert store.load([one.header.key], deadline_seconds=SECONDS) == [None]
    # A link, a pipe or a socket is replaced by the next save; a folder is left to whoever made it.
    saved = what != "folder"
    assert store.save([one], deadline_seconds=SECONDS) == [saved]
    assert store.lookup([one.header.key], deadline_seconds=SECONDS) == [one.header if saved else None]
    assert (tmp_path / "elsewhere").read_bytes() == before
    store.close()
    again = open_store(tmp_path / "store")
    assert again.used_bytes == (used if saved else 0)
    assert list(read_objects(again._folder, scan(again._folder), whole=True))[:1] != [] or not saved


@pytest.mark.parametrize("what", NO_FILES)
def test_something_else_under_a_temporary_name_is_ignored(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "store")
    segments = chain("temporary", 2)
    store.save(segments, deadline_seconds=SECONDS)
    used = store.used_bytes
    store.close()
    path = store.path_of(segments[0].header.key)
    other = path.with_name(f".{path.name}.ab.tmp")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    put_in_place(other, what, tmp_path / "elsewhere")
    again = open_store(tmp_path / "store")
    assert all(again.load(keys(segments), deadline_seconds=SECONDS))
    assert again.used_bytes == used
    assert os.path.lexists(other) and (tmp_path / "elsewhere").read_bytes() == b"theirs"
    scan(again._folder)
    assert [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()] == [
        f"{other} is ignored: it is not a plain file"
    ]


@pytest.mark.parametrize("what", NO_FILES)
def test_something_else_in_the_place_of_the_ledger_is_refused(tmp_path: Path, what: str) -> None:
    open_store(tmp_path / "store").close()
    ledger = tmp_path / "store" / LEDGER_NAME
    ledger.rename(tmp_path / "elsewhere")
    put_in_place(ledger, what, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is not a plain file"):
        open_store(tmp_path / "store")


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite"])
def test_a_disk_that_is_full_at_the_start_saves_nothing_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """As one that fills up later: a cache is no reason not to start."""
    one = segment("full")
    real_open = os.open
    with monkeypatch.context() as patch:
        if call == "open":

            def open_full(path: object, flags: int, *mode: int) -> int:
                return full_disk() if flags & os.O_CREAT else real_open(path, flags, *mode)  # type: ignore

            patch.setattr(folder_module.os, "open", open_full)
        else:
            patch.setattr(folder_module.os, call, full_disk)
        store = open_store(tmp_path / "store")
        assert any("room" in record.getMessage() for record in caplog.records)
        assert store.lookup([one.header.key], deadline_seconds=SECONDS) == [None]
        assert store.save([one], deadline_seconds=SECONDS) == [False]
        assert store.outcomes.get(oc.SAVE, oc.FULL) == 1 and not store.outcomes.get(oc.SAVE, oc.ERROR)
    assert store.save([one], deadline_seconds=SECONDS) == [True]
    assert payload(store.load([one.header.key], deadline_seconds=SECONDS)[0]) == payload(one)
    store.close()
    assert open_store(tmp_path / "store").used_bytes == store._folder.total_bytes


@pytest.mark.parametrize(("policy", "wanted"), [("never", (0, 0)), ("rename", (1, 0)), ("always", (1, 1))])
def test_fsync_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, wanted: tuple[int, int]
) -> None:
    store = open_store(tmp_path / "store", fsync=policy)
    calls: list[str] = []
    for name in ("fdatasync", "fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    assert store.save([segment("synced")], deadline_seconds=SECONDS) == [True]
    assert (calls.count("fdatasync"), calls.count("fsync")) == wanted
    assert calls == ["fdatasync"] * wanted[0] + ["rename"] + ["fsync"] * wanted[1]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    store = open_store(tmp_path / "store", 300_000)
    for index in range(5):
        segments = chain(("open", index), 4, record_bytes=30_000)
        store.save(segments, deadline_seconds=SECONDS)
        store.lookup(keys(segments), deadline_seconds=SECONDS)
        store.load(keys(segments), deadline_seconds=SECONDS)
        store.path_of(segments[0].header.key).write_bytes(b"torn")
        store.load(keys(segments), deadline_seconds=SECONDS)
    store.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_made_says_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match=r"taken/store cannot be used as a folder: .*\(.*taken\); name one"):
        open_store(tmp_path / "taken" / "store")
