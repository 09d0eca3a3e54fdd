"""What only a Mooncake pool can do to us. Run by test_mooncake.py, in a network of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.segments import IDENTITY, LATE, SECONDS, chain, keys, payload, segment
from tests.stores.services import Server, free_port, start_mooncake

from milepost.errors import StoreError
from milepost.stores import mooncake_client
from milepost.stores import outcomes as oc
from milepost.stores.address import open_stores, parse_address
from milepost.stores.guard import GuardedStore, GuardOptions
from milepost.stores.mooncake import MooncakeStore
from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions
from milepost.stores.port import StoredSegment
from milepost.stores.tiers import Tiers

pytestmark = pytest.mark.service

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20

OWNER = """
import os, sys
from milepost.stores.mooncake import MooncakeStore
from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions
from tests.stores.segments import IDENTITY, chain
master, name, ssd_path, host = sys.argv[1:5]
options = MooncakeOptions(
    master, 64 << 20, buffer_bytes=32 << 20, ssd_path=ssd_path, ssd_bytes=1 << 30, host=host
)
store = MooncakeStore(MooncakeConnection(options), IDENTITY)
if name:
    print(sum(store.save(chain(name, 4, record_bytes=100_000), deadline_seconds=20.0)), flush=True)
else:
    print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


def start_owner(server: Server, name: str, ssd_path: str = "", host: str = "") -> subprocess.Popen[str]:
    """Another replica; it has saved a path of four when this returns."""
    command = [sys.executable, "-c", OWNER, f"127.0.0.1:{server.port}", name, ssd_path, host]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    owner = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None and owner.stdout.readline() == ("4\n" if name else "ready\n")
    return owner


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def connect(server: Server, segment_bytes: int = 64 * MIB, **options: object) -> MooncakeConnection:
    address = f"127.0.0.1:{server.port}"
    return MooncakeConnection(
        MooncakeOptions(address, segment_bytes, **{"buffer_bytes": 32 * MIB, **options})
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A master that a test may hurt."""
    made = start_mooncake(tmp_path, "--client_ttl=3")
    yield made
    made.kill()


def test_a_replica_reads_what_another_computed(server: Server) -> None:
    owner = start_owner(server, "shared")
    address = parse_address(f"mooncake://127.0.0.1:{server.port}?bytes=0&buffer=32MiB")
    (store,) = open_stores([address], IDENTITY)
    wanted = chain("shared", 4, record_bytes=100_000)
    assert store.lookup(keys(wanted), deadline_seconds=SECONDS) == [each.header for each in wanted]
    loaded = store.load(keys(wanted), deadline_seconds=SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in wanted]
    kill(owner)


def test_the_death_of_an_owner_is_a_miss(server: Server) -> None:
    """Its objects stay listed for a while and cannot be read."""
    owner = start_owner(server, "orphaned")
    store = GuardedStore(MooncakeStore(connect(server), IDENTITY))
    wanted = chain("orphaned", 4, record_bytes=100_000)
    assert all(store.load(keys(wanted), deadline_seconds=SECONDS))
    kill(owner)
    begin = time.monotonic()
    while time.monotonic() < begin + 6:
        loaded = store.load(keys(wanted), deadline_seconds=2.0)
        for each, want in zip(loaded, wanted, strict=True):
            assert not each or payload(each) == payload(want)
    assert not any(loaded)
    # They are computed again, and ours now, once the store is no longer left alone.
    end = time.monotonic() + 30
    while store.save(wanted, deadline_seconds=SECONDS) != [True] * 4:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert [payload(each) for each in store.load(keys(wanted), deadline_seconds=SECONDS)] == [
        payload(each) for each in wanted
    ]
    store.close()


def test_a_master_that_dies_is_found_again(server: Server) -> None:
    options = GuardOptions(failures_to_open=2, open_seconds=0.1, max_open_seconds=0.5)
    store = GuardedStore(MooncakeStore(connect(server), IDENTITY), options)
    segments = chain("master", 3)
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 3
    server.kill()
    for _ in range(5):
        assert not any(store.load(keys(segments), deadline_seconds=1.0))
        assert store.save(segments, deadline_seconds=1.0) == [False] * 3
    assert store.breaker.is_open
    server.start()
    end = time.monotonic() + 30
    while store.save(segments, deadline_seconds=1.0) != [True] * 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]
    store.close()


def test_calls_to_a_master_that_died_end_at_once(server: Server) -> None:
    """Mooncake itself takes more than four seconds for each."""
    store = MooncakeStore(connect(server), IDENTITY)
    segments = chain("gone", 2)
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 2
    server.kill()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(StoreError, match="is gone"):
            store.lookup(keys(segments), deadline_seconds=SECONDS)
        with pytest.raises(StoreError, match="is gone"):
            store.load(keys(segments), deadline_seconds=SECONDS)
        with pytest.raises(StoreError, match="is gone"):
            store.save(segments, deadline_seconds=SECONDS)
        with pytest.raises(StoreError, match="is gone"):
            store.remove(keys(segments), deadline_seconds=SECONDS)
    assert time.monotonic() - begin < 2
    server.start()
    store.close()


def test_a_hanging_master_costs_the_deadline_and_stops_no_other_thread(server: Server) -> None:
    store = GuardedStore(MooncakeStore(connect(server), IDENTITY))
    segments = chain("hanging", 2)
    store.save(segments, deadline_seconds=SECONDS)
    pauses: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not stop.wait(0.005):
            pauses.append(time.monotonic() - last)
            last = time.monotonic()

    ticker = threading.Thread(target=tick)
    ticker.start()
    server.process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        assert store.lookup(keys(segments), deadline_seconds=0.3) == [LATE, LATE]
        assert store.load(keys(segments), deadline_seconds=0.3) == [LATE, LATE]
        assert store.save(segments, deadline_seconds=0.3) == [False, False]
        assert time.monotonic() - begin < 3
        assert store.outcomes.get(oc.LOOKUP, oc.TIMEOUT) == 2
    finally:
        server.process.send_signal(signal.SIGCONT)
        stop.set()
        ticker.join()
    assert max(pauses) < 1.0
    store.close()


def test_without_a_master_the_start_is_quick_and_it_is_found_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.kill()
    monkeypatch.setattr(mooncake_client, "_RECONNECT_SECONDS", 0.2)
    begin = time.monotonic()
    connection = connect(server)
    assert time.monotonic() - begin < 5
    store = MooncakeStore(connection, IDENTITY)
    with pytest.raises(StoreError, match="no Mooncake master"):
        store.lookup(keys(chain("none", 1)), deadline_seconds=SECONDS)
    server.start()
    segments = chain("found", 2)
    end = time.monotonic() + 30
    while True:
        try:
            assert store.save(segments, deadline_seconds=SECONDS) == [True, True]
            break
        except StoreError:
            assert time.monotonic() < end
            time.sleep(0.1)
    store.close()


def test_a_full_pool_saves_less_and_breaks_nothing(server: Server) -> None:
    store = MooncakeStore(connect(server, 16 * MIB), IDENTITY)
    segments = [segment(("full", index), record_bytes=MIB // 3) for index in range(60)]
    saved: list[bool] = []
    for start in range(0, 60, 6):
        saved += store.save(segments[start : start + 6], deadline_seconds=SECONDS)
    assert saved.count(True) >= 8
    assert store.outcomes.get(oc.SAVE, oc.FULL) == saved.count(False) > 0
    assert not store.outcomes.get(oc.SAVE, oc.ERROR)
    num_read = 0
    for each in segments:
        (loaded,) = store.load([each.header.key], deadline_seconds=SECONDS)
        assert not loaded or payload(loaded) == payload(each)
        num_read += bool(loaded)
    assert 8 <= num_read <= saved.count(True)
    store.close()


def test_what_is_larger_than_the_buffer_is_not_saved(server: Server) -> None:
    store = MooncakeStore(connect(server, buffer_bytes=8 * MIB), IDENTITY)
    small, large = segment("small"), segment("large", record_bytes=2 * MIB)
    assert store.save([large, small], deadline_seconds=SECONDS) == [False, True]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == 1
    reader = MooncakeStore(connect(server, 0, buffer_bytes=32 * MIB), IDENTITY)
    assert reader.save([large], deadline_seconds=SECONDS) == [True]
    assert store.load(keys([large, small]), deadline_seconds=SECONDS)[0] is None
    assert payload(reader.load(keys([large]), deadline_seconds=SECONDS)[0]) == payload(large)
    store.close()
    reader.close()


def test_more_than_the_buffer_goes_in_groups(server: Server) -> None:
    store = MooncakeStore(connect(server, buffer_bytes=4 * MIB), IDENTITY)
    segments = chain("groups", 10, record_bytes=MIB // 5)
    assert store.save(segments, deadline_seconds=SECONDS) == [True] * 10
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]
    store.close()


def test_a_tier_among_others(server: Server, tmp_path: Path) -> None:
    """Memory in front of the pool: found there, promoted, and served without it afterwards."""
    from milepost.stores.memory import MemoryStore

    owner = start_owner(server, "promoted")
    pool = MooncakeStore(connect(server, 0), IDENTITY)
    tiers = Tiers([MemoryStore(IDENTITY, budget_bytes=64 * MIB), pool])
    tiers.forbid_thread(threading.current_thread())
    wanted = chain("promoted", 4, record_bytes=100_000)
    found = tiers.find(keys(wanted), deadline_seconds=SECONDS).result(SECONDS)
    assert [each.tier for each in found] == [1] * 4
    assert all(tiers.load(found, deadline_seconds=SECONDS).result(SECONDS))
    assert tiers.flush(SECONDS)
    kill(owner)
    server.kill()
    found = tiers.find(keys(wanted), deadline_seconds=SECONDS).result(SECONDS)
    assert [each.tier for each in found] == [0] * 4
    loaded = tiers.load(found, deadline_seconds=SECONDS).result(SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in wanted]
    server.start()
    tiers.close()


def test_the_disk_of_a_replica_survives_it_and_the_master(tmp_path: Path) -> None:
    server = start_mooncake(tmp_path, "--client_ttl=3", "--enable_offload=true")
    host, ssd_path = f"127.0.0.1:{free_port()}", str(tmp_path / "ssd")
    owner = start_owner(server, "durable", ssd_path, host)
    wanted = chain("durable", 4, record_bytes=100_000)
    end = time.monotonic() + 30
    while sum(path.stat().st_size for path in Path(ssd_path).rglob("*") if path.is_file()) < 1_200_000:
        assert time.monotonic() < end, "nothing reached the disk"
        time.sleep(0.2)
    kill(owner)
    server.kill()
    server.start()
    owner = start_owner(server, "", ssd_path, host)
    reader = MooncakeStore(connect(server, 0), IDENTITY)
    wait_for(reader, wanted, [True] * 4)
    assert reader.lookup([*keys(wanted), keys(chain("never", 1))[0]], deadline_seconds=SECONDS) == [
        *(each.header for each in wanted),
        None,
    ]
    # What the disk changed is found by our own checksum.
    kill(owner)
    server.kill()
    needle = bytes(wanted[1].payload[0][5000:5100])
    (file,) = [path for path in Path(ssd_path).rglob("*") if path.is_file() and needle in path.read_bytes()]
    file.write_bytes(file.read_bytes().replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))
    server.start()
    owner = start_owner(server, "", ssd_path, host)
    wait_for(reader, wanted, [True, False, True, True])
    assert reader.outcomes.get(oc.LOAD, oc.CORRUPT) == 1
    kill(owner)
    server.kill()


def wait_for(store: MooncakeStore, segments: list[StoredSegment], wanted: list[bool]) -> None:
    """Until exactly these can be loaded; what comes back is right all the while."""
    end = time.monotonic() + 40
    while True:
        try:
            loaded = store.load(keys(segments), deadline_seconds=SECONDS)
        except StoreError:
            loaded = [None] * len(segments)
        for each, want in zip(loaded, segments, strict=True):
            assert not each or payload(each) == payload(want)
        if [bool(each) for each in loaded] == wanted:
            return
        assert time.monotonic() < end, store.outcomes.snapshot()
        time.sleep(0.3)
