"""What is in a folder of segments, for people: listing, checking and cleaning, beside running servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import StoreError
from milepost.stores.buffers import new_buffer
from milepost.stores.folder import (
    LEDGER_NAME,
    FoundFile,
    SegmentFolder,
    object_path,
    read_all,
    read_head,
)
from milepost.stores.objects import Deadline
from milepost.stores.port import SegmentHeader
from milepost.stores.segment_format import (
    ForeignSegmentError,
    SegmentError,
    decode,
    decode_head,
)

_LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Attributes:
    file: path below the root, bytes on the disk, last use.
    header: None if the object cannot be read.
    problem: why not, or what else is wrong with it; None if nothing is.
    is_foreign: sound, but of a format version that this program does not read.
    """

    file: FoundFile
    header: SegmentHeader | None
    problem: str | None = None
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class FolderSummary:
    """Attributes:
    objects: all of them, in no order.
    num_unusable: objects whose path to the first token has a gap.
    total_bytes: of all files, in whole blocks.
    """

    objects: list[StoredObject]
    num_unusable: int
    total_bytes: int


def open_folder(root: Path) -> SegmentFolder:
    """
    Raises:
        StoreError: there is no store, or it is not ours.
    """
    if not (root / LEDGER_NAME).is_file():
        raise StoreError(
            f"{root} holds no stored segments: it is not a folder that file:// or --persist made"
        )
    return SegmentFolder(root)


def scan(folder: SegmentFolder) -> list[FoundFile]:
    """All objects; what dead writers left is removed on the way.

    Raises:
        StoreError: another process held the lock for too long.
    """
    with folder.locked(Deadline(_LOCK_SECONDS, time.monotonic)):
        return folder.scan()


def read_objects(
    folder: SegmentFolder, files: Sequence[FoundFile], *, whole: bool = False
) -> Iterator[StoredObject]:
    """Each file's header; files that went away meanwhile are left out.

    Args:
        whole: read payloads too, and compare their checksums.
    """
    for file in files:
        fd = folder.open(file.path)
        if fd is None:
            continue
        try:
            header = _read(fd, whole)
            wanted = object_path(header.fingerprint, header.shard, header.key)
            yield StoredObject(file, header, None if wanted == file.path else f"belongs at {wanted}")
        except ForeignSegmentError as error:
            yield StoredObject(file, None, str(error), is_foreign=True)
        except (SegmentError, OSError) as error:
            yield StoredObject(file, None, str(error))
        finally:
            os.close(fd)


def _read(fd: int, whole: bool) -> SegmentHeader:
    num_bytes = os.fstat(fd).st_size
    header = decode_head(read_head(fd), object_bytes=num_bytes).header
    if whole:
        data = new_buffer(num_bytes)
        num_read = read_all(fd, data, 0, lambda: None)
        header = decode(data[:num_read]).header
    return header


def unusable(objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Objects that nobody can start from, because something they build on is not here."""
    sound = [each for each in objects if each.header is not None and each.problem is None]
    usable: set[str] = set()
    for each in sorted(sound, key=lambda each: each.header.start if each.header else 0):
        parent = _parent_path(each)
        if parent is None or parent in usable:
            usable.add(each.file.path)
    return [each for each in sound if each.file.path not in usable]


def _parent_path(stored: StoredObject) -> str | None:
    header = stored.header
    if header is None or not header.parent_key:
        return None
    return object_path(header.fingerprint, header.shard, header.parent_key)


def summarize(folder: SegmentFolder) -> FolderSummary:
    objects = list(read_objects(folder, scan(folder)))
    return FolderSummary(objects, len(unusable(objects)), folder.total_bytes)


def remove_files(folder: SegmentFolder, paths: Sequence[str]) -> int:
    """The bytes that were given back."""
    num_bytes = 0
    for path in paths:
        with folder.locked(Deadline(_LOCK_SECONDS, time.monotonic)):
            num_bytes += folder.unlink(path)
    return num_bytes


def choose_garbage(
    objects: Sequence[StoredObject],
    *,
    now_ns: int,
    keep_bytes: int | None = None,
    max_unused_seconds: float | None = None,
    fingerprint: str = "",
) -> list[StoredObject]:
    """What to remove: corrupt objects and unusable ones always, then what the limits name, oldest first.

    Args:
        keep_bytes: what may stay, in whole blocks.
        max_unused_seconds: since the last use.
        fingerprint: everything of writers whose fingerprint begins so; empty = of none.
    """
    doomed = {each.file.path for each in objects if each.problem is not None and not each.is_foreign}
    for each in objects:
        age_seconds = (now_ns - each.file.used_ns) / 1e9
        if max_unused_seconds is not None and age_seconds > max_unused_seconds:
            doomed.add(each.file.path)
        if fingerprint and each.file.path.startswith(fingerprint):
            doomed.add(each.file.path)

    def left() -> list[StoredObject]:
        return [each for each in objects if each.file.path not in doomed]

    # What builds on something that goes is of no use either.
    doomed.update(each.file.path for each in unusable(left()))
    if keep_bytes is not None:
        excess = sum(each.file.num_bytes for each in left()) - keep_bytes
        for each in sorted(left(), key=lambda each: each.file.used_ns):
            if excess <= 0:
                break
            doomed.add(each.file.path)
            excess -= each.file.num_bytes
        doomed.update(each.file.path for each in unusable(left()))
    return [each for each in objects if each.file.path in doomed]
