"""Requests that share a prefix with one that is still to be prefilled: compute it once.

The first request of a prefix leads; a later one follows it up to their divergence boundary, which
the leader exports (reason `junction`). A follower waits only while its leader runs and has not
passed that boundary; if the leader ends or is preempted, the next one leads.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.request import Request, RequestStatus
from milepost.core.units import floor_div


@dataclass(frozen=True, slots=True)
class Following:
    """`follower` shares [0, boundary) tokens with `leader`, which is going to compute them."""

    follower: Request
    leader: Request
    boundary: int


class Siblings:
    """Prefixes that are going to be computed, by chain key.

    Invariant: if the key of unit i is registered, so are the keys of all units before it.
    """

    __slots__ = ("_followers", "_following", "_keys", "_owner", "match_unit")

    def __init__(self, match_unit: int) -> None:
        self.match_unit = match_unit
        self._owner: dict[bytes, Request] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._following: dict[int, Following] = {}
        self._followers: dict[int, dict[int, Request]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def register(self, request: Request) -> Following | None:
        """Add a request whose prefill is to come; says whom it follows, if anybody. O(units)."""
        chain = request.chain
        if chain is None:
            raise ValueError(f"request {request.request_id} has no key chain")
        keys = chain.extend(floor_div(request.num_tokens - 1, self.match_unit))
        shared = self._num_registered(keys)
        own = keys[shared:]
        for key in own:
            self._owner[key] = request
        self._keys[request.request_id] = own
        if not shared:
            return None
        leader = self._owner[keys[shared - 1]]
        following = Following(request, leader, shared * self.match_unit)
        self._following[request.request_id] = following
        self._followers.setdefault(leader.request_id, {})[request.request_id] = request
        return following

    def _num_registered(self, keys: list[bytes]) -> int:
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in self._owner:
                low = middle
            else:
                high = middle - 1
        return low

    def awaited_boundary(self, request: Request) -> int:
        """Boundary (tokens) that `request` should wait for now; 0 = it should not wait."""
        following = self._following.get(request.request_id)
        if following is None:
            return 0
        leader = following.leader
        if leader.num_processed >= following.boundary:
            return 0
        if leader.status is RequestStatus.RUNNING:
            return following.boundary
        return following.boundary if self.awaited_boundary(leader) else 0

    def overtake(self, request: Request) -> list[Following]:
        """`request` is about to be computed before a leader that waits (it came back from a preemption,
        or stands further behind in the queue): that one follows it now. Returns the new relations."""
        changed: list[Following] = []
        while True:
            following = self._following.get(request.request_id)
            if following is None or following.leader.status is RequestStatus.RUNNING:
                return changed
            changed += self.leave(following.leader, heir=request)
            relation = self.register(following.leader)
            if relation is not None:
                changed.append(relation)

    def leave(self, request: Request, heir: Request | None = None) -> list[Following]:
        """Remove a request whose prefill is over or will not happen. Its followers are led by `heir`,
        or by the first of them, from now on; returns these new relations."""
        request_id = request.request_id
        if request_id not in self._keys:
            return []
        self._forget_keys(request)
        following = self._following.pop(request_id, None)
        if following is not None:
            self._followers[following.leader.request_id].pop(request_id, None)
        orphans = self._followers.pop(request_id, {})
        changed = []
        for orphan in orphans.values():
            self._following.pop(orphan.request_id, None)
            self._forget_keys(orphan)
        for orphan in sorted(orphans.values(), key=lambda orphan: orphan is not heir):
            relation = self.register(orphan)
            if relation is not None:
                changed.append(relation)
        return changed

    def _forget_keys(self, request: Request) -> None:
        for key in self._keys.pop(request.request_id, ()):
            if self._owner.get(key) is request:
                del self._owner[key]

    def audit(self) -> list[str]:
        """The invariant, and that owners are registered."""
        problems = []
        for request_id, own in self._keys.items():
            for key in own:
                owner = self._owner.get(key)
                if owner is None or owner.request_id != request_id:
                    problems.append(f"siblings: a key of request {request_id} is owned by somebody else")
        for request_id, following in self._following.items():
            if following.leader.request_id not in self._keys:
                leader_id = following.leader.request_id
                problems.append(f"siblings: request {request_id} follows {leader_id}, who left")
        return problems
