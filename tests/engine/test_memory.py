"""What may be taken, what is going to be taken, and the refusal when it does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from milepost.cli.fit import memory_line
from milepost.engine.memory import (
    MemoryLimit,
    MemoryPlan,
    auto_cache_bytes,
    available_memory,
    memory_limit,
    weight_bytes,
)
from milepost.engine.serving import EMBEDDED_MODEL, ServingOptions, load_serving_model, planned_memory
from milepost.errors import ConfigError
from milepost.models.description import describe

GIB = 1 << 30


def machine(root: Path, *, cgroup: str = "", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert memory_limit(root) == MemoryLimit(16 * GIB, "the machine's memory")
    assert available_memory(root) == 8 * GIB


def test_version_two_with_limits_on_the_way_up(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max\n", "a/memory.max": f"{2 * GIB}\n", "memory.max": f"{3 * GIB}\n"}
    root = machine(tmp_path, cgroup="0::/a/b\n", **files)
    assert memory_limit(root) == MemoryLimit(2 * GIB, "the control group's limit, memory.max")


def test_version_one_beside_an_empty_version_two(tmp_path: Path) -> None:
    cgroup = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    files = {"memory/docker/abc/memory.limit_in_bytes": str(GIB)}
    found = memory_limit(machine(tmp_path, cgroup=cgroup, **files))
    assert found == MemoryLimit(GIB, "the control group's limit, memory.limit_in_bytes")


def test_inside_a_container_only_the_root_is_visible(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": str(GIB)}
    root = machine(tmp_path, cgroup="4:memory:/docker/not-visible-here\n", **files)
    assert memory_limit(root).num_bytes == GIB


@pytest.mark.parametrize("text", ["9223372036854771712", "max", "", "-1", "lots"])
def test_no_limit_and_nonsense(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, cgroup="0::/\n4:memory:/\n", **{"memory/memory.limit_in_bytes": text})
    assert memory_limit(root).num_bytes == 16 * GIB


def test_a_limit_above_the_machine_does_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", **{"memory.max": str(64 * GIB)})
    assert memory_limit(root) == MemoryLimit(16 * GIB, "the machine's memory")


def test_this_machine_has_a_limit() -> None:
    assert 1 << 28 < memory_limit().num_bytes and available_memory() > 0


def test_weights_are_what_loading_holds() -> None:
    """The embedded model is stored and computed in bf16; in float32 it takes twice as much."""
    small = weight_bytes(EMBEDDED_MODEL, describe(EMBEDDED_MODEL))
    files = sum(path.stat().st_size for path in EMBEDDED_MODEL.glob("*.safetensors"))
    assert files * 0.7 <= small <= files, "the module that drafts is in the files, and not loaded"
    large = weight_bytes(EMBEDDED_MODEL, describe(EMBEDDED_MODEL, dtype="float32"))
    assert large == 2 * small


def plan(**changes: int) -> MemoryPlan:
    sizes = {"weights": 2 * GIB, "workspace": GIB, "cache": 4 * GIB, "stores": 0, "process": GIB} | changes
    return MemoryPlan(limit=MemoryLimit(8 * GIB, "planted"), **sizes)


def test_what_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    plan().check()
    with pytest.raises(ConfigError, match=r"\(planted\); lower --cache-bytes to at most 4096MiB") as raised:
        plan(cache=4 * GIB + 1).check()
    assert raised.value.field == "cache_bytes"
    with pytest.raises(ConfigError, match="lower --cache-bytes to at most 3072MiB"):
        plan(stores=GIB).check()
    with pytest.raises(ConfigError, match="larger machine"):
        plan(weights=7 * GIB).check()


def test_auto_takes_what_is_left() -> None:
    assert auto_cache_bytes(plan(), 100 * GIB) == 4 * GIB - int(0.1 * 8 * GIB)
    left = auto_cache_bytes(plan(cache=1), 100 * GIB)
    assert left == auto_cache_bytes(plan(), 100 * GIB), "what was in the plan does not matter"
    dataclasses.replace(plan(), cache=left).check()
    assert auto_cache_bytes(plan(), 5 * GIB) == GIB - int(0.5 * GIB)
    with pytest.raises(ConfigError, match="leave nothing"):
        auto_cache_bytes(plan(), 4 * GIB)


def test_loading_checks_it_before_reading_weights() -> None:
    with pytest.raises(ConfigError, match="do not fit into"):
        load_serving_model(None, ServingOptions(cache_bytes=1 << 50))


def test_stores_in_memory_count() -> None:
    from milepost.engine.stores import StoreOptions

    about = describe(EMBEDDED_MODEL)
    options = ServingOptions(stores=StoreOptions(kv_stores=("memory://?bytes=64MiB",)))
    assert planned_memory(EMBEDDED_MODEL, about, options).stores == 64 << 20
    assert planned_memory(EMBEDDED_MODEL, about, ServingOptions()).stores == 0


def test_the_line_for_people() -> None:
    parts = "weights 2.0 GiB, workspace 1.0 GiB, cache 4.0 GiB, process 1.0 GiB"
    assert memory_line(plan()) == f"memory: {parts}; 8.0 GiB of 8.0 GiB (planted)"
    loading = plan(weights=GIB, reading=GIB)
    expected = "memory: weights 1.0 GiB, reading them 1.0 GiB, workspace 1.0 GiB,"
    assert memory_line(loading).startswith(expected)
    assert loading.total == plan().total
