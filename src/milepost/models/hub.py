"""Model directories by their hub id, where `huggingface_hub` is installed and can reach it. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from milepost.errors import CheckpointFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tiktoken.model")


def is_hub_id(text: str) -> bool:
    """`owner/name`, or `owner/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None


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
            f"{model_id} is no local directory, and the hub does not give it: {reason} Give a directory with "
            "config.json and *.safetensors, downloaded where there is a network"
        ) from None
