"""Several stores as one: nothing waits, nothing is fetched twice, and a fault costs hits only."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.stores.segments import BROKEN, IDENTITY, LATE, LEFT_ALONE, SECONDS, chain, keys, payload, segment
from tests.stores.test_guard import ScriptedStore, broken

from milepost.errors import InvariantError, StoreError
from milepost.stores import outcomes as oc
from milepost.stores.answers import Answer, Timer
from milepost.stores.faulty import Faults, FaultyStore
from milepost.stores.file import FileStore
from milepost.stores.guard import GuardOptions
from milepost.stores.memory import MemoryStore
from milepost.stores.tiers import Found, Tiers, TiersOptions

NOTHING: Callable[[bool], None] = lambda saved: None  # noqa: E731


def memory(name: str) -> ScriptedStore:
    store = ScriptedStore()
    store.name = name
    return store


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def stores() -> list[ScriptedStore]:
    return [memory("fast"), memory("slow")]


@pytest.fixture
def tiers(stores: list[ScriptedStore], gate: threading.Event) -> Iterator[Tiers]:
    made = Tiers(stores)
    made.forbid_thread(threading.current_thread())
    yield made
    gate.set()
    made.close()


def waiting(gate: threading.Event) -> Callable[[], None]:
    return lambda: None if gate.wait(30) else None


def find(tiers: Tiers, segments, seconds: float = SECONDS):
    return tiers.find(keys(segments), deadline_seconds=seconds).result(SECONDS)


def load(tiers: Tiers, found, seconds: float = SECONDS):
    return tiers.load(found, deadline_seconds=seconds).result(SECONDS)


def put(store: ScriptedStore, segments) -> None:
    """Without the guards of the tiers."""
    assert all(MemoryStore.save(store, segments, deadline_seconds=SECONDS))


def has(store: ScriptedStore, segments) -> list[bool]:
    return [bool(each) for each in MemoryStore.lookup(store, keys(segments), deadline_seconds=SECONDS)]


def test_saved_everywhere_found_in_the_fastest(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("both", 3)
    done: list[bool] = []
    for each in segments:
        assert tiers.save(each, done.append)
    assert tiers.flush(SECONDS)
    assert done == [True] * 3 and tiers.pending_save_bytes == 0 and tiers.oldest_pending_seconds == 0
    assert all(has(store, segments) == [True] * 3 for store in stores)
    found = find(tiers, segments)
    assert [each.tier for each in found] == [0, 0, 0]
    assert [each.header for each in found] == [each.header for each in segments]
    assert [payload(each) for each in load(tiers, found)] == [payload(each) for each in segments]


def test_a_payload_is_hashed_once_for_all_tiers(
    tiers: Tiers, stores: list[ScriptedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    from milepost.stores import segment_format

    real, hashed = segment_format._digest, []

    def digest(pieces) -> bytes:
        hashed.append(sum(memoryview(piece).nbytes for piece in pieces))
        return real(pieces)

    monkeypatch.setattr(segment_format, "_digest", digest)
    one = segment("hashed once", record_bytes=10_000)
    tiers.save(one, NOTHING)
    assert tiers.flush(SECONDS)
    assert hashed.count(one.header.payload_bytes) == 1
    MemoryStore.remove(stores[0], keys([one]), deadline_seconds=SECONDS)
    hashed.clear()
    loaded = load(tiers, find(tiers, [one]))
    assert tiers.flush(SECONDS) and payload(loaded[0]) == payload(one)
    # Checked when it was read, and promoted with the digest that was found right.
    assert hashed.count(one.header.payload_bytes) == 1 and has(stores[0], [one]) == [True]


def test_no_store_is_called_on_the_caller_s_thread(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("threads", 2)
    tiers.save(segments[0], NOTHING)
    tiers.flush(SECONDS)
    put(stores[1], segments[1:])
    load(tiers, find(tiers, segments))
    tiers.remove(keys(segments)).result(SECONDS)
    assert tiers.flush(SECONDS)
    assert all(store.threads and threading.get_ident() not in store.threads for store in stores)


def test_a_forbidden_thread_that_reaches_a_store_is_a_bug(tiers: Tiers) -> None:
    with pytest.raises(InvariantError, match="must not wait"):
        tiers._stores[0].lookup([], deadline_seconds=SECONDS)


def test_each_tier_is_asked_once_for_what_is_missing(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("split", 6)
    put(stores[0], segments[:2])
    put(stores[1], segments[1:4])
    found = find(tiers, segments)
    assert [each and each.tier for each in found] == [0, 0, 1, 1, None, None]
    fast, slow = tiers.counters()
    assert fast.calls["lookup"].num_calls == slow.calls["lookup"].num_calls == 1
    assert fast.outcomes == {("lookup", "hit"): 2, ("lookup", "miss"): 4}
    assert slow.outcomes == {("lookup", "hit"): 2, ("lookup", "miss"): 2}


def test_every_tier_can_be_asked_for_itself(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("each", 3)
    put(stores[0], segments[:1])
    put(stores[1], segments[1:])
    each = tiers.find_each(keys(segments), deadline_seconds=SECONDS).result(SECONDS)
    assert each == [[segments[0].header, None, None], [None, segments[1].header, segments[2].header]]
    stores[0].before = waiting(gate)
    fast, slow = tiers.find_each(keys(segments), deadline_seconds=0.1).result(SECONDS)
    assert fast == [LATE] * 3 and slow == each[1], "one that hangs is not waited for"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["error", "late", "left alone", "a part is late"])
def test_a_tier_that_says_nothing_may_have_it(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event, which: int, how: str
) -> None:
    """What one tier lacks is absent only if all of them said so."""
    segments = chain("silent", 3)
    put(stores[0], segments[:1])
    put(stores[1], segments[:1])
    silent = stores[which]
    wanted = {"error": BROKEN, "left alone": LEFT_ALONE}.get(how, LATE)
    if how == "left alone":
        for _ in range(3):
            tiers._stores[which].breaker.failed()
    if how == "a part is late":
        late = {each.header.key for each in segments[1:]}

        def some(keys: list[bytes], *, deadline_seconds: float) -> list[object]:
            return [LATE if key in late else None for key in keys]

        silent.lookup = some  # type: ignore[assignment]
    if how in ("error", "late"):
        silent.before = waiting(gate) if how == "late" else broken
    first, *others = find(tiers, segments, seconds=0.4)
    assert isinstance(first, Found) and first.tier == (0 if which else 1) or how == "a part is late"
    assert others == [wanted] * 2
    # Also where it was found before.
    found = [Found(each.header, which) for each in segments[1:]]
    if how != "a part is late":
        assert load(tiers, found, seconds=0.4) == [wanted] * 2


def test_what_a_slow_tier_gave_is_promoted(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("promote", 3)
    put(stores[1], segments)
    loaded = load(tiers, find(tiers, segments))
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]
    assert tiers.flush(SECONDS)
    assert has(stores[0], segments) == [True] * 3
    assert [each.tier for each in find(tiers, segments)] == [0, 0, 0]
    assert tiers.counters()[0].written_bytes == sum(each.header.payload_bytes for each in segments)


def test_a_load_whose_tier_lost_it_tries_the_slower_ones(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("lost", 3)
    for store in stores:
        put(store, segments)
    found = find(tiers, segments)
    MemoryStore.remove(stores[0], keys(segments[:2]), deadline_seconds=SECONDS)
    assert [payload(each) for each in load(tiers, found)] == [payload(each) for each in segments]
    assert tiers.flush(SECONDS)
    MemoryStore.remove(stores[0], keys(segments), deadline_seconds=SECONDS)
    MemoryStore.remove(stores[1], keys(segments), deadline_seconds=SECONDS)
    assert load(tiers, found) == [None] * 3


def test_a_transfer_in_flight_is_shared(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("shared", 4)
    put(stores[0], segments)
    found = find(tiers, segments)
    stores[0].before = waiting(gate)
    first = tiers.load(found[:3], deadline_seconds=SECONDS)
    second = tiers.load(found[1:], deadline_seconds=SECONDS)
    hurried = tiers.load(found[:2], deadline_seconds=0.05)
    assert hurried.result(SECONDS) == [LATE, LATE]
    assert not first.done() and not second.done()
    gate.set()
    assert [payload(each) for each in first.result(SECONDS)] == [payload(each) for each in segments[:3]]
    assert [payload(each) for each in second.result(SECONDS)] == [payload(each) for each in segments[1:]]
    assert tiers.counters()[0].read_bytes == sum(each.header.payload_bytes for each in segments)
    assert not tiers._transfers


def test_nobody_joins_a_transfer_that_is_late(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("late", 1)
    put(stores[0], segments)
    found = find(tiers, segments)
    stores[0].before = waiting(gate)
    assert load(tiers, found, seconds=0.03) == [LATE]
    stores[0].before = lambda: None
    assert payload(load(tiers, found)[0]) == payload(segments[0])


def test_an_answer_is_there_at_its_deadline_whatever_hangs(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("hang", 2)
    put(stores[0], segments[:1])
    put(stores[1], segments[1:])
    found = find(tiers, segments)
    stores[1].before = waiting(gate)
    begin = time.monotonic()
    first, second = find(tiers, segments, seconds=0.5)
    assert first and first.tier == 0 and second == LATE
    loaded = load(tiers, found, seconds=0.5)
    assert payload(loaded[0]) == payload(segments[0]) and loaded[1] == LATE
    # Every thread of the lookups hangs by now; later ones answer in time all the same.
    for _ in range(10):
        assert find(tiers, segments, seconds=0.02)[1] in (LATE, LEFT_ALONE)
    assert time.monotonic() - begin < 10


def test_a_tier_that_hangs_leaves_time_for_the_next(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("fair", 2)
    put(stores[1], segments)
    stores[0].before = waiting(gate)
    assert [each and each.tier for each in find(tiers, segments, seconds=1.0)] == [1, 1]


def test_what_was_loaded_before_the_deadline_counts(
    stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("partial", 4)
    num_bytes = segments[0].header.payload_bytes
    tiers = Tiers(stores[:1], TiersOptions(max_batch_bytes=2 * num_bytes))
    put(stores[0], segments)
    found = find(tiers, segments)
    calls: list[int] = []

    def hang_in_the_second() -> None:
        calls.append(1)
        if len(calls) > 1:
            gate.wait(30)

    stores[0].before = hang_in_the_second
    loaded = load(tiers, found, seconds=1.0)
    assert [payload(each) for each in loaded[:2]] == [payload(each) for each in segments[:2]]
    assert loaded[2:] == [LATE, LATE]
    gate.set()
    tiers.close()


def test_saving_pushes_back_instead_of_waiting(stores: list[ScriptedStore], gate: threading.Event) -> None:
    """The bound on pinned bytes holds; one slow tier does not take the room of the other."""
    segments = [segment(("pressure", index)) for index in range(12)]
    num_bytes = segments[0].header.payload_bytes
    tiers = Tiers(stores, TiersOptions(max_pending_save_bytes=8 * num_bytes, max_batch_bytes=num_bytes))
    stores[1].before = waiting(gate)
    done: list[bool] = []
    accepted = []
    for each in segments:
        accepted.append(tiers.save(each, done.append))
        end = time.monotonic() + 10
        while tiers.counters()[0].pending_save_bytes:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert tiers.pending_save_bytes <= 8 * num_bytes
    # The slow tier took its share of four, one of them in its hands; the fast one took all.
    assert all(accepted) and has(stores[0], segments) == [True] * 12
    assert tiers.counters()[1].outcomes["save", oc.BACK_PRESSURE] == 12 - 4
    assert tiers.oldest_pending_seconds > 0
    stores[0].before = waiting(gate)
    more = [segment(("more", index)) for index in range(12)]
    accepted = [tiers.save(each, done.append) for each in more]
    assert accepted == [True] * 4 + [False] * 8
    assert not tiers.save(segment("huge", record_bytes=9 * num_bytes), done.append)
    gate.set()
    assert tiers.flush(SECONDS) and done == [True] * 16
    # The slow one was given the rest from the fast one when it had time.
    assert has(stores[1], [*segments, *more[:4]]) == [True] * 16
    assert tiers.save(segment("later"), done.append)
    tiers.close()


def test_a_tier_that_was_gone_gets_what_it_missed(stores: list[ScriptedStore], monkeypatch) -> None:
    """A path with a gap would be of no use after a restart."""
    monkeypatch.setattr("milepost.stores.write_behind._REPAIR_PAUSE_SECONDS", 0.01)
    options = GuardOptions(failures_to_open=1, open_seconds=0.05, max_open_seconds=0.05)
    tiers = Tiers(stores, guard_options=options)
    path = chain("gone", 6)

    def broken() -> None:
        raise OSError("gone")

    stores[1].before = broken
    for each in path[:4]:
        assert tiers.save(each, NOTHING)
        # A tier that is left alone is not waited for.
        assert tiers.flush(SECONDS)
    assert has(stores[1], path) == [False] * 6 and tiers.oldest_pending_seconds > 0
    stores[1].before = lambda: None
    end = time.monotonic() + 10
    while has(stores[1], path[:4]) != [True] * 4:
        # Some call finds out that it is back.
        find(tiers, path[4:])
        assert time.monotonic() < end
        time.sleep(0.01)
    assert tiers.flush(SECONDS) and tiers.oldest_pending_seconds == 0
    tiers.close()


def test_what_was_removed_is_not_repaired(stores: list[ScriptedStore], gate: threading.Event) -> None:
    one, two = segment("one"), segment("two")
    num_bytes = one.header.payload_bytes
    tiers = Tiers(stores, TiersOptions(max_pending_save_bytes=3 * num_bytes, max_batch_bytes=num_bytes))
    stores[1].before = waiting(gate)
    for each in (one, two, segment("three")):
        assert tiers.save(each, NOTHING)
        end = time.monotonic() + 10
        while tiers.counters()[0].pending_save_bytes:
            assert time.monotonic() < end
            time.sleep(0.001)
    removing = tiers.remove(keys([two]))
    gate.set()
    assert removing.result(SECONDS) == 1 and tiers.flush(SECONDS)
    assert has(stores[1], [one, two, segment("three")]) == [True, False, True]
    tiers.close()


def test_payloads_are_kept_until_a_hanging_call_ends(
    stores: list[ScriptedStore], gate: threading.Event
) -> None:
    tiers = Tiers(stores, TiersOptions(save_deadline_seconds=0.05))
    stores[1].before = waiting(gate)
    one = segment("pinned")
    wanted = payload(one)
    done: list[bool] = []
    assert tiers.save(one, done.append)
    assert not tiers.flush(0.3)
    assert done == [] and tiers.pending_save_bytes == one.header.payload_bytes
    gate.set()
    assert tiers.flush(SECONDS) and done == [True]
    one.payload[0][:] = bytes(len(one.payload[0]))
    for store in stores:
        assert payload(MemoryStore.load(store, keys([one]), deadline_seconds=SECONDS)[0]) == wanted
    tiers.close()


@pytest.mark.parametrize(("second_bytes", "wanted"), [(1 << 20, True), (1000, False)])
def test_done_says_whether_any_tier_has_it(second_bytes: int, wanted: bool) -> None:
    tiers = Tiers(
        [
            MemoryStore(IDENTITY, budget_bytes=1000, name="small"),
            MemoryStore(IDENTITY, budget_bytes=second_bytes, name="second"),
        ]
    )
    done: list[bool] = []
    assert tiers.save(segment("any"), done.append)
    assert tiers.flush(SECONDS) and done == [wanted]
    assert tiers.counters()[0].outcomes["save", oc.FULL] == 1
    tiers.close()


def test_a_callback_that_raises_stops_nothing(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    def raises(saved: bool) -> None:
        raise ValueError("a bug of the caller")

    done: list[bool] = []
    assert tiers.save(segment("raises"), raises) and tiers.save(segment("fine"), done.append)
    assert tiers.flush(SECONDS) and done == [True]
    assert "callback of a save failed" in caplog.text


def test_removed_everywhere_and_not_promoted_again(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    segments = chain("removed", 2)
    put(stores[1], segments)
    found = find(tiers, segments)
    stores[1].before = waiting(gate)
    loading = tiers.load(found, deadline_seconds=SECONDS)
    tiers.save(segment("pending"), NOTHING)
    removing = tiers.remove([*keys(segments), segment("pending").header.key])
    gate.set()
    assert removing.result(SECONDS) in (1, 2, 3)
    loading.result(SECONDS)
    assert tiers.flush(SECONDS)
    for store in stores:
        assert has(store, [*segments, segment("pending")]) == [False] * 3


def test_a_save_that_ends_after_its_removal_is_removed_again(
    stores: list[ScriptedStore], gate: threading.Event
) -> None:
    """It hung, was abandoned, and then succeeded: what was to be forgotten would be back."""
    tiers = Tiers(stores, TiersOptions(save_deadline_seconds=0.05))
    one = segment("late save")
    hung = threading.Event()

    def hang_once() -> None:
        if not hung.is_set():
            hung.set()
            gate.wait(30)

    stores[1].before = hang_once
    assert tiers.save(one, NOTHING) and hung.wait(10)
    assert tiers.remove(keys([one])).result(SECONDS) == 1
    assert has(stores[0], [one]) == has(stores[1], [one]) == [False]
    gate.set()
    assert tiers.flush(SECONDS)
    assert has(stores[0], [one]) == has(stores[1], [one]) == [False]
    tiers.close()


def test_what_is_saved_after_a_removal_stays(
    tiers: Tiers, stores: list[ScriptedStore], gate: threading.Event
) -> None:
    """Also if the one before it was still waiting: an object that is replaced is removed and saved again."""
    old = segment("replaced")
    new = dataclasses.replace(old, payload=[bytes(old.header.payload_bytes)])
    for store in stores:
        store.before = waiting(gate)
    tiers.save(segment("in front"), NOTHING)
    tiers.save(old, NOTHING)
    removing = tiers.remove(keys([old]))
    tiers.save(new, NOTHING)
    gate.set()
    assert removing.result(SECONDS) == 1 and tiers.flush(SECONDS)
    for store in stores:
        assert payload(MemoryStore.load(store, keys([old]), deadline_seconds=SECONDS)[0]) == payload(new)


def test_a_removal_that_a_tier_did_not_answer_is_said(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    def broken() -> None:
        raise OSError("gone")

    stores[1].before = broken
    with pytest.raises(StoreError, match="not removed from slow"):
        tiers.remove(keys([segment("x")])).result(SECONDS)


def test_closing_ends_everything(stores: list[ScriptedStore], gate: threading.Event) -> None:
    tiers = Tiers(stores)
    segments = chain("closing", 3)
    put(stores[0], segments)
    found = find(tiers, segments)
    for store in stores:
        store.before = waiting(gate)
    finding = tiers.find(keys(segments), deadline_seconds=SECONDS)
    loading = tiers.load(found, deadline_seconds=SECONDS)
    done: list[bool] = []
    for index in range(3):
        tiers.save(segment(("closing", index), record_bytes=12 << 20), done.append)
    closer = threading.Thread(target=tiers.close, args=(0.05,))
    closer.start()
    assert finding.result(SECONDS) == [LATE] * 3 and loading.result(SECONDS) == [LATE] * 3
    gate.set()
    closer.join(SECONDS)
    assert not closer.is_alive()
    end = time.monotonic() + SECONDS
    while len(done) < 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert not tiers.save(segment("after"), done.append)
    assert tiers.find(keys(segments), deadline_seconds=SECONDS).result(1) == [LATE] * 3
    assert tiers.load(found, deadline_seconds=SECONDS).result(1) == [LATE] * 3
    with pytest.raises(StoreError, match="closed"):
        tiers.remove(keys(segments)).result(1)
    tiers.close()


def test_local_tiers_say_what_they_take(tmp_path: Path) -> None:
    file = FileStore(tmp_path / "store", IDENTITY, budget_bytes=1 << 20)
    tiers = Tiers([MemoryStore(IDENTITY, budget_bytes=1 << 16), file])
    one = segment("usage")
    assert tiers.save(one, NOTHING) and tiers.flush(SECONDS)
    num_bytes = 512 + one.header.payload_bytes
    assert [tier.usage for tier in tiers.counters()] == [(num_bytes, 1 << 16), (file.used_bytes, 1 << 20)]
    tiers.close()


def test_names_differ() -> None:
    with pytest.raises(StoreError, match="different names"):
        Tiers([memory("a"), memory("a")])
    with pytest.raises(StoreError, match="different names"):
        Tiers([])


def test_estimates_follow_what_is_measured(tiers: Tiers, stores: list[ScriptedStore]) -> None:
    segments = chain("speed", 3, record_bytes=50_000)
    put(stores[1], segments)
    stores[1].before = lambda: time.sleep(0.02)
    before = tiers.load_bytes_per_second(1)
    load(tiers, find(tiers, segments))
    assert tiers.load_latency_seconds(1) >= 0.02
    assert 0 < tiers.load_bytes_per_second(1) != before


# ---------------------------------------------------------------- everything at once


@pytest.mark.parametrize("seed", [1, 2])
def test_faults_in_all_tiers_cost_hits_only(tmp_path: Path, seed: int) -> None:
    """Clients that save, find, load and remove while every kind of fault happens: what comes back is what
    was saved under that key, every payload is let go, and no thread is left waiting."""
    faults = Faults(
        slow=0.05, error=0.05, torn=0.05, bit_flip=0.05, lost=0.05, full=0.05, foreign=0.05, slow_seconds=0.03
    )
    root = tmp_path / "store"
    stores = [
        FaultyStore(MemoryStore(IDENTITY, budget_bytes=300_000), faults, seed=seed),
        FaultyStore(FileStore(root, IDENTITY, budget_bytes=600_000), faults, seed=seed + 100),
    ]
    tiers = Tiers(
        stores,
        TiersOptions(max_pending_save_bytes=400_000, save_deadline_seconds=0.02),
        guard_options=GuardOptions(
            failures_to_open=2, open_seconds=0.02, max_open_seconds=0.05, patience_seconds=0.0
        ),
    )
    paths = [chain((seed, index), 4, record_bytes=6_000) for index in range(12)]
    wanted = {each.header.key: payload(each) for path in paths for each in path}
    open_saves: list[int] = []
    num_hits: list[int] = []
    errors: list[BaseException] = []

    def client(number: int) -> None:
        source = random.Random(1000 * seed + number)
        tiers.forbid_thread(threading.current_thread())
        try:
            for _ in range(60):
                path = source.choice(paths)
                found = find(tiers, path, seconds=0.2)
                have = [each for each in found if each]
                for each, stored in zip(have, load(tiers, have, seconds=0.2), strict=True):
                    if stored:
                        assert payload(stored) == wanted[each.header.key]
                        num_hits.append(1)
                for each, there in zip(path, found, strict=True):
                    if not there:
                        open_saves.append(1)
                        if not tiers.save(each, lambda saved: open_saves.append(-1)):
                            open_saves.append(-1)
                if source.random() < 0.05:
                    tiers.remove(keys(path))
        except BaseException as error:
            errors.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(60)
        assert not each.is_alive()
    assert not errors
    assert tiers.flush(SECONDS) and sum(open_saves) == 0 and tiers.pending_save_bytes == 0
    assert not tiers._transfers
    assert len(num_hits) > 50
    seen = {outcome for tier in tiers.counters() for _, outcome in tier.outcomes}
    assert {oc.CORRUPT, oc.FOREIGN, oc.FULL, oc.ERROR} <= seen
    for tier in tiers.counters():
        for operation in ("lookup", "load"):
            hits, misses = tier.outcomes[operation, oc.HIT], tier.outcomes[operation, oc.MISS]
            assert hits > 0 and misses > 0
    tiers.close()
    assert not list(root.rglob("*.tmp"))


# ---------------------------------------------------------------- answers and their time


def test_the_timer_runs_what_is_due_in_order() -> None:
    timer = Timer("test", time.monotonic)
    ran: list[str] = []
    ended = threading.Event()
    timer.after(0.05, lambda: (ran.append("late"), ended.set()))
    timer.after(0.01, lambda: ran.append("early"))
    assert ended.wait(10) and ran == ["early", "late"]
    timer.after(100, lambda: ran.append("at close"))
    timer.close()
    assert ran[-1] == "at close"
    timer.after(100, lambda: ran.append("after it"))
    assert ran[-1] == "after it"


def test_an_answer_is_given_once() -> None:
    from concurrent.futures import Future

    future: Future[list[int]] = Future()
    answer = Answer(future, 2, -1)
    assert not future.cancel()
    answer.put(1, 5)
    answer.finish()
    answer.put(0, 6)
    answer.finish()
    assert future.result(0) == [-1, 5]
    empty: Future[list[int]] = Future()
    Answer(empty, 0, -1)
    assert empty.result(0) == []
