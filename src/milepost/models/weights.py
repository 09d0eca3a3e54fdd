"""Tensors of a model directory: one file, or shards with an index, memory-mapped.

Every error names the file, the tensor and, for a wrong shape, both shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from milepost.errors import CheckpointFileError
from milepost.kernels.stored import StoredPart, is_finite
from milepost.models.config_reader import read_json_object
from milepost.models.safetensors_file import INDEX_FILE, SINGLE_FILE, SafetensorsFile

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E8M0": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
BYTE_DTYPES = ("U8", "F8_E8M0")
"""Packed values and their scales; read as uint8."""
INTEGER_DTYPES = ("I64", "I32")

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all files) after each tensor."""


class WeightReader:
    """Hands out tensors by hub name and remembers which were asked for."""

    _reads_values = True

    def __init__(
        self, directory: str | Path, *, progress: Progress | None = None, check_finite: bool = False
    ) -> None:
        """Opens all files and checks their headers.

        Args:
            check_finite: refuse tensors that hold NaN or infinity (reads every value once).

        Raises:
            CheckpointFileError: no weights, a missing shard, a truncated or foreign file, or an index that
                disagrees with its shards.
        """
        self._directory = Path(directory)
        self._progress = progress
        self._check_finite = check_finite
        self._files: dict[str, SafetensorsFile] = {}
        self._taken: set[str] = set()
        self._resident: list[tuple[SafetensorsFile, int, int]] = []
        self._bytes_done = 0
        self._open()
        self.num_bytes = sum(
            entry.end - entry.start for name, file in self._files.items() for entry in (file.entries[name],)
        )

    def _open(self) -> None:
        index_path = self._directory / INDEX_FILE
        if index_path.exists():
            self._open_shards(index_path)
            return
        path = self._directory / SINGLE_FILE
        if not path.exists():
            found = sorted(file.name for file in self._directory.glob("*.safetensors"))
            hint = f"; it holds {found}" if found else ""
            raise CheckpointFileError(f"{self._directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
        file = SafetensorsFile(path)
        self._files = dict.fromkeys(file.entries, file)

    def _open_shards(self, index_path: Path) -> None:
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointFileError(f"{index_path} has no weight_map")
        shards: dict[str, SafetensorsFile] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointFileError(f"{index_path} puts tensor {name} into the odd file {file_name!r}")
            if file_name not in shards:
                path = self._directory / file_name
                if not path.exists():
                    raise CheckpointFileError(
                        f"{path} does not exist, but {index_path} puts tensor {name} into it"
                    )
                shards[file_name] = SafetensorsFile(path)
            if name not in shards[file_name].entries:
                raise CheckpointFileError(
                    f"{shards[file_name].path} lacks tensor {name}, which {INDEX_FILE} puts into it"
                )
            self._files[name] = shards[file_name]
        for file in shards.values():
            for name in file.entries:
                if self._files.get(name, file) is not file:
                    raise CheckpointFileError(
                        f"{file.path} holds tensor {name} a second time; {INDEX_FILE} puts it into "
                        f"{self._files[name].path.name}"
                    )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def files(self) -> dict[str, SafetensorsFile]:
        """Tensor name -> the file it is in."""
        return dict(self._files)

    def unused_names(self) -> list[str]:
        """Tensors nobody asked for, sorted."""
        return sorted(set(self._files) - self._taken)

    def prefix(self, candidates: Sequence[str], probe: str) -> str:
        """The first prefix under which tensor `probe` exists.

        Raises:
            CheckpointFileError: none; lists what was tried.
        """
        for candidate in candidates:
            if candidate + probe in self._files:
                return candidate
        tried = ", ".join(candidate + probe for candidate in candidates)
        raise CheckpointFileError(f"{self._directory} lacks tensor {tried}")

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, also: Sequence[Sequence[int]] = ()
    ) -> torch.Tensor:
        """Tensor `name` in `dtype`, of exactly `shape` (or one of `also`, then reshaped to `shape`).

        It is a view of the mapped file if no conversion is needed.

        Raises:
            CheckpointFileError: missing, wrong shape, not floating point, or not finite (if checked).
        """
        file = self._checked(name, (shape, *also), FLOAT_DTYPES)
        stored = _view(file, name)
        if self._check_finite and not is_finite(stored):
            self._refuse(name, "")
        self._count(name)
        return stored.to(dtype).reshape(tuple(shape))

    def take_unread(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> StoredPart:
        """Like `take`, but nobody has looked for NaN and infinity: whoever reads the values next does.

        Raises:
            CheckpointFileError: missing, wrong shape, or not floating point.
        """
        file = self._checked(name, (shape,), FLOAT_DTYPES)
        stored = _view(file, name)
        self._count(name)
        rounded = "" if stored.dtype == dtype else f" as {str(dtype).removeprefix('torch.')}"
        refuse = functools.partial(self._refuse, name, rounded) if self._check_finite else None
        return StoredPart(stored.to(dtype).reshape(tuple(shape)), refuse)

    def _refuse(self, name: str, rounded: str) -> NoReturn:
        raise CheckpointFileError(f"{self._files[name].path}: tensor {name} holds NaN or infinity{rounded}")

    def take_bytes(self, name: str, shape: Sequence[int], *, nan: int | None = None) -> torch.Tensor:
        """uint8 tensor `name` of exactly `shape`, a view of the mapped file.

        Args:
            nan: byte that stands for NaN, refused like NaN in `take`.

        Raises:
            CheckpointFileError: missing, wrong shape, not stored as bytes, or NaN (if checked).
        """
        file = self._checked(name, (shape,), BYTE_DTYPES)
        stored = _view(file, name)
        if self._check_finite and nan is not None and bool((stored == nan).any()):
            raise CheckpointFileError(f"{file.path}: tensor {name} holds NaN")
        self._count(name)
        return stored

    def take_integers(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """int64 tensor `name` of exactly `shape`; a copy.

        Raises:
            CheckpointFileError: missing, wrong shape, or not stored as integers.
        """
        file = self._checked(name, (shape,), INTEGER_DTYPES)
        self._count(name)
        return _view(file, name).to(torch.int64, copy=True)

    def must_repeat(self, name: str, other: str) -> None:
        """Takes tensor `name` only to see that it is a copy of `other`.

        Raises:
            CheckpointFileError: it has another shape or dtype, or other values.
        """
        file, original = self._files[name], self._files[other]
        entry, expected = file.entries[name], original.entries[other]
        same = (entry.shape, entry.dtype) == (expected.shape, expected.dtype)
        if same and self._reads_values:
            same = torch.equal(_view(file, name), _view(original, other))
        if not same:
            raise CheckpointFileError(
                f"{file.path}: tensor {name} is no copy of {other}, but tie_word_embeddings is true; "
                "set it to false in config.json, or remove the tensor"
            )
        self._count(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored.

        Raises:
            CheckpointFileError: missing.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointFileError(f"{self._directory} lacks tensor {name}")
        return file.entries[name].shape

    def _checked(self, name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> SafetensorsFile:
        """The file of a tensor that has one of the shapes (the first is named) and dtypes."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointFileError(
                f"{self._directory} lacks tensor {name} (expected shape {list(shapes[0])})"
            )
        entry = file.entries[name]
        if entry.shape not in [tuple(shape) for shape in shapes]:
            raise CheckpointFileError(
                f"{file.path}: tensor {name} has shape {list(entry.shape)}, expected {list(shapes[0])}"
            )
        if entry.dtype not in dtypes:
            raise CheckpointFileError(
                f"{file.path}: tensor {name} has dtype {entry.dtype}, expected one of {list(dtypes)}"
            )
        return file

    def release(self) -> None:
        """Give back the memory of the mapped files that was read since the last call.

        Packed weights are copies, so a loader that calls this after each layer never holds a model twice.
        Views that are still in use read their bytes from the file again.
        """
        for file, start, end in self._resident:
            file.release(start, end)
        self._resident.clear()

    def finish(self) -> None:
        """Reports the end: tensors nobody took are done as well. Memory is released."""
        self.release()
        if self._progress is not None and self._bytes_done < self.num_bytes:
            self._bytes_done = self.num_bytes
            self._progress(self._bytes_done, self.num_bytes)

    def _count(self, name: str) -> None:
        if name in self._taken:
            return
        self._taken.add(name)
        entry = self._files[name].entries[name]
        self._resident.append((self._files[name], entry.start, entry.end))
        self._bytes_done += entry.end - entry.start
        if self._progress is not None:
            self._progress(self._bytes_done, self.num_bytes)


def _view(file: SafetensorsFile, name: str) -> torch.Tensor:
    entry = file.entries[name]
    dtype = TORCH_DTYPES[entry.dtype]
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.start % dtype.itemsize:
        # The format does not promise alignment; a copy does.
        flat = torch.frombuffer(bytearray(file.mapping[entry.start : entry.end]), dtype=dtype)
    else:
        count = (entry.end - entry.start) // dtype.itemsize
        flat = torch.frombuffer(file.mapping, dtype=dtype, offset=entry.start, count=count)
    return flat.reshape(entry.shape)
