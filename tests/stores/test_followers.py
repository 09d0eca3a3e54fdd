"""What builds on a segment can be found where a store can list what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.stores.segments import IDENTITY, OTHER_FINGERPRINT, SECONDS, chain, keys, segment

from milepost.errors import StoreError
from milepost.stores.faulty import Faults, FaultyStore
from milepost.stores.file import FileStore
from milepost.stores.guard import GuardedStore
from milepost.stores.memory import MemoryStore
from milepost.stores.port import SegmentStore
from milepost.stores.segment_format import Identity
from milepost.stores.tiers import Tiers

KINDS: dict[str, Callable[[Path], SegmentStore]] = {
    "memory": lambda path: MemoryStore(IDENTITY, budget_bytes=1 << 24),
    "file": lambda path: FileStore(path, IDENTITY, budget_bytes=1 << 24),
    "faulty": lambda path: FaultyStore(MemoryStore(IDENTITY, budget_bytes=1 << 24), Faults(), seed=0),
    "guarded": lambda path: GuardedStore(FileStore(path, IDENTITY, budget_bytes=1 << 24)),
}


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SegmentStore]:
    made = KINDS[request.param](tmp_path / "kv")
    yield made
    made.close()


def test_followers_are_found_over_any_distance(store: SegmentStore) -> None:
    trunk = chain("trunk", 4)
    branch = [segment("branch 0", parent=trunk[1])]
    branch.append(segment("branch 1", parent=branch[0]))
    other = chain("other", 3)
    everything = [*trunk, *branch, *other]
    assert all(store.save(everything, deadline_seconds=SECONDS))

    def after(*parents) -> set[bytes]:
        found = store.followers(keys(list(parents)), deadline_seconds=SECONDS)
        assert len(set(found)) == len(found)
        return set(found)

    assert after(trunk[0]) == set(keys(trunk[1:] + branch))
    assert after(trunk[1]) == set(keys(trunk[2:] + branch))
    assert after(trunk[3]) == after() == set()
    assert after(trunk[2], branch[0]) == set(keys([trunk[3], branch[1]]))
    assert after(trunk[0], trunk[1]) == set(keys(trunk[2:] + branch)), "none of those asked for"
    # Also behind one that is gone, which is how they are found after a removal that was cut short.
    store.remove(keys([trunk[0], branch[0]]), deadline_seconds=SECONDS)
    assert after(trunk[0]) == set(keys(trunk[1:]))
    assert after(branch[0]) == set(keys(branch[1:]))


def test_files_of_other_writers_count_if_they_are_of_this_model(tmp_path: Path) -> None:
    mine, second = (FileStore(tmp_path / "kv", IDENTITY, budget_bytes=1 << 24) for _ in range(2))
    foreign = FileStore(tmp_path / "kv", Identity(OTHER_FINGERPRINT), budget_bytes=1 << 24)
    ours = chain("chain", 3)
    theirs = chain("chain", 3)
    assert all(second.save(ours, deadline_seconds=SECONDS))
    others = [segment(("chain", n), identity=foreign.identity) for n in range(len(theirs))]
    assert all(foreign.save(others, deadline_seconds=SECONDS))
    (tmp_path / "kv" / IDENTITY.fingerprint / "00").mkdir(exist_ok=True)
    (tmp_path / "kv" / IDENTITY.fingerprint / "00" / ("00" * 32)).write_bytes(b"no segment")
    assert set(mine.followers(keys(ours[:1]), deadline_seconds=SECONDS)) == set(keys(ours[1:]))
    assert foreign.followers(keys(ours[:1]), deadline_seconds=SECONDS) == []
    with pytest.raises(StoreError):
        mine.followers(keys(ours[:1]), deadline_seconds=0.0)


def test_tiers_say_which_of_them_did_not_answer() -> None:
    fast, slow = (MemoryStore(IDENTITY, budget_bytes=1 << 24, name=name) for name in ("fast", "slow"))
    segments = chain("tiers", 3)
    assert all(slow.save(segments, deadline_seconds=SECONDS))
    broken = FaultyStore(fast, Faults(error=1.0), seed=0)
    tiers = Tiers([broken, slow])
    try:
        found = tiers.followers(keys(segments[:1]), deadline_seconds=SECONDS).result(SECONDS)
        assert found[0] is None and set(found[1] or ()) == set(keys(segments[1:]))
    finally:
        tiers.close()
