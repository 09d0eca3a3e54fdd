"""One `*.safetensors` file, memory-mapped. Format: 8 bytes little-endian header length, JSON header, data.

The header is checked completely before a tensor is handed out, so that a truncated or foreign file
is named at once and not met in the middle of a load. No torch is needed for that.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from milepost.errors import CheckpointFileError
from milepost.models.config_reader import unrepeated

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""What the files of a checkpoint are called: the only one, or what says which tensor is in which."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [start, end) of the file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """Header and mapping of one file.

    Attributes:
        path: for messages.
        entries: tensor name -> entry.
        mapping: private copy-on-write map of the whole file; tensors are views of it.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointFileError: the file is missing, truncated or no safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._num_bytes = file.seek(0, 2)
                if self._num_bytes < _LENGTH_BYTES:
                    raise self._error(
                        f"has only {self._num_bytes} bytes; it is truncated or no safetensors file"
                    )
                self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointFileError(f"{path} does not exist") from None
        except OSError as error:
            raise CheckpointFileError(f"{path} cannot be read: {error}") from None
        self._header_end = self._read_header_end()
        self.entries = self._read_entries()

    def release(self, start: int, end: int) -> None:
        """Give back the memory of bytes [start, end); who reads them again gets them from the file."""
        start -= start % mmap.PAGESIZE
        if hasattr(self.mapping, "madvise") and end > start:
            self.mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _error(self, message: str) -> CheckpointFileError:
        return CheckpointFileError(f"{self.path} {message}")

    def _read_header_end(self) -> int:
        header_bytes = int.from_bytes(self.mapping[:_LENGTH_BYTES], "little")
        if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
            raise self._error("is no safetensors file: its first 8 bytes are not a header length")
        if _LENGTH_BYTES + header_bytes > self._num_bytes:
            raise self._error(
                f"is truncated: the header needs {_LENGTH_BYTES + header_bytes} bytes, "
                f"the file has {self._num_bytes}"
            )
        return _LENGTH_BYTES + header_bytes

    def _read_entries(self) -> dict[str, TensorEntry]:
        try:
            text = self.mapping[_LENGTH_BYTES : self._header_end].decode("utf-8")
            header = json.loads(text, object_pairs_hook=unrepeated)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise self._error(f"is no safetensors file: its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._error("is no safetensors file: its header is not a JSON object")
        entries = {name: self._entry(name, value) for name, value in header.items() if name != "__metadata__"}
        self._check_apart(entries)
        return entries

    def _check_apart(self, entries: dict[str, TensorEntry]) -> None:
        """No byte belongs to two tensors."""
        placed = sorted((entry.start, entry.end, name) for name, entry in entries.items())
        for (_, end, name), (start, _, other) in pairwise(placed):
            if start < end:
                raise self._error(f"is corrupt: tensors {name} and {other} share bytes")

    def _entry(self, name: str, value: Any) -> TensorEntry:
        try:
            dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
            begin, end = (int(offset) for offset in value["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise self._error(f"has a broken header entry for tensor {name}: {value!r}") from None
        if dtype not in _ITEM_BYTES:
            raise self._error(f"stores tensor {name} with the unknown dtype {dtype!r}")
        if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise self._error(
                f"is corrupt: tensor {name} is {dtype} {list(shape)} but takes {end - begin} bytes"
            )
        if self._header_end + end > self._num_bytes:
            raise self._error(
                f"is truncated: tensor {name} ends at byte {self._header_end + end}, "
                f"the file has {self._num_bytes} bytes"
            )
        return TensorEntry(dtype, shape, self._header_end + begin, self._header_end + end)
