"""Reader of public request traces (Mooncake's JSONL format).

A row gives arrival time, prompt and output length in tokens, and one id per 512-token block;
equal ids mean equal prefixes up to that block. Contents are not part of a trace, so tokens are
made up: block `i` becomes 512 times the token id `i`. What lies inside a block is therefore
synthetic, and a replay must say so.
"""

from __future__ import annotations

import gzip
import json
import lzma
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from milepost.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
_OPENERS: dict[str, Callable[..., TextIO]] = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        timestamp: seconds since the start of the trace.
        num_input_tokens: prompt length.
        num_output_tokens: answer length.
        block_ids: ceil(num_input_tokens / 512) ids; the last block may be partial.
    """

    timestamp: float
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]

    def tokens(self) -> array[int]:
        """Synthetic prompt tokens: each block's id repeated, cut to the prompt's length."""
        parts = bytearray()
        for block_id in self.block_ids:
            parts += array("I", (block_id,)).tobytes() * TRACE_BLOCK_TOKENS
        tokens = array("I")
        tokens.frombytes(bytes(parts[: 4 * self.num_input_tokens]))
        return tokens


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[TraceRow]:
    """Rows of a trace file in file order; `.gz` and `.xz` are unpacked on the way.

    Raises:
        ConfigError: the file is missing, or a line is not what the format says; names the line.
    """
    opener = _OPENERS.get(Path(path).suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and number > limit:
                    return
                if line.strip():
                    yield _row(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError("trace", f"{path} is not text: {error.reason}") from None
    except (EOFError, lzma.LZMAError) as error:
        raise ConfigError("trace", f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ConfigError("trace", f"cannot read {path}: {error.strerror or error}") from None


def _row(line: str, where: str) -> TraceRow:
    try:
        record: Any = json.loads(line)
        row = TraceRow(
            timestamp=float(record["timestamp"]) / 1000.0,
            num_input_tokens=int(record["input_length"]),
            num_output_tokens=int(record["output_length"]),
            block_ids=tuple(int(block_id) for block_id in record["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("trace", f"{where}: not a trace row ({type(error).__name__}: {error})") from None
    blocks = -(-row.num_input_tokens // TRACE_BLOCK_TOKENS)
    if row.num_input_tokens < 1 or len(row.block_ids) < blocks:
        raise ConfigError(
            "trace",
            f"{where}: {row.num_input_tokens} input tokens need {blocks} hash_ids, got {len(row.block_ids)}",
        )
    if any(not 0 <= block_id < 1 << 32 for block_id in row.block_ids):
        raise ConfigError("trace", f"{where}: hash_ids must be in [0, 2**32)")
    return row
