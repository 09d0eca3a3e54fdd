"""Segments as plain files: survives restarts, shared by processes, bounded in bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.buffers import new_buffer
from milepost.stores.folder import (
    LockTimeoutError,
    SegmentFolder,
    disk_bytes,
    is_full,
    object_path,
    read_all,
    read_head,
    write_all,
)
from milepost.stores.lru import Entry, LruIndex
from milepost.stores.objects import Clock, Deadline, ObjectStore, StoreTimeoutError, keeps_existing
from milepost.stores.port import Buffer, Loaded, LookedUp, SegmentHeader, StoredSegment, Unanswered
from milepost.stores.segment_format import (
    Identity,
    SegmentError,
    decode_head,
    encode_head,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

FsyncPolicy = Literal["always", "rename", "never"]
FSYNC_POLICIES: tuple[FsyncPolicy, ...] = ("always", "rename", "never")
_DISCARD_SECONDS = 0.05
_OPEN_SECONDS = 10.0


class _DeadlinePassed(Exception):
    """The call's time is over."""


class FileStore(ObjectStore):
    """One file per segment below `root`.

    Recency is each file's modification time, written at every use, so the order of eviction survives
    restarts. Eviction is least recently used over all models in the folder; a save never evicts what the
    new segment builds on, and fails if there is nothing else to give up.

    Args:
        budget_bytes: of all files below `root` in whole blocks, whoever writes them; never exceeded.
        fsync: `never` (default): a crash of the process loses nothing that was renamed, and a file that a
            loss of power tore fails its checksum and is a miss. A cache need not pay 10 to 50 ms a file to
            survive the rest. `rename`: data reaches the disk before the file gets its name. `always`: the
            name too, before `save` returns.

    Raises:
        StoreError: a folder that cannot be used, or one whose lock is not to be had.
    """

    def __init__(
        self,
        root: str | Path,
        identity: Identity,
        *,
        budget_bytes: int,
        fsync: FsyncPolicy = "never",
        name: str = "file",
        clock: Clock = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(name, identity, clock)
        if budget_bytes < 1:
            raise StoreError(f"{name}: bytes must be positive, not {budget_bytes}")
        if fsync not in FSYNC_POLICIES:
            raise StoreError(f"{name}: fsync must be one of {', '.join(FSYNC_POLICIES)}, not {fsync!r}")
        self.budget_bytes = budget_bytes
        self._fsync = fsync
        self._wall_clock_ns = wall_clock_ns
        self._used_ns = 0
        self._lock = threading.RLock()
        self._index = LruIndex(self._read_parent, self._discover)
        self._seen_generation = 0
        self._folder = SegmentFolder(root)
        try:
            self._open(Deadline(_OPEN_SECONDS, clock))
        except (OSError, StoreError) as error:
            self._folder.close()
            raise StoreError(f"{root}: {error}") from error

    def _open(self, deadline: Deadline) -> None:
        try:
            with self._folder.locked(deadline), self._lock:
                self._rescan()
                num_bytes = self._folder.total_bytes
                self._evict(0, ())
                if (num_evicted := num_bytes - self._folder.total_bytes) > 0:
                    logger.warning(
                        "%s: %.1f of %.1f MiB were given up, since the budget is %.1f MiB", self._folder.root,
                        num_evicted / 2**20, num_bytes / 2**20, self.budget_bytes / 2**20,
                    )  # fmt: skip
        except OSError as error:
            if not is_full(error):
                raise
            # As for a disk that fills up later: what is there can be read, and saves begin with the room.
            logger.warning("%s: %s: nothing is saved until there is room", self._folder.root, error.strerror)

    @property
    def used_bytes(self) -> int:
        """What the folder's files take, those of other processes included."""
        return self._folder.peek_total_bytes()

    @property
    def known_usage(self) -> tuple[int, int]:
        # A disk that hangs must not hang whoever only counts.
        return self._folder.total_bytes, self.budget_bytes

    def path_of(self, key: bytes) -> Path:
        """Where the segment that ends at `key` is, if it is there."""
        return self._folder.root / self._name(key)

    def _name(self, key: bytes) -> str:
        return object_path(self.identity.fingerprint, self.identity.shard, key)

    # ------------------------------------------------------------ reading

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        deadline = Deadline(deadline_seconds, self._clock)
        found: list[LookedUp] = []
        for key in keys:
            if deadline.passed:
                break
            found.append(self._guarded(oc.LOOKUP, partial(self._lookup_one, oc.LOOKUP, key)))
        return found + self._late(oc.LOOKUP, len(keys) - len(found))

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        deadline = Deadline(deadline_seconds, self._clock)
        loaded: list[Loaded] = []
        for key in keys:
            if deadline.passed:
                break
            loaded.append(self._guarded(oc.LOAD, partial(self._load_one, key, deadline)))
        with self._lock:
            touched: set[str] = set()
            for segment in reversed(loaded):
                if segment and (name := self._name(segment.header.key)) not in touched:
                    touched.update(self._touch(name))
        return loaded + self._late(oc.LOAD, len(keys) - len(loaded))

    def _guarded(self, operation: str, act: Callable[[], T]) -> T | Unanswered:
        """One key's trouble is its own."""
        try:
            return act()
        except (_DeadlinePassed, LockTimeoutError):
            fault = oc.TIMEOUT
        except OSError as error:
            fault = oc.FULL if is_full(error) else oc.ERROR
            self._log_once(f"{error.strerror}: {error.filename or self._folder.root}")
        self.outcomes.add(operation, fault)
        return Unanswered(fault)

    def _lookup_one(self, operation: str, key: bytes) -> SegmentHeader | None:
        fd = self._folder.open(self._name(key))
        if fd is None:
            return None
        try:
            num_bytes = os.fstat(fd).st_size
            data = read_head(fd)
        finally:
            os.close(fd)
        return self._read_header(operation, key, data, num_bytes)

    def _load_one(self, key: bytes, deadline: Deadline) -> StoredSegment | None:
        def check() -> None:
            if deadline.passed:
                raise _DeadlinePassed

        fd = self._folder.open(self._name(key))
        if fd is None:
            return None
        try:
            num_bytes = os.fstat(fd).st_size
            head = read_head(fd)
            # Before memory is taken for a length that may be nonsense.
            if self._read_header(oc.LOAD, key, head, num_bytes) is None:
                return None
            data = new_buffer(num_bytes)
            num_read = read_all(fd, data, 0, check)
        finally:
            os.close(fd)
        return self._read_segment(key, data[:num_read])

    # ------------------------------------------------------------ writing

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        deadline = Deadline(deadline_seconds, self._clock)
        saved: list[bool | Unanswered] = []
        for segment in segments:
            if deadline.passed:
                break
            saved.append(self._guarded(oc.SAVE, partial(self._save_one, segment, deadline)))
        return [bool(each) for each in (*saved, *self._late(oc.SAVE, len(segments) - len(saved)))]

    def _save_one(self, segment: StoredSegment, deadline: Deadline) -> bool:
        header = segment.header
        name = self._name(header.key)
        existing = self._lookup_one(oc.SAVE, header.key)
        if existing is not None and keeps_existing(existing, header, self._has):
            with self._lock:
                self._touch(name)
            return True
        head = encode_head(segment)
        num_bytes = len(head) + header.payload_bytes
        with self._folder.locked(deadline), self._lock:
            self._refresh()
            if not self._make_room(disk_bytes(num_bytes), name, header.parent_key):
                self.outcomes.add(oc.SAVE, oc.FULL)
                return False
            fd, temporary = self._folder.create(name, num_bytes)
            self._seen_generation = self._folder.generation
        try:
            self._write(fd, (head, *segment.payload), deadline)
            with self._folder.locked(deadline), self._lock:
                self._folder.publish(temporary, name)
                self._seen_generation = self._folder.generation
                parent = self._name(header.parent_key) if header.parent_key else None
                self._index.add(name, Entry(disk_bytes(num_bytes), parent))
                self._touch(name)
        except BaseException:
            self._give_up(temporary)
            raise
        finally:
            os.close(fd)
        if self._fsync == "always":
            self._folder.sync(name)
        return True

    def _write(self, fd: int, pieces: Sequence[Buffer], deadline: Deadline) -> None:
        def check() -> None:
            if deadline.passed:
                raise _DeadlinePassed

        for piece in pieces:
            write_all(fd, memoryview(piece).cast("B"), check)
        if self._fsync != "never":
            os.fdatasync(fd)

    def _give_up(self, temporary: str) -> None:
        """Best effort: what stays is removed by the next scan of any process."""
        try:
            with self._folder.locked(Deadline(_DISCARD_SECONDS, self._clock)):
                self._folder.unlink(temporary)
        except (OSError, StoreError) as error:
            logger.warning("%s: an unfinished file stays until the next start: %s", self.name, error)

    def remove(self, keys: Sequence[bytes], *, deadline_seconds: float) -> int:
        deadline = Deadline(deadline_seconds, self._clock)
        num_removed = 0
        for key in keys:
            removed = self._guarded(oc.REMOVE, partial(self._unlink, self._name(key), deadline))
            num_removed += bool(removed)
        return num_removed

    def _unlink(self, name: str, deadline: Deadline) -> bool:
        with self._folder.locked(deadline), self._lock:
            self._index.remove(name)
            return self._folder.unlink(name) > 0

    def _links(self, deadline: Deadline) -> Iterable[tuple[bytes, bytes]]:
        with self._folder.locked(deadline), self._lock:
            files = self._folder.scan()
        for file in files:
            if deadline.passed:
                raise StoreTimeoutError(f"{self.name}: {len(files)} files could not be read in time")
            if not file.path.startswith(f"{self.identity.fingerprint}/"):
                continue
            header = self._header_of(file.path)
            if header is not None and header.shard == self.identity.shard:
                yield header.key, header.parent_key

    def _header_of(self, name: str) -> SegmentHeader | None:
        """None if it cannot be read."""
        fd = self._folder.open(name)
        if fd is None:
            return None
        try:
            return decode_head(read_head(fd)).header
        except SegmentError:
            return None
        finally:
            os.close(fd)

    def _discard(self, key: bytes) -> None:
        self._guarded(
            oc.REMOVE, lambda: self._unlink(self._name(key), Deadline(_DISCARD_SECONDS, self._clock))
        )

    def close(self) -> None:
        self._folder.close()

    # ------------------------------------------------------------ recency and eviction

    def _has(self, key: bytes) -> bool:
        return self._folder.find(self._name(key)) is not None

    def _discover(self, name: str) -> Entry | None:
        """A file of another process."""
        found = self._folder.find(name)
        return None if found is None else Entry(found.num_bytes, parent_known=False, used_ns=found.used_ns)

    def _read_parent(self, name: str) -> str | None:
        """What the object of file `name` builds on."""
        header = self._header_of(name)
        if header is None or not header.parent_key:
            return None
        return object_path(header.fingerprint, header.shard, header.parent_key)

    def _touch(self, name: str) -> list[str]:
        names = self._index.touch_path(name)
        for each in names:
            self._used_ns = max(self._wall_clock_ns(), self._used_ns + 1)
            entry = self._index.entry(each)
            if entry is None or not self._folder.mark_used(each, self._used_ns):
                self._index.remove(each)
            else:
                entry.used_ns = self._used_ns
        return names

    def _refresh(self) -> None:
        """With the lock held: read the folder again if others changed much of it."""
        num_foreign_changes = self._folder.generation - self._seen_generation
        if num_foreign_changes > max(64, len(self._index) // 8):
            self._rescan()

    def _rescan(self) -> None:
        files = self._folder.scan()
        old, self._index = self._index, LruIndex(self._read_parent, self._discover)
        for file in sorted(files, key=lambda file: (file.used_ns, file.path)):
            known = old.entry(file.path)
            entry = Entry(file.num_bytes, parent_known=False, used_ns=file.used_ns)
            if known is not None and known.parent_known:
                entry.parent, entry.parent_known = known.parent, True
            self._index.add(file.path, entry)
            self._used_ns = max(self._used_ns, file.used_ns)
        self._seen_generation = self._folder.generation

    def _make_room(self, num_bytes: int, name: str, parent_key: bytes) -> bool:
        """With the lock held: whether `num_bytes` more fit, after evicting what must go."""
        if num_bytes > self.budget_bytes:
            return False
        parents = self._index.path(self._name(parent_key)) if parent_key else []
        # An object of the same name is replaced only when the new one is whole.
        return self._evict(num_bytes, {name, *parents})

    def _evict(self, num_bytes: int, protected: Collection[str]) -> bool:
        rescanned = False
        while (needed := self._folder.total_bytes + num_bytes - self.budget_bytes) > 0:
            victims = self._index.victims(needed, protected)
            if victims is None:
                if rescanned:
                    return False
                self._rescan()
                rescanned = True
                continue
            for victim in victims:
                self._evict_one(victim)
        return True

    def _evict_one(self, name: str) -> None:
        entry, found = self._index.entry(name), self._folder.find(name)
        if entry is not None and found is not None and found.used_ns > entry.used_ns:
            # Another process used it since.
            entry.used_ns = found.used_ns
            self._index.move_to_end(name)
            return
        self._index.remove(name)
        self._folder.unlink(name)
