"""Carries out retention: ranks segments by value and drops or merges the least valuable ones."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush, heapreplace

from milepost.core import reasons
from milepost.core.geometry import CacheGeometry
from milepost.core.lease import Lease
from milepost.core.losses import LostCheckpoints
from milepost.core.memory import Memory
from milepost.core.metrics import CacheCounters
from milepost.core.retention import GUESS, LIVE_FLOOR, Rank, SegmentRecord, eviction_rank
from milepost.core.reuse import CONTINUATION_REASONS, TURN_ENDS, ReuseClass, ReuseModel, class_of
from milepost.core.tree import Node, PrefixTree
from milepost.core.units import floor_div, is_multiple


def is_guess(node: Node) -> bool:
    """Whether this is an `interval` checkpoint that was never hit."""
    return node.reason == reasons.INTERVAL and not node.num_hits


ANSWERS = frozenset({reasons.DECODE, reasons.FINISH})
RANKING_LIFE_DIVISOR = 8
"""A ranking of n candidates serves n / 8 evictions before it is made anew."""
RANKING_LIVES = 4
"""And no longer than a quarter of the age up to which conversations count as live."""
MAX_STALE = 64
"""Ranked entries beyond twice the number of checkpoints before outdated ones are cleared away."""


class Evictor:
    """Frees records of unpinned nodes, least valuable first. Deterministic."""

    def __init__(
        self, tree: PrefixTree, memory: Memory, geometry: CacheGeometry, counters: CacheCounters
    ) -> None:
        self.tree = tree
        self.memory = memory
        self.geometry = geometry
        self._unit_bytes = geometry.unit_bytes
        self._checkpoint_bytes = geometry.checkpoint_bytes
        self.counters = counters
        self.reuse = ReuseModel()
        self.losses = LostCheckpoints()
        self._heap: list[tuple[Rank, int, Node, float]] = []
        self._changed: dict[bytes, Node] = {}
        self._num_ranked = 0
        self._life = 0
        self._ranked_at = 0.0

    def evict_one(self, now: float, below: Rank | None = None) -> bool:
        """Free at least one record; False if everything left is in use or, if `below` is given, worth at
        least that much. Amortised O(log n)."""
        for node in self.tree.stranded.values():
            if not node.pins:
                self._drop_tail(node, "stranded", reasons.INTERVAL)
                return True
        if RANKING_LIVES * abs(now - self._ranked_at) > self.reuse.live_age:
            self._rank_all(now)
        self._rank_changed(now)
        is_fresh = False
        while True:
            while self._heap and self._life > 0:
                rank, _, node, last_used = self._heap[0]
                if not self._is_up_to_date(node, last_used):
                    heappop(self._heap)
                    continue
                worth = eviction_rank(self._record(node, now))
                if worth > rank:
                    # The checkpoint below it is gone since it was ranked: it saves more now.
                    self._num_ranked += 1
                    heapreplace(self._heap, (worth, self._num_ranked, node, last_used))
                    continue
                self._life -= worth[0] > GUESS  # the order of guesses matters little, and they are many
                if below is not None and worth >= below:
                    return False
                heappop(self._heap)
                self._note_times(node, now)
                self._evict(node)
                return True
            if is_fresh:
                return False
            self._rank_all(now)
            is_fresh = True

    def _is_up_to_date(self, node: Node, last_used: float) -> bool:
        """Whether a ranked node can still be given up, and was not used since."""
        if node.states is None or node.pins or node.last_used != last_used:
            return False
        return self.tree.index.get(node.key) is node

    def export_limit(
        self, lease: Lease, made: Mapping[int, tuple[list[int], str]], position: int, reason: str, now: float
    ) -> Rank | None:
        """Below which rank others make room for the checkpoint that `lease` is about to make at `position`;
        None = all do.

        Those a request is taken up from push out whatever else there is, but where nobody has come back so
        far, no live conversation. The others push out what will be worth less.
        """
        if reason not in reasons.REQUIRED:
            return self.export_worth(lease, made, position, reason, now)
        return self.page_limits(lease)[0]

    @staticmethod
    def page_limits(lease: Lease) -> tuple[Rank | None, ...]:
        """Below which rank others make room for what `lease` needs to run; None = all do. The first limit
        holds as long as there is another way: for a one-off request no live conversation makes room then."""
        if not lease.is_one_off:
            return (None,)
        return (LIVE_FLOOR,) if lease.spares_live else (LIVE_FLOOR, None)

    def export_worth(
        self, lease: Lease, made: Mapping[int, tuple[list[int], str]], position: int, reason: str, now: float
    ) -> Rank:
        """What the checkpoint that `lease` is about to make at `position` will be worth.

        Args:
            made: position -> (slots, reason) of others that the same chunk makes.
        """
        guesses = reason == reasons.INTERVAL
        below = max(
            (p for p, (_, other) in made.items() if p < position and (guesses or other != reasons.INTERVAL)),
            default=0,
        )
        unit = self.geometry.match_unit
        tip = lease.tip
        if not below:
            below = unit * (tip.depth if tip.states is not None else self.depth_below(tip, guesses=guesses))
        is_marked = reason == reasons.MARKER or floor_div(position, unit) in lease.marked_units
        reuse_class = class_of(reason, position, 0 if guesses else lease.lineage, is_passed=False)
        record = SegmentRecord(
            num_saved_tokens=position - below,
            freed_bytes=self._checkpoint_bytes,
            is_pinned=is_marked and lease.pin_seconds > 0,
            is_guess=guesses,
            is_live=reason == reasons.JUNCTION or (not lease.is_one_off and reason in CONTINUATION_REASONS),
            priority=lease.retention_priority,
            reuse_index=self.reuse.index(reuse_class, 0.0, now),
        )
        return eviction_rank(record)

    def pass_by(self, node: Node | None, conversation: tuple[bytes, str] | None, reason: str) -> None:
        """A request of `conversation` made a deeper checkpoint on the path through `node`. Where another
        conversation is to go on, a side request that went further changes nothing."""
        if node is None or node.conversation not in (None, conversation):
            return
        if node.states is not None and not node.is_passed:
            node.is_passed, node.is_answered = True, reason in ANSWERS
            self.reuse.reclassify(node.key, self.reuse_class(node))
            self.reconsider(node)

    def reuse_class(self, node: Node) -> ReuseClass:
        """Class of a checkpoint for the reuse model."""
        position = node.depth * self.geometry.match_unit
        return class_of(node.reason, position, node.num_hits, is_passed=node.is_passed)

    def await_use(self, node: Node, now: float) -> None:
        """A checkpoint was made or used: it begins to wait for its next use, unless it is a mere guess."""
        if not is_guess(node):
            reuse_class = self.reuse_class(node)
            self.reuse.created(node.key, reuse_class, now, node.conversation, node.num_prompt_tokens)

    def await_return(self, lease: Lease, key: bytes, position: int, reason: str, now: float) -> None:
        """A checkpoint of `lease` was refused. Whether somebody comes back to it is learned all the same."""
        if reason in reasons.REQUIRED:
            reuse_class = class_of(reason, position, lease.lineage, is_passed=False)
            self.reuse.created(key, reuse_class, now, lease.conversation, lease.num_prompt_tokens)

    def depth_below(self, node: Node, *, guesses: bool) -> int:
        """Depth (units) of the checkpoint a prompt falls back to without the one at `node`; 0 = none.
        Guesses count only with `guesses`, beside their like: where memory is short they are gone, and the
        others are worth what they save without them."""
        for ancestor in self.tree.ancestors(node):
            if ancestor.states is not None and (guesses or not is_guess(ancestor)):
                return ancestor.depth
        return 0

    def reconsider(self, node: Node) -> None:
        """A checkpoint was made, used or let go: it is ranked before the next eviction."""
        if node.states is not None:
            self._changed[node.key] = node

    def evict_all(self) -> None:
        """Free every record that no lease holds."""
        while self.evict_one(0.0):
            pass

    def can_give_up_tip(self, lease: Lease, limit: Rank | None, now: float) -> bool:
        """Whether `lease` alone stands on a checkpoint, and one that is worth less than `limit`."""
        tip = lease.tip
        if tip.states is None or tip.pins != 1:
            return False
        return limit is None or self.rank(tip, now) < limit

    def give_up_passed_state(self, lease: Lease, limit: Rank | None, now: float) -> bool:
        """Free the checkpoint that `lease` left behind at its tip, which its own pin protects. Without this a
        request that fits alone could wait for ever for the bytes of its own checkpoint."""
        if lease.running is None or not self.can_give_up_tip(lease, limit, now):
            return False
        self.give_up_state(lease.tip)
        return True

    def give_up_state(self, node: Node) -> None:
        """Free the checkpoint of a node; its pages stay."""
        self._free_state(node, "merge")

    def drop_subtree(self, root: Node, move: str = "condemned") -> int:
        """Drop `root` and everything behind it, whatever its value; returns the checkpoints dropped.

        Args:
            move: under which the evictions are counted.

        Raises:
            ValueError: a lease still stands in the subtree.
        """
        order = [root]
        for node in order:
            order.extend(node.children.values())
        num_checkpoints = 0
        for node in reversed(order):
            reason = node.reason or reasons.INTERVAL
            if node.states is not None:
                self._free_state(node, move)
                num_checkpoints += 1
            self._remove_unit(node, move, reason)
        self.counters.evicted_bytes += len(order) * self._unit_bytes
        self.counters.num_evicted_tokens += len(order) * self.geometry.match_unit
        return num_checkpoints

    def thin(self, node: Node, reason: str, num_hits: int) -> None:
        """Free one checkpoint whose place has become unimportant, if nobody stands on it and it was
        never hit (its hits are still the `num_hits` it was created with)."""
        if node.states is None or node.pins or node.reason != reason or node.num_hits > num_hits:
            return
        self._free_state(node, "thin")
        if not node.children:
            self._drop_tail(node, "thin", reason)

    def thin_decode(self, lease: Lease, interval_units: int) -> None:
        """Keep the last two decode checkpoints of a request and one per `interval_units`; free the others
        once half of the budget is used (below that they cost nothing anybody needs)."""
        nodes = lease.decode_nodes
        is_roomy = 2 * self.memory.used_bytes < self.memory.budget_bytes
        while len(nodes) > 2:
            node = nodes[0]
            is_kept = interval_units > 0 and is_multiple(node.depth, interval_units)
            if is_roomy and not is_kept:
                return
            del nodes[0]
            if not is_kept:
                self.thin(node, reasons.DECODE, lease.lineage)

    def bound_path(self, on_path: list[Node], limit: int, now: float) -> None:
        """Keep at most `limit` of the checkpoints of one path, the last one in any case. Those that are gone
        leave the list. O(limit + checkpoints that are spared), whatever the length of the path."""
        if len(on_path) <= limit:
            return
        on_path[:] = [a for a in on_path if a.states is not None and self.tree.index.get(a.key) is a]
        excess = len(on_path) - limit
        if excess <= 0:
            return
        ranked: list[tuple[Rank, int, Node]] = []
        below = below_guess = 0
        for node in on_path[:-1]:
            if not node.pins and len(node.children) < 2:
                record = self._record(node, now, below_guess if is_guess(node) else below)
                ranked.append((eviction_rank(record), -node.depth, node))
            below_guess = node.depth
            below = below if is_guess(node) else node.depth
        for _, _, victim in sorted(ranked)[:excess]:
            reason = victim.reason
            self.counters.refusals[reasons.REFUSED_STATES_PER_PATH, reason] += 1
            self._free_state(victim, "merge")
            self.losses.remember(victim.key, reasons.REFUSED_STATES_PER_PATH, reason)

    def _rank_all(self, now: float) -> None:
        self._heap = []
        self._changed = dict(self.tree.state_nodes)
        self._rank_changed(now)
        self._ranked_at = now
        self._life = max(1, floor_div(len(self._heap), RANKING_LIFE_DIVISOR))

    def _rank_changed(self, now: float) -> None:
        if len(self._heap) + len(self._changed) > 2 * len(self.tree.state_nodes) + MAX_STALE:
            self._heap = []
            self._changed = dict(self.tree.state_nodes)
        for node in self._changed.values():
            if node.states is not None and not node.pins:
                self._num_ranked += 1
                rank = eviction_rank(self._record(node, now))
                heappush(self._heap, (rank, self._num_ranked, node, node.last_used))
        self._changed = {}

    def rank(self, node: Node, now: float) -> Rank:
        """Sort key of a checkpoint: the smallest goes first. Changes nothing."""
        return eviction_rank(self._record(node, now))

    def _record(self, node: Node, now: float, below: int | None = None) -> SegmentRecord:
        """What retention knows about `node`; `below` is its `depth_below` where the caller knows it."""
        if below is None:
            below = self.depth_below(node, guesses=is_guess(node))
        freed = self._checkpoint_bytes
        if not node.children:
            freed += self._tail_units(node) * self._unit_bytes
        return SegmentRecord(
            num_saved_tokens=(node.depth - below) * self.geometry.match_unit,
            freed_bytes=freed,
            is_pinned=node.pinned_until > now,
            priority=node.retention_priority,
            is_guess=is_guess(node),
            is_live=self._is_live(node, now),
            reuse_index=self.reuse.index(self.reuse_class(node), now - node.last_used, now),
        )

    def _is_live(self, node: Node, now: float) -> bool:
        """Whether a conversation that went on before is expected to go on here, or several began here."""
        if is_guess(node) or now - node.last_used > self.reuse.live_age:
            return False
        if node.reason == reasons.JUNCTION:
            return True
        was_used = node.last_used > node.made_at
        if not node.num_hits or node.reason not in CONTINUATION_REASONS:
            return bool(node.num_hits) and was_used
        if node.reason in TURN_ENDS:
            return not node.is_passed or node.is_resumed
        # The answer of its own turn passed it; the next turn may still go on here.
        return not (node.is_passed and was_used)

    def _tail_units(self, node: Node) -> int:
        """Units that go when leaf `node` is dropped: back to a checkpoint, a branch or a lease."""
        units = 1
        parent = node.parent
        while parent is not None and not parent.is_root:
            if parent.states is not None or parent.pins or len(parent.children) > 1:
                break
            units += 1
            parent = parent.parent
        return units

    def _evict(self, node: Node) -> None:
        reason = node.reason
        if node.children:
            self._hand_down(node)
            self._free_state(node, "merge")
        else:
            self._free_state(node, "drop")
            self._drop_tail(node, "drop", reason)

    def _note_times(self, node: Node, now: float) -> None:
        # A reset of the cache has no time, and makes no room for others.
        if now >= node.last_used and not is_guess(node):
            self.counters.lifetimes.add(now - node.made_at)
            self.counters.idle_times.add(now - node.last_used)

    def _hand_down(self, node: Node) -> None:
        """Whoever would have started at `node` starts at the checkpoint below it from now on."""
        below = self.tree.ancestor_with_state(node)
        if below is None or is_guess(node) or node.num_hits <= below.num_hits:
            return
        below.num_hits, below.is_passed = node.num_hits, node.is_passed
        below.last_used = max(below.last_used, node.last_used)
        self.reuse.reclassify(below.key, self.reuse_class(below))
        self.reconsider(below)

    def _free_state(self, node: Node, move: str) -> None:
        reason = node.reason
        for pool, slot in zip(self.geometry.checkpoint_pools, self.tree.detach_state(node), strict=True):
            self.memory.release(pool, slot)
        self.counters.evictions[move, reason] += 1
        self.counters.evicted_bytes += self._checkpoint_bytes
        self.losses.remember(node.key, move, reason)

    def _remove_unit(self, node: Node, move: str, reason: str) -> None:
        for pool, page in enumerate(self.tree.remove_leaf(node)):
            if page >= 0:
                self.memory.release(pool, page)
        if not self.geometry.recurrent:
            self.losses.remember(node.key, move, reason)

    def _drop_tail(self, node: Node, move: str, reason: str) -> None:
        """Remove `node` and its ancestors as far as nothing else needs their pages."""
        num_units = 0
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.children or current.states is not None or current.pins:
                break
            parent = current.parent
            self._remove_unit(current, move, reason)
            num_units += 1
            current = parent
        if current is not None and current.is_passed and not current.children:
            # Nothing goes on behind it any more: this is where its conversation resumes.
            current.is_passed = False
            self.reuse.reclassify(current.key, self.reuse_class(current))
            self.reconsider(current)
        if move == "stranded":
            self.counters.evictions[move, reason] += 1
        self.counters.evicted_bytes += num_units * self._unit_bytes
        self.counters.num_evicted_tokens += num_units * self.geometry.match_unit
