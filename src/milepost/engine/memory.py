"""What the process may take of the machine's memory, and what it is going to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from milepost.config import DEFAULT_MATCH_UNIT
from milepost.core.units import ceil_div
from milepost.errors import ConfigError
from milepost.models.description import ModelDescription, read_spec
from milepost.models.layout import DRAFT_COPY_BYTES

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = 400 << 20
"""Python and torch with their libraries, before a model is loaded."""
ACTIVATIONS_PER_ROW = 24
"""Rows of the hidden size, in float32, that a step keeps at the same time; generous."""
LOGIT_COPIES = 3
UNLIMITED_BYTES = 1 << 60
RESERVE_SHARE = 0.1
"""Of the limit, left alone by `--cache-bytes auto`."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`num_bytes` may be taken; `source` says by whom that was set, for people."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Attributes: bytes.

    weights: as loaded.
    reading: one layer of the files beside them, while they are read.
    workspace: activations and logits of a step.
    cache: pages and states, `--cache-bytes`.
    stores: memory tiers behind the cache.
    process: interpreter and libraries.
    """

    limit: MemoryLimit
    weights: int
    workspace: int
    cache: int
    stores: int
    process: int = PROCESS_BYTES
    reading: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, int]:
        """Name -> bytes, for a table."""
        return {
            "weights": self.weights,
            "reading them": self.reading,
            "workspace": self.workspace,
            "cache": self.cache,
            "stores in memory": self.stores,
            "process": self.process,
        }

    def check(self) -> None:
        """
        Raises:
            ConfigError: it does not fit.
        """
        if self.total <= self.limit.num_bytes:
            return
        others = self.total - self.cache
        room = self.limit.num_bytes - others
        fix = (
            f"lower --cache-bytes to at most {room >> 20}MiB, or to auto"
            if room >> 20 > 0
            else "the model needs a larger machine, --dtype bfloat16 or --quantization int4"
        )
        raise ConfigError(
            "cache_bytes",
            f"{self.cache:,} bytes beside {others:,} for weights, workspace and the process do not fit into "
            f"{self.limit.num_bytes:,} bytes ({self.limit.source}); {fix}",
        )


def memory_plan(
    directory: Path,
    about: ModelDescription,
    *,
    cache_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    store_bytes: int = 0,
    max_model_len: int | None = None,
    match_unit: int = DEFAULT_MATCH_UNIT,
    limit: MemoryLimit | None = None,
) -> MemoryPlan:
    """What serving a model takes, from its config and the sizes of its files.

    Args:
        max_model_len: tokens of the longest request; None = what the model declares.
        match_unit: tokens between boundaries where states are exported.
    """
    rows = min(max_num_batched_tokens, max_num_seqs + 1)
    return MemoryPlan(
        limit=limit or memory_limit(),
        weights=weight_bytes(directory, about),
        reading=_stored_bytes(directory) // max(1, about.num_layers),
        workspace=4
        * (
            (ACTIVATIONS_PER_ROW + _num_taps(about)) * max_num_batched_tokens * about.hidden_size
            + LOGIT_COPIES * rows * about.vocab_size
        )
        + draft_copy_bytes(about, cache_bytes, max_model_len or about.max_model_len)
        + staged_state_bytes(about, rows, ceil_div(max_num_batched_tokens, match_unit)),
        cache=cache_bytes,
        stores=store_bytes,
    )


def _num_taps(about: ModelDescription) -> int:
    """Hidden states per row that are kept for a drafter, twice while they are put side by side."""
    return 0 if about.drafter is None else 2 * len(about.drafter.tap_layers)


def draft_copy_bytes(about: ModelDescription, cache_bytes: int, max_model_len: int) -> int:
    """Most that a drafter copies of its entries at the same time: what one request has, or a fixed size."""
    group = about.layout.draft_group
    if group is None:
        return 0
    most = max(DRAFT_COPY_BYTES, group.bytes_per_token * max_model_len)
    # With a budget of auto it is not known yet what the cache holds.
    return most if cache_bytes <= 1 else min(most, cache_bytes)


def staged_state_bytes(about: ModelDescription, num_sequences: int, num_exports: int) -> int:
    """Scratch records of one layer, where states are rounded when they are kept, see
    `kernels.index.StagedStates`."""
    records = num_sequences + num_exports if about.layout.rounds_checkpoints else 0
    return records * about.layer_state_bytes


def weight_bytes(directory: Path, about: ModelDescription) -> int:
    """Bytes of the weights once they are loaded: those of the files, at the dtype they are computed in, and
    no more than the parameters take; packed experts stay packed, quantised weights are smaller."""
    item, stored = ITEM_BYTES[about.dtype], _stored_bytes(directory)
    held = (about.num_parameters - about.draft_parameters) * item
    if stored:
        held = min(stored * item // ITEM_BYTES[read_spec(directory).dtype], held)
    return held + about.draft_parameters * item - about.quantized_bytes_saved


def _stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def auto_cache_bytes(plan: MemoryPlan, available_bytes: int) -> int:
    """`--cache-bytes auto`: what is left beside everything else, a tenth of the limit kept free.

    Args:
        available_bytes: what the machine has free now.

    Raises:
        ConfigError: nothing is left.
    """
    limit = min(plan.limit.num_bytes, available_bytes)
    left = limit - (plan.total - plan.cache) - int(RESERVE_SHARE * limit)
    if left <= 0:
        raise ConfigError(
            "cache_bytes",
            f"auto: {limit:,} bytes ({plan.limit.source}, {available_bytes:,} free) leave nothing beside "
            f"weights ({plan.weights + plan.reading:,}), workspace ({plan.workspace:,}) and the process "
            f"({plan.process:,})",
        )
    return left


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The smallest limit that holds for this process: its control groups' (v1 or v2), else the machine's.

    Args:
        root: where /proc and /sys are; tests have their own.
    """
    best = MemoryLimit(_meminfo(root, "MemTotal"), "the machine's memory")
    for path in _limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal() and int(text) < min(best.num_bytes, UNLIMITED_BYTES):
            best = MemoryLimit(int(text), f"the control group's limit, {path.name}")
    return best


def available_memory(root: Path = Path("/")) -> int:
    """Bytes the kernel could give without swapping."""
    return _meminfo(root, "MemAvailable")


def _meminfo(root: Path, name: str) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return UNLIMITED_BYTES  # not Linux: nothing is known


def _limit_files(root: Path) -> Iterator[Path]:
    """Limits of the process's groups and of those they are in."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            yield from _up(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _up(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")


def _up(mount: Path, group: str, name: str) -> Iterator[Path]:
    """From the group to the root: inside a container only the root may be visible."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length], name)
