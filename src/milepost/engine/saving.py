"""What goes out to the stores: which checkpoints, in which order, and again when a store lost some.

Everything here runs in the engine thread, except what is handed to the tiers as a callback.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from milepost.core import reasons
from milepost.core.scheduler import Scheduler
from milepost.core.transfers import SegmentRecords
from milepost.core.tree import Node
from milepost.core.units import floor_div
from milepost.engine import tiering_limits as limits
from milepost.engine.known_keys import KnownKeys
from milepost.engine.segments import SegmentCodec

if TYPE_CHECKING:
    from milepost.stores.tiers import Tiers


class WorthSaving:
    """Which checkpoints are worth their bytes outside of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        cache = scheduler.cache
        self._unit = cache.match_unit
        # Guesses are fine because memory is free; on the way out a state should stand for as many bytes of
        # pages.
        self._every = {
            reasons.DECODE: cache.config.decode_interval,
            reasons.INTERVAL: cache.geometry.default_checkpoint_interval(),
        }

    def __call__(self, node: Node) -> bool:
        interval = self._every.get(node.reason)
        return interval is None or bool(interval and node.depth * self._unit % interval == 0)


class Saves:
    """Saves new checkpoints to the stores, behind the engine's back; listens to the prefix tree.

    Args:
        clock: seconds, monotonic.
        put: runs an event in the engine thread; called from threads of the tiers.

    Attributes:
        known: keys that are believed to be in a store.
        num_unsaved: checkpoints that were gone, or refused, before they were saved.
        num_lost: segments that a store saved and could not use, because it had lost what they build on.
    """

    def __init__(
        self,
        tiers: Tiers,
        scheduler: Scheduler,
        codec: SegmentCodec,
        clock: Callable[[], float],
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        self._tiers = tiers
        self._transfers = scheduler.transfers
        self._codec = codec
        self._clock = clock
        self._put = put
        self.is_worth = WorthSaving(scheduler)
        self.known = KnownKeys()
        self.num_unsaved = 0
        self.num_lost = 0
        self.removed: list[bytes] | None = None
        """While a path is dropped by force: keys of the checkpoints that went."""
        self._pending: deque[tuple[Node, float]] = deque()
        self._saving: dict[bytes, SegmentRecords] = {}
        self._saving_bytes = 0
        self._is_blocked = False
        self._shunned: Counter[bytes] = Counter()
        self._deferred: list[tuple[Node, float]] = []
        self._saved_again: OrderedDict[bytes, float] = OrderedDict()
        self._tree = scheduler.cache.tree
        self._max_saving_bytes = floor_div(scheduler.cache.memory.budget_bytes, limits.SAVING_SHARE)
        if tiers.takes_saves:
            self._tree.listeners.append(self)
            tiers.on_losses = lambda lost: put(lambda: self._save_lost(lost))

    # -- what the tree tells ---------------------------------------------------------------------

    def checkpoint_added(self, node: Node) -> None:
        if self.is_worth(node):
            self._enqueue(node)

    def checkpoint_removed(self, node: Node) -> None:
        """A save of what is gone finds out by itself."""
        if self.removed is not None:
            self.removed.append(node.key)

    def path_ended(self, node: Node) -> None:
        if node.states is not None:
            self._enqueue(node)

    # -- for the engine --------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._deferred) + len(self._saving)

    @property
    def is_reading(self) -> bool:
        """Whether records are being read by somebody."""
        return bool(self._saving)

    @property
    def is_done(self) -> bool:
        """Nothing waits that may be saved, and nothing is being saved."""
        return not self._saving and not self._pending

    @property
    def waiting_since(self) -> float | None:
        """When the oldest checkpoint began to wait; from any thread."""
        try:
            return self._pending[0][1]
        except IndexError:
            return None

    def may_save(self) -> bool:
        """Whether `save_some` may begin with something."""
        has_room = not self._saving or self._saving_bytes < self._max_saving_bytes
        return bool(self._pending) and not self._is_blocked and has_room

    def save_some(self, limit: int = limits.SAVES_PER_TURN) -> None:
        """Hand what waits to the stores, as far as they take it."""
        num_begun = 0
        while num_begun < limit and self.may_save():
            node, since = self._pending.popleft()
            if self._is_stored(node.key):
                continue
            if self._is_shunned(node):
                self._deferred.append((node, since))
                continue
            records = self._transfers.begin_save(node, self._is_stored)
            if records is None:
                self.num_unsaved += 1
                continue
            segment = self._codec.encode(records)
            self._saving[node.key] = records
            self._saving_bytes += segment.header.payload_bytes
            if not self._tiers.save(segment, self._reporter(records, segment.header.payload_bytes)):
                self._unpin(records, segment.header.payload_bytes)
                if self._saving:
                    self._is_blocked = True
                    self._pending.appendleft((node, since))
                else:
                    self.num_unsaved += 1  # larger than the whole queue
                return
            num_begun += 1

    # -- for whoever means a path ----------------------------------------------------------------

    def save_again(self, nodes: Iterable[Node]) -> None:
        """Save these checkpoints of a path, in order of position, whatever is known of the stores."""
        wanted = {node.key: node for node in nodes}
        # What waits already would come before what it builds on.
        self._pending = deque(entry for entry in self._pending if entry[0].key not in wanted)
        self.known.discard(*wanted)
        for node in wanted.values():
            self._enqueue(node)

    def is_saving(self, keys: set[bytes]) -> bool:
        """Whether one of these checkpoints waits to be saved, or is being saved."""
        waiting = (node.key for node, _ in (*self._pending, *self._deferred))
        return any(key in keys for key in (*self._saving, *waiting))

    def shun(self, keys: Sequence[bytes]) -> None:
        """Neither load nor save these until `admit`: they are about to be removed. What began goes on."""
        self.known.discard(*keys)
        self._shunned.update(keys)

    def admit(self, keys: Sequence[bytes]) -> None:
        """Undo one `shun`; what came to be saved meanwhile is saved now."""
        self._shunned -= Counter(keys)
        self._pending.extend(self._deferred)
        self._deferred = []

    def is_shunned(self, key: bytes) -> bool:
        return key in self._shunned

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Tiers.remove`."""
        self.known.discard(*keys)
        return self._tiers.remove(keys)

    # -- parts -----------------------------------------------------------------------------------

    def _is_shunned(self, node: Node) -> bool:
        """Whether a save could take units along that are about to be removed."""
        above = self._tree.ancestors(node)
        return bool(self._shunned) and any(each.key in self._shunned for each in (node, *above))

    def _enqueue(self, node: Node) -> None:
        if self._is_stored(node.key):
            return
        self._pending.append((node, self._clock()))
        if len(self._pending) > limits.MAX_PENDING_SAVES:
            self._pending.popleft()
            self.num_unsaved += 1

    def _is_stored(self, key: bytes) -> bool:
        """In a store, or on its way: what is saved next may build on it."""
        return key in self.known or key in self._saving

    def _reporter(self, records: SegmentRecords, num_bytes: int) -> Callable[[bool], None]:
        return lambda ok: self._put(lambda: self._saved(records, num_bytes, ok))

    def _saved(self, records: SegmentRecords, num_bytes: int, ok: bool) -> None:
        self._is_blocked = False
        self._unpin(records, num_bytes)
        if not ok:
            self.num_unsaved += 1
        elif records.start and records.parent_key not in self.known:
            # What it builds on was not saved: it is of no use alone.
            self._enqueue(records.node)
        else:
            self.known.add(records.key)

    def _unpin(self, records: SegmentRecords, num_bytes: int) -> None:
        del self._saving[records.key]
        self._saving_bytes -= num_bytes
        self._transfers.end_save(records)

    # -- losses ----------------------------------------------------------------------------------

    def _save_lost(self, lost: Sequence[tuple[bytes, bytes]]) -> None:
        """Stores have segments without what these build on: save the paths anew, as far as they are here.

        A store that cannot keep a path is not written to for ever: a path is saved again once in a while.

        Args:
            lost: (key of a segment, key of the one it builds on and the store does not have).
        """
        now = self._clock()
        self.num_lost += len(lost)
        for key, parent_key in lost:
            node = self._tree.index.get(key)
            if node is None:
                self.known.discard(key, parent_key)
                continue
            saved_at = self._saved_again.get(parent_key)
            if saved_at is not None and now - saved_at < limits.LOSS_PAUSE_SECONDS:
                self._saved_again[key] = saved_at  # the same path, which grows
                continue
            path = [*reversed([*self._tree.ancestors(node)]), node]
            checkpoints = [each for each in path if each.states is not None]
            wanted = [each for each in checkpoints if self.is_worth(each) or each.key in self.known]
            self.known.discard(*(each.key for each in path))
            self.save_again(wanted)
            for each in path:
                self._saved_again[each.key] = now
                self._saved_again.move_to_end(each.key)
        while len(self._saved_again) > limits.MAX_SAVED_AGAIN:
            self._saved_again.popitem(last=False)
