"""The stores of the contract tests: how each is opened, and how its objects are damaged behind its back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.stores.segments import IDENTITY

from milepost.stores.file import FileStore
from milepost.stores.guard import GuardedStore
from milepost.stores.memory import MemoryStore
from milepost.stores.objects import ObjectStore
from milepost.stores.segment_format import Identity

if TYPE_CHECKING:
    from milepost.stores.mooncake_client import MooncakeConnection

Change = Callable[[bytes], bytes]


def inside(store: ObjectStore | GuardedStore) -> ObjectStore:
    """The store that a guard may be around."""
    return store.store if isinstance(store, GuardedStore) else store


class Harness:
    """Opens stores of one kind over one place; closes them at the end."""

    shared = True
    """Several processes see the same objects."""
    object_overhead_bytes = 512
    """What an object takes beyond its payload, at most."""

    def __init__(self) -> None:
        self._opened: list[ObjectStore | GuardedStore] = []
        self.guarded = False

    def open(self, identity: Identity = IDENTITY, budget_bytes: int = 64 << 20) -> ObjectStore | GuardedStore:
        """A client; `outcomes` of a guarded one are those of the store inside, too."""
        store: ObjectStore | GuardedStore = self._open(identity, budget_bytes)
        if self.guarded:
            store = GuardedStore(store)
        self._opened.append(store)
        return store

    def used_bytes(self, store: ObjectStore | GuardedStore) -> int:
        """What the store says it takes."""
        return inside(store).used_bytes

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        raise AssertionError("a kind of store says how it is opened")

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        """Change the bytes of an object; those of a key that has none start empty."""
        raise AssertionError("a kind of store says how it is damaged")


class MemoryHarness(Harness):
    shared = False

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        return MemoryStore(identity, budget_bytes=budget_bytes)

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        store = inside(store)
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

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        store = inside(store)
        assert isinstance(store, FileStore)
        path = store.path_of(key)
        data = path.read_bytes() if path.exists() else b""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change(data))


class RedisHarness(Harness):
    """An empty database of a server that the session started."""

    def __init__(self, port: int) -> None:
        super().__init__()
        import redis

        self.url = f"redis://127.0.0.1:{port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.client.flushdb()

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        from milepost.stores.redis import RedisStore

        return RedisStore(self.url, identity, budget_bytes=budget_bytes)

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        name = inside(store).key_of(key)
        self.client.set(name, change(self.client.get(name) or b""))

    def close(self) -> None:
        super().close()
        self.client.close()


class MooncakeHarness(Harness):
    """Stores over connections that the session made; each test has keys of its own."""

    def __init__(self, connections: list[MooncakeConnection]) -> None:
        super().__init__()
        self._connections = connections

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        from milepost.stores.mooncake import MooncakeStore

        connection = self._connections[len(self._opened) % len(self._connections)]
        return MooncakeStore(connection, identity)

    def close(self) -> None:
        """Connecting and leaving take seconds: the connections stay, the objects go."""
        with self._connections[0].use() as client:
            client.remove_all(True)

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        name = inside(store).key_of(key)
        with self._connections[0].use() as client:
            data = client.get(name)
            client.remove(name, True)
            # An object without bytes is refused.
            assert client.put(name, change(data) or b"\0") == 0
