"""The stores of the contract tests: how each is opened, and how its objects are damaged behind its back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.stores.segments import IDENTITY

from milepost.stores.file import FileStore
from milepost.stores.guard import GuardedStore
from milepost.stores.memory import MemoryStore
from milepost.stores.objects import ObjectStore
from milepost.stores.peer import PeerStore
from milepost.stores.peer_protocol import MAX_HEAD_BYTES
from milepost.stores.port import StoredSegment
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


class MemorySource:
    """What a peer's cache would give: the objects of a memory store, as they are, damaged ones included."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.memory = MemoryStore(identity, budget_bytes=64 << 20)
        self.num_reading = 0

    def _object(self, key: bytes) -> memoryview | None:
        return self.memory._objects.get(key.hex())

    def heads(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[memoryview | None]:
        found = [self._object(key) for key in keys]
        return [None if each is None else each[:MAX_HEAD_BYTES] for each in found]

    @contextmanager
    def reading(
        self, keys: Sequence[bytes], max_bytes: int, *, deadline_seconds: float
    ) -> Iterator[list[list[memoryview] | None]]:
        objects: list[list[memoryview] | None] = []
        num_bytes = 0
        for key in keys:
            data = self._object(key)
            num_bytes += 0 if data is None else data.nbytes
            if num_bytes > max_bytes and any(objects):
                break
            # In two pieces, as a head and a payload are.
            objects.append(None if data is None else [data[:100], data[100:]])
        self.num_reading += 1
        yield objects
        self.num_reading -= 1


class WrittenPeer(PeerStore):
    """A peer whose cache is filled from here, which only a test can do."""

    takes_saves = True

    def __init__(self, source: MemorySource, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.source = source

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        # What it counts about saves is what a store counts.
        self.source.memory.outcomes = self.outcomes
        return self.source.memory.save(segments, deadline_seconds=deadline_seconds)

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        return self.source.memory.remove(keys, deadline_seconds=deadline_seconds)


class PeerHarness(Harness):
    """One serving side for every identity, in this process, over real connections."""

    def __init__(
        self, *, nixl: bool = False, area_bytes: int = 8 << 20, secret: str | None = "secret"
    ) -> None:
        super().__init__()
        self.nixl = nixl
        self.area_bytes = area_bytes
        self.secret = secret
        self.servers: dict[Identity, Any] = {}
        self.sources: dict[Identity, MemorySource] = {}
        self.readers: list[Any] = []

    def serve(self, identity: Identity) -> Any:
        """The server of an identity; started with the first call."""
        from milepost.server.app import bind
        from milepost.server.peer_app import PeerApp, PeerServer
        from milepost.stores.staging import StagingArea

        if identity not in self.servers:
            self.sources[identity] = MemorySource(identity)
            area = StagingArea(self.area_bytes)
            stage = None
            if self.nixl:
                from milepost.stores.peer_nixl import NixlStage

                stage = NixlStage(area, "127.0.0.1", self.secret, "instance")
            app = PeerApp(self.sources[identity], area, secret=self.secret, stage=stage)
            self.servers[identity] = PeerServer(app, bind("127.0.0.1", 0))
            self.servers[identity].start()
        return self.servers[identity]

    def _open(self, identity: Identity, budget_bytes: int) -> ObjectStore:
        from milepost.stores.peer_connection import PeerConnections

        host, port = self.serve(identity).address
        connections = PeerConnections(
            host, port, secret=self.secret, silence_seconds=5.0, clock=time.monotonic
        )
        bulk = None
        if self.nixl:
            from milepost.stores.peer_nixl import NixlReader

            bulk = NixlReader(host, self.secret, name="peer", silence_seconds=5.0)
            self.readers.append(bulk)
        store = WrittenPeer(self.sources[identity], connections, identity, bulk=bulk)
        if bulk is not None:
            bulk.connect(store.ask_hello)
            end = time.monotonic() + 60
            while not bulk.is_ready:
                assert time.monotonic() < end
                time.sleep(0.002)
        return store

    def damage(self, store: ObjectStore | GuardedStore, key: bytes, change: Change) -> None:
        store = inside(store)
        assert isinstance(store, WrittenPeer)
        objects = store.source.memory._objects
        # A frame without bytes means that there is nothing.
        objects[key.hex()] = memoryview(change(bytes(objects.get(key.hex(), b""))) or b"\0")

    def close(self) -> None:
        for server in self.servers.values():
            assert not server.app.counts.num_segments["wire" if self.nixl else "nixl"], "only one way"
        super().close()
        for server in self.servers.values():
            server.close()
            assert not server.app._area.used_bytes, "everything staged was given back"
