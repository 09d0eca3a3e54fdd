"""Segments in a Redis server, shared by replicas (extra `redis`).

The bound in bytes is kept by an index in the server, not by its `maxmemory`: recency, sizes and parents of
the objects change together with them in Lua scripts, which the server runs one at a time, so the bound and
the order of eviction are the same for all clients. Set `maxmemory` above the bound with the policy
`noeviction` (the default) or `volatile-*`; with `allkeys-*` the server may drop the index, and then keeps
to its own bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.objects import Clock, Deadline, ObjectStore, StoreTimeoutError, keeps_existing
from milepost.stores.port import Loaded, LookedUp, SegmentHeader, StoredSegment
from milepost.stores.segment_format import (
    HEAD_UNIT_BYTES,
    Identity,
    SegmentError,
    encode_head,
    head_bytes_needed,
)

if TYPE_CHECKING:
    import redis

_MAX_OBJECT_BYTES = 512 << 20
"""The server takes no larger value."""
_INDEX = ("milepost:recency", "milepost:sizes", "milepost:parents", "milepost:total", "milepost:clock")
_SOCKET_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""A connection keeps its timeout: a call takes one whose timeout is not above its deadline."""
_LOADS_AT_ONCE = 8

_COMMON = """
local recency, sizes, parents, total, clock = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local function path(name)
  local names, seen = {}, {}
  while name and name ~= '' and not seen[name] and redis.call('HEXISTS', sizes, name) == 1 do
    seen[name] = true
    names[#names + 1] = name
    name = redis.call('HGET', parents, name)
  end
  return names, seen
end
local function touch(name, touched)
  for _, each in ipairs(path(name)) do
    redis.call('ZADD', recency, redis.call('INCR', clock), each)
    touched[each] = true
  end
end
local function forget(name)
  local size = redis.call('HGET', sizes, name)
  if size then
    redis.call('DECRBY', total, size)
    redis.call('HDEL', sizes, name)
    redis.call('HDEL', parents, name)
    redis.call('ZREM', recency, name)
  end
  return redis.call('DEL', name)
end
"""
_SAVE = (
    _COMMON
    + """
-- The server checks its own limit at the first write of a script only, and not for DEL.
redis.call('INCR', clock)
local name, parent, size, budget, data = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
forget(name)
local needed = tonumber(redis.call('GET', total) or '0') + size - budget
local _, protected = path(parent)
local victims, first = {}, 0
while needed > 0 do
  local names = redis.call('ZRANGE', recency, first, first + 99)
  if #names == 0 then return 0 end
  first = first + 100
  for _, each in ipairs(names) do
    if needed > 0 and not protected[each] then
      victims[#victims + 1] = each
      needed = needed - tonumber(redis.call('HGET', sizes, each) or '0')
    end
  end
end
for _, each in ipairs(victims) do forget(each) end
redis.call('SET', name, data)
redis.call('HSET', sizes, name, size)
redis.call('HSET', parents, name, parent)
redis.call('INCRBY', total, size)
touch(name, {})
return 1
"""
)
_TOUCH = (
    _COMMON
    + """
local touched = {}
for _, name in ipairs(ARGV) do
  if not touched[name] then touch(name, touched) end
end
"""
)
_FORGET = (
    _COMMON
    + """
local count = 0
for _, name in ipairs(ARGV) do count = count + forget(name) end
return count
"""
)


class RedisStore(ObjectStore):
    """One string value per segment; the head is read without the payload.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS.
        budget_bytes: of all values of Milepost in that database.
    """

    expected_call_seconds = 0.002
    expected_load_bytes_per_second = 3e8

    def __init__(
        self,
        url: str,
        identity: Identity,
        *,
        budget_bytes: int,
        name: str = "redis",
        clock: Clock = time.monotonic,
    ) -> None:
        import redis

        super().__init__(name, identity, clock)
        if budget_bytes < 1:
            raise StoreError(f"{name}: bytes must be positive, not {budget_bytes}")
        self.budget_bytes = budget_bytes
        self._url = url
        self._redis = redis
        self._lock = threading.Lock()
        self._clients: dict[float, Any] = {}
        rank, num_ranks = identity.shard
        self._prefix = f"milepost:segment:{identity.fingerprint}:{rank}-{num_ranks}:"
        self._client(1.0)

    @property
    def used_bytes(self) -> int:
        """What the server's index says."""
        with self._errors():
            return int(self._client(1.0).get(_INDEX[3]) or 0)

    def key_of(self, key: bytes) -> str:
        """The name of the value that holds the segment which ends at `key`."""
        return self._prefix + key.hex()

    # ------------------------------------------------------------ the port

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        if deadline_seconds <= 0:
            return [*self._late(oc.LOOKUP, len(keys))]
        with self._errors():
            return [*self._headers(oc.LOOKUP, keys, self._client(deadline_seconds))]

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        deadline = Deadline(deadline_seconds, self._clock)
        loaded: list[Loaded] = []
        with self._errors():
            while len(loaded) < len(keys) and not deadline.passed:
                some = keys[len(loaded) : len(loaded) + _LOADS_AT_ONCE]
                client = self._client(deadline.remaining_seconds)
                values = client.mget([self.key_of(key) for key in some])
                loaded += [self._read_segment(key, value) for key, value in zip(some, values, strict=True)]
            found = [self.key_of(each.header.key) for each in reversed(loaded) if each]
            if found:
                self._touch(found, self._client(deadline.remaining_seconds))
        return loaded + self._late(oc.LOAD, len(keys) - len(loaded))

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        deadline = Deadline(deadline_seconds, self._clock)
        saved: list[bool] = []
        if deadline.passed or not segments:
            self.outcomes.add(oc.SAVE, oc.TIMEOUT, len(segments))
            return [False] * len(segments)
        with self._errors():
            keys = [segment.header.key for segment in segments]
            existing = self._headers(oc.SAVE, keys, self._client(deadline_seconds))
            for segment, header in zip(segments, existing, strict=True):
                if deadline.passed:
                    break
                client = self._client(deadline.remaining_seconds)
                if header is not None and keeps_existing(header, segment.header, self._has):
                    self._touch([self.key_of(header.key)], client)
                    saved.append(True)
                else:
                    saved.append(self._save_one(segment, client))
        self.outcomes.add(oc.SAVE, oc.TIMEOUT, len(segments) - len(saved))
        return saved + [False] * (len(segments) - len(saved))

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        if not keys:
            return 0
        with self._errors():
            return int(self._run(_FORGET, [self.key_of(key) for key in keys], self._client(deadline_seconds)))

    def _links(self, deadline: Deadline) -> Iterable[tuple[bytes, bytes]]:
        with self._errors():
            parents = self._client(deadline.remaining_seconds).hgetall(_INDEX[2])
        pairs = [(name.decode(), parent.decode()) for name, parent in parents.items()]
        return [(self._key_in(name), self._key_in(parent)) for name, parent in pairs if self._is_mine(name)]

    def _is_mine(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def _key_in(self, name: str) -> bytes:
        """Undoes `key_of`; empty for no name."""
        return bytes.fromhex(name.removeprefix(self._prefix))

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    # ------------------------------------------------------------ parts

    def _headers(self, operation: str, keys: Sequence[bytes], client: Any) -> list[SegmentHeader | None]:
        """One round trip; a second one for heads that are longer than usual."""
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(self.key_of(key), 0, HEAD_UNIT_BYTES - 1)
                pipeline.strlen(self.key_of(key))
            answers = pipeline.execute()
        heads, lengths = answers[::2], answers[1::2]
        with client.pipeline(transaction=False) as pipeline:
            longer = []
            for index, head in enumerate(heads):
                try:
                    needed = head_bytes_needed(head) if lengths[index] else 0
                except SegmentError:
                    continue
                if needed > len(head) and lengths[index] > len(head):
                    longer.append(index)
                    pipeline.getrange(self.key_of(keys[index]), 0, needed - 1)
            for index, head in zip(longer, pipeline.execute() if longer else (), strict=True):
                heads[index] = head
        return [
            self._read_header(operation, key, head, length) if length else None
            for key, head, length in zip(keys, heads, lengths, strict=True)
        ]

    def _save_one(self, segment: StoredSegment, client: Any) -> bool:
        head = encode_head(segment)
        data = b"".join((head, *segment.payload))
        parent = segment.header.parent_key
        if len(data) > min(self.budget_bytes, _MAX_OBJECT_BYTES):
            self.outcomes.add(oc.SAVE, oc.FULL)
            return False
        arguments: list[str | int | bytes] = [
            self.key_of(segment.header.key),
            self.key_of(parent) if parent else "",
            len(data),
            self.budget_bytes,
            data,
        ]
        try:
            saved = bool(self._run(_SAVE, arguments, client))
        except self._redis.exceptions.OutOfMemoryError:
            saved = False
        if not saved:
            self.outcomes.add(oc.SAVE, oc.FULL)
        return saved

    def _touch(self, names: Sequence[str], client: Any) -> None:
        # A server at its own limit refuses to note the use; what was read is none the worse.
        with suppress(self._redis.exceptions.OutOfMemoryError):
            self._run(_TOUCH, names, client)

    def _has(self, key: bytes) -> bool:
        return bool(self._client(1.0).exists(self.key_of(key)))

    def _discard(self, key: bytes) -> None:
        try:
            self._run(_FORGET, [self.key_of(key)], self._client(_SOCKET_SECONDS[2]))
        except self._redis.RedisError as error:
            self._log_once(f"a corrupt segment stays for now: {error!r}")

    # ------------------------------------------------------------ connections

    def _run(self, script: str, arguments: Sequence[str | int | bytes], client: Any) -> Any:
        return client.register_script(script)(keys=_INDEX, args=arguments)

    def _client(self, seconds: float) -> Any:
        timeout = max((each for each in _SOCKET_SECONDS if each <= seconds), default=_SOCKET_SECONDS[0])
        with self._lock:
            if timeout not in self._clients:
                self._clients[timeout] = self._new_client(timeout)
            return self._clients[timeout]

    def _new_client(self, timeout: float) -> redis.Redis:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            return self._redis.Redis.from_url(
                self._url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # A guard decides what happens after a failure.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StoreError(f"{self.name}: {error}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._redis.TimeoutError as error:
            raise StoreTimeoutError(f"{self.name}: {error}") from error
        except self._redis.RedisError as error:
            raise StoreError(f"{self.name}: {error}") from error
