"""From a hub directory to a decoder that can run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from milepost.config import EXACT, FP32
from milepost.core.geometry import CacheGeometry
from milepost.kernels.api import Kernels, select_kernels
from milepost.models.description import (
    ModelDescription,
    describe_spec,
    expands_latents,
    read_spec,
    resolve_dtype,
)
from milepost.models.draft_target import DraftTarget
from milepost.models.drafters import MTP, DrafterSpec, load_drafter, read_drafter
from milepost.models.hub import model_directory
from milepost.models.hybrid import HybridDecoder
from milepost.models.layout import CacheLayout, cache_layout
from milepost.models.quantization import Quantization, quantization_of
from milepost.models.specs import DecoderSpec
from milepost.models.weights import Progress, WeightReader

log = logging.getLogger(__name__)
_MAX_NAMED = 5
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadedModel:
    """A decoder with its weights, and the sizes of what it caches.

    Attributes:
        config: the parsed config.
        layout: where each layer keeps what it caches.
        decoder: the torch side.
        dtype: name of the dtype it runs in.
        quantization: what its weights were rounded to; None = nothing was.
        kernels: the operations it calls, with the choices behind them.
        unused_tensors: names in the files that the decoder has no use for.
        drafter: what drafts with weights, None unless it was asked for.
        drafts: its torch side, see `drafters.DrafterSpec.load`.
        state_dtype: in which states are kept, a name of `config.STATE_DTYPES`.
        expands_latents: see `description.expands_latents`.
    """

    def __init__(
        self,
        config: DecoderSpec,
        layout: CacheLayout,
        decoder: HybridDecoder,
        dtype: str,
        kernels: Kernels,
        unused_tensors: list[str],
        drafter: DrafterSpec | None = None,
        drafts: Any = None,
        quantization: Quantization | None = None,
        state_dtype: str = FP32,
    ) -> None:
        self.config = config
        self.layout = layout
        self.decoder = decoder
        self.dtype = dtype
        self.kernels = kernels
        self.unused_tensors = unused_tensors
        self.drafter = drafter
        self.drafts = drafts
        self.quantization = quantization
        self.state_dtype = state_dtype
        self.expands_latents = expands_latents((layer.mixer for layer in config.layers), kernels.exactness)

    @property
    def numerics(self) -> str:
        """Names every rounding behind a result: those of the kernels and those of the weights."""
        quantization = self.quantization
        return self.kernels.numerics + ("" if quantization is None else f"+{quantization.numerics}")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Positions the checkpoint declares."""
        return self.config.max_model_len

    def geometry(self, match_unit: int) -> CacheGeometry:
        """Cache sizes for the core, with pages of `match_unit` tokens."""
        return self.layout.geometry(match_unit)

    def describe(self) -> ModelDescription:
        return describe_spec(self.config, self.dtype, self.drafter, self.quantization, self.state_dtype)


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
    check_finite: bool = True,
    kernels: Kernels | None = None,
    num_draft_tokens: int = 0,
    draft_method: str = MTP,
    draft_model: str | Path | None = None,
    draft_confidence: float = 0.0,
    exactness: str = EXACT,
    quantization: str | None = None,
    state_dtype: str = FP32,
) -> LoadedModel:
    """Loads `path/config.json` and `path/*.safetensors`.

    Args:
        path: a directory in hub layout, or a hub id.
        dtype: "float32", "bfloat16", or None / "auto" for what the checkpoint asks for.
        progress: called with (bytes loaded, bytes in all) after each tensor.
        check_finite: refuse weights that hold NaN or infinity (reads every value once).
        kernels: None = the best available.
        exactness: as for `select_kernels`, unless `kernels` are given.
        num_draft_tokens: tokens to be drafted by a drafter with weights; 0 = none is loaded.
        draft_method: which, a key of `drafters.METHODS`.
        draft_model: directory or hub id of its checkpoint; None = its tensors are among the decoder's.
        draft_confidence: see `block_config.BlockDrafterSpec.confidence_threshold`.
        quantization: a name of `models.quantization.QUANTIZATIONS`; None = weights stay as they are.
        state_dtype: in which states are kept, a name of `config.STATE_DTYPES`; running ones are fp32.

    Raises:
        ConfigError: the config cannot work; `field` is the key.
        CheckpointFileError: files missing, truncated, foreign or of another shape.
    """
    path = model_directory(path)
    spec = read_spec(path)
    dtype_name = resolve_dtype(spec, dtype)
    drafter = read_drafter(spec, num_draft_tokens, draft_method, draft_model, draft_confidence)
    coding = quantization_of(quantization)
    weights = WeightReader(path, progress=progress, check_finite=check_finite)
    chosen = kernels or select_kernels(exactness=exactness, coded_weights=coding is not None)
    decoder = HybridDecoder(spec, weights, chosen, TORCH_DTYPES[dtype_name], coding)
    opened: list[WeightReader] = []

    def open_files(directory: Path) -> WeightReader:
        opened.append(WeightReader(directory, check_finite=check_finite))
        return opened[-1]

    drafts = None
    if drafter is not None:
        target = DraftTarget(spec, decoder, weights, chosen, TORCH_DTYPES[dtype_name], coding, open_files)
        drafts = load_drafter(drafter, target)
        for reader in opened:
            reader.finish()
            _log_unused(reader.unused_names(), drafter.skipped)
    weights.finish()
    unused = weights.unused_names()
    _log_unused(unused, spec.skipped)
    layout = cache_layout(spec, dtype_name, None if drafter is None else drafter.group(dtype_name))
    layout = layout.kept_in(state_dtype)
    return LoadedModel(
        spec, layout, decoder, dtype_name, chosen, unused, drafter, drafts, coding, state_dtype
    )


def _log_unused(names: Sequence[str], skipped: Sequence[str]) -> None:
    """One line for parts that are left out on purpose, a warning for what nobody expected."""
    groups = [next((prefix for prefix in skipped if name.startswith(prefix)), "") for name in names]
    known = Counter(prefix for prefix in groups if prefix)
    if known:
        parts = ", ".join(f"{prefix}* ({count} tensors)" for prefix, count in sorted(known.items()))
        log.info("not needed and not loaded: %s", parts)
    unknown = [name for name, prefix in zip(names, groups, strict=True) if not prefix]
    if unknown:
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        log.warning("tensors without a use: %s%s", ", ".join(unknown[:_MAX_NAMED]), more)
