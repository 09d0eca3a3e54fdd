"""The trace reader: format, compression, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path

import pytest

from milepost.errors import ConfigError
from milepost.sim.trace import TRACE_BLOCK_TOKENS, TraceRow, read_trace

DATA = Path(__file__).resolve().parents[1] / "data" / "mooncake"
GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def test_a_row(tmp_path: Path) -> None:
    (row,) = read_trace(write(tmp_path / "t.jsonl", GOOD, ""))
    assert row == TraceRow(1.5, 600, 7, (3, 9))
    assert row.tokens() == array("I", [3] * TRACE_BLOCK_TOKENS + [9] * 88)


def test_limit_and_compression(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", GOOD, GOOD, GOOD)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(packed, limit=2)) == list(read_trace(plain))[:2]


@pytest.mark.parametrize(
    ("name", "num_requests", "num_tokens"),
    [("conversation", 12_031, 144_793_823), ("synthetic", 3_993, 61_194_628)],
)
def test_public_traces(name: str, num_requests: int, num_tokens: int) -> None:
    rows = list(read_trace(DATA / f"{name}_trace.jsonl.xz"))
    assert len(rows) == num_requests
    assert sum(row.num_input_tokens for row in rows) == num_tokens
    assert all(a.timestamp <= b.timestamp for a, b in zip(rows, rows[1:], strict=False))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not a trace row"),
        ({**GOOD, "input_length": "many"}, ":2: not a trace row"),
        ({"timestamp": 0}, ":2: not a trace row"),
        ({**GOOD, "hash_ids": None}, ":2: not a trace row"),
        ({**GOOD, "hash_ids": [3]}, "600 input tokens need 2 hash_ids, got 1"),
        ({**GOOD, "input_length": 0}, "0 input tokens"),
        ({**GOOD, "hash_ids": [3, -1]}, "hash_ids must be in"),
        ("[1, 2]", ":2: not a trace row"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(ConfigError, match="trace") as caught:
        list(read_trace(path))
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))
    binary = tmp_path / "t.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        list(read_trace(binary))
    for suffix in ("gz", "xz"):
        torn = tmp_path / f"t.jsonl.{suffix}"
        torn.write_bytes((DATA / "conversation_trace.jsonl.xz").read_bytes()[:100])
        with pytest.raises(ConfigError, match="trace"):
            list(read_trace(torn))
