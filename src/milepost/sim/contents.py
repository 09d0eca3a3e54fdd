"""What a lookup could find, compared with what the worker holds.

This finds a wrong publication at once, not only when a later request happens to run into it.
"""

from __future__ import annotations

from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request
from milepost.sim.fingerprint import FingerprintWorker
from milepost.sim.model import TrueSequence
from milepost.sim.taps import tapped_groups


class ContentsCheck:
    """Knows which tokens every chain key stands for, from the requests that made the keys."""

    def __init__(self, cache: PrefixCache, worker: FingerprintWorker) -> None:
        self._cache = cache
        self._worker = worker
        self._unit = cache.geometry.match_unit
        self._tapped = tapped_groups(cache.geometry)
        self._nodes_by_key: dict[bytes, list[int]] = {}
        self._num_learned: dict[int, int] = {}

    def learn(self, request: Request, truth: TrueSequence) -> list[str]:
        """Take in the keys a request has computed so far; reports keys that stand for two prefixes."""
        problems: list[str] = []
        if request.chain is None:
            return problems
        keys = request.chain.keys
        first = self._num_learned.get(request.request_id, 0)
        if len(keys) == first:
            return problems
        truth.ensure(len(keys) * self._unit)
        for index in range(first, len(keys)):
            nodes = truth.path[index * self._unit + 1 : (index + 1) * self._unit + 1]
            known = self._nodes_by_key.setdefault(keys[index], nodes)
            if known != nodes:
                problems.append(f"unit {index} of request {request.request_id} has the key of another prefix")
        self._num_learned[request.request_id] = len(keys)
        return problems

    def forget(self, request_id: int) -> None:
        """A request has ended; its keys stay known."""
        self._num_learned.pop(request_id, None)

    def problems(self) -> list[str]:
        """Every published page or state that does not hold what its key says. Empty = sound."""
        problems: list[str] = []
        worker = self._worker
        checkpoint_pools = worker.geometry.checkpoint_pools
        listed: set[tuple[str, int, int]] = set()
        for key, node in self._cache.tree.index.items():
            nodes = self._nodes_by_key.get(key)
            if nodes is None:
                problems.append(f"{node} has a key that no request made")
                continue
            for group, page in enumerate(node.pages):
                held = [*nodes, nodes[-1]] if group in self._tapped else nodes
                if worker.pages[group].get(page) != held:
                    problems.append(f"{node}: page {page} of group {group} does not hold its unit")
                if ("page", group, page) in listed:
                    problems.append(f"{node}: page {page} of group {group} is listed twice")
                listed.add(("page", group, page))
            for group, slot in enumerate(node.states or ()):
                if worker.slots[checkpoint_pools[group]].get(slot) != nodes[-1]:
                    problems.append(f"{node}: slot {slot} of group {group} does not hold its state")
                if ("slot", group, slot) in listed:
                    problems.append(f"{node}: slot {slot} of group {group} is listed twice")
                listed.add(("slot", group, slot))
        return problems
