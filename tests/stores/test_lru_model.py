"""Memory and file stores against a model of a few lines, through any sequence of operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.stores.segments import IDENTITY, SECONDS, payload, segment

from milepost.stores.file import FileStore
from milepost.stores.folder import LEDGER_NAME, disk_bytes
from milepost.stores.memory import MemoryStore
from milepost.stores.port import StoredSegment
from milepost.stores.segment_format import encode_head

BUDGET_BYTES = 20 * 4096
UNITS = st.integers(1, 3)


def tree_of_segments() -> list[StoredSegment]:
    """Fourteen segments: paths with forks, of one to three blocks each."""
    made = [segment("root"), segment("other root", record_bytes=2500)]
    for index in range(12):
        parent = made[(index * 5) % len(made)]
        made.append(segment(index, parent=parent, record_bytes=700 + 900 * (index % 3)))
    return made


SEGMENTS = tree_of_segments()
PARENTS = {each.header.key: each.header.parent_key for each in SEGMENTS}


class Model:
    """Recency as a list, oldest first; sizes as the store counts them."""

    def __init__(self, sizes: dict[bytes, int]) -> None:
        self.sizes = sizes
        self.order: list[bytes] = []

    def path(self, key: bytes) -> list[bytes]:
        path = []
        while key in self.order:
            path.append(key)
            key = PARENTS[key]
        return path

    def use(self, key: bytes) -> None:
        for each in self.path(key):
            self.order.remove(each)
            self.order.append(each)

    def save(self, key: bytes) -> bool:
        if key in self.order:
            self.use(key)
            return True
        protected = self.path(PARENTS[key])
        total = sum(self.sizes[each] for each in self.order) + self.sizes[key]
        victims = []
        for each in self.order:
            if total > BUDGET_BYTES and each not in protected:
                victims.append(each)
                total -= self.sizes[each]
        if total > BUDGET_BYTES:
            return False
        self.order = [each for each in self.order if each not in victims]
        self.order.append(key)
        self.use(key)
        return True


class LruMachine(RuleBasedStateMachine):
    """The store is opened by the subclass."""

    sizes: dict[bytes, int]
    store: MemoryStore | FileStore

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.sizes)

    @rule(index=st.integers(0, len(SEGMENTS) - 1))
    def save(self, index: int) -> None:
        one = SEGMENTS[index]
        assert self.store.save([one], deadline_seconds=SECONDS) == [self.model.save(one.header.key)]

    @rule(indices=st.lists(st.integers(0, len(SEGMENTS) - 1), max_size=5, unique=True))
    def load(self, indices: list[int]) -> None:
        wanted = [SEGMENTS[index] for index in indices]
        loaded = self.store.load([each.header.key for each in wanted], deadline_seconds=SECONDS)
        touched: set[bytes] = set()
        for stored, each in zip(loaded, wanted, strict=True):
            assert payload(stored) == (payload(each) if each.header.key in self.model.order else None)
        for each in reversed(wanted):
            if each.header.key in self.model.order and each.header.key not in touched:
                touched.update(self.model.path(each.header.key))
                self.model.use(each.header.key)

    @rule(index=st.integers(0, len(SEGMENTS) - 1))
    def remove(self, index: int) -> None:
        key = SEGMENTS[index].header.key
        present = key in self.model.order
        assert self.store.remove([key], deadline_seconds=SECONDS) == present
        if present:
            self.model.order.remove(key)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        found = self.store.lookup([each.header.key for each in SEGMENTS], deadline_seconds=SECONDS)
        assert [each.header.key for each in SEGMENTS if each.header.key in self.model.order] == [
            header.key for header in found if header
        ]
        assert self.store.used_bytes == sum(self.sizes[key] for key in self.model.order) <= BUDGET_BYTES

    @invariant()
    def parents_are_not_older_than_their_children(self) -> None:
        for position, key in enumerate(self.model.order):
            assert PARENTS[key] not in self.model.order[:position]

    def teardown(self) -> None:
        self.store.close()


class MemoryMachine(LruMachine):
    sizes = {each.header.key: len(encode_head(each)) + each.header.payload_bytes for each in SEGMENTS}

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(IDENTITY, budget_bytes=BUDGET_BYTES)


class FileMachine(LruMachine):
    sizes = {key: disk_bytes(size) for key, size in MemoryMachine.sizes.items()}

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.now_ns = 10**18
        self.store = self.reopened()

    def reopened(self) -> FileStore:
        return FileStore(self.root, IDENTITY, budget_bytes=BUDGET_BYTES, wall_clock_ns=lambda: self.now_ns)

    @rule()
    @precondition(lambda self: self.model.order)
    def restart(self) -> None:
        self.store.close()
        self.store = self.reopened()

    @rule(seconds=st.sampled_from([-3600, 1, 5]))
    def set_the_clock(self, seconds: int) -> None:
        """Backwards too."""
        self.now_ns += seconds * 10**9

    @invariant()
    def the_folder_holds_no_more_than_it_says(self) -> None:
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != LEDGER_NAME]
        assert sum(disk_bytes(path.stat().st_size) for path in files) == self.store.used_bytes

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.root)


class SharedFolder(RuleBasedStateMachine):
    """Several stores over one folder, as of several processes. Which object goes is not the model's here,
    but the bound, the account and the order on the disk hold for all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.stores = [self.opened() for _ in range(3)]

    def opened(self) -> FileStore:
        return FileStore(self.root, IDENTITY, budget_bytes=BUDGET_BYTES)

    @rule(which=st.integers(0, 2), index=st.integers(0, len(SEGMENTS) - 1))
    def save(self, which: int, index: int) -> None:
        one = SEGMENTS[index]
        saved = self.stores[which].save([one], deadline_seconds=SECONDS)
        for store in self.stores:
            found = store.lookup([one.header.key], deadline_seconds=SECONDS)
            assert [header is not None for header in found] == saved

    @rule(which=st.integers(0, 2), indices=st.lists(st.integers(0, len(SEGMENTS) - 1), max_size=4))
    def load(self, which: int, indices: list[int]) -> None:
        wanted = [SEGMENTS[index] for index in indices]
        loaded = self.stores[which].load([each.header.key for each in wanted], deadline_seconds=SECONDS)
        for stored, each in zip(loaded, wanted, strict=True):
            assert payload(stored) == (payload(each) if self.path(each.header.key).exists() else None)

    @rule(which=st.integers(0, 2), index=st.integers(0, len(SEGMENTS) - 1))
    def remove(self, which: int, index: int) -> None:
        key = SEGMENTS[index].header.key
        present = self.path(key).exists()
        assert self.stores[which].remove([key], deadline_seconds=SECONDS) == present
        assert not self.path(key).exists()

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.opened()

    def path(self, key: bytes) -> Path:
        return self.stores[0].path_of(key)

    @invariant()
    def the_account_is_right_and_within_the_bound(self) -> None:
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != LEDGER_NAME]
        total_bytes = sum(disk_bytes(path.stat().st_size) for path in files)
        assert {store.used_bytes for store in self.stores} == {total_bytes}
        assert total_bytes <= BUDGET_BYTES

    @invariant()
    def parents_are_not_older_than_their_children(self) -> None:
        for each in SEGMENTS:
            child, parent = self.path(each.header.key), self.path(each.header.parent_key)
            if each.header.parent_key and child.exists() and parent.exists():
                assert parent.stat().st_mtime_ns >= child.stat().st_mtime_ns

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = settings(max_examples=60, stateful_step_count=40)
TestFileStore = FileMachine.TestCase
TestFileStore.settings = settings(max_examples=25, stateful_step_count=40)
TestSharedFolder = SharedFolder.TestCase
TestSharedFolder.settings = settings(max_examples=25, stateful_step_count=40)
