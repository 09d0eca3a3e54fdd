"""What the cache holds, announced to routers in vLLM's event format.

Only prefixes that can be resumed are announced: the match units up to a checkpoint. A unit is taken back
when no checkpoint is left at or behind it. Prompts of salted domains are never announced: no router could
match them, and their tokens are nobody else's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from milepost.core.hashing import CacheDomain, domain_root, tokens_from_bytes
from milepost.core.tree import Node

MEDIUM = "GPU"
"""vLLM's word for the memory a step reads from; ours is the process's own."""

KvEvent = dict[str, Any]


class _Announced:
    """A unit the routers know.

    Attributes:
        num_children: announced units right behind it.
        is_checkpoint: whether it has a state itself.
    """

    __slots__ = ("is_checkpoint", "key", "num_children", "parent")

    def __init__(self, key: bytes, parent: _Announced | None) -> None:
        self.key = key
        self.parent = parent
        self.num_children = 0
        self.is_checkpoint = False


def block_hash(key: bytes) -> int:
    """The 64-bit hash a unit has in events: the head of its chain key."""
    return int.from_bytes(key[:8], "big")


class KvEventLog:
    """Collects events between two steps; listens to the prefix tree. O(units that change hands).

    Args:
        match_unit: tokens per announced block.
    """

    def __init__(self, match_unit: int) -> None:
        self._match_unit = match_unit
        self._open_root = domain_root(CacheDomain(), match_unit)
        self._announced: dict[bytes, _Announced] = {}
        self._events: list[KvEvent] = []

    @property
    def num_announced(self) -> int:
        """Blocks the routers know."""
        return len(self._announced)

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        if not self._announced and any(event["type"] == "BlockRemoved" for event in events):
            return [{"type": "AllBlocksCleared"}]
        return events

    # -- what the tree tells ---------------------------------------------------------------------

    def checkpoint_added(self, node: Node) -> None:
        path = self._unannounced(node)
        if path is None:
            return
        if path:
            self._announce(path)
        self._announced[node.key].is_checkpoint = True

    def checkpoint_removed(self, node: Node) -> None:
        entry: _Announced | None = self._announced.get(node.key)
        if entry is None:
            return
        entry.is_checkpoint = False
        gone: list[int] = []
        while entry is not None and not entry.is_checkpoint and not entry.num_children:
            del self._announced[entry.key]
            gone.append(block_hash(entry.key))
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1
        if gone:
            self._events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": MEDIUM})

    def path_ended(self, node: Node) -> None:
        """Says nothing about what can be resumed."""

    def _unannounced(self, node: Node) -> list[Node] | None:
        """Units of the path to `node` that no router knows yet, first to last; None in a salted domain."""
        path: list[Node] = []
        current: Node | None = node
        while current is not None and not current.is_root:
            if current.key in self._announced:
                break
            path.append(current)
            current = current.parent
        if current is None or (current.is_root and current.key != self._open_root):
            return None
        path.reverse()
        return path

    def _announce(self, path: Sequence[Node]) -> None:
        before = path[0].parent
        known = self._announced.get(before.key) if before is not None else None
        event: KvEvent = {
            "type": "BlockStored",
            "block_hashes": [block_hash(node.key) for node in path],
            "parent_block_hash": block_hash(known.key) if known is not None else None,
            "token_ids": [token for node in path for token in tokens_from_bytes(node.tokens)],
            "block_size": self._match_unit,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        self._events.append(event)
        for node in path:
            entry = _Announced(node.key, known)
            if known is not None:
                known.num_children += 1
            self._announced[node.key] = known = entry


def encode_batch(events: Sequence[KvEvent], timestamp: float, rank: int = 0) -> bytes:
    """One message: msgpack [seconds since the epoch, events as tagged maps, data-parallel rank]."""
    return msgspec.msgpack.encode([timestamp, list(events), rank])


class KvEventSource:
    """The log and where its batches go; the engine calls `flush` between steps.

    Args:
        publish: takes an encoded batch and must not block.
        clock: seconds since the epoch.
    """

    def __init__(self, log: KvEventLog, publish: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self.log = log
        self._publish = publish
        self._clock = clock

    def flush(self) -> None:
        events = self.log.take()
        if events:
            self._publish(encode_batch(events, self._clock()))
