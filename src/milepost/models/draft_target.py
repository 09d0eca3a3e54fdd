"""What a drafter gets to load its weights, and what those that guess token after token have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from milepost.kernels.api import Kernels
from milepost.models.hybrid import HybridDecoder
from milepost.models.inputs import CacheFields, StepInputs
from milepost.models.layers import Loader
from milepost.models.quantization import Quantization
from milepost.models.specs import DecoderSpec
from milepost.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The decoder that somebody is to draft for.

    Attributes:
        decoder: loaded; its embedding and head may be used.
        weights: the decoder's files.
        open_files: (directory) -> the files of a checkpoint of the drafter's own. Who calls this load sees to
            it that they are finished and that tensors without a use are named.
    """

    spec: DecoderSpec
    decoder: HybridDecoder
    weights: WeightReader
    kernels: Kernels
    dtype: torch.dtype
    quantization: Quantization | None
    open_files: Callable[[Path], WeightReader]

    def loader(self, weights: WeightReader, prefix: str = "") -> Loader:
        return Loader(weights, self.kernels, self.dtype, prefix, self.quantization)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What a module computed for some rows.

    Attributes:
        handed_on: [N, width], what the next stage reads.
        normed: [N, width], what the head reads.
    """

    handed_on: torch.Tensor
    normed: torch.Tensor


class ChainedModules(Protocol):
    """Modules that guess one token from a token and a hidden state; run by `runner.drafting.ChainRunner`.

    Module m, at position j, reads token j and the hidden state of the stage before it at position j - 1: of
    the decoder for m = 0, of module m - 1 otherwise. So entry j of its attention depends on tokens [0, j] and
    exists from position m + 1 on. Entries are counted from a module's first one: index positions are token
    positions less `first_position`.
    """

    @property
    def num_modules(self) -> int: ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """See `drafters.DrafterSpec`."""

    def first_position(self, module: int) -> int:
        """Token position of the first entry of `module`."""

    def layer(self, module: int) -> int:
        """Number under which a module's cache fields are kept."""

    def taps(self, read: torch.Tensor) -> torch.Tensor:
        """[N, width], what the first module reads of the decoder's rows: of its hidden states [N, D], or of
        the outputs of the tap layers side by side [N, layers * D]."""

    def run(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> DraftRows:
        """One pass over rows of one module; their entries are stored.

        Args:
            inputs: tokens of the rows, and the index of the module's entries.
            hidden: [N, width], for each row the hidden state of the stage before, at the position before.
        """

    def store(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> None:
        """Stores the entries of rows, for modules nothing comes behind; see `run`."""

    def logits(self, module: int, normed: torch.Tensor) -> torch.Tensor:
        """fp32 [M, vocabulary of the decoder] of rows `DraftRows.normed` [M, width]; -inf for tokens that the
        module does not know."""
