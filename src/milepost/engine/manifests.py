"""Names of conversations, kept in the stores: which tokens each one stands for, and which names there are.

A name is an object like a segment, so that every store can keep it, bound it and check it:

    manifest   key = SHA-256 over a tag, the domain's root and the name; payload: the token ids and a note
    index      the names of a domain, in two objects that are written in turn, so that a crash loses neither

A name is bound to its domain by its key: who may not share the domain's cache cannot ask for it. What names
exist is decided by the manifests; the index only says where to look.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

import msgspec

from milepost.core.hashing import CacheDomain, domain_root, token_bytes, tokens_from_bytes
from milepost.core.units import floor_div
from milepost.engine.messages import EngineError
from milepost.errors import RequestError, StoreError
from milepost.stores.port import Loaded, PoolPart, SegmentHeader, StoredSegment, Unanswered
from milepost.stores.tiers import Find, Found, Tiers

T = TypeVar("T")

log = logging.getLogger("milepost.engine")

NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~:@+=-]{1,128}")
MAX_NAMES = 1024
"""Of one domain: the index is written anew with every change."""
MANIFEST_REASON, INDEX_REASON = NAME_REASONS = ("manifest", "names")
_MANIFEST_TAG, _INDEX_TAG = b"milepost/name/1", b"milepost/names/1"
_NUM_INDEX_SLOTS = 2
_TOKEN_BYTES = 4
_RETRY_SECONDS = 0.02
LOOKUP_SECONDS = 5.0
"""A store that hangs may delay the look-up of a name so long."""
MIN_CALL_SECONDS = 1.0
"""A step of an operation whose time is over gets so long: what was done is still to be told."""


class StoresUnavailable(EngineError):
    """A store did not answer, or did not take what it was given."""


class Note(msgspec.Struct, frozen=True):
    """What a manifest says besides the tokens.

    Attributes:
        public_tokens: tokens at the head that other conversations have too (system prompt, tools); None
            where that is not known.
    """

    name: str
    saved_tokens: int
    public_tokens: int | None = None


class Entry(msgspec.Struct, frozen=True):
    """A line of an index. `created`: seconds since the epoch."""

    name: str
    saved_tokens: int
    created: float


class _Index(msgspec.Struct, frozen=True):
    version: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a name stands for."""

    tokens: array[int]
    note: Note

    @property
    def name(self) -> str:
        return self.note.name


def checked_name(name: str) -> str:
    """
    Raises:
        RequestError: it cannot be a name.
    """
    if not NAME.fullmatch(name):
        raise RequestError("name", "must be 1 to 128 characters of A-Z, a-z, 0-9 and ._~:@+=-, not . or ..")
    return name


class Until:
    """How long an operation may still take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    @property
    def has_passed(self) -> bool:
        return self.seconds_left <= 0

    @property
    def call_seconds(self) -> float:
        """For the next call."""
        return max(MIN_CALL_SECONDS, self.seconds_left)


class Manifests:
    """Reads and writes the names of one replica. For an event loop; nothing here blocks it.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        tiers: Tiers,
        fingerprint: str,
        match_unit: int,
        shard: tuple[int, int] = (0, 1),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tiers = tiers
        self._fingerprint = fingerprint
        self._match_unit = match_unit
        self._shard = shard
        self._clock = clock

    # -- manifests -----------------------------------------------------------------------------

    def key(self, domain: CacheDomain, name: str) -> bytes:
        return sha256(_MANIFEST_TAG + domain_root(domain, self._match_unit) + name.encode()).digest()

    async def read(self, domain: CacheDomain, name: str, until: Until) -> Manifest | None:
        """
        Raises:
            StoresUnavailable: whether there is one is not known.
        """
        (segment,) = await self._fetch([self.key(domain, name)], until)
        if isinstance(segment, Unanswered):
            raise self._silent()
        return None if segment is None else _manifest_in(segment)

    async def read_all(self, domain: CacheDomain, names: Sequence[str], until: Until) -> list[Manifest]:
        """Those that exist."""
        segments = await self._fetch([self.key(domain, name) for name in names], until)
        return [found for each in segments if each and (found := _manifest_in(each)) is not None]

    async def write(self, domain: CacheDomain, manifest: Manifest, until: Until) -> None:
        """Remember a name, or change what it stands for, and list it. A store that is down does not prevent
        it as long as another one takes it.

        Raises:
            RequestError: too many names. StoresUnavailable: it is not remembered.
        """
        index, version, _ = await self._read_index(domain, until)
        existing, _ = await self._existing(domain, index, until)
        entries = {entry.name: entry for entry in existing}
        if manifest.name not in entries and len(entries) >= MAX_NAMES:
            raise RequestError("name", f"there are {MAX_NAMES} names already; delete one that is not needed")
        key = self.key(domain, manifest.name)
        (known,) = await self._fetch([key], until)
        if not known or _manifest_in(known) != manifest:
            note = msgspec.msgpack.encode(manifest.note)
            parts = (
                PoolPart("tokens", len(manifest.tokens), _TOKEN_BYTES),
                PoolPart("note", 1, len(note)),
            )
            payload = (token_bytes(manifest.tokens), note)
            await self._replace(key, MANIFEST_REASON, len(manifest.tokens), parts, payload, until)
        entries[manifest.name] = Entry(manifest.name, manifest.note.saved_tokens, self._clock())
        try:
            await self._write_index(domain, list(entries.values()), version + 1, until)
        except StoresUnavailable as error:
            log.warning("a name that was saved is not in the list of names: %s", error)

    async def remove(self, domain: CacheDomain, name: str, until: Until) -> bool:
        """Forget a name, and take it off the list; whether it was there.

        Raises:
            StoresUnavailable: some store may still have it.
        """
        was_there = await self._removed([self.key(domain, name)], until) > 0
        index, version, _ = await self._read_index(domain, until)
        if any(entry.name == name for entry in index):
            entries = [entry for entry in index if entry.name != name]
            for step in range(1, _NUM_INDEX_SLOTS + 1):  # the other one has the name, too
                await self._write_index(domain, entries, version + step, until)
        return was_there

    async def names(self, domain: CacheDomain, until: Until) -> list[Entry]:
        """Names of a domain, in order.

        Raises:
            StoresUnavailable: a store did not answer.
        """
        index, _, is_whole = await self._read_index(domain, until)
        existing, is_sure = await self._existing(domain, index, until)
        if not is_sure or not (index or is_whole):
            raise self._silent()
        return existing

    # -- index ---------------------------------------------------------------------------------

    def _index_key(self, domain: CacheDomain, version: int) -> bytes:
        slot = bytes([version % _NUM_INDEX_SLOTS])
        return sha256(_INDEX_TAG + domain_root(domain, self._match_unit) + slot).digest()

    async def _read_index(self, domain: CacheDomain, until: Until) -> tuple[list[Entry], int, bool]:
        """Entries of both objects, in order of names, the higher version, and whether every store that could
        have one of them said so."""
        slots = await self._fetch([self._index_key(domain, v) for v in range(_NUM_INDEX_SLOTS)], until)
        entries: dict[str, Entry] = {}
        version = 0
        for index in sorted(
            (each for slot in slots if slot and (each := _index_in(slot)) is not None),
            key=lambda index: index.version,
        ):
            entries.update((entry.name, entry) for entry in index.entries)
            version = index.version
        is_whole = not any(isinstance(slot, Unanswered) for slot in slots)
        return sorted(entries.values(), key=lambda entry: entry.name), version, is_whole

    async def _existing(
        self, domain: CacheDomain, entries: list[Entry], until: Until
    ) -> tuple[list[Entry], bool]:
        """Those whose manifest may be there, and whether that is known of all of them: one that a failing
        store may have is not taken off the list."""
        keys = [self.key(domain, entry.name) for entry in entries]
        found = await self._newest(keys, until.call_seconds)
        existing = [entry for entry, each in zip(entries, found, strict=True) if each is not None]
        return existing, not any(isinstance(each, Unanswered) for each in found)

    async def _write_index(
        self, domain: CacheDomain, entries: list[Entry], version: int, until: Until
    ) -> None:
        data = msgspec.msgpack.encode(_Index(version, entries))
        parts = (PoolPart("names", 1, len(data)),)
        key = self._index_key(domain, version)
        await self._replace(key, INDEX_REASON, self._match_unit, parts, (data,), until)

    # -- objects -------------------------------------------------------------------------------

    async def _newest(self, keys: Sequence[bytes], seconds: float) -> list[Find]:
        """Where the newest version of each object is: a store that was down may have an older one."""
        tiers = await asyncio.wrap_future(self._tiers.find_each(keys, deadline_seconds=seconds))
        newest: list[Find] = []
        for index in range(len(keys)):
            answers = [headers[index] for headers in tiers]
            found = [
                Found(each, tier) for tier, each in enumerate(answers) if isinstance(each, SegmentHeader)
            ]
            silent = next((each for each in answers if isinstance(each, Unanswered)), None)
            newest.append(max(found, key=lambda each: each.header.created, default=silent))
        return newest

    async def _fetch(self, keys: Sequence[bytes], until: Until) -> list[Loaded]:
        """The newest version of each object."""
        found = await self._newest(keys, min(until.call_seconds, LOOKUP_SECONDS))
        present = [each for each in found if isinstance(each, Found)]
        loaded = await asyncio.wrap_future(self._tiers.load(present, deadline_seconds=until.call_seconds))
        segments = iter(loaded)
        return [next(segments) if isinstance(each, Found) else each for each in found]

    async def _replace(
        self,
        key: bytes,
        reason: str,
        num_tokens: int,
        parts: tuple[PoolPart, ...],
        payload: tuple[bytes, ...],
        until: Until,
    ) -> None:
        """Stores keep what they have under a key, so the old object goes first."""
        try:
            await self._removed([key], until)
        except StoresUnavailable as error:
            log.warning("an older version of a name may stay in a store: %s", error)
        header = SegmentHeader(
            fingerprint=self._fingerprint,
            key=key,
            parent_key=b"",
            start=0,
            position=max(1, floor_div(num_tokens, self._match_unit)) * self._match_unit,
            match_unit=self._match_unit,
            parts=parts,
            reason=reason,
            shard=self._shard,
            created=self._clock(),
        )
        saved: Future[bool] = Future()
        saved.set_running_or_notify_cancel()
        while not self._tiers.save(StoredSegment(header, payload), saved.set_result):
            if until.has_passed:
                raise StoresUnavailable("the stores are busy with other saves; try again")
            await asyncio.sleep(_RETRY_SECONDS)
        if not await waited(saved, until):
            raise StoresUnavailable("no store took the name; try again, or look for the reason in the log")

    async def _removed(self, keys: Sequence[bytes], until: Until) -> int:
        return await removed(self._tiers.remove(keys), until)

    def _silent(self) -> StoresUnavailable:
        """A store that says nothing may have what was not found."""
        silent = [each.name for each in self._tiers.counters() if each.breaker_is_open and each.takes_saves]
        who = ", ".join(silent) or "a store"
        return StoresUnavailable(f"{who} does not answer, so that the name cannot be looked up; try again")


async def waited(future: Future[T], until: Until) -> T:
    """
    Raises:
        StoresUnavailable: not in time.
    """
    try:
        async with asyncio.timeout(until.call_seconds):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise StoresUnavailable("the stores did not answer in time; try again") from None


async def removed(future: Future[int], until: Until) -> int:
    """
    Raises:
        StoresUnavailable: some store may still have it; the message names it.
    """
    try:
        return await waited(future, until)
    except StoreError as error:
        raise StoresUnavailable(f"{error}; try again") from None


def _manifest_in(segment: StoredSegment) -> Manifest | None:
    """None if it is something else."""
    parts = segment.header.parts
    if [part.name for part in parts] != ["tokens", "note"] or parts[0].record_bytes != _TOKEN_BYTES:
        return None
    data = b"".join(segment.payload)
    num_token_bytes = parts[0].num_records * _TOKEN_BYTES
    try:
        note = msgspec.msgpack.decode(data[num_token_bytes:], type=Note)
    except msgspec.DecodeError:
        return None
    return Manifest(tokens_from_bytes(data[:num_token_bytes]), note)


def _index_in(segment: StoredSegment) -> _Index | None:
    """None if it is something else."""
    if [part.name for part in segment.header.parts] != ["names"]:
        return None
    try:
        return msgspec.msgpack.decode(b"".join(segment.payload), type=_Index)
    except msgspec.DecodeError:
        return None
