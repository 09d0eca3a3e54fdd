"""The stores of the contract tests: how each is opened, and how its objects are damaged behind its back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.stores.segments import IDENTITY

from milepost.stores.file import FileStore
from milepost.stores.memory import MemoryStore
from milepost.stores.objects import ObjectStore
from milepost.stores.segment_format import Identity

Change = Callable[[bytes], bytes]


class Harness:
    """Opens stores of one kind over one place; closes them at the end."""

    shared = True
    """Several processes see the same objects."""
    object_overhead_bytes = 512
    """What an object takes beyond its payload, at most."""

    def __init__(self) -> None:
        self._opened: list[ObjectStore] = []

    def open(self, identity: Identity = IDENTITY, budget_bytes: int = 64 << 20) -> ObjectStore:
        store = self._open(identity, budget_bytes)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        raise AssertionError("a kind of store says how it is opened")

    def damage(self, store: ObjectStore, key: bytes, change: Change) -> None:
        """Change the bytes of an object; those of a key that has none start empty."""
        raise AssertionError("a kind of store says how it is damaged")


class MemoryHarness(Harness):
    shared = False

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        return MemoryStore(identity, budget_bytes=budget_bytes)

    def damage(self, store: ObjectStore, key: bytes, change: Change) -> None:
        assert isinstance(store, MemoryStore)
        data = bytes(store._objects.get(key.hex(), b""))
        store._objects[key.hex()] = memoryview(change(data))


class FileHarness(Harness):
    object_overhead_bytes = 512 + 4096

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        return FileStore(self.root, identity, budget_bytes=budget_bytes)

    def damage(self, store: ObjectStore, key: bytes, change: Change) -> None:
        assert isinstance(store, FileStore)
        path = store.path_of(key)
        data = path.read_bytes() if path.exists() else b""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change(data))
