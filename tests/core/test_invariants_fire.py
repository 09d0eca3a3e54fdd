"""Every clause of the audits is shown the violation it looks for, on an otherwise sound core.

The last test makes sure that no clause was forgotten: it counts the messages in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.core.harness import Harness, make_geometry, numbered

import milepost.core.invariants
import milepost.core.memory
import milepost.core.siblings
import milepost.core.stats
import milepost.core.transfers
from milepost.core.lease import Lease
from milepost.core.request import RequestStatus
from milepost.core.tree import Node


def sound() -> Harness:
    """One finished path with two checkpoints, one request decoding behind it, one in mid-prefill with
    exports in flight, one waiting sibling of it."""
    harness = Harness(geometry=make_geometry(num_attention=2, num_recurrent=2), budget=12)
    harness.serve(numbered(16), wanted=[(8, "message")])
    harness.add(numbered(16) + [1, 2, 3], 9)
    harness.add(numbered(30, 1), 9, wanted=[(p, "message") for p in range(4, 28, 4)])
    harness.add(numbered(28, 1) + [7, 7], 9)
    harness.step()
    harness.schedule()
    assert harness.scheduler.audit() == []
    return harness


def node(harness: Harness, units: int) -> Node:
    """Node of the finished path that covers so many units."""
    return next(
        n for n in harness.cache.tree.index.values() if n.depth == units and n.tokens[:2] == _head(units)
    )


def _head(units: int) -> bytes:
    return (1000 + 4 * (units - 1)).to_bytes(2, "little")


def lease(harness: Harness, request_id: int) -> Lease:
    found = harness.requests[request_id].lease
    assert found is not None
    return found


# ------------------------------------------------------------------ the violations
def wrong_key(h: Harness) -> None:
    node(h, 2).key = b"other"


def orphan(h: Harness) -> None:
    node(h, 1).parent = None


def unlinked(h: Harness) -> None:
    target = node(h, 4)
    assert target.parent is not None
    target.parent.children[target.key] = node(h, 3)


def wrong_depth(h: Harness) -> None:
    node(h, 4).depth = 9


def removed_parent(h: Harness) -> None:
    del h.cache.tree.index[node(h, 3).key]


def no_pages(h: Harness) -> None:
    node(h, 2).pages[1] = -1


def unlisted_checkpoint(h: Harness) -> None:
    del h.cache.tree.state_nodes[node(h, 2).key]


def unlisted_stranded(h: Harness) -> None:
    h.cache.tree.stranded[node(h, 4).key] = node(h, 4)


def listed_but_gone(h: Harness) -> None:
    ghost = Node(b"ghost", node(h, 1), b"", [0, 0], 0.0)
    h.cache.tree.stranded[b"ghost"] = ghost


def extra_child(h: Harness) -> None:
    node(h, 1).children[b"ghost"] = node(h, 4)


def forgotten_root(h: Harness) -> None:
    h.cache.tree.roots[b"unused"] = Node(b"unused", None, b"", [-1, -1], 0.0)


def too_many_pins(h: Harness) -> None:
    node(h, 2).pins += 1


def wrong_users(h: Harness) -> None:
    node(h, 2).num_users += 1


def miscounted_units(h: Harness) -> None:
    h.cache.tree.num_units_in_use += 1


def tip_not_in_tree(h: Harness) -> None:
    held = lease(h, 1)
    copy = Node(held.tip.key, held.tip.parent, held.tip.tokens, held.tip.pages, 0.0)
    copy.states = held.tip.states
    held.tip = copy


def short_table(h: Harness) -> None:
    del lease(h, 1).page_tables[1][1:]


def foreign_page(h: Harness) -> None:
    lease(h, 1).page_tables[0][0] = lease(h, 2).page_tables[0][0]


def no_state(h: Harness) -> None:
    held = lease(h, 1)
    held.running = None
    h.cache.tree.detach_state(held.tip)


def doubled_record(h: Harness) -> None:
    h.cache.memory.release(0, lease(h, 2).page_tables[0][-1])
    lease(h, 2).page_tables[0][-1] = lease(h, 1).page_tables[0][-1]


def leaked_record(h: Harness) -> None:
    h.cache.memory.acquire(3)


def freed_record(h: Harness) -> None:
    states = node(h, 2).states
    assert states is not None
    h.cache.memory.release(2, states[0])


def freed_export(h: Harness) -> None:
    exports = lease(h, 2).exports
    assert exports, "the scenario has a chunk with exports in flight"
    slots, _ = next(iter(exports.values()))
    h.cache.memory.release(2, slots[0])


def freed_running(h: Harness) -> None:
    running = lease(h, 1).running
    assert running is not None
    h.cache.memory.release(3, running[1])


def miscounted_query(h: Harness) -> None:
    h.cache.counters.num_hit_tokens += 1


def lost_id(h: Harness) -> None:
    h.cache.memory._pools[0].num_fresh += 1


def miscounted_committed(h: Harness) -> None:
    h.cache.memory.committed_bytes -= 1


def miscounted_used(h: Harness) -> None:
    h.cache.memory.used_bytes += 1


def over_budget(h: Harness) -> None:
    h.cache.memory.budget_bytes = h.cache.memory.committed_bytes - 1


def foreign_sibling_key(h: Harness) -> None:
    siblings = h.scheduler.siblings
    siblings._owner[siblings._keys[2][0]] = h.requests[3]


def unowned_sibling_key(h: Harness) -> None:
    siblings = h.scheduler.siblings
    del siblings._owner[siblings._keys[2][0]]


def unlisted_sibling_key(h: Harness) -> None:
    h.scheduler.siblings._keys[2].pop()


def follows_nobody(h: Harness) -> None:
    h.scheduler.siblings._following[3].leader = h.requests[0]


def unknown_follower(h: Harness) -> None:
    del h.scheduler.siblings._followers[2][3]


def stale_follower(h: Harness) -> None:
    siblings = h.scheduler.siblings
    siblings._followers.setdefault(3, {})[3] = siblings._following[3]


def lease_without_running(h: Harness) -> None:
    request = h.requests[1]
    h.scheduler.running.remove(request)
    h.scheduler.waiting.push(request)


def wrong_status(h: Harness) -> None:
    h.requests[1].status = RequestStatus.PREEMPTED


def processed_too_much(h: Harness) -> None:
    h.requests[1].num_processed = 1000


def in_no_list(h: Harness) -> None:
    h.scheduler.waiting.remove(h.requests[3])


def out_of_order(h: Harness) -> None:
    h.scheduler.running.reverse()


def held_but_gone(h: Harness) -> None:
    h.scheduler.transfers.hold(12345)


VIOLATIONS: list[tuple[Callable[[Harness], None], str]] = [
    (wrong_key, "indexed under a wrong key"),
    (orphan, "indexed under a wrong key or has no parent"),
    (unlinked, "is not a child of its parent"),
    (wrong_depth, "is at a wrong depth"),
    (removed_parent, "was removed"),
    (no_pages, "lacks pages"),
    (unlisted_checkpoint, "the list of checkpoints disagree"),
    (unlisted_stranded, "the list of stranded leaves disagree"),
    (listed_but_gone, "is listed but not in the tree"),
    (extra_child, r"\d+ children but \d+ nodes"),
    (forgotten_root, "root of an unused domain"),
    (too_many_pins, r"should have \d+ pins"),
    (wrong_users, "counts its users wrongly"),
    (miscounted_units, r"\d+ units are in use, \d+ are counted"),
    (tip_not_in_tree, "of a lease is not in the tree"),
    (short_table, "is shorter than the published path"),
    (foreign_page, "differs from the published path"),
    (no_state, "has no state to go on from"),
    (doubled_record, "have several owners"),
    (leaked_record, "are in use but owned by nobody"),
    (freed_record, "are owned but free"),
    (freed_export, "are owned but free"),
    (freed_running, "are owned but free"),
    (miscounted_query, "queried tokens differ"),
    (lost_id, "ids are lost or doubled"),
    (miscounted_committed, "committed bytes"),
    (miscounted_used, "used bytes"),
    (over_budget, "exceed the budget"),
    (foreign_sibling_key, "is owned by somebody else"),
    (unowned_sibling_key, "is owned by somebody else"),
    (unlisted_sibling_key, "a key belongs to nobody's list"),
    (follows_nobody, "who left"),
    (unknown_follower, "does not know its follower"),
    (stale_follower, "a leader lists a request that does not follow it"),
    (lease_without_running, "lease and running list disagree"),
    (wrong_status, "status preempted is wrong"),
    (processed_too_much, "processed more tokens than it has"),
    (in_no_list, "neither waiting nor running"),
    (out_of_order, "out of order"),
    (held_but_gone, "is held but gone"),
]


@pytest.mark.parametrize(("violate", "message"), VIOLATIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_the_clause_fires(violate: Callable[[Harness], None], message: str) -> None:
    harness = sound()
    violate(harness)
    problems = harness.scheduler.audit()
    assert any(re.search(message, problem) for problem in problems), problems


def _clauses(module: object) -> int:
    """Places in a module where an audit reports a problem."""
    source = Path(str(getattr(module, "__file__", ""))).read_text(encoding="utf-8")
    return sum(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr == "append"
        and isinstance(n.func.value, ast.Name)
        and n.func.value.id == "problems"
        for n in ast.walk(ast.parse(source))
    )


def test_every_clause_has_a_violation() -> None:
    modules = (
        milepost.core.invariants,
        milepost.core.memory,
        milepost.core.siblings,
        milepost.core.stats,
        milepost.core.transfers,
    )
    distinct = len({message for _, message in VIOLATIONS}) - 1  # one clause is shown in two ways
    assert sum(_clauses(module) for module in modules) == distinct
