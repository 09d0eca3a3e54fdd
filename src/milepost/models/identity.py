"""What a stored segment must agree on with the process that reads it, as one fingerprint."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from milepost.models.config_reader import read_json_object
from milepost.models.hub import CONFIG_FILE
from milepost.models.layout import CacheLayout
from milepost.models.safetensors_file import SafetensorsFile
from milepost.models.weights import WeightReader

_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_FULL_READ_BYTES = 1 << 24
FINGERPRINT_FORMAT = "milepost/fingerprint/1"


def weights_digest(directory: str | Path, *, full: bool = False) -> str:
    """Hex SHA-256 over every tensor's name, dtype, shape and bytes.

    Args:
        full: hash every byte (`--verify-weights`). Otherwise 16 windows of 4 KiB, evenly spread over each
            tensor, which a retrained or requantised checkpoint does not survive but a targeted change of
            single values may.

    Raises:
        CheckpointFileError: no weights, or damaged headers.
    """
    digest = sha256(b"full" if full else b"sampled")
    for name, file in sorted(WeightReader(directory).files.items()):
        entry = file.entries[name]
        header = json.dumps([name, entry.dtype, list(entry.shape)], separators=(",", ":"))
        digest.update(len(header).to_bytes(4, "little") + header.encode())
        for start, end in _windows(entry.start, entry.end, full=full):
            digest.update(_bytes(file, start, end))
    return digest.hexdigest()


def _windows(start: int, end: int, *, full: bool) -> list[tuple[int, int]]:
    size = end - start
    if full:
        return [(at, min(end, at + _FULL_READ_BYTES)) for at in range(start, end, _FULL_READ_BYTES)]
    if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
        return [(start, end)]
    last = size - _SAMPLE_BYTES
    firsts = [start + last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]
    return [(first, first + _SAMPLE_BYTES) for first in firsts]


def _bytes(file: SafetensorsFile, start: int, end: int) -> memoryview:
    return memoryview(file.mapping)[start:end]


def fingerprint(
    directory: str | Path,
    layout: CacheLayout,
    *,
    dtype: str,
    numerics: str,
    exactness: str,
    full: bool = False,
    drafter: str | Path | None = None,
) -> str:
    """Hex SHA-256 over config, weights, layout and dtypes of what is cached, numerics and exactness.

    Two processes with the same fingerprint compute the same bytes for the same tokens and keep them at the
    same places; every other difference makes a stored segment foreign.

    Args:
        dtype: the model computes in.
        numerics: `LoadedModel.numerics`: instruction path and revision of the kernels, and what the weights
            were quantised to.
        exactness: what the self-test promises here, and the mode asked for.
        drafter: directory of a drafter with a checkpoint of its own, whose entries are cached as well.
    """
    parts: dict[str, object] = {
        "format": FINGERPRINT_FORMAT,
        "config": read_json_object(Path(directory) / CONFIG_FILE),
        "weights": weights_digest(directory, full=full),
        "layout": repr(layout),
        "dtype": dtype,
        "numerics": numerics,
        "exactness": exactness,
    }
    if drafter is not None:
        parts["drafter"] = {
            "config": read_json_object(Path(drafter) / CONFIG_FILE),
            "weights": weights_digest(drafter, full=full),
        }
    if layout.rounds_checkpoints:
        parts["checkpoints"] = [repr(group.checkpoint_fields) for group in layout.recurrent]
    return sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
