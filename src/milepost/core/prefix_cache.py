"""The prefix cache: a facade of five verbs, `match`, `reserve`, `publish`, `release`, `audit`.

match    what could be reused; changes nothing.
reserve  takes the records one chunk needs, all or nothing; invisible until `confirm`, undone by
         `rollback`.
publish  makes what a finished step wrote visible to lookups.
release  gives up what a request holds; what it published stays until retention needs the bytes.
audit    every violated invariant, as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milepost.config import CacheConfig
from milepost.core import reasons
from milepost.core.coordinator import JointHit, Match, joint_hit
from milepost.core.eviction import Evictor, is_guess
from milepost.core.geometry import CacheGeometry
from milepost.core.groups.attention import AttentionGroup
from milepost.core.groups.recurrent import RecurrentGroup
from milepost.core.hashing import KeyChain
from milepost.core.lease import Lease, Reservation
from milepost.core.memory import Memory
from milepost.core.metrics import CacheCounters
from milepost.core.plan import ZERO_STATE
from milepost.core.retention import Rank, export_order
from milepost.core.reuse import CONTINUATION_REASONS, TURN_ENDS, KnownConversations
from milepost.core.tree import NO_RECORD, Node, PrefixTree
from milepost.core.units import ceil_div, floor_div, is_multiple


class PrefixCache:
    """Pages and states of one replica under one byte budget."""

    def __init__(self, geometry: CacheGeometry, config: CacheConfig) -> None:
        self.geometry = geometry
        self.config = config
        self.match_unit = config.match_unit
        self.unit_bytes = geometry.unit_bytes
        self.checkpoint_bytes = geometry.checkpoint_bytes
        self.running_bytes = geometry.running_bytes
        self.keeps_states_apart = geometry.keeps_states_apart
        self.counters = CacheCounters()
        self.memory = Memory(geometry.pool_record_bytes, config.cache_bytes)
        self._checkpoint_pools, self._running_pools = geometry.checkpoint_pools, geometry.running_pools
        self.attention = [AttentionGroup(i, spec.name) for i, spec in enumerate(geometry.attention)]
        self.recurrent = [
            RecurrentGroup(i, spec.name, self._checkpoint_pools[i])
            for i, spec in enumerate(geometry.recurrent)
        ]
        self.tree = PrefixTree(geometry.num_attention_groups)
        self.evictor = Evictor(self.tree, self.memory, geometry, self.counters)
        self.conversations = KnownConversations()
        self._zero_state = [ZERO_STATE] * len(self.recurrent)

    # -- match ---------------------------------------------------------------------------------

    def match(self, chain: KeyChain, num_tokens: int) -> Match:
        """Deepest joint hit for the first `num_tokens` tokens of `chain`. O(num_tokens / U)."""
        if not self.config.enable_prefix_caching:
            return self.no_match()
        limit = floor_div(num_tokens - 1, self.match_unit)
        keys = chain.extend(limit)
        root = self.tree.roots.get(chain.root)
        path = self.tree.walk(root, keys, limit) if root is not None else []
        hit = joint_hit(self.attention, self.recurrent, path, limit)
        is_media_bound = False
        hit.attention_units = chain.unsplit_units(hit.attention_units)
        while (unsplit := chain.unsplit_units(hit.units)) < hit.units:
            is_media_bound = True
            hit.units = joint_hit(self.attention, self.recurrent, path, unsplit).units
        loss = self.evictor.losses.beyond(chain, hit.units, limit)
        return Match(hit.units * self.match_unit, path, hit, limit, is_media_bound, loss)

    # -- reserve -------------------------------------------------------------------------------

    def no_match(self) -> Match:
        """The match of a request that must not reuse anything."""
        return Match(0, [], JointHit(0, 0, {}, None), 0)

    def open(self, match: Match, chain: KeyChain, now: float, *, uses_cache: bool = True) -> Lease:
        """Pin the matched boundary for a request; `release` undoes it."""
        lease = self.stand_on(chain, match.path[: match.units], now)
        lease.is_caching = self.config.enable_prefix_caching and uses_cache
        lease.hit_reason, lease.num_prompt_tokens = lease.tip.reason, len(chain.tokens)
        lease.newest = lease.tip if lease.tip.states is not None else None
        return lease

    def stand_on(self, chain: KeyChain, path: Sequence[Node], now: float) -> Lease:
        """A lease on the end of `path` (on the root, if it is empty); `release` undoes it."""
        tip = path[-1] if path else self.tree.root(chain.root, now)
        self.tree.pin(tip)
        tables = [[node.pages[group.index] for node in path] for group in self.attention]
        lease = Lease(chain, tip, tables, is_caching=True)
        if self.config.max_states_per_path is not None:
            lease.on_path = [node for node in path if node.states is not None]
        return lease

    def take_pages(self, lease: Lease, num_units: int, now: float) -> list[list[int]] | None:
        """Pages for the units of `lease` up to `num_units`, to be filled from outside between steps;
        per attention group, or None with nothing taken."""
        taken = Reservation([[] for _ in self.attention], None, {}, [], [], [], now)
        for group in self.attention:
            for _ in range(num_units - lease.num_units):
                page = self._acquire(group.index, now, taken)
                if page is None:
                    self.rollback(lease, taken)
                    return None
                taken.new_pages[group.index].append(page)
        for table, pages in zip(lease.page_tables, taken.new_pages, strict=True):
            table.extend(pages)
        for pool, record_id in taken.records:
            self.memory.keep(pool, record_id)
        return taken.new_pages

    def take_slots(self, now: float, *, may_evict: bool) -> list[int] | None:
        """Slots for a checkpoint, to be filled from outside between steps; None if there is no room."""
        return self._take(self._checkpoint_pools, now, may_evict=may_evict)

    def take_running(self, now: float) -> list[int] | None:
        """Slots for one more running state; None if there is no room."""
        return self._take(self._running_pools, now, may_evict=True)

    def _take(self, pools: Sequence[int], now: float, *, may_evict: bool) -> list[int] | None:
        taken = Reservation([], None, {}, [], [], [], now)
        slots = self._acquire_slots(pools, taken, now, may_evict=may_evict)
        for pool, record_id in taken.records:
            self.memory.keep(pool, record_id)
        return slots

    def turns_before(self, lease: Lease, match: Match) -> int:
        """Turns of a conversation that led to the request of `lease`, as far as anything shows it."""
        tip, conversation = lease.tip, lease.conversation
        keys = lease.chain.keys[: match.limit_units]
        turns = self.evictor.reuse.turns_before(keys, lease.num_prompt_tokens, conversation, match.loss)
        if lease.hit_reason in CONTINUATION_REASONS and tip.conversation in (None, conversation):
            turns = max(turns, tip.num_hits + (not match.is_repeat(lease)))
        return max(turns, int(self.conversations.is_known(conversation)))

    def record_hit(self, lease: Lease, match: Match, now: float) -> None:
        """Count the first admission of a request that starts from the tip of `lease`."""
        tip = lease.tip
        self.evictor.reuse.used_deepest(lease.chain.keys[: match.limit_units], now)
        for units in lease.marked_units:
            if units <= match.units:
                self._pin(match.path[units - 1], lease, now)
        self.conversations.note(lease.conversation)
        if tip.is_root:
            return
        self.counters.reuse_gaps.add(now - tip.last_used)
        tip.is_resumed = tip.is_resumed or tip.is_passed
        lease.resumes = tip.is_resumed and tip.is_answered
        tip.num_hits += is_guess(tip) or not match.is_repeat(lease)
        tip.num_prompt_tokens = max(tip.num_prompt_tokens, lease.num_prompt_tokens)
        tip.last_used, tip.is_passed = now, False
        if tip.states is not None:
            self.evictor.await_use(tip, now)

    def _pin(self, node: Node, lease: Lease, now: float) -> None:
        """A caller asks for the checkpoint at `node`, which counts as a use of it."""
        if node.states is not None:
            node.last_used = now
            node.pinned_until = max(node.pinned_until, now + lease.pin_seconds)
            self.evictor.reconsider(node)

    def initial_slots(self, lease: Lease) -> list[int]:
        """Where the state at the position of `lease` can be read now."""
        if lease.running is not None:
            return lease.running
        return lease.tip.states if lease.tip.states is not None else self._zero_state

    def is_end_exported(self, lease: Lease, end: int) -> bool:
        """Whether a chunk that ends at `end` has to export the state there to keep it: it stands on a
        boundary that will be published, and cannot become a checkpoint by changing hands."""
        return (
            self.keeps_states_apart
            and lease.is_caching
            and is_multiple(end, self.match_unit)
            and lease.shared(end) == end
        )

    def is_supplied(self, lease: Lease, start: int) -> bool:
        """Whether one token at `start` needs no record: it goes on in its own slots and its last page."""
        if lease.running is None or self.is_end_exported(lease, start + 1):
            return False
        return not is_multiple(start, self.match_unit) or not lease.page_tables

    def reserve(
        self,
        lease: Lease,
        end: int,
        exports: Sequence[tuple[int, str]],
        now: float,
        end_reason: str | None = None,
    ) -> Reservation | None:
        """Records for computing up to `end` and for `exports` = (position, reason).

        Pages and the running state are all or nothing (None = no room, nothing taken). Exports are
        served in order of importance. Those that this request is taken up from make room like pages do,
        the others push out only what is worth less; one that finds no room is listed in `refused`.

        Args:
            end_reason: why the state at `end` is wanted, if it is. Where it has to be exported it always
                is, since the request could be ended there.
        """
        taken = Reservation(
            [[] for _ in self.attention], None, {}, [], [], list(self.initial_slots(lease)), now
        )
        taken.starts_from_checkpoint = lease.running is None and lease.tip.states is not None
        if self.is_end_exported(lease, end):
            exports = [*exports, (end, end_reason or reasons.INTERVAL)]
        missing = ceil_div(end, self.match_unit) - lease.num_units
        for group in self.attention:
            pages = taken.new_pages[group.index]
            for _ in range(missing):
                page = self._acquire_page(lease, group.index, taken, now)
                if page is None:
                    self.rollback(lease, taken)
                    return None
                pages.append(page)
        if lease.running is None and not self._reserve_running(lease, taken, now):
            self.rollback(lease, taken)
            return None
        for position, reason in sorted(exports, key=lambda e: export_order(*e)):
            worth = None
            if self.memory.free_bytes < self.checkpoint_bytes:
                worth = self.evictor.export_limit(lease, taken.exports, position, reason, now)
            slots = self._acquire_slots(self._checkpoint_pools, taken, now, may_evict=True, below=worth)
            if slots is None:
                taken.refused.append((position, reason))
            else:
                taken.exports[position] = (slots, reason)
        return taken

    def confirm(self, lease: Lease, reservation: Reservation) -> None:
        """Hand the reserved records to the lease."""
        for table, pages in zip(lease.page_tables, reservation.new_pages, strict=True):
            table.extend(pages)
        if reservation.running is not None:
            lease.running = reservation.running
        if reservation.reclaimed_reason is not None:
            self.tree.detach_state(lease.tip)
            self.counters.evictions["reclaim", reservation.reclaimed_reason] += 1
            self.evictor.losses.remember(lease.tip.key, "reclaim", reservation.reclaimed_reason)
        lease.exports = reservation.exports
        for position, reason in reservation.refused:
            self._refuse(lease, position, reasons.REFUSED_NO_MEMORY, reason, reservation.now)

    def _refuse(self, lease: Lease, position: int, why: str, reason: str, now: float) -> None:
        """A checkpoint of `lease` at `position` was wanted and is not kept."""
        self.counters.refusals[why, reason] += 1
        units = floor_div(position, self.match_unit)
        key = lease.chain.extend(units)[units - 1]
        if lease.is_caching and key not in self.tree.state_nodes:
            self.evictor.losses.remember(key, why, reason)
            self.evictor.await_return(lease, key, position, reason, now)

    def rollback(self, lease: Lease, reservation: Reservation) -> None:
        """Give everything back that `reserve` took. What it evicted to make room stays evicted."""
        for pool, record_id in reversed(reservation.records):
            self.memory.release(pool, record_id)
        reservation.records = []

    def _acquire_page(self, lease: Lease, pool: int, taken: Reservation, now: float) -> int | None:
        for limit in self.evictor.page_limits(lease):
            page = self._acquire(pool, now, taken, below=limit)
            if page is None and self.evictor.give_up_passed_state(lease, limit, now):
                page = self._acquire(pool, now, taken, below=limit)
            if page is not None:
                return page
        return None

    def _reserve_running(self, lease: Lease, taken: Reservation, now: float) -> bool:
        tip = lease.tip
        for limit in self.evictor.page_limits(lease):
            slots = self._acquire_slots(self._running_pools, taken, now, may_evict=True, below=limit)
            if (
                slots is None
                and not self.keeps_states_apart
                and self.evictor.can_give_up_tip(lease, limit, now)
            ):
                # Nothing can make room: serve on, in place, without the checkpoint this lease stands on.
                taken.reclaimed_reason = tip.reason
                slots = tip.states
            if slots is not None:
                taken.running = slots
                return True
        return False

    def _acquire_slots(
        self,
        pools: Sequence[int],
        taken: Reservation,
        now: float,
        *,
        may_evict: bool,
        below: Rank | None = None,
    ) -> list[int] | None:
        mark = len(taken.records)
        slots: list[int] = []
        for pool in pools:
            slot = self._acquire(pool, now, taken, may_evict=may_evict, below=below)
            if slot is None:
                for _ in range(len(taken.records) - mark):
                    self.memory.release(*taken.records.pop())
                return None
            slots.append(slot)
        return slots

    def _acquire(
        self, pool: int, now: float, taken: Reservation, *, may_evict: bool = True, below: Rank | None = None
    ) -> int | None:
        record_id = self.memory.acquire(pool)
        while record_id is None and may_evict and self.evictor.evict_one(now, below):
            record_id = self.memory.acquire(pool)
        if record_id is not None:
            taken.records.append((pool, record_id))
        return record_id

    # -- publish -------------------------------------------------------------------------------

    def publish(
        self, lease: Lease, end: int, exported: Iterable[int], end_reason: str | None, now: float
    ) -> None:
        """Make the units up to `end` and the acknowledged exports visible.

        Args:
            end: position the worker acknowledged; pages [0, end) and the running state are written.
            exported: positions whose export the worker acknowledged.
            end_reason: keep the running state as a checkpoint, if `end` lies on a boundary.
        """
        acknowledged = set(exported)
        if lease.is_caching:
            num_units = floor_div(lease.shared(end), self.match_unit)
            keys = lease.chain.extend(num_units)
            self._settle_export(lease, acknowledged, now)  # of a load, where only a state was missing
            for index in range(lease.tip.depth, num_units):
                self._publish_unit(lease, index, keys[index], now)
                self._settle_export(lease, acknowledged, now)
            if end_reason is not None and end == lease.tip.depth * self.match_unit:
                self.keep_running(lease, end_reason, now)
        for position, (_, reason) in lease.exports.items():
            # Drafts that would have led to a boundary may not have been accepted.
            if position <= end or reason != reasons.DECODE:
                self._refuse(lease, position, reasons.REFUSED_NOT_WRITTEN, reason, now)
        self._give_back_reserved(lease)

    def _settle_export(self, lease: Lease, acknowledged: set[int], now: float) -> None:
        """Attach what was exported at the tip's boundary, if it was written."""
        position = lease.tip.depth * self.match_unit
        export = lease.exports.pop(position, None)
        if export is None:
            return
        slots, reason = export
        if position in acknowledged:
            self._attach(lease, slots, reason, now)
        else:
            self._refuse(lease, position, reasons.REFUSED_NOT_WRITTEN, reason, now)
            self.give_back_slots(slots)

    def keep_running(self, lease: Lease, reason: str, now: float) -> bool:
        """Turn the running state, which stands on the tip's boundary, into a checkpoint.

        The lease then stands on that checkpoint and needs a new running slot to go on. Returns
        False if the boundary already has one, or checkpoints are kept apart and it was exported (the lease
        keeps running in its own slot).
        """
        tip = lease.tip
        if not lease.is_caching or lease.running is None or tip.states is not None or tip.is_root:
            return False
        if not self.recurrent or self.keeps_states_apart:
            return False
        running, lease.running = lease.running, None
        self._attach(lease, running, reason, now)
        return True

    def _publish_unit(self, lease: Lease, index: int, key: bytes, now: float) -> None:
        tip = lease.tip
        pages = [table[index] for table in lease.page_tables]
        node = tip.children.get(key)
        if node is None:
            node = self.tree.add(tip, key, lease.chain.unit_tokens(index), pages, now)
            if not self.recurrent:
                self.evictor.losses.forget(key)
        else:
            self._share_unit(lease, index, node)
            if node.states is not None and self.config.max_states_per_path is not None:
                lease.on_path.append(node)
        self.tree.pin(node)
        self.tree.unpin(tip)
        self.evictor.reconsider(tip)
        lease.tip = node

    def _share_unit(self, lease: Lease, index: int, node: Node) -> None:
        """Somebody else published this unit first: read their pages and free our own."""
        for group, table in enumerate(lease.page_tables):
            own = table[index]
            if node.pages[group] == NO_RECORD:
                node.pages[group] = own
                continue
            table[index] = node.pages[group]
            lease.replaced.append((group, index, node.pages[group]))
            self.memory.release(group, own)

    def _attach(self, lease: Lease, slots: list[int], reason: str, now: float) -> None:
        node = lease.tip
        is_marked = reason == reasons.MARKER or node.depth in lease.marked_units
        if node.states is not None:
            self.give_back_slots(slots)
            if is_marked:
                self._pin(node, lease, now)
            return
        self.tree.attach_state(node, slots, reason)
        self.evictor.losses.forget(node.key)
        node.conversation, node.num_prompt_tokens = lease.conversation, lease.num_prompt_tokens
        node.made_at = node.last_used = now
        node.is_passed = node.is_answered = False
        node.is_resumed = lease.resumes and reason in TURN_ENDS
        node.num_hits = 0 if reason == reasons.INTERVAL else lease.lineage
        node.retention_priority = lease.retention_priority
        self.evictor.await_use(node, now)
        node.pinned_until = now + lease.pin_seconds if is_marked else 0.0
        self.counters.checkpoints_by_reason[reason] += 1
        if reason != reasons.INTERVAL:
            self.evictor.pass_by(lease.newest, lease.conversation, reason)
            lease.newest = node
        if reason == reasons.DECODE:
            lease.decode_nodes.append(node)
        limit = self.config.max_states_per_path
        if limit is not None:
            lease.on_path.append(node)
            self.evictor.bound_path(lease.on_path, limit, now)

    def thin_decode(self, lease: Lease) -> None:
        """Keep the last two decode checkpoints and one per `decode_interval`."""
        self.evictor.thin_decode(lease, floor_div(self.config.decode_interval, self.match_unit))

    # -- release -------------------------------------------------------------------------------

    def release(self, lease: Lease, processed: int | None, now: float) -> None:
        """End a lease.

        Args:
            processed: position of the running state, if it is sound; a state that stands on a
                boundary becomes a checkpoint. None: nothing of the running state may be used.
        """
        if processed is not None and processed == lease.tip.depth * self.match_unit:
            self.keep_running(lease, reasons.FINISH, now)
        self._give_back_reserved(lease)
        if lease.running is not None:
            self.give_back_running(lease.running)
            lease.running = None
        for pool, pages in enumerate(lease.cut(lease.tip.depth)):
            for page in pages:
                self.memory.release(pool, page)
        lease.page_tables = [[] for _ in lease.page_tables]
        self.tree.unpin(lease.tip)
        self.evictor.reconsider(lease.tip)
        self.tree.end_path(lease.tip)
        if lease.tip.is_root:
            self.tree.forget_root(lease.tip)

    def node_at(self, chain: KeyChain, position: int) -> Node | None:
        """Node that stands for the first `position` tokens of `chain` (a multiple of U), if it exists."""
        units = floor_div(position, self.match_unit)
        return self.tree.index.get(chain.extend(units)[units - 1]) if units else None

    def reset(self) -> bool:
        """Drop everything no running request holds; True if nothing is left."""
        self.evictor.evict_all()
        self.evictor.losses.forget_all_but(self.tree.index)
        return not self.tree.index

    def give_back_slots(self, slots: Sequence[int]) -> None:
        """Undo `take_slots`, or end what a checkpoint's slots were reserved for."""
        self.memory.release_each(self._checkpoint_pools, slots)

    def give_back_running(self, slots: Sequence[int]) -> None:
        """Undo `take_running`, or end what runs."""
        self.memory.release_each(self._running_pools, slots)

    def _give_back_reserved(self, lease: Lease) -> None:
        exports, previous = lease.take_reserved()
        for slots in exports:
            self.give_back_slots(slots)
        if previous is not None:
            self.give_back_running(previous)

    # -- audit ---------------------------------------------------------------------------------

    def audit(
        self, leases: Sequence[Lease], restores: Sequence[Lease] = (), pinned: Sequence[Node] = ()
    ) -> list[str]:
        """Every violated invariant, given all leases in force, those of loads in progress, and the nodes
        that are pinned without one. Empty = sound."""
        from milepost.core.invariants import audit_cache

        return audit_cache(self, leases, restores, pinned)
