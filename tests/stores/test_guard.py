"""Deadlines, the breaker and what is counted: a store that misbehaves never hurts its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.stores.segments import (
    BROKEN,
    IDENTITY,
    LATE,
    LEFT_ALONE,
    SECONDS,
    chain,
    key_of,
    keys,
    payload,
    segment,
)

from milepost.errors import InvariantError, StoreError
from milepost.stores import outcomes as oc
from milepost.stores.faulty import Faults, FaultyStore
from milepost.stores.guard import Breaker, GuardedStore, GuardOptions
from milepost.stores.memory import MemoryStore
from milepost.stores.meter import Meter

KEY = key_of("any")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedStore(MemoryStore):
    """`before` runs at the start of every call."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(IDENTITY, budget_bytes=1 << 24)
        self.before = before
        self.threads: set[int] = set()

    def _enter(self) -> None:
        self.threads.add(threading.get_ident())
        self.before()

    def lookup(self, *args, **options):
        self._enter()
        return super().lookup(*args, **options)

    def load(self, *args, **options):
        self._enter()
        return super().load(*args, **options)

    def save(self, *args, **options):
        self._enter()
        return super().save(*args, **options)

    def remove(self, *args, **options):
        self._enter()
        return super().remove(*args, **options)


def broken() -> None:
    raise OSError("the cable is out")


@pytest.fixture
def gate():
    """Calls hang until it is opened."""
    event = threading.Event()
    yield event
    event.set()


def test_calls_run_on_threads_of_the_tier() -> None:
    inner = ScriptedStore()
    store = GuardedStore(inner)
    segments = chain("threads", 2)
    store.save(segments, deadline_seconds=SECONDS)
    store.lookup(keys(segments), deadline_seconds=SECONDS)
    store.load(keys(segments), deadline_seconds=SECONDS)
    assert store.remove(keys(segments), deadline_seconds=SECONDS) == 2
    assert inner.threads and threading.get_ident() not in inner.threads
    assert store.outcomes.snapshot() == {
        (oc.SAVE, oc.SAVED): 2, (oc.LOOKUP, oc.HIT): 2, (oc.LOAD, oc.HIT): 2, (oc.REMOVE, oc.REMOVED): 2,
    }  # fmt: skip


def test_a_call_that_hangs_is_abandoned_and_its_late_result_ignored(gate: threading.Event) -> None:
    inner = ScriptedStore()
    store = GuardedStore(inner)
    segments = chain("hang", 2)
    store.save(segments, deadline_seconds=SECONDS)
    inner.before = lambda: None if gate.wait(30) else None
    begin = time.monotonic()
    assert store.load(keys(segments), deadline_seconds=0.05) == [LATE, LATE]
    assert time.monotonic() - begin < 5
    assert store.outcomes.get(oc.LOAD, oc.TIMEOUT) == 2
    gate.set()
    # Later answers are those of their own calls.
    assert store.lookup(keys(segments), deadline_seconds=SECONDS) == [each.header for each in segments]
    assert store.outcomes.get(oc.LOAD, oc.HIT) == 0


def test_errors_are_misses() -> None:
    store = GuardedStore(ScriptedStore(broken), GuardOptions(failures_to_open=100))
    assert store.lookup([KEY], deadline_seconds=SECONDS) == [BROKEN]
    assert store.load([KEY, KEY], deadline_seconds=SECONDS) == [BROKEN, BROKEN]
    assert store.save([segment("error")], deadline_seconds=SECONDS) == [False]
    assert store.remove([KEY], deadline_seconds=SECONDS) == 0
    assert store.outcomes.snapshot() == {
        (oc.LOOKUP, oc.ERROR): 1, (oc.LOOKUP, oc.MISS): 1,
        (oc.LOAD, oc.ERROR): 2, (oc.LOAD, oc.MISS): 2,
        (oc.SAVE, oc.ERROR): 1, (oc.SAVE, oc.NOT_SAVED): 1,
        (oc.REMOVE, oc.ERROR): 1,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["error", "late", "a part is late"])
def test_a_store_that_says_nothing_is_not_said_to_lack_anything(how: str, gate: threading.Event) -> None:
    inner = ScriptedStore(broken if how == "error" else lambda: None)
    store = GuardedStore(inner)
    if how == "late":
        inner.before = lambda: None if gate.wait(30) else None
    if how == "a part is late":
        inner.lookup = lambda keys, **options: [None, LATE]
    assert store.lacking([KEY, key_of("other")], 0.05) == ([KEY] if how == "a part is late" else [])
    inner.before, store = lambda: None, GuardedStore(ScriptedStore())
    assert store.lacking([KEY], SECONDS) == [KEY]


def test_a_store_that_answers_with_another_number_of_results_is_in_error() -> None:
    inner = ScriptedStore()
    inner.lookup = lambda *args, **options: []
    store = GuardedStore(inner)
    assert store.lookup([KEY], deadline_seconds=SECONDS) == [BROKEN]
    assert store.outcomes.get(oc.LOOKUP, oc.ERROR) == 1


def test_the_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    inner = ScriptedStore(broken)
    store = GuardedStore(inner, GuardOptions(failures_to_open=3, open_seconds=2.0), clock=clock)
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1
        broken()

    inner.before = count
    for number in range(10):
        wanted = BROKEN if number < 3 else LEFT_ALONE
        assert store.lookup([KEY], deadline_seconds=SECONDS) == [wanted]
    assert num_calls == 3 and store.breaker.is_open
    assert store.outcomes.get(oc.LOOKUP, oc.BREAKER_OPEN) == 7
    # One probe after two seconds; then the pause doubles.
    clock.now += 2.0
    store.lookup([KEY], deadline_seconds=SECONDS)
    store.lookup([KEY], deadline_seconds=SECONDS)
    assert num_calls == 4
    clock.now += 3.9
    store.lookup([KEY], deadline_seconds=SECONDS)
    assert num_calls == 4
    clock.now += 0.1
    inner.before = lambda: None
    store.lookup([KEY], deadline_seconds=SECONDS)
    assert not store.breaker.is_open
    inner.before = broken
    for _ in range(2):
        store.lookup([KEY], deadline_seconds=SECONDS)
    assert not store.breaker.is_open


def test_one_probe_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(GuardOptions(failures_to_open=1, open_seconds=1.0, max_open_seconds=3.0), clock)
    assert breaker.failed() and not breaker.admits()
    for pause in (1.0, 2.0, 3.0, 3.0):
        clock.now += pause
        assert breaker.admits() and not breaker.admits()
        assert not breaker.failed() and not breaker.admits()
        clock.now += pause / 2
        assert not breaker.admits()
        clock.now -= pause / 2
    clock.now += 3.0
    assert breaker.admits()
    breaker.undecided()
    assert breaker.admits() and breaker.succeeded() and breaker.admits()


def test_a_store_that_came_back_starts_anew() -> None:
    """The pause of an earlier outage is not remembered, and neither are its failures."""
    clock = Clock()
    breaker = Breaker(GuardOptions(failures_to_open=2, open_seconds=1.0), clock)
    assert not breaker.failed() and breaker.failed()
    # What was under way when it opened changes nothing any more.
    assert not breaker.failed() and not breaker.failed()
    clock.now += 1.0
    assert breaker.admits() and not breaker.failed()
    clock.now += 2.0
    assert breaker.admits() and breaker.succeeded()
    assert not breaker.failed() and not breaker.is_open and breaker.failed()
    clock.now += 0.9
    assert not breaker.admits()
    clock.now += 0.1
    assert breaker.admits()


def test_an_outage_is_logged_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    inner = ScriptedStore(broken)
    store = GuardedStore(inner, GuardOptions(failures_to_open=2), clock=clock)
    assert store.outcomes is inner.outcomes
    for _ in range(5):
        store.lookup([KEY], deadline_seconds=SECONDS)
    inner.before = lambda: None
    clock.now += 2.0
    for _ in range(3):
        store.lookup([KEY], deadline_seconds=SECONDS)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "left alone for a while: lookup: OSError('the cable is out')" in messages[0]
    assert "answers again" in messages[1]


def test_bytes_are_metered_as_they_went() -> None:
    store = GuardedStore(MemoryStore(IDENTITY, budget_bytes=5000))
    small, large = segment("small"), segment("large", record_bytes=9000)
    assert store.save([small, large], deadline_seconds=SECONDS) == [True, False]
    store.load(keys([small, large]), deadline_seconds=SECONDS)
    store.lookup(keys([small, large]), deadline_seconds=SECONDS)
    totals = store.meter.totals()
    assert totals[oc.SAVE].num_bytes == totals[oc.LOAD].num_bytes == small.header.payload_bytes
    assert totals[oc.LOOKUP].num_bytes == 0


def test_a_short_deadline_says_nothing_about_the_store_unless_all_threads_hang(gate: threading.Event) -> None:
    inner = ScriptedStore(lambda: None if gate.wait(30) else None)
    options = GuardOptions(failures_to_open=1, patience_seconds=0.5, num_threads=2)
    store = GuardedStore(inner, options)
    assert store.lookup([KEY], deadline_seconds=0.02) == [LATE]
    assert not store.breaker.is_open
    store.lookup([KEY], deadline_seconds=0.02)
    assert store.breaker.is_open


def test_a_call_that_never_began_does_not_begin_late(gate: threading.Event) -> None:
    inner = ScriptedStore(lambda: None if gate.wait(30) else None)
    store = GuardedStore(inner, GuardOptions(num_threads=1, failures_to_open=100))
    saved = segment("queued")
    store.lookup([KEY], deadline_seconds=0.02)
    assert store.save([saved], deadline_seconds=0.02) == [False]
    gate.set()
    assert store.lookup([saved.header.key], deadline_seconds=SECONDS) == [None]


def test_an_abandoned_save_keeps_its_payload_until_it_ends(gate: threading.Event) -> None:
    inner = ScriptedStore(lambda: None if gate.wait(30) else None)
    store = GuardedStore(inner)
    released = threading.Event()
    one = segment("in place")
    wanted = payload(one)
    assert store.save_in_place([one], deadline_seconds=0.02, released=released.set) == [False]
    assert not released.is_set()
    gate.set()
    assert released.wait(10)
    one.payload[0][:] = bytes(len(one.payload[0]))
    assert payload(store.load([one.header.key], deadline_seconds=SECONDS)[0]) == wanted


def test_the_port_s_save_lets_go_of_the_payload_when_it_returns(gate: threading.Event) -> None:
    inner = ScriptedStore(lambda: None if gate.wait(30) else None)
    store = GuardedStore(inner)
    one = segment("copied")
    wanted = payload(one)
    assert store.save([one], deadline_seconds=0.02) == [False]
    one.payload[0][:] = bytes(len(one.payload[0]))
    gate.set()
    end = time.monotonic() + 10
    while (loaded := store.load([one.header.key], deadline_seconds=SECONDS)[0]) is None:
        assert time.monotonic() < end
    assert payload(loaded) == wanted


@pytest.mark.parametrize("why", ["ok", "open", "no time", "closed", "error", "empty"])
def test_the_payload_is_released_exactly_once(why: str) -> None:
    inner = ScriptedStore(broken if why == "error" else lambda: None)
    store = GuardedStore(inner, GuardOptions(failures_to_open=1))
    if why == "open":
        store.breaker.failed()
    if why == "closed":
        store.close()
    released: list[int] = []
    segments = [] if why == "empty" else [segment("once")]
    saved = store.save_in_place(
        segments, deadline_seconds=0.0 if why == "no time" else SECONDS, released=lambda: released.append(1)
    )
    time.sleep(0.01)
    assert released == [1] and saved == ([] if why == "empty" else [why == "ok"])


def test_the_engine_s_thread_must_not_wait_for_a_store() -> None:
    forbidden = {threading.current_thread()}
    store = GuardedStore(ScriptedStore(), forbidden_threads=forbidden)
    for call in (store.lookup, store.load, store.remove):
        with pytest.raises(InvariantError, match="must not wait"):
            call([KEY], deadline_seconds=SECONDS)
    with pytest.raises(InvariantError):
        store.save([segment("forbidden")], deadline_seconds=SECONDS)
    forbidden.clear()
    assert store.lookup([KEY], deadline_seconds=SECONDS) == [None]


def test_a_store_that_does_not_close_is_left_behind(gate: threading.Event, monkeypatch) -> None:
    monkeypatch.setattr("milepost.stores.guard._CLOSE_SECONDS", 0.05)
    inner = ScriptedStore()
    inner.close = lambda: None if gate.wait(30) else None
    begin = time.monotonic()
    GuardedStore(inner).close()
    assert time.monotonic() - begin < 5


# ---------------------------------------------------------------- the meter


def test_the_meter_finds_latency_and_bandwidth() -> None:
    meter = Meter()
    for _ in range(50):
        meter.record(oc.LOOKUP, 0.004, 0)
        meter.record(oc.LOAD, 0.004 + 1e6 / 2e8, 1_000_000)
        meter.record(oc.LOAD, 0.004 + 1e7 / 2e8, 10_000_000)
    assert meter.call_seconds == pytest.approx(0.004)
    assert meter.load_bytes_per_second == pytest.approx(2e8, rel=0.01)
    assert meter.totals()[oc.LOAD].num_bytes == 50 * 11_000_000


def test_a_lookup_of_many_keys_does_not_raise_the_latency() -> None:
    meter = Meter(call_seconds=0.01)
    meter.record(oc.LOOKUP, 0.5, 0, num_keys=4000)
    assert meter.call_seconds == 0.01
    meter.record(oc.LOOKUP, 0.001, 0, num_keys=4000)
    meter.record(oc.LOOKUP, 0.001, 0, num_keys=4000)
    assert meter.call_seconds < 0.01
    before = meter.call_seconds
    meter.record(oc.LOOKUP, 0.5, 0, num_keys=5)
    assert meter.call_seconds > before


def test_misses_leave_the_estimate_alone_and_timeouts_lower_it() -> None:
    meter = Meter()
    meter.record(oc.LOAD, 0.1, 10_000_000)
    before = meter.load_bytes_per_second
    meter.record(oc.LOAD, 0.1, 0)
    assert meter.load_bytes_per_second == before
    meter.record(oc.LOAD, 1.0, 0, timed_out=True)
    assert meter.load_bytes_per_second < before / 2


# ---------------------------------------------------------------- the faulty store


def faulty(**faults: float) -> FaultyStore:
    return FaultyStore(MemoryStore(IDENTITY, budget_bytes=1 << 24), Faults(**faults), seed=5)


@pytest.mark.parametrize(
    ("fault", "outcome"), [("torn", oc.CORRUPT), ("bit_flip", oc.CORRUPT), ("foreign", oc.FOREIGN)]
)
def test_damage_is_found_by_the_reader(fault: str, outcome: str) -> None:
    store = faulty()
    segments = chain("damage", 20, record_bytes=50)
    store.save(segments, deadline_seconds=SECONDS)
    store.set_faults(**{fault: 0.5})
    loaded = store.load(keys(segments), deadline_seconds=SECONDS)
    num_misses = loaded.count(None)
    assert 3 < num_misses < 17
    for stored, each in zip(loaded, segments, strict=True):
        assert not stored or payload(stored) == payload(each)
    found = store.outcomes.snapshot()
    # A flipped bit may be in the version.
    assert found.get((oc.LOAD, oc.CORRUPT), 0) + found.get((oc.LOAD, oc.FOREIGN), 0) == num_misses
    assert found[oc.LOAD, outcome] > 0
    store.set_faults(**{fault: 0.0})
    assert None not in store.load(keys(segments), deadline_seconds=SECONDS)


def test_lost_full_slow_and_error() -> None:
    naps: list[float] = []
    inner = MemoryStore(IDENTITY, budget_bytes=1 << 24)
    store = FaultyStore(inner, Faults(full=0.5, slow=1.0, slow_seconds=7.0), seed=1, sleep=naps.append)
    segments = chain("faults", 20, record_bytes=50)
    saved = store.save(segments, deadline_seconds=SECONDS)
    assert 3 < saved.count(True) < 17 and naps == [7.0]
    assert store.outcomes.get(oc.SAVE, oc.FULL) == saved.count(False)
    found = inner.lookup(keys(segments), deadline_seconds=SECONDS)
    assert [each is not None for each in found] == saved
    store.set_faults(full=0.0, slow=0.0, lost=1.0)
    assert store.lookup(keys(segments), deadline_seconds=SECONDS) == [None] * 20
    store.set_faults(error=1.0, lost=0.0)
    with pytest.raises(StoreError, match="asked for"):
        store.load(keys(segments), deadline_seconds=SECONDS)
    with pytest.raises(StoreError, match="probability"):
        store.set_faults(error=2.0)


def test_equal_seeds_give_equal_faults() -> None:
    runs = []
    for _ in range(2):
        store = faulty(full=0.5)
        runs.append(store.save(chain("seed", 30, record_bytes=5), deadline_seconds=SECONDS))
    assert runs[0] == runs[1]
