"""Requests that share a prefix with one that is still to be prefilled: compute it once.

The first request of a prefix leads; a later one follows it up to their divergence boundary, which
the leader exports (reason `junction`). A follower waits only while its leader runs and has not
passed that boundary; if the leader ends or is preempted, the next one leads.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.request import Request, RequestStatus
from milepost.core.units import floor_div


@dataclass(slots=True, eq=False)
class Following:
    """`follower` shares [0, boundary) tokens with `leader`, which is going to compute them."""

    follower: Request
    leader: Request
    boundary: int


class Siblings:
    """Prefixes that are going to be computed, by chain key.

    A key belongs to one request: a leader owns the units from its own boundary (0 if it follows nobody)
    to the end, its followers the units behind theirs.

    Invariant: if the key of unit i is registered, so are the keys of all units before it.
    """

    __slots__ = ("_followers", "_following", "_keys", "_owner", "match_unit")

    def __init__(self, match_unit: int) -> None:
        self.match_unit = match_unit
        self._owner: dict[bytes, Request] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._following: dict[int, Following] = {}
        self._followers: dict[int, dict[int, Following]] = {}

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
        self._follow(following, leader)
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

    def awaited_boundary(self, request: Request, known: set[int] | None = None) -> int:
        """Boundary (tokens) that `request` should wait for now; 0 = it should not wait.

        A leader that waits for its own leader is waited for too. `known` collects the requests found
        to wait, so that looking at all of a long chain once costs no more than its length.
        """
        own = self._following.get(request.request_id)
        following = own
        visited: list[int] = []
        while following is not None:
            leader = following.leader
            if leader.num_processed >= following.boundary:
                return 0
            visited.append(following.follower.request_id)
            if leader.status is RequestStatus.RUNNING or (known is not None and leader.request_id in known):
                if known is not None:
                    known.update(visited)
                return own.boundary if own is not None else 0
            following = self._following.get(leader.request_id)
        return 0

    def overtake(self, request: Request) -> list[Following]:
        """`request` is about to be computed before a leader that waits (it came back from a preemption,
        or stands further behind in the queue): that one follows it now. Returns the new relations."""
        changed: list[Following] = []
        while True:
            following = self._following.get(request.request_id)
            if following is None or following.leader.status is RequestStatus.RUNNING:
                return [r for r in changed if self._following.get(r.follower.request_id) is r]
            leader = following.leader
            changed += self.leave(leader, heir=request)
            relation = self.register(leader)
            if relation is not None:
                changed.append(relation)

    def leave(self, request: Request, heir: Request | None = None) -> list[Following]:
        """Remove a request whose prefill is over or will not happen; returns the new relations, one
        per leader and boundary.

        Its followers are led from now on by `heir`, else by one that runs, else by the one that
        shares most with it. The new leader takes over the keys up to its boundary; followers that
        share more than that are led by the next one, and so on. O(units + followers).
        """
        keys = self._keys.pop(request.request_id, None)
        if keys is None:
            return []
        following = self._following.pop(request.request_id, None)
        leader = following.leader if following is not None else None
        if leader is not None:
            del self._followers[leader.request_id][request.request_id]
        first = position = floor_div(following.boundary, self.match_unit) if following is not None else 0
        orphans = list(self._followers.pop(request.request_id, {}).values())
        changed: dict[tuple[int, int], Following] = {}
        while orphans:
            chosen = self._choose(orphans, heir)
            shared = floor_div(chosen.boundary, self.match_unit)
            self._take_over(chosen.follower, keys[position - first : shared - first])
            following_it = [o for o in orphans if o is not chosen and o.boundary <= chosen.boundary]
            orphans = [o for o in orphans if o.boundary > chosen.boundary]
            if leader is None:
                del self._following[chosen.follower.request_id]
            else:
                chosen.boundary = position * self.match_unit
                self._follow(chosen, leader)
                changed[leader.request_id, chosen.boundary] = chosen
            leader, position = chosen.follower, shared
            for orphan in following_it:
                self._follow(orphan, leader)
                changed[leader.request_id, orphan.boundary] = orphan
        for key in keys[position - first :]:
            del self._owner[key]
        return list(changed.values())

    @staticmethod
    def _choose(orphans: list[Following], heir: Request | None) -> Following:
        return max(
            orphans,
            key=lambda o: (o.follower is heir, o.follower.status is RequestStatus.RUNNING, o.boundary),
        )

    def _take_over(self, request: Request, keys: list[bytes]) -> None:
        for key in keys:
            self._owner[key] = request
        self._keys[request.request_id] = keys + self._keys[request.request_id]

    def _follow(self, following: Following, leader: Request) -> None:
        following.leader = leader
        self._followers.setdefault(leader.request_id, {})[following.follower.request_id] = following

    def audit(self) -> list[str]:
        """Owners are registered, keys form whole prefixes, and both directions of a relation agree."""
        problems = []
        num_owned = 0
        for request_id, own in self._keys.items():
            num_owned += len(own)
            for key in own:
                owner = self._owner.get(key)
                if owner is None or owner.request_id != request_id:
                    problems.append(f"siblings: a key of request {request_id} is owned by somebody else")
        if num_owned != len(self._owner):
            problems.append("siblings: a key belongs to nobody's list")
        for request_id, following in self._following.items():
            leader_id = following.leader.request_id
            if leader_id not in self._keys:
                problems.append(f"siblings: request {request_id} follows {leader_id}, who left")
            if self._followers.get(leader_id, {}).get(request_id) is not following:
                problems.append(f"siblings: leader {leader_id} does not know its follower {request_id}")
        if sum(len(f) for f in self._followers.values()) != len(self._following):
            problems.append("siblings: a leader lists a request that does not follow it")
        return problems
