"""The prefix tree: one node per match unit, linked by chain keys.

A node stands for the whole prefix [0, depth * U). It keeps the token ids of its unit, so that the
first divergence can be named, and the ids of the records that hold its pages and its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

NO_RECORD = -1


class Node:
    """One match unit on a path.

    Attributes:
        depth: units summarised; the root of a domain has depth 0 and no tokens.
        pages: per attention group, page id of this unit or NO_RECORD.
        states: per recurrent group, slot of the state at depth * U; None = no checkpoint here.
        reason: why the checkpoint exists ("" without one).
        pins: leases that stand on this node; it and everything below it cannot be dropped. Changed by
            `PrefixTree.pin` and `unpin` only.
        num_users: pins, and children with users: whether a lease needs this unit.
        pinned_until: a client asked to give this checkpoint up last until then.
        num_hits: hits on this checkpoint, those of the conversation it continues included.
        is_answered: the deeper checkpoint belongs to an answer.
        is_resumed: requests come back here although something deeper was made behind it, or did so at the
            end of the turn before.
        num_prompt_tokens: of the longest request that made or hit it.
        is_passed: whether a request that went through this checkpoint left a deeper one, `interval` ones
            aside, since they depend on free memory.
        conversation: (domain root, name) of the conversation whose request made the checkpoint.
        made_at: when it became a checkpoint.
    """

    __slots__ = (
        "children", "conversation", "depth", "is_answered", "is_passed", "is_resumed", "key", "last_used",
        "made_at", "num_hits", "num_prompt_tokens", "num_users", "pages", "parent", "pinned_until", "pins",
        "reason", "retention_priority", "states", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, pages: list[int], now: float) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}
        self.pages = pages
        self.states: list[int] | None = None
        self.reason = ""
        self.pins = 0
        self.num_users = 0
        self.last_used = now
        self.made_at = now
        self.num_hits = 0
        self.is_passed = False
        self.is_answered = False
        self.is_resumed = False
        self.num_prompt_tokens = 0
        self.conversation: tuple[bytes, str] | None = None
        self.retention_priority = 0
        self.pinned_until = 0.0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def __repr__(self) -> str:
        return (
            f"Node(depth={self.depth}, states={self.states}, pins={self.pins}, children={len(self.children)})"
        )


class TreeListener(Protocol):
    """Hears of checkpoints as they come and go; must not change the tree and must not raise."""

    def checkpoint_added(self, node: Node) -> None:
        """`node` has a state now."""

    def checkpoint_removed(self, node: Node) -> None:
        """`node` lost its state; its pages may go next."""

    def path_ended(self, node: Node) -> None:
        """The request that published `node` last has ended, or was preempted."""


class PrefixTree:
    """Nodes by key, over all domains.

    Attributes:
        listeners: told of every checkpoint that comes or goes.
    """

    __slots__ = (
        "_num_attention_groups", "index", "listeners", "num_units_in_use", "roots", "state_nodes", "stranded",
    )  # fmt: skip

    def __init__(self, num_attention_groups: int) -> None:
        self._num_attention_groups = num_attention_groups
        self.index: dict[bytes, Node] = {}
        self.roots: dict[bytes, Node] = {}
        self.state_nodes: dict[bytes, Node] = {}
        """Nodes with a checkpoint, oldest first."""
        self.stranded: dict[bytes, Node] = {}
        """Leaves without a checkpoint: nothing can resume from their last pages."""
        self.num_units_in_use = 0
        """Units that leases stand on or above: no eviction can free them."""
        self.listeners: list[TreeListener] = []

    def __len__(self) -> int:
        return len(self.index)

    def root(self, key: bytes, now: float) -> Node:
        """Root node of a domain, created on first use."""
        node = self.roots.get(key)
        if node is None:
            node = self.roots[key] = Node(key, None, b"", [NO_RECORD] * self._num_attention_groups, now)
        return node

    def walk(self, root: Node, keys: Sequence[bytes], limit: int) -> list[Node]:
        """Nodes of units [0, k), k <= limit, as far as the path of `keys` exists."""
        path: list[Node] = []
        children = root.children
        for index in range(limit):
            node = children.get(keys[index])
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def add(self, parent: Node, key: bytes, tokens: bytes, pages: list[int], now: float) -> Node:
        """Append a unit with its pages behind `parent`."""
        node = Node(key, parent, tokens, pages, now)
        parent.children[key] = node
        self.index[key] = node
        self.stranded[key] = node
        self.stranded.pop(parent.key, None)
        return node

    def pin(self, node: Node) -> None:
        """A lease stands on `node` now. O(units that nobody used before)."""
        node.pins += 1
        current: Node | None = node
        while current is not None:
            current.num_users += 1
            if current.num_users > 1 or current.parent is None:
                return
            self.num_units_in_use += 1
            current = current.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin`. O(units that nobody uses any more)."""
        node.pins -= 1
        current: Node | None = node
        while current is not None:
            current.num_users -= 1
            if current.num_users or current.parent is None:
                return
            self.num_units_in_use -= 1
            current = current.parent

    def attach_state(self, node: Node, states: list[int], reason: str) -> None:
        """Turn `node` into a checkpoint."""
        node.states = states
        node.reason = reason
        self.state_nodes[node.key] = node
        self.stranded.pop(node.key, None)
        for listener in self.listeners:
            listener.checkpoint_added(node)

    def detach_state(self, node: Node) -> list[int]:
        """Remove the checkpoint of `node`; returns its slots."""
        states = node.states
        if states is None:
            raise ValueError(f"{node} has no checkpoint")
        node.states = None
        node.reason = ""
        del self.state_nodes[node.key]
        if not node.children:
            self.stranded[node.key] = node
        for listener in self.listeners:
            listener.checkpoint_removed(node)
        return states

    def remove_leaf(self, node: Node) -> list[int]:
        """Remove a leaf without a checkpoint; returns its page ids."""
        parent = node.parent
        if parent is None or node.children or node.states is not None or node.pins:
            raise ValueError(f"{node} cannot be removed")
        del parent.children[node.key]
        del self.index[node.key]
        self.stranded.pop(node.key, None)
        if not parent.children and parent.states is None and not parent.is_root:
            self.stranded[parent.key] = parent
        if parent.is_root and not parent.children and not parent.pins:
            del self.roots[parent.key]
        return node.pages

    def end_path(self, node: Node) -> None:
        """The request that stood on `node` goes."""
        if not node.is_root:
            for listener in self.listeners:
                listener.path_ended(node)

    def forget_root(self, root: Node) -> None:
        """Drop the root of a domain nobody uses any more."""
        if not root.children and not root.pins:
            self.roots.pop(root.key, None)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Nodes from the parent of `node` down to its root."""
        current = node.parent
        while current is not None:
            yield current
            current = current.parent

    def is_behind(self, node: Node, other: Node) -> bool:
        """Whether `node` is `other` or lies behind it on a path."""
        current: Node | None = node
        while current is not None and current.depth > other.depth:
            current = current.parent
        return current is other

    def ancestor_with_state(self, node: Node) -> Node | None:
        """The nearest checkpoint strictly below `node` on its path."""
        return next((a for a in self.ancestors(node) if a.states is not None), None)
