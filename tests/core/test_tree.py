"""The tree against a model that is a set of paths."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milepost.core.tree import NO_RECORD, Node, PrefixTree

Path = tuple[int, ...]


def key_of(path: Path) -> bytes:
    return bytes(path)


class TreeMachine(RuleBasedStateMachine):
    """A node is a tuple of symbols; the first symbol is its domain, (domain,) is the root."""

    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree(2)
        self.nodes: dict[Path, Node] = {}
        self.checkpoints: list[Path] = []
        self.roots: dict[Path, Node] = {}
        self.pinned: list[Path] = []

    def node(self, path: Path) -> Node:
        return self.roots[path] if len(path) == 1 else self.nodes[path]

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.nodes if p[:-1] == path]

    @rule(domain=st.integers(0, 1))
    def open_root(self, domain: int) -> None:
        root = self.tree.root(key_of((domain,)), 1.0)
        assert root is self.roots.setdefault((domain,), root)
        assert root.is_root and root.depth == 0 and root.pages == [NO_RECORD, NO_RECORD]

    @precondition(lambda self: self.roots)
    @rule(data=st.data(), symbol=st.integers(0, 2))
    def add(self, data: st.DataObject, symbol: int) -> None:
        parent = data.draw(st.sampled_from(sorted([*self.roots, *self.nodes])))
        path = (*parent, symbol)
        if path in self.nodes or len(path) > 6:
            return
        node = self.tree.add(self.node(parent), key_of(path), b"tokens", [len(path), 7], 2.0)
        assert (node.depth, node.parent, node.pages) == (len(path) - 1, self.node(parent), [len(path), 7])
        assert not node.is_root
        self.nodes[path] = node

    @precondition(lambda self: set(self.nodes) - set(self.checkpoints))
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(set(self.nodes) - set(self.checkpoints))))
        self.tree.attach_state(self.nodes[path], [3], "tail")
        self.checkpoints.append(path)

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.checkpoints)))
        assert self.tree.detach_state(self.nodes[path]) == [3]
        assert self.nodes[path].reason == ""
        self.checkpoints.remove(path)
        with pytest.raises(ValueError, match="has no checkpoint"):
            self.tree.detach_state(self.nodes[path])

    @precondition(lambda self: self.nodes or self.roots)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted([*self.roots, *self.nodes])))
        self.tree.pin(self.node(path))
        self.pinned.append(path)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        path = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.tree.unpin(self.node(path))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[path]
        if path in self.pinned or self.children(path) or path in self.checkpoints:
            with pytest.raises(ValueError, match="cannot be removed"):
                self.tree.remove_leaf(node)
            return
        assert self.tree.remove_leaf(node) == [len(path), 7]
        del self.nodes[path]
        root = path[:1]
        if len(path) == 2 and not self.children(root) and root not in self.pinned:
            del self.roots[root]

    @precondition(lambda self: self.roots)
    @rule(data=st.data())
    def forget_root(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.roots)))
        self.tree.forget_root(self.roots[path])
        if path not in self.pinned and not self.children(path):
            del self.roots[path]

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6), limit=st.integers(0, 6))
    def walk(self, path: list[int], limit: int) -> None:
        root = self.roots.get((path[0],))
        if root is None:
            return
        prefixes = [tuple(path[: length + 1]) for length in range(1, len(path))]
        limit = min(limit, len(prefixes))
        expected = []
        for prefix in prefixes[:limit]:
            if prefix not in self.nodes:
                break
            expected.append(self.nodes[prefix])
        assert self.tree.walk(root, [key_of(p) for p in prefixes], limit) == expected

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        assert len(tree) == len(self.nodes)
        assert tree.index == {key_of(p): n for p, n in self.nodes.items()}
        assert tree.roots == {key_of(p): n for p, n in self.roots.items()}
        assert list(tree.state_nodes) == [key_of(p) for p in self.checkpoints], "oldest first"
        in_use = {p[:length] for p in self.pinned for length in range(2, len(p) + 1)}
        assert tree.num_units_in_use == len(in_use)
        stranded = {p for p in self.nodes if not self.children(p) and p not in self.checkpoints}
        assert set(tree.stranded) == {key_of(p) for p in stranded}
        for path, node in self.nodes.items():
            prefixes = [path[:length] for length in range(len(path) - 1, 0, -1)]
            assert list(tree.ancestors(node)) == [self.node(p) for p in prefixes]
            assert node.pins == self.pinned.count(path)
            assert (node.num_users > 0) == any(p[: len(path)] == path for p in self.pinned)
            below = [len(p) - 1 for p in prefixes if p in self.checkpoints]
            found = tree.ancestor_with_state(node)
            assert (found.depth if found is not None else 0) == (below[0] if below else 0)


TreeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTreeMachine = TreeMachine.TestCase


def test_the_root_cannot_be_removed_as_a_leaf() -> None:
    tree = PrefixTree(1)
    with pytest.raises(ValueError, match="cannot be removed"):
        tree.remove_leaf(tree.root(b"r", 0.0))


def test_a_pinned_root_outlives_its_last_leaf() -> None:
    tree = PrefixTree(1)
    root = tree.root(b"r", 0.0)
    leaf = tree.add(root, b"k", b"", [0], 0.0)
    root.pins = 1
    tree.remove_leaf(leaf)
    assert tree.roots == {b"r": root}
    root.pins = 0
    tree.forget_root(root)
    assert tree.roots == {}


def test_a_new_node_carries_its_time_and_nothing_else() -> None:
    tree = PrefixTree(1)
    node = tree.add(tree.root(b"r", 1.0), b"k", b"abcd", [4], 2.5)
    assert (node.last_used, node.num_hits, node.pins) == (2.5, 0, 0)
    assert (node.states, node.reason, node.conversation, node.tokens) == (None, "", None, b"abcd")
    assert "depth=1" in repr(node)
