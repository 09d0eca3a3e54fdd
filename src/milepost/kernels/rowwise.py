"""Element functions whose bits do not depend on where a value stands.

torch computes the last elements of a tensor, those that fill no vector register, with another routine
than the rest. A row would then depend on how many rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_VECTOR_ELEMENTS = 64
"""Elements that every instruction set handles without a rest."""


def on_full_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for a function that works element by element."""
    width = x.shape[-1]
    missing = -width % _VECTOR_ELEMENTS
    if not missing:
        return function(x.contiguous())
    return function(F.pad(x, (0, missing)))[..., :width]
