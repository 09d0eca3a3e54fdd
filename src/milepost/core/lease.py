"""What one running request holds: its place in the tree, its pages and its running state."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.hashing import KeyChain
from milepost.core.tree import Node


class Lease:
    """Held from admission to the end of a request (or its preemption).

    Attributes:
        tip: deepest published node of the request's path; pinned once by this lease.
        page_tables: per attention group, page ids of units [0, k). Units below `tip.depth` belong to
            the tree.
        running: per recurrent group, the slot the request mutates; None = it stands on the
            checkpoint of `tip` (or on the zero state at the root) and has mutated nothing.
        previous: per recurrent group, the own slot the chunk in flight starts from while it writes another
            one (`running`), so that rejected drafts leave no trace; given back when the step is over.
        replaced: (group, unit, page) the worker must be told about: somebody else published the
            unit first, the lease reads that page now and its own was freed.
        exports: position -> slots reserved for checkpoints of the plan in flight.
        num_hit_units: units reused at admission.
        decode_nodes: decode checkpoints of this request, oldest first.
        hit_reason: why the checkpoint existed that this lease started from; "" without one.
        conversation: (domain root, name) of the conversation the caller named.
        lineage: turns of the conversation this request continues; its checkpoints inherit it.
        newest: last checkpoint of this request's path that it started from or made itself, `interval`
            ones aside.
        on_path: checkpoints of its path, first one first, if their number is bounded. Some may be gone.
        shared_end: positions behind it are not published; None = all are.
        is_one_off: nothing says that anybody comes back to it: it continues nothing, and its client asks for
            no checkpoint to be kept.
        num_prompt_tokens: of its request.
        resumes: it goes on at the end of a turn behind whose answer something was kept: so will the next one.
        spares_live: it does without rather than push out what live conversations go on from.
        marked_units: depths where the caller asked for a checkpoint; those are kept `pin_seconds` long.
    """

    __slots__ = (
        "chain", "conversation", "decode_nodes", "exports", "hit_reason", "is_caching", "is_one_off",
        "lineage", "marked_units", "newest", "num_hit_units", "num_prompt_tokens", "on_path",
        "page_tables", "pin_seconds", "previous", "replaced", "resumes", "retention_priority",
        "running", "shared_end", "spares_live", "tip",
    )  # fmt: skip

    def __init__(self, chain: KeyChain, tip: Node, page_tables: list[list[int]], *, is_caching: bool) -> None:
        self.chain = chain
        self.tip = tip
        self.page_tables = page_tables
        self.running: list[int] | None = None
        self.previous: list[int] | None = None
        self.replaced: list[tuple[int, int, int]] = []
        self.exports: dict[int, tuple[list[int], str]] = {}
        self.num_hit_units = tip.depth
        self.decode_nodes: list[Node] = []
        self.is_caching = is_caching
        self.conversation: tuple[bytes, str] | None = None
        self.hit_reason = ""
        self.lineage = 0
        self.newest: Node | None = None
        self.on_path: list[Node] = []
        self.marked_units: frozenset[int] = frozenset()
        self.retention_priority = 0
        self.pin_seconds = 0.0
        self.shared_end: int | None = None
        self.is_one_off = False
        self.resumes = False
        self.num_prompt_tokens = 0
        self.spares_live = False

    def shared(self, position: int) -> int:
        """`position`, or the last one before it that may be published."""
        return position if self.shared_end is None else min(position, self.shared_end)

    def take_reserved(self) -> tuple[list[list[int]], list[int] | None]:
        """Slots of `exports`, and `previous`, to be given back; the lease forgets them."""
        taken = [slots for slots, _ in self.exports.values()], self.previous
        self.exports, self.previous = {}, None
        return taken

    def cut(self, num_units: int) -> list[list[int]]:
        """Pages behind the first `num_units`, per attention group, to give back; the lease forgets them."""
        cut = [table[num_units:] for table in self.page_tables]
        for table in self.page_tables:
            del table[num_units:]
        return cut

    @property
    def num_units(self) -> int:
        """Units the page tables cover (0 for a model without attention)."""
        return len(self.page_tables[0]) if self.page_tables else 0


@dataclass(slots=True)
class Reservation:
    """Records taken for one chunk; nothing of it is visible before `PrefixCache.confirm`.

    Attributes:
        new_pages: per attention group, pages to append.
        running: new running slots, or None if the lease already has some.
        exports: position -> (slots, reason).
        refused: (position, reason code) of exports that got no slot.
    """

    new_pages: list[list[int]]
    running: list[int] | None
    exports: dict[int, tuple[list[int], str]]
    refused: list[tuple[int, str]]
    records: list[tuple[int, int]]
    """(pool, record id) of everything taken, for rollback."""
    initial: list[int]
    """Per recurrent group, where the chunk reads its initial state."""
    now: float
    starts_from_checkpoint: bool = False
    """`initial` are the slots of a checkpoint."""
    reclaimed_reason: str | None = None
    """Set if `running` is the tip's own checkpoint, which `confirm` takes off the tree."""
