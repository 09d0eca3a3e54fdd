"""The cached path of a prompt that somebody means as such, not a request: what is there, keep it, forget it.

No call while a plan is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from milepost.core.hashing import KeyChain, token_bytes
from milepost.core.lease import Lease
from milepost.core.prefix_cache import PrefixCache
from milepost.core.transfers import Transfers
from milepost.core.tree import Node
from milepost.core.units import floor_div

FORGOTTEN = "forgotten"
"""Move under which evictions count what a caller had removed."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What `forget` did, or would do.

    Attributes:
        num_kept_units: units at the head of the prompt that others need as well.
        keys: chain keys of everything else: of the prompt's other units, cached or not, and of all
            cached units that continue it.
        num_checkpoints: checkpoints that were dropped.
    """

    num_kept_units: int
    keys: list[bytes]
    num_checkpoints: int = 0


def cached_path(cache: PrefixCache, chain: KeyChain) -> list[Node]:
    """Nodes of the whole units of `chain`, as far as they exist. O(units)."""
    num_units = floor_div(len(chain.tokens), cache.match_unit)
    root = cache.tree.roots.get(chain.root)
    keys = chain.extend(num_units)
    return cache.tree.walk(root, keys, num_units) if root is not None else []


def checkpoints_of(path: Iterable[Node]) -> list[Node]:
    """Those of `path` a request could go on from, by ascending position."""
    return [node for node in path if node.states is not None]


def pin(cache: PrefixCache, chain: KeyChain, until: float) -> Node | None:
    """Give the deepest checkpoint of a prompt up last until then; None if it has none. Counts as no use."""
    checkpoints = checkpoints_of(cached_path(cache, chain))
    if not checkpoints:
        return None
    node = checkpoints[-1]
    node.pinned_until = max(node.pinned_until, until)
    cache.evictor.reconsider(node)
    return node


def unpin(cache: PrefixCache, chain: KeyChain, now: float) -> Node | None:
    """End the pin of the deepest checkpoint of a prompt that has one; None if there is none."""
    for node in reversed(checkpoints_of(cached_path(cache, chain))):
        if node.pinned_until > now:
            node.pinned_until = 0.0
            cache.evictor.reconsider(node)
            return node
    return None


def find_forgettable(
    cache: PrefixCache,
    chain: KeyChain,
    leases: Sequence[Lease],
    *,
    num_kept_units: int,
    num_public_units: int,
) -> tuple[Forgotten, list[Node]]:
    """What of a prompt nobody else needs, and the nodes whose subtrees that is.

    A prompt's own are its units behind the last point where another path leaves it, or where a request
    stands that runs; and what continues it to its last token and further.

    Args:
        leases: of the requests that run.
        num_kept_units: at least so many stay.
        num_public_units: paths that leave the prompt behind so many units are its own, too.
    """
    path = cached_path(cache, chain)
    num_units = len(chain.keys)
    tail = token_bytes(chain.tokens[num_units * cache.match_unit :])
    in_use: set[int] = set()
    kept = min(num_kept_units, num_units)
    by_id = {id(node): node for node in path}
    for lease in leases:
        node: Node | None = lease.tip
        while node is not None and id(node) not in by_id:
            in_use.add(id(node))
            node = node.parent
        if node is not None:
            kept = max(kept, node.depth)
    for index, node in enumerate(path[:num_public_units]):
        following = path[index + 1] if index + 1 < len(path) else None
        if any(
            not _continues(child, following, tail, index + 1 == num_units) for child in node.children.values()
        ):
            kept = max(kept, index + 1)
    victims: list[Node] = []
    if kept < len(path):
        victims = [path[kept]]
    elif kept == num_units and path and len(path) == num_units:
        victims = [
            child
            for child in path[-1].children.values()
            if id(child) not in in_use
            and (num_units > num_public_units or _continues(child, None, tail, True))
            and num_kept_units < num_units
        ]
    keys = list(chain.keys[kept:])
    for victim in victims:
        keys += [node.key for node in _subtree(victim)]
    return Forgotten(kept, list(dict.fromkeys(keys))), victims


def forget(
    cache: PrefixCache,
    transfers: Transfers,
    chain: KeyChain,
    leases: Sequence[Lease],
    *,
    num_kept_units: int = 0,
    num_public_units: int | None = None,
) -> Forgotten | None:
    """Drop what `find_forgettable` finds; None, with nothing dropped, while a transfer reads or brings
    a part of it."""
    public = len(chain.tokens) if num_public_units is None else num_public_units
    found, victims = find_forgettable(
        cache, chain, leases, num_kept_units=num_kept_units, num_public_units=public
    )
    if any(victim.num_users for victim in victims) or _is_being_loaded(chain, found, transfers):
        return None
    num_checkpoints = sum(cache.evictor.drop_subtree(victim, FORGOTTEN) for victim in victims)
    for key in found.keys:
        cache.evictor.losses.forget(key)
    return Forgotten(found.num_kept_units, found.keys, num_checkpoints)


def _continues(child: Node, following: Node | None, tail: bytes, is_last: bool) -> bool:
    """Whether `child` lies on the prompt's path, or goes on where its tokens end."""
    if following is not None:
        return child is following
    return is_last and child.tokens.startswith(tail)


def _subtree(root: Node) -> list[Node]:
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _is_being_loaded(chain: KeyChain, found: Forgotten, transfers: Transfers) -> bool:
    """Whether a load in progress will bring units of the prompt that are to go, or what continues it."""
    kept, num_units = found.num_kept_units, len(chain.keys)
    if not num_units:
        return False
    last = min(kept, num_units - 1)
    for lease in transfers.leases():
        keys = lease.chain.keys
        goes_on = len(keys) > (kept if kept < num_units else num_units)
        if goes_on and keys[last] == chain.keys[last]:
            return True
    return False
