"""Model directories, local or by their hub id, where `huggingface_hub` is installed and can reach it. No
torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from milepost.errors import CheckpointFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
CONFIG_FILE = "config.json"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SHIPPED = "milepost-tiny/"
"""Drafters of the embedded model are named like hub ids of its owner."""
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tiktoken.model")


def is_hub_id(text: str) -> bool:
    """`owner/name`, or `owner/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None


def model_directory(path: str | Path) -> Path:
    """`path` as a directory that exists, one that ships with the package (`milepost-tiny` or
    `milepost-tiny/NAME`), or the local copy of a hub id like `owner/name@revision`.

    Raises:
        CheckpointFileError: it does not exist, is a file, or the hub cannot be reached.
    """
    directory = Path(path)
    if not directory.is_dir():
        if f"{path}/".startswith(_SHIPPED) and (ASSETS / path).is_dir():
            return ASSETS / path
        if str(path).startswith(_SHIPPED):
            shipped = sorted(folder.parent.name for folder in (ASSETS / _SHIPPED).glob(f"*/{CONFIG_FILE}"))
            names = " and ".join(f"{_SHIPPED}{name}" for name in shipped)
            raise CheckpointFileError(f"{path} does not come with the package; {names} do")
        if is_hub_id(str(path)) and not directory.exists():
            return snapshot_directory(str(path))
        raise CheckpointFileError(f"{directory} is not a directory; give a local directory with config.json")
    return directory


def model_name(path: str | Path) -> str:
    """What callers know a model by: the name of its directory, or its hub id without the revision."""
    directory = Path(path)
    if not directory.exists() and is_hub_id(str(path)):
        return str(path).partition("@")[0]
    return directory.resolve().name


def snapshot_directory(model_id: str) -> Path:
    """The local copy of a hub model, downloaded if it is not there yet.

    Args:
        model_id: see `is_hub_id`.

    Raises:
        CheckpointFileError: `huggingface_hub` is missing, or cannot get the model.
    """
    repository, _, revision = model_id.partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointFileError(
            f"{model_id} is no local directory, and huggingface_hub is not installed to look it up on the "
            "hub; install it, or give a directory with config.json and *.safetensors"
        ) from None
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(WANTED_FILES))
        )
    except Exception as error:  # network, permissions, unknown names: each with an exception of its own
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointFileError(
            f"{model_id} is no local directory, and the hub does not give it: {reason.rstrip('.')}. "
            f"{_advice(repository)}"
        ) from None


def _advice(repository: str) -> str:
    """What to do where the hub gives nothing."""
    copied = "Give a directory with config.json and *.safetensors, downloaded where there is a network"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{copied}, or leave out --offline (HF_HUB_OFFLINE) to download it here"
    return (
        f"{copied} (`hf download {repository} --local-dir DIR`); if this machine never has one, "
        "--offline saves the attempt"
    )
