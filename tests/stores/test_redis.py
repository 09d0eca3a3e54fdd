"""The Redis tier with a real server: shared bounds, a full, a dead and a hanging server."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.stores.harness import RedisHarness
from tests.stores.segments import (
    BROKEN,
    IDENTITY,
    LATE,
    LEFT_ALONE,
    OTHER_FINGERPRINT,
    SECONDS,
    chain,
    keys,
    payload,
    segment,
)
from tests.stores.services import Server, start_redis
from tests.stores.test_lru_model import BUDGET_BYTES, LruMachine, MemoryMachine

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.guard import GuardedStore, GuardOptions
from milepost.stores.objects import StoreTimeoutError
from milepost.stores.segment_format import Identity, encode_head

pytestmark = pytest.mark.service


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that a test may hurt."""
    made = start_redis(tmp_path)
    yield made
    made.kill()


def open_store(server: Server, budget_bytes: int = 1 << 26):
    from milepost.stores.redis import RedisStore

    return RedisStore(f"redis://127.0.0.1:{server.port}/0", IDENTITY, budget_bytes=budget_bytes)


def test_replicas_share_one_bound(redis_server: Server) -> None:
    harness = RedisHarness(redis_server.port)
    num_bytes = len(encode_head(segment("size", record_bytes=30_000))) + 30_000 * 3 + 7
    budget = 5 * num_bytes
    stores = [harness.open(budget_bytes=budget) for _ in range(3)]
    over: list[int] = []

    def work(number: int) -> None:
        for index in range(15):
            path = chain((number, index), 3, record_bytes=30_000)
            stores[number].save(path, deadline_seconds=SECONDS)
            sizes = [harness.client.strlen(name) for name in harness.client.keys("milepost:segment:*")]
            over.append(max(0, sum(sizes) - budget))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over and max(over) == 0
    sizes = [harness.client.strlen(name) for name in harness.client.keys("milepost:segment:*")]
    assert sum(sizes) == stores[0].used_bytes > 3 * num_bytes
    harness.close()


def test_a_server_at_its_own_limit_is_full(tmp_path: Path) -> None:
    server = start_redis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    store = open_store(server)
    segments = [segment(("oom", index), record_bytes=100_000) for index in range(12)]
    saved = [store.save([each], deadline_seconds=SECONDS)[0] for each in segments]
    assert saved[0] and not saved[-1]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == saved.count(False)
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    assert [each is not None for each in loaded] == saved
    assert store.used_bytes == saved.count(True) * (512 + segments[0].header.payload_bytes)
    store.close()
    server.kill()


def test_what_the_server_dropped_is_counted_no_more(redis_server: Server) -> None:
    harness = RedisHarness(redis_server.port)
    segments = [segment(("dropped", index), record_bytes=30_000) for index in range(5)]
    num_bytes = 512 + segments[0].header.payload_bytes
    store = harness.open(budget_bytes=3 * num_bytes)
    store.save(segments[:3], deadline_seconds=SECONDS)
    harness.client.delete(*(store.key_of(key) for key in keys(segments[:3])))
    assert store.save(segments[3:], deadline_seconds=SECONDS) == [True, True]
    assert store.remove(keys(segments[:3]), deadline_seconds=SECONDS) == 0
    assert store.used_bytes == 2 * num_bytes
    harness.close()


def test_followers_of_this_model_are_found(redis_server: Server) -> None:
    harness = RedisHarness(redis_server.port)
    try:
        mine, foreign = harness.open(), harness.open(Identity(OTHER_FINGERPRINT))
        trunk = chain("redis trunk", 3)
        branch = segment("redis branch", parent=trunk[0])
        assert all(mine.save([*trunk, branch], deadline_seconds=SECONDS))
        found = mine.followers(keys(trunk[:1]), deadline_seconds=SECONDS)
        assert set(found) == set(keys([*trunk[1:], branch]))
        mine.remove(keys(trunk[:1]), deadline_seconds=SECONDS)
        assert set(mine.followers(keys(trunk[:1]), deadline_seconds=SECONDS)) == set(found)
        assert foreign.followers(keys(trunk[:1]), deadline_seconds=SECONDS) == []
    finally:
        harness.close()


def test_other_data_in_the_server_is_left_alone(redis_server: Server) -> None:
    harness = RedisHarness(redis_server.port)
    harness.client.set("theirs", b"x" * 1000)
    store = harness.open(budget_bytes=100_000)
    for index in range(20):
        store.save([segment(("mine", index), record_bytes=30_000)], deadline_seconds=SECONDS)
    assert harness.client.get("theirs") == b"x" * 1000
    assert {name.partition(b":")[0] for name in harness.client.keys("*")} == {b"theirs", b"milepost"}
    harness.close()


def test_a_dead_server_is_a_miss_and_comes_back(server: Server) -> None:
    store = GuardedStore(open_store(server), GuardOptions(failures_to_open=2, open_seconds=0.05))
    segments = chain("dead", 2)
    assert store.save(segments, deadline_seconds=SECONDS) == [True, True]
    server.kill()
    for number in range(4):
        wanted = BROKEN if number < 2 else LEFT_ALONE
        assert store.load(keys(segments), deadline_seconds=SECONDS) == [wanted, wanted]
    assert store.save(segments, deadline_seconds=SECONDS) == [False, False]
    assert store.outcomes.get(oc.LOAD, oc.ERROR) == 4 and store.outcomes.get(oc.LOAD, oc.BREAKER_OPEN) == 4
    server.start()
    time.sleep(0.2)
    # It kept nothing: that is a miss and no error.
    assert store.load(keys(segments), deadline_seconds=SECONDS) == [None, None]
    assert store.outcomes.get(oc.LOAD, oc.ERROR) == 4
    assert store.save(segments, deadline_seconds=SECONDS) == [True, True]
    assert [payload(each) for each in store.load(keys(segments), deadline_seconds=SECONDS)] == [
        payload(each) for each in segments
    ]
    store.close()


def test_a_hanging_server_costs_the_deadline(server: Server) -> None:
    store = open_store(server)
    segments = chain("hanging", 2)
    store.save(segments, deadline_seconds=SECONDS)
    server.process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            store.load(keys(segments), deadline_seconds=0.1)
        guarded = GuardedStore(store)
        assert guarded.lookup(keys(segments), deadline_seconds=0.3) == [LATE, LATE]
        assert guarded.outcomes.get(oc.LOOKUP, oc.TIMEOUT) == 2
        assert time.monotonic() - begin < 5
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert all(store.load(keys(segments), deadline_seconds=SECONDS))
    store.close()


def test_addresses_that_cannot_be(redis_server: Server) -> None:
    from milepost.stores.redis import RedisStore

    with pytest.raises(StoreError, match="bytes must be positive"):
        RedisStore("redis://127.0.0.1", IDENTITY, budget_bytes=0)
    with pytest.raises(StoreError, match="Redis URL"):
        RedisStore("http://127.0.0.1", IDENTITY, budget_bytes=10)


@pytest.mark.usefixtures("redis_server")
class TestAgainstTheModel:
    def test_any_sequence_of_operations(self, redis_server: Server) -> None:
        from hypothesis.stateful import run_state_machine_as_test

        class RedisMachine(LruMachine):
            sizes = MemoryMachine.sizes

            def __init__(self) -> None:
                super().__init__()
                self.harness = RedisHarness(redis_server.port)
                self.store = self.harness.open(budget_bytes=BUDGET_BYTES)

            def teardown(self) -> None:
                self.harness.close()

        run_state_machine_as_test(
            RedisMachine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
        )
