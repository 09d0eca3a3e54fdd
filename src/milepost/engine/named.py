"""Conversations that a caller means as such: save, load, pin and forget them, by name or by their prompt.

Everything here runs on an event loop. What touches the cache is done in the engine thread between two steps,
what asks the stores is waited for; neither is ever blocked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from milepost.core import paths
from milepost.core.geometry import CacheGeometry
from milepost.core.hashing import CacheDomain, KeyChain, domain_root
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.core.transfers import ANY_COST, Outlook, StoredCheckpoint, choose_segments
from milepost.core.units import floor_div
from milepost.engine.engine import Engine
from milepost.engine.load_outcomes import CACHED
from milepost.engine.manifests import (
    Entry,
    Manifest,
    Manifests,
    Note,
    StoresUnavailable,
    Until,
    removed,
    waited,
)
from milepost.engine.messages import LoadNote
from milepost.engine.named_messages import Loaded, Meant, Removed, Saved
from milepost.engine.tiering import Tiering
from milepost.errors import RequestError

T = TypeVar("T")

log = logging.getLogger("milepost.engine")

MAX_PIN_SECONDS = 86400.0
DEFAULT_TIMEOUT_SECONDS = 30.0
MAX_TIMEOUT_SECONDS = 300.0
FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 0.005, 0.25
"""Between two looks at the engine thread: each one doubles the pause."""
MAX_LEFTOVER_KEYS = 1 << 16
"""Segments that a store kept in spite of a `forget`, to be removed with the next one."""
MANIFESTS_AT_ONCE = 16
"""So many prompts are in memory to be compared."""


class NamedConversations:
    """The operations on one engine. Make it once the engine's stores are connected; use it from one loop."""

    def __init__(self, engine: Engine, geometry: CacheGeometry, max_model_len: int) -> None:
        self._engine = engine
        self._unit = geometry.match_unit
        self._max_model_len = max_model_len
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._ids = itertools.count(-1, -1)
        self._leftover: dict[bytes, dict[bytes, None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._manifests: Manifests | None = None
        if engine.tiering is not None:
            tiers, fingerprint = engine.tiering.tiers, engine.tiering.codec.fingerprint
            shard = (geometry.rank, geometry.world_size)
            self._manifests = Manifests(tiers, fingerprint, geometry.match_unit, shard)

    # -- save and load -------------------------------------------------------------------------

    async def save(self, meant: Meant, name: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Saved:
        """See that the stores have the checkpoints of the prompt's cached path that are worth it, the deepest
        one among them, and remember the name.

        At the timeout it ends with what has been saved by then.

        Raises:
            RequestError: without stores, of an unknown name, or if nothing of the prompt is there.
            StoresUnavailable: nothing could be saved, or the name is not remembered.
        """
        manifests, tiering = self._stores("save")
        until = Until(timeout_seconds)
        prompt = await self._prompt(meant, until)
        chain = self._chain(meant.domain, prompt.tokens)

        stored = await self._stored(tiering, chain, until)
        cached_tokens = await self._save_missing(tiering, chain, stored, until)
        if cached_tokens:
            stored = await self._stored(tiering, chain, until)
        best = max(
            (choose_segments(offers, Outlook(0, 0, []), ANY_COST) for offers in stored),
            key=lambda segments: segments[-1].position if segments else 0,
        )
        if not best and not (cached_tokens and await self._cached_tokens(chain)):
            raise _nothing_there()  # or forgotten meanwhile
        if not best:
            raise StoresUnavailable("no store took a part of this prompt in time; try again")
        tokens = [max(usable(offers), default=0) for offers in stored]
        saved = Saved(
            name,
            dict(zip((tiering.tiers.names[tier] for tier in tiering.tiers.kept), tokens, strict=True)),
            cached_tokens,
            len(best),
            sum(segment.num_bytes for segment in best),
        )
        note = Note(name, saved.saved_tokens, prompt.note.public_tokens)
        async with self._lock(meant.names_domain):
            await manifests.write(meant.names_domain, Manifest(prompt.tokens, note), until)
        return saved

    async def _save_missing(
        self, tiering: Tiering, chain: KeyChain, stored: list[list[StoredCheckpoint]], until: Until
    ) -> int:
        """Save the prompt's cached checkpoints that some store lacks, or cannot use, as far as time allows;
        returns the position of the deepest one."""
        everywhere = set.intersection(*(usable(offers) for offers in stored))
        keys: set[bytes] = set()

        def begin(scheduler: Scheduler, now: float) -> int:
            checkpoints = paths.checkpoints_of(paths.cached_path(scheduler.cache, chain))
            missing = [
                node
                for node in checkpoints
                if node.depth * self._unit not in everywhere
                and (node is checkpoints[-1] or tiering.saves.is_worth(node))
            ]
            keys.update(node.key for node in missing)
            tiering.saves.save_again(missing)
            return checkpoints[-1].depth * self._unit if checkpoints else 0

        def is_saving(scheduler: Scheduler, now: float) -> bool:
            return tiering.saves.is_saving(keys)

        cached_tokens = await self._act(begin)
        pauses = poll_pauses(until)
        while keys and not until.has_passed and await self._act(is_saving):
            await asyncio.sleep(next(pauses))
        return cached_tokens

    async def load(self, meant: Meant, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Loaded:
        """Bring what the stores have of the prompt into the cache.

        Raises:
            RequestError: without stores, of an unknown name, or if the prompt is too long for this server.
        """
        _, tiering = self._stores("load")
        until = Until(timeout_seconds)
        prompt = await self._prompt(meant, until)
        if len(prompt.tokens) >= self._max_model_len:
            raise RequestError(
                "name",
                f"this conversation has {len(prompt.tokens)} tokens, more than fit the {self._max_model_len} "
                "tokens of this server",
                code="context_length_exceeded",
            )
        # A hit ends before the last token of a request: one more, and it may cover the whole prompt.
        request = Request(
            next(self._ids), [*prompt.tokens, 0], SamplingParams(temperature=0.0), max_tokens=1,
            domain=meant.domain,
        )  # fmt: skip
        request.chain = self._chain(meant.domain, request.tokens)
        noted: Future[LoadNote] = Future()
        noted.set_running_or_notify_cancel()
        seconds = until.call_seconds
        note = LoadNote(CACHED, "", 0, 0.0)
        if await self._act(lambda scheduler, now: tiering.prefetch(request, seconds, noted.set_result)):
            note = await waited(noted, Until(2 * seconds))
        chain = self._chain(meant.domain, prompt.tokens)

        def touch(scheduler: Scheduler, now: float) -> int:
            checkpoints = paths.checkpoints_of(paths.cached_path(scheduler.cache, chain))
            if not checkpoints:
                return 0
            checkpoints[-1].last_used = now
            scheduler.cache.evictor.reconsider(checkpoints[-1])
            return checkpoints[-1].depth

        return Loaded(await self._act(touch) * self._unit, note)

    # -- pins ----------------------------------------------------------------------------------

    async def pin(self, meant: Meant, seconds: float) -> int:
        """Give the deepest checkpoint of the prompt up last for so long; returns its position.

        Raises:
            RequestError: an unknown name, or nothing of the prompt is in the cache.
        """
        prompt = await self._prompt(meant, Until(DEFAULT_TIMEOUT_SECONDS))
        chain = self._chain(meant.domain, prompt.tokens)
        node = await self._act(lambda scheduler, now: paths.pin(scheduler.cache, chain, now + seconds))
        if node is None:
            raise _nothing_there()
        return node.depth * self._unit

    async def unpin(self, meant: Meant) -> int:
        """End the pin of the deepest checkpoint that has one; returns its position, 0 if there is none."""
        prompt = await self._prompt(meant, Until(DEFAULT_TIMEOUT_SECONDS))
        chain = self._chain(meant.domain, prompt.tokens)
        node = await self._act(lambda scheduler, now: paths.unpin(scheduler.cache, chain, now))
        return 0 if node is None else node.depth * self._unit

    # -- names ---------------------------------------------------------------------------------

    async def names(
        self, domain: CacheDomain, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> list[Entry]:
        """Names of a domain, in order; none without stores."""
        if self._manifests is None:
            return []
        return await self._manifests.names(domain, Until(timeout_seconds))

    # -- forget --------------------------------------------------------------------------------

    async def forget(
        self,
        meant: Meant,
        *,
        with_branches: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Removed:
        """Remove what nobody else needs of a prompt, and of what continues it, from the cache and from all
        stores, and its name. Once begun it goes on, also if nobody waits for it any more.

        Args:
            with_branches: what leaves the prompt behind its public tokens goes as well.

        Raises:
            RequestError: an unknown name, or branches of a prompt whose public part is not known.
            StoresUnavailable: some store may still have a part; what could be removed is.
        """
        task = asyncio.create_task(self._forget(meant, with_branches, Until(timeout_seconds)))
        self._tasks.add(task)
        task.add_done_callback(self._settled)
        return await asyncio.shield(task)

    def _settled(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also if the caller is gone

    async def _forget(self, meant: Meant, with_branches: bool, until: Until) -> Removed:
        domain, manifests = meant.domain, self._manifests
        async with self._lock(meant.names_domain):
            prompt = await self._prompt(meant, until)
            chain = self._chain(domain, prompt.tokens)
            public_tokens = prompt.note.public_tokens
            if with_branches and public_tokens is None:
                raise RequestError(
                    "branches", "where this prompt's own part begins is not known: name it by its `messages`"
                )
            num_kept_units, kept_for = await self._needed_by_names(meant, chain, until)
            num_public_units = floor_div(public_tokens or 0, self._unit) if with_branches else None
            done, num_segments = await self._drop(domain, chain, num_kept_units, num_public_units, until)
            if meant.name is not None and manifests is not None:
                await manifests.remove(meant.names_domain, meant.name, until)
        log.info(
            "forgot %d of %d units of a prompt: %d checkpoints, %d stored segments",
            len(chain.keys) - done.num_kept_units, len(chain.keys), done.num_checkpoints, num_segments,
        )  # fmt: skip
        return Removed(
            num_tokens=len(chain.keys) * self._unit,
            num_kept_tokens=done.num_kept_units * self._unit,
            kept_for=kept_for if done.num_kept_units == num_kept_units else [],
            num_checkpoints=done.num_checkpoints,
            num_segments=num_segments,
        )

    async def _needed_by_names(self, meant: Meant, chain: KeyChain, until: Until) -> tuple[int, list[str]]:
        """How many units at the head of the prompt other names stand for, and which names reach so far."""
        if self._manifests is None:
            return 0, []
        entries = await self._manifests.names(meant.names_domain, until)
        others = [entry.name for entry in entries if entry.name != meant.name]
        prompt = chain.tokens.tobytes()
        shared: dict[str, int] = {}
        for first in range(0, len(others), MANIFESTS_AT_ONCE):
            names = others[first : first + MANIFESTS_AT_ONCE]
            for manifest in await self._manifests.read_all(meant.names_domain, names, until):
                num_bytes = common_prefix(prompt, manifest.tokens.tobytes())
                shared[manifest.name] = floor_div(num_bytes, self._unit * chain.tokens.itemsize)
        most = max(shared.values(), default=0)
        return most, sorted(name for name, units in shared.items() if units == most > 0)

    async def _drop(
        self,
        domain: CacheDomain,
        chain: KeyChain,
        num_kept_units: int,
        num_public_units: int | None,
        until: Until,
    ) -> tuple[paths.Forgotten, int]:
        """From the cache, as soon as no transfer has to do with it, then from the stores.

        Meanwhile nothing of it is loaded or saved anew, or the stores would have it again.
        """
        tiering = self._engine.tiering
        shunned: list[bytes] = []

        def attempt(scheduler: Scheduler, now: float) -> paths.Forgotten | None:
            if tiering is not None and not shunned:
                shunned.extend(chain.keys[num_kept_units:])
                tiering.saves.shun(shunned)
            done = paths.forget(
                scheduler.cache,
                scheduler.transfers,
                chain,
                [request.lease for request in scheduler.running if request.lease is not None],
                num_kept_units=num_kept_units,
                num_public_units=num_public_units,
            )
            if done is not None:
                self._engine.explainer.forget(domain, chain.tokens, done.num_kept_units * self._unit)
                if tiering is not None:
                    tiering.saves.shun(done.keys)
                    shunned.extend(done.keys)
            return done

        def admit(scheduler: Scheduler, now: float) -> None:
            if tiering is not None:
                tiering.saves.admit(shunned)

        try:
            pauses = poll_pauses(until)
            while (done := await self._act(attempt)) is None:
                if until.has_passed:
                    raise StoresUnavailable("a transfer of this prompt does not end; nothing was removed")
                await asyncio.sleep(next(pauses))
            if tiering is None:
                return done, 0
            return done, await self._remove(tiering, chain.root, done.keys, until)
        finally:
            # Not awaited: it is to happen whatever becomes of this call.
            self._engine.act(admit)

    async def _remove(self, tiering: Tiering, root: bytes, keys: list[bytes], until: Until) -> int:
        """From every store, with what only a store knows to build on it; how many segments there were."""
        everything = dict.fromkeys([*self._leftover.pop(root, ()), *keys])
        if not everything:
            return 0
        try:
            found = await asyncio.wrap_future(
                tiering.tiers.followers(list(everything), deadline_seconds=until.call_seconds)
            )
            everything.update(dict.fromkeys(key for each in found for key in each or ()))
            future = await self._act(lambda scheduler, now: tiering.saves.remove(list(everything)))
            num_removed = await removed(future, until)
            silent = [name for name, each in zip(tiering.tiers.names, found, strict=True) if each is None]
            if silent:
                raise StoresUnavailable(f"{', '.join(silent)} did not tell what builds on this; try again")
            return num_removed
        except StoresUnavailable:
            # What was only in the stores is known by nobody else.
            if sum(map(len, self._leftover.values())) + len(everything) <= MAX_LEFTOVER_KEYS:
                self._leftover[root] = everything
            raise

    # -- helpers -------------------------------------------------------------------------------

    def _act(self, change: Callable[[Scheduler, float], T]) -> Coroutine[Any, Any, T]:
        async def result() -> T:
            return await asyncio.wrap_future(self._engine.act(change))

        return result()

    async def _cached_tokens(self, chain: KeyChain) -> int:
        """Position of the prompt's deepest checkpoint in the cache."""

        def look(scheduler: Scheduler, now: float) -> int:
            checkpoints = paths.checkpoints_of(paths.cached_path(scheduler.cache, chain))
            return checkpoints[-1].depth * self._unit if checkpoints else 0

        return await self._act(look)

    def _chain(self, domain: CacheDomain, tokens: array[int]) -> KeyChain:
        """With the keys of all whole units."""
        chain = KeyChain(tokens, domain, self._unit)
        chain.extend(floor_div(len(tokens), self._unit))
        return chain

    def _lock(self, domain: CacheDomain) -> asyncio.Lock:
        """Names of a domain are changed one after the other."""
        root = domain_root(domain, self._unit)
        lock = self._locks.get(root)
        if lock is None:
            lock = self._locks[root] = asyncio.Lock()
        return lock

    def _stores(self, operation: str) -> tuple[Manifests, Tiering]:
        tiering = self._engine.tiering
        has_none = operation == "save" and tiering is not None and not tiering.tiers.takes_saves
        if self._manifests is None or tiering is None or has_none:
            raise RequestError(
                None,
                f"this server has no store to {operation} conversations "
                f"{'to' if operation == 'save' else 'from'}; start it with --persist DIR or --kv-store URL",
                code="no_store",
            )
        return self._manifests, tiering

    async def _prompt(self, meant: Meant, until: Until) -> Manifest:
        """What is meant. The name counts only where no tokens are given."""
        if meant.tokens is not None:
            return Manifest(meant.tokens, Note(meant.name or "", 0, meant.public_tokens))
        if meant.name is None:
            raise RequestError("name", "give `name`, `messages` or `prompt`")
        found = None
        if self._manifests is not None:
            found = await self._manifests.read(meant.names_domain, meant.name, until)
        if found is None:
            raise RequestError(
                "name", f"there is no conversation named {meant.name!r}", code="name_not_found", status=404
            )
        return found

    async def _stored(self, tiering: Tiering, chain: KeyChain, until: Until) -> list[list[StoredCheckpoint]]:
        """Segments of the prompt that each store has which takes saves, by ascending position."""
        keys, codec = chain.keys, tiering.codec
        found = await asyncio.wrap_future(tiering.tiers.find_each(keys, deadline_seconds=until.call_seconds))
        return [
            [
                stored
                for units, header in enumerate(headers, 1)
                if header and (stored := codec.checkpoint(header, keys, units)) is not None
            ]
            for headers in (found[tier] for tier in tiering.tiers.kept)
        ]


def poll_pauses(until: Until) -> Iterator[float]:
    """Seconds to wait before looking again, not beyond the end of the operation."""
    pause = FIRST_POLL_SECONDS
    while True:
        yield max(FIRST_POLL_SECONDS, min(pause, until.seconds_left))
        pause = min(2 * pause, LAST_POLL_SECONDS)


def common_prefix(left: bytes, right: bytes) -> int:
    """How many bytes both begin with. O(log n) comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = floor_div(low + high + 1, 2)
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def usable(offers: Sequence[StoredCheckpoint]) -> set[int]:
    """Positions of the segments whose whole path is there.

    Args:
        offers: by ascending position, at most one each.
    """
    positions: set[int] = set()
    for offer in offers:
        if not offer.start or offer.start in positions:
            positions.add(offer.position)
    return positions


def _nothing_there() -> RequestError:
    return RequestError(
        None,
        "nothing of this prompt is cached: send it as a request first, or load it",
        code="not_cached",
        status=404,
    )
