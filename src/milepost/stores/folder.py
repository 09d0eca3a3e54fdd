"""A folder of segment files that several processes share: layout, lock, and the ledger of its bytes.

    <root>/.milepost                        lock and ledger
    <root>/<fingerprint>/<hh>/<name>        one object; name = SHA-256 of shard and key, hh = its first digits
    <root>/<fingerprint>/<hh>/.<name>.<n>.tmp    an object that is being written

Readers need no lock: a file appears whole by its rename, and stays readable for who has it open. Writers
hold the lock while they change what the folder contains, not while they write bytes. A file that is being
written has its full length from the start, so the ledger counts bytes before they are on the disk, and
gives them back after they are gone: at no moment are there more than it says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from milepost.errors import StoreError
from milepost.stores.objects import Deadline
from milepost.stores.segment_format import HEAD_UNIT_BYTES, SegmentError, head_bytes_needed

LEDGER_NAME = ".milepost"
BLOCK_BYTES = 4096
"""Files are counted in whole blocks, as a disk does."""

_LEDGER = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<I")
_LEDGER_MAGIC = b"MPLEDGR1"
_OBJECT_PATH = re.compile(r"[0-9a-f]{8,128}/([0-9a-f]{2})/\1[0-9a-f]{62}")
_TEMPORARY_PATH = re.compile(r"[0-9a-f]{8,128}/[0-9a-f]{2}/\.[0-9a-f]{64}\.[0-9a-f]+\.tmp")
# Whatever has the name of an object: a pipe must not hold who opens it.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

logger = logging.getLogger(__name__)

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
"""The last two: a symbolic link, and a socket."""
_MAX_IGNORED = 10


class LockTimeoutError(StoreError):
    """Another process held the lock for too long."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """Attributes:
    path: relative to the root; it is the name in indexes too.
    num_bytes: in whole blocks.
    used_ns: modification time, which stands for the last use.
    """

    path: str
    num_bytes: int
    used_ns: int


def is_full(error: OSError) -> bool:
    """Whether it says that a disk, or a quota, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_bytes(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def object_path(fingerprint: str, shard: tuple[int, int], key: bytes) -> str:
    name = sha256(struct.pack("<II", *shard) + key).hexdigest()
    return f"{fingerprint}/{name[:2]}/{name}"


class SegmentFolder:
    """Opens the folder, and makes it if it is not there.

    A disk that is too full to make it does not prevent that: whoever takes the lock later tries again.

    Raises:
        StoreError: a folder that others could read or change, or that holds something else.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._thread_lock = threading.Lock()
        self._lock_fd = -1
        self._is_closed = False
        self.total_bytes = 0
        """What the ledger said when the lock was held last."""
        self.generation = 0
        """Changes so far, by all processes."""
        self._ignored: set[str] = set()
        try:
            self._prepare()
        except OSError as error:
            logger.warning("%s: %s; it is made when there is room", self.root, error.strerror)

    def close(self) -> None:
        with self._thread_lock:
            self._is_closed = True
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = -1

    def absolute(self, path: str) -> str:
        return f"{self.root}/{path}"

    # ------------------------------------------------------------ opening

    def _prepare(self) -> None:
        """
        Raises:
            StoreError: it cannot be used. OSError: the disk is full.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.root, 0o700)
            self._check_root()
            self._open_ledger()
        except OSError as error:
            if is_full(error):
                raise
            raise StoreError(
                f"{self.root} cannot be used as a folder: {error.strerror or error} ({error.filename}); "
                "name one that exists or may be made"
            ) from error

    def _check_root(self) -> None:
        found = os.lstat(self.root)
        if stat.S_ISLNK(found.st_mode):
            raise StoreError(f"{self.root} is a symbolic link; give the folder it points to")
        if not stat.S_ISDIR(found.st_mode):
            raise StoreError(f"{self.root} is not a folder")
        if found.st_uid != os.geteuid():
            raise StoreError(
                f"{self.root} belongs to user {found.st_uid}; cached prompts need a folder of yours"
            )
        if found.st_mode & 0o022:
            raise StoreError(
                f"{self.root} can be written by others, who could change what is reused; give a folder "
                "of your own, like ~/.cache/milepost (one that is missing is made, for you alone)"
            )
        names = os.listdir(self.root)
        if names and LEDGER_NAME not in names:
            raise StoreError(f"{self.root} holds other files; give a new or empty folder")

    def _open_ledger(self) -> None:
        path = self.root / LEDGER_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise StoreError(f"{path} is not a plain file; remove it, or give another folder") from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StoreError(f"{path} is not a plain file; remove it, or give another folder")
        self._lock_fd = fd

    # ------------------------------------------------------------ the lock

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Nobody else changes the folder meanwhile.

        Raises:
            LockTimeoutError: the lock was not free before the deadline.
        """
        if not self._thread_lock.acquire(timeout=deadline.remaining_seconds):
            raise LockTimeoutError(f"{self.root}: another thread holds the lock")
        try:
            self._take_file_lock(deadline)
            try:
                self._read_ledger()
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _take_file_lock(self, deadline: Deadline) -> None:
        pause = 0.0005
        while True:
            if self._is_closed:
                raise StoreError(f"{self.root}: the store is closed")
            if self._lock_fd < 0:
                # It could not be made again when it was gone; by now it may be.
                self._prepare()
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    return
                # Somebody removed the folder: ours is another file by now, or none.
                os.close(self._lock_fd)
                self._lock_fd = -1
                self._prepare()
                continue
            if deadline.passed:
                raise LockTimeoutError(f"{self.root}: another process holds the lock")
            time.sleep(min(pause, deadline.remaining_seconds))
            pause = min(2 * pause, 0.02)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock_fd), os.stat(self.root / LEDGER_NAME))
        except OSError:
            return False

    def peek_total_bytes(self) -> int:
        """What the ledger says now, without the lock; what it said last, if it cannot be read."""
        ledger = self._parse_ledger() if self._lock_fd >= 0 else None
        return self.total_bytes if ledger is None else ledger[0]

    def _read_ledger(self) -> None:
        ledger = self._parse_ledger()
        if ledger is not None:
            self.total_bytes, self.generation = ledger
        else:
            # New, or torn by a loss of power: the folder itself knows.
            self.scan()

    def _parse_ledger(self) -> tuple[int, int] | None:
        data = os.pread(self._lock_fd, _LEDGER.size + _CHECKSUM.size, 0)
        if len(data) < _LEDGER.size + _CHECKSUM.size:
            return None
        magic, total_bytes, generation = _LEDGER.unpack_from(data)
        (checksum,) = _CHECKSUM.unpack_from(data, _LEDGER.size)
        if magic != _LEDGER_MAGIC or checksum != zlib.crc32(data[: _LEDGER.size]):
            return None
        return total_bytes, generation

    def _write_ledger(self, total_bytes: int) -> None:
        self.total_bytes, self.generation = max(0, total_bytes), self.generation + 1
        data = _LEDGER.pack(_LEDGER_MAGIC, self.total_bytes, self.generation)
        os.pwrite(self._lock_fd, data + _CHECKSUM.pack(zlib.crc32(data)), 0)

    # ------------------------------------------------------------ changes, with the lock held

    def scan(self) -> list[FoundFile]:
        """All objects, in no order. Removes what writers that died left, and puts the ledger right."""
        found: list[FoundFile] = []
        total_bytes = 0
        for entry, path in self._files():
            try:
                info = entry.stat(follow_symlinks=False)
                is_temporary = _TEMPORARY_PATH.fullmatch(path) is not None
                if not is_temporary and not _OBJECT_PATH.fullmatch(path):
                    continue
                if not stat.S_ISREG(info.st_mode):
                    self._ignore(path, "it is not a plain file")
                elif is_temporary:
                    if not self._remove_if_stale(path):
                        total_bytes += disk_bytes(info.st_size)
                else:
                    found.append(FoundFile(path, disk_bytes(info.st_size), info.st_mtime_ns))
                    total_bytes += found[-1].num_bytes
            except FileNotFoundError:
                continue
            except OSError as error:
                self._ignore(path, error.strerror)
        self._write_ledger(total_bytes)
        return found

    def _ignore(self, path: str, reason: str | None) -> None:
        """Nothing of ours is a link, a pipe or a folder. Whatever it is, it is not touched; said once."""
        if path not in self._ignored and len(self._ignored) < _MAX_IGNORED:
            self._ignored.add(path)
            logger.warning("%s is ignored: %s", self.absolute(path), reason)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], str]]:
        for first in _scandir(self.root):
            if first.is_dir(follow_symlinks=False):
                for second in _scandir(first.path):
                    if second.is_dir(follow_symlinks=False):
                        for entry in _scandir(second.path):
                            yield entry, f"{first.name}/{second.name}/{entry.name}"

    def _remove_if_stale(self, path: str) -> bool:
        # A living writer holds a lock on its file; process numbers would be reused.
        fd = self.open(path)
        if fd is None:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(self.absolute(path))
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def create(self, path: str, num_bytes: int) -> tuple[int, str]:
        """A file to write the object of `path` into: its descriptor and its path; counted from now on."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        self._write_ledger(self.total_bytes + disk_bytes(num_bytes))
        fd = -1
        try:
            for part in (folder.partition("/")[0], folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.absolute(part), 0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self.absolute(temporary), flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, num_bytes)
        except OSError:
            if fd >= 0:
                os.close(fd)
                os.unlink(self.absolute(temporary))
            self._write_ledger(self.total_bytes - disk_bytes(num_bytes))
            raise
        return fd, temporary

    def publish(self, temporary: str, path: str) -> None:
        """The finished file takes its name; what had the name is gone."""
        replaced = self._size_of(path)
        os.rename(self.absolute(temporary), self.absolute(path))
        if replaced:
            self._write_ledger(self.total_bytes - replaced)

    def unlink(self, path: str) -> int:
        """Remove a file; the bytes it gave back."""
        num_bytes = self._size_of(path)
        try:
            os.unlink(self.absolute(path))
        except FileNotFoundError:
            return 0
        self._write_ledger(self.total_bytes - num_bytes)
        return num_bytes

    def _size_of(self, path: str) -> int:
        found = self.find(path)
        return found.num_bytes if found else 0

    # ------------------------------------------------------------ without the lock

    def find(self, path: str) -> FoundFile | None:
        try:
            info = os.lstat(self.absolute(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        return FoundFile(path, disk_bytes(info.st_size), info.st_mtime_ns)

    def open(self, path: str) -> int | None:
        """A descriptor to read from; None if there is no such file, or or none that is a plain file."""
        try:
            fd = os.open(self.absolute(path), _READ_FLAGS)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def mark_used(self, path: str, used_ns: int) -> bool:
        """Whether the file is there; its modification time says from now on when it was used last.

        Not the access time: reading for a backup or a check would change that one.
        """
        try:
            os.utime(self.absolute(path), ns=(used_ns, used_ns), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sync(self, path: str) -> None:
        """The names in the folder of `path` survive a loss of power from now on."""
        fd = os.open(os.path.dirname(self.absolute(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _scandir(path: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return


def write_all(fd: int, piece: memoryview, check: Callable[[], None], chunk_bytes: int = 8 << 20) -> None:
    """Write a view, calling `check` between chunks."""
    offset = 0
    while offset < piece.nbytes:
        check()
        offset += os.write(fd, piece[offset : offset + chunk_bytes])


def read_all(fd: int, target: memoryview, offset: int, check: Callable[[], None]) -> int:
    """Fill `target` from `offset` of the file on; how many bytes there were."""
    done = 0
    while done < target.nbytes:
        check()
        count = os.preadv(fd, [target[done : done + (8 << 20)]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_head(fd: int) -> bytes:
    """The head of the object in a file; what there is of it, if it is none."""
    start = os.pread(fd, HEAD_UNIT_BYTES, 0)
    try:
        missing = head_bytes_needed(start) - len(start)
    except SegmentError:
        # Whoever decodes it says what is wrong.
        return start
    return start + os.pread(fd, missing, len(start)) if missing > 0 else start
