"""Sizes of what is cached: the only owner of bytes per page and bytes per state.

A model states its groups (`AttentionGroupSpec`, `RecurrentGroupSpec`); everything else in the
core, the worker and the simulator reads sizes from `CacheGeometry`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from milepost.core.units import ceil_div, ceil_to, floor_div, floor_to
from milepost.errors import ConfigError

ALLOCATION_QUANTUM_BYTES = 4096
"""Records start on an operating-system page, so that a freed record can be given back alone."""
INTERVAL_MIN_TOKENS = 512
INTERVAL_MAX_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class AttentionGroupSpec:
    """Full-attention layers that share one page table.

    Attributes:
        name: unique within the model, for messages and metrics.
        bytes_per_token: KV bytes of one token over all layers of the group, on this rank.
        bytes_per_page: what a page holds besides, once: a drafter's taps.
    """

    name: str
    bytes_per_token: int
    bytes_per_page: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentGroupSpec:
    """Linear-attention layers whose states are saved and restored together.

    Attributes:
        name: unique within the model.
        state_bytes: bytes of one state (conv tail + recurrent matrix) over all layers, on this rank.
        checkpoint_alignment: tokens; the kernel can export a state inside a pass at absolute
            positions that are multiples of it. `None`: it cannot export inside a pass.
        checkpoint_bytes: bytes of a state that is kept, where that has another layout than a running
            one. `None`: it has the same, and a running state becomes a checkpoint by changing hands.
    """

    name: str
    state_bytes: int
    checkpoint_alignment: int | None = 1
    checkpoint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Match unit, groups and rank layout of one replica.

    Every group has a pool of its own. Pools are numbered attention groups first, then the
    checkpoints of recurrent groups, then, where these are kept apart, their running states
    (`pool_record_bytes`).
    """

    match_unit: int
    attention: tuple[AttentionGroupSpec, ...]
    recurrent: tuple[RecurrentGroupSpec, ...]
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.match_unit < 1:
            raise ConfigError("prefix_match_unit", f"must be at least 1 token, not {self.match_unit}")
        if not self.attention and not self.recurrent:
            raise ConfigError(
                "model", "has neither attention nor recurrent layers; there is nothing to cache"
            )
        for attention in self.attention:
            if attention.bytes_per_token < 1:
                raise ConfigError(f"attention group {attention.name}", "bytes_per_token must be positive")
            if attention.bytes_per_page < 0:
                raise ConfigError(f"attention group {attention.name}", "bytes_per_page is negative")
        for recurrent in self.recurrent:
            if recurrent.state_bytes < 1 or recurrent.checkpoint_bytes == 0:
                raise ConfigError(
                    f"recurrent group {recurrent.name}", "state_bytes and checkpoint_bytes must be positive"
                )
            alignment = recurrent.checkpoint_alignment
            if alignment is not None and alignment < 1:
                raise ConfigError(
                    f"recurrent group {recurrent.name}", "checkpoint_alignment must be positive or None"
                )
        names = [g.name for g in self.attention] + [g.name for g in self.recurrent]
        if len(set(names)) != len(names):
            raise ConfigError("model", f"cache group names must be unique, got {names}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("rank", f"{self.rank} is outside of world_size {self.world_size}")

    @property
    def num_attention_groups(self) -> int:
        return len(self.attention)

    @property
    def num_recurrent_groups(self) -> int:
        return len(self.recurrent)

    @property
    def page_record_bytes(self) -> tuple[int, ...]:
        """Bytes one page takes in each attention group's pool (match_unit tokens, rounded up)."""
        return tuple(
            ceil_to(g.bytes_per_token * self.match_unit + g.bytes_per_page, ALLOCATION_QUANTUM_BYTES)
            for g in self.attention
        )

    @property
    def keeps_states_apart(self) -> bool:
        """Whether checkpoints have another layout than running states, and therefore other pools."""
        return any(g.checkpoint_bytes is not None for g in self.recurrent)

    @property
    def checkpoint_record_bytes(self) -> tuple[int, ...]:
        """Bytes one checkpoint takes in each recurrent group's pool of them (rounded up)."""
        return tuple(
            ceil_to(
                g.state_bytes if g.checkpoint_bytes is None else g.checkpoint_bytes, ALLOCATION_QUANTUM_BYTES
            )
            for g in self.recurrent
        )

    @property
    def running_record_bytes(self) -> tuple[int, ...]:
        """Bytes one running state takes in each recurrent group's pool of them (rounded up)."""
        return tuple(ceil_to(g.state_bytes, ALLOCATION_QUANTUM_BYTES) for g in self.recurrent)

    @property
    def state_record_bytes(self) -> tuple[int, ...]:
        """Bytes per record of every pool of states."""
        running = self.running_record_bytes if self.keeps_states_apart else ()
        return self.checkpoint_record_bytes + running

    @property
    def checkpoint_pools(self) -> range:
        """Per recurrent group, the pool its checkpoints are in."""
        return range(self.num_attention_groups, self.num_attention_groups + self.num_recurrent_groups)

    @property
    def running_pools(self) -> range:
        """Per recurrent group, the pool its running states are in."""
        first = self.num_attention_groups + self.keeps_states_apart * self.num_recurrent_groups
        return range(first, first + self.num_recurrent_groups)

    @property
    def pool_record_bytes(self) -> tuple[int, ...]:
        """Bytes per record of every pool."""
        return self.page_record_bytes + self.state_record_bytes

    @property
    def segment_record_bytes(self) -> tuple[int, ...]:
        """Bytes per record of the pools that segments are made of: all but those of running states."""
        return self.page_record_bytes + self.checkpoint_record_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of the pages of one match unit over all attention groups."""
        return sum(self.page_record_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint over all recurrent groups."""
        return sum(self.checkpoint_record_bytes)

    @property
    def running_bytes(self) -> int:
        """Bytes of one running state over all recurrent groups."""
        return sum(self.running_record_bytes)

    @property
    def request_state_bytes(self) -> int:
        """Bytes of the states that a request needs to go on: its own and, where checkpoints are kept
        apart, the one it starts from (elsewhere it can run in that one's place)."""
        return self.running_bytes + self.keeps_states_apart * self.checkpoint_bytes

    @property
    def checkpoint_alignment(self) -> int | None:
        """Grid of positions at which *every* recurrent group can export (lcm), or None."""
        alignments = [g.checkpoint_alignment for g in self.recurrent]
        if any(a is None for a in alignments):
            return None
        return math.lcm(*(a for a in alignments if a is not None)) if alignments else 1

    @property
    def bytes_per_token(self) -> int:
        """Attention KV bytes of one token over all groups, without rounding."""
        return sum(g.bytes_per_token for g in self.attention)

    @property
    def state_bytes(self) -> int:
        """Bytes of one running state over all recurrent groups, without rounding."""
        return sum(g.state_bytes for g in self.recurrent)

    @property
    def kept_state_bytes(self) -> int:
        """Bytes of one checkpoint over all recurrent groups, without rounding."""
        return sum(
            g.state_bytes if g.checkpoint_bytes is None else g.checkpoint_bytes for g in self.recurrent
        )

    def default_checkpoint_interval(self) -> int:
        """Tokens between `interval` checkpoints: bytes of one / KV bytes per token, within bounds.

        A checkpoint then costs about as much as the pages between two of them.
        """
        per_token = max(1, self.bytes_per_token)
        wanted = floor_div(self.kept_state_bytes, per_token)
        wanted = min(max(wanted, INTERVAL_MIN_TOKENS), INTERVAL_MAX_TOKENS)
        return max(self.match_unit, floor_to(wanted, self.match_unit))

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes a request of `num_tokens` needs while it runs: its pages and `request_state_bytes`."""
        return ceil_div(num_tokens, self.match_unit) * self.unit_bytes + self.request_state_bytes

    def max_tokens_for(self, budget_bytes: int) -> int:
        """Longest request (prompt and output, tokens) that fits `budget_bytes` alone."""
        room = budget_bytes - self.request_state_bytes
        if room < 0:
            return 0
        if self.unit_bytes == 0:
            return 1 << 40
        return floor_div(room, self.unit_bytes) * self.match_unit
