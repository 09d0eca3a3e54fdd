"""Drives conversations through a world: arrivals, think times, answers, departures."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from milepost.sim.spec import Conversation, Outcome, RequestSpec
from milepost.sim.world import MAX_IDLE_STEPS, SimulationError, World


class _Client:
    """One conversation and the requests of its current turn."""

    __slots__ = ("conversation", "num_open", "outcomes")

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.num_open = 0
        self.outcomes: dict[int, Outcome] = {}


class ClientDriver:
    """Runs conversations side by side until all have ended.

    The requests of a turn are sent at their own delays; the turn ends when all of them have.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcomes: list[Outcome] = []
        self._events: list[tuple[float, int, _Client, int, RequestSpec]] = []
        self._num_events = 0
        self._owner: dict[int, _Client] = {}
        self._ended: list[Outcome] = []
        world.on_end = self._ended.append

    def run(self, conversations: Iterable[Conversation], max_steps: int = 1_000_000) -> list[Outcome]:
        """Run to the end; returns all outcomes in order of arrival.

        Raises:
            SimulationError: a finding, a livelock, or no end within `max_steps`.
            RequestError: the core refused a request of the workload.
        """
        for conversation in conversations:
            client = _Client(conversation)
            self._plan_turn(client, next(conversation, ()))
        idle = 0
        for _ in range(max_steps):
            self._deliver()
            if not self._send_due():
                self.world.drain()
                return self.outcomes
            before = self.world.progress
            self.world.step()
            idle = idle + 1 if before == self.world.progress else 0
            if idle > MAX_IDLE_STEPS and not self._jump():
                raise SimulationError(f"requests {sorted(self.world.running)} wait for ever")
        raise SimulationError(f"not done after {max_steps} steps")

    def _plan_turn(self, client: _Client, specs: Iterable[RequestSpec]) -> None:
        client.outcomes = {}
        for index, spec in enumerate(specs):
            client.num_open += 1
            heapq.heappush(self._events, (self.world.now + spec.delay, self._num_events, client, index, spec))
            self._num_events += 1

    def _deliver(self) -> None:
        """Hand finished turns to their conversations and plan what they send next."""
        ended = self._ended[:]
        self._ended.clear()
        for outcome in ended:
            client = self._owner.pop(outcome.request_id)
            client.num_open -= 1
            if client.num_open:
                continue
            try:
                specs = client.conversation.send(
                    [client.outcomes[index] for index in sorted(client.outcomes)]
                )
            except StopIteration:
                continue
            self._plan_turn(client, specs)

    def _send_due(self) -> bool:
        """Send what is due; jump to the next arrival if nothing runs. False = all is over."""
        world = self.world
        if not world.is_busy and not self._jump():
            return False
        due: list[tuple[int, int, _Client, RequestSpec]] = []
        while self._events and self._events[0][0] <= world.now:
            _, number, client, index, spec = heapq.heappop(self._events)
            due.append((number, index, client, spec))
        for _, index, client, spec in sorted(due, key=lambda entry: entry[0]):
            request_id = world.add(spec)
            self._owner[request_id] = client
            client.outcomes[index] = world.outcomes[request_id]
            self.outcomes.append(world.outcomes[request_id])
        return True

    def _jump(self) -> bool:
        """Advance the clock to the next arrival; False if there is none."""
        if not self._events:
            return False
        self.world.now = max(self.world.now, self._events[0][0])
        return True
