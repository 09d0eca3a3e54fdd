"""Events tell routers exactly which prefixes can be resumed; the wire format is vLLM's."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import msgspec
import pytest
from tests.core.harness import Harness, make_geometry, numbered

from milepost.core.hashing import CacheDomain, domain_root
from milepost.core.tree import Node, PrefixTree
from milepost.engine.kv_events import KvEvent, KvEventLog, KvEventSource, block_hash, encode_batch
from milepost.engine.kv_publisher import KvEventsConfig, ZmqPublisher, parse_kv_events_config
from milepost.errors import ConfigError
from milepost.sim.swarm import Swarm


class Router:
    """What a router knows from events: block hash -> (parent, tokens)."""

    def __init__(self, match_unit: int) -> None:
        self.match_unit = match_unit
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block]
                assert not [b for b, (parent, _) in self.blocks.items() if parent in event["block_hashes"]]
            else:
                parent = event["parent_block_hash"]
                assert parent is None or parent in self.blocks
                assert len(event["token_ids"]) == self.match_unit * len(event["block_hashes"])
                for number, block in enumerate(event["block_hashes"]):
                    first = number * self.match_unit
                    assert block not in self.blocks
                    self.blocks[block] = (parent, event["token_ids"][first : first + self.match_unit])
                    parent = block

    def matched_tokens(self, prompt: list[int]) -> int:
        parent: int | None = None
        children = {(p, tuple(t)): b for b, (p, t) in self.blocks.items()}
        for start in range(0, len(prompt), self.match_unit):
            found = children.get((parent, tuple(prompt[start : start + self.match_unit])))
            if found is None:
                return start
            parent = found
        return len(prompt)


def resumable(tree: PrefixTree, match_unit: int) -> set[int]:
    """Units at or before a checkpoint, of prompts without salt."""
    open_root = domain_root(CacheDomain(), match_unit)
    units: set[int] = set()
    for node in tree.state_nodes.values():
        path = []
        current: Node = node
        while current.parent is not None:
            path.append(block_hash(current.key))
            current = current.parent
        if current.key == open_root:
            units.update(path)
    return units


def test_a_router_knows_what_can_be_resumed() -> None:
    harness = Harness(geometry=make_geometry())
    events = KvEventLog(4)
    harness.cache.tree.listeners.append(events)
    router = Router(4)
    harness.serve(numbered(22), wanted=[(8, "message")])
    router.apply(events.take())
    assert router.matched_tokens(numbered(30)) == 20
    harness.serve(numbered(12) + [5] * 9)
    router.apply(events.take())
    assert router.matched_tokens(numbered(12) + [5] * 20) == 20
    assert harness.scheduler.reset_prefix_cache()
    cleared = events.take()
    assert cleared == [{"type": "AllBlocksCleared"}]
    router.apply(cleared)
    assert router.matched_tokens(numbered(22)) == 0


def test_pages_without_a_state_behind_them_are_not_announced() -> None:
    harness = Harness(geometry=make_geometry())
    events = KvEventLog(4)
    harness.cache.tree.listeners.append(events)
    router = Router(4)
    harness.serve(numbered(40), wanted=[(8, "message")])
    for node in list(harness.cache.tree.state_nodes.values()):
        if node.depth > 2:
            harness.cache.evictor.give_up_state(node)
    router.apply(events.take())
    assert router.matched_tokens(numbered(40)) == 8
    assert len(harness.cache.tree.index) == 10


def test_salted_prompts_are_never_announced() -> None:
    harness = Harness(geometry=make_geometry())
    events = KvEventLog(4)
    harness.cache.tree.listeners.append(events)
    harness.serve(numbered(20), domain=CacheDomain(b"tenant"))
    assert events.take() == []
    assert harness.scheduler.reset_prefix_cache()
    assert events.take() == []


@pytest.mark.parametrize("seed", range(12))
def test_routers_agree_with_the_cache_after_every_action(seed: int) -> None:
    swarm = Swarm(Random(seed))
    unit = swarm.config.geometry.match_unit
    tree = swarm.world.scheduler.cache.tree
    events, router = KvEventLog(unit), Router(unit)
    tree.listeners.append(events)
    for _ in range(120):
        swarm.act()
        router.apply(events.take())
        assert set(router.blocks) == resumable(tree, unit)
        assert events.num_announced == len(router.blocks)


def test_a_batch_is_what_vllm_sends() -> None:
    event: KvEvent = {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU"}
    decoded = msgspec.msgpack.decode(encode_batch([event], 12.5))
    assert decoded == [12.5, [event], 0]


def test_nothing_is_published_without_events() -> None:
    sent: list[bytes] = []
    source = KvEventSource(KvEventLog(4), sent.append, lambda: 1.0)
    source.flush()
    assert sent == []


# ------------------------------------------------------------------ over the wire
def receive(socket: Any, count: int) -> list[list[bytes]]:
    frames = []
    for _ in range(count):
        assert socket.poll(5000), "nothing came"
        frames.append(socket.recv_multipart())
    return frames


def test_a_replay_leaves_nothing_out() -> None:
    """A router drops what is over its high-water mark, 1,000 messages unless it is told otherwise."""
    zmq = pytest.importorskip("zmq")
    config = KvEventsConfig(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", buffer_steps=20_000
    )
    publisher = ZmqPublisher(config)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        client.connect(publisher.replay_endpoint)

        def ask(first: int, pause: float) -> list[int]:
            client.send_multipart((b"", first.to_bytes(8, "big")))
            assert client.poll(10_000)
            time.sleep(pause)  # a reader that is not at once there
            numbers: list[int] = []
            while not numbers or numbers[-1] != -1:
                [[_, number, _]] = receive(client, 1)
                numbers.append(int.from_bytes(number, "big", signed=True))
            return numbers

        for _ in range(12_000):
            publisher.publish(bytes(200))
        while ask(11_999, 0.01) != [11_999, -1]:
            continue
        assert ask(0, 0.3) == [*range(12_000), -1]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_subscribers_get_numbered_batches_and_may_ask_for_missed_ones() -> None:
    zmq = pytest.importorskip("zmq")
    config = KvEventsConfig(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv", buffer_steps=3
    )
    publisher = ZmqPublisher(config)
    context = zmq.Context()
    subscriber, client = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe("kv")
        client.connect(publisher.replay_endpoint)
        deadline = time.monotonic() + 10
        first = 0
        while not subscriber.poll(20):  # a subscription takes a moment to arrive
            assert time.monotonic() < deadline
            publisher.publish(b"early")
            first += 1
        publisher.publish(b"last")
        numbers = []
        while True:
            [[topic, number, payload]] = receive(subscriber, 1)
            assert topic == b"kv"
            numbers.append(int.from_bytes(number, "big"))
            if payload == b"last":
                break
        assert numbers == list(range(numbers[0], first + 1))
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        kept = min(3, first + 1)
        replayed = receive(client, kept + 1)
        got = [(int.from_bytes(n, "big", signed=True), payload) for _, n, payload in replayed]
        assert got[-2:] == [(first, b"last"), (-1, b"")]
        assert [n for n, _ in got[:-1]] == list(range(first + 1 - kept, first + 1))
        client.send_multipart((b"garbage",))
        client.send_multipart((b"", first.to_bytes(8, "big")))
        assert [payload for _, _, payload in receive(client, 2)] == [b"last", b""]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_an_endpoint_in_use_is_named() -> None:
    pytest.importorskip("zmq")
    publisher = ZmqPublisher(KvEventsConfig(endpoint="tcp://127.0.0.1:*"))
    try:
        with pytest.raises(ConfigError, match="cannot bind tcp://127"):
            ZmqPublisher(KvEventsConfig(endpoint=publisher.endpoint))
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ('{"endpont": "x"}', "endpont"),
        ('{"publisher": "null"}', "only 'zmq'"),
        ('{"buffer_steps": -1}', "buffer_steps must be from 0 to 2147483646, not -1"),
        ('{"buffer_steps": 2147483647}', "buffer_steps must be from 0"),
        ('{"buffer_steps": 99999999999999999999}', "buffer_steps must be from 0"),
        ('{"hwm": -1}', "hwm must be from 0"),
        ('{"hwm": 2147483648}', "hwm must be from 0"),
        ('{"hwm": 99999999999}', "hwm must be from 0"),
        ('{"endpoint": "tcp://127.0.0.1:5557\\u0000"}', "endpoint has a NUL"),
        ('{"replay_endpoint": "ipc:///tmp/a\\u0000b"}', "replay_endpoint has a NUL"),
        ('{"hwm": "many"}', "hwm"),
    ],
)
def test_a_wrong_config_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kv_events_config(text)


def test_the_largest_numbers_work() -> None:
    largest = parse_kv_events_config('{"hwm": 2147483647, "buffer_steps": 2147483646}')
    endpoint = "tcp://127.0.0.1:*"
    ZmqPublisher(msgspec.structs.replace(largest, endpoint=endpoint, replay_endpoint=endpoint)).close()


def test_vllms_own_config_is_taken() -> None:
    config = parse_kv_events_config(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    )
    assert (config.endpoint, config.topic) == ("tcp://*:5557", "kv")
