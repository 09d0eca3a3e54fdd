"""Models: hub directories in, decoders out. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milepost.models.description import ModelDescription, describe

if TYPE_CHECKING:
    from milepost.models.loading import LoadedModel, load_model

__all__ = ["LoadedModel", "ModelDescription", "describe", "load_model"]


def __getattr__(name: str) -> Any:
    # load_model needs torch; describe must work without it.
    if name in ("LoadedModel", "load_model"):
        from milepost.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
