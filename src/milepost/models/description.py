"""Facts about a model directory that need neither torch nor the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from milepost.config import EXACT, FP32
from milepost.errors import ConfigError
from milepost.models.config_reader import read_json_object
from milepost.models.drafters import MTP, DrafterSpec, read_drafter
from milepost.models.hub import CONFIG_FILE, model_directory
from milepost.models.layout import CacheLayout, cache_layout
from milepost.models.parameters import bytes_saved, count_by_role
from milepost.models.quantization import Quantization, Role, quantization_of
from milepost.models.registry import parse_config
from milepost.models.specs import COMPUTE_DTYPES, DecoderSpec


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `milepost info` prints.

    Attributes:
        layer_kinds: mixer of each layer, in order.
        num_parameters: weights of the decoder and of its drafter, counted from their configs.
        bytes_per_token: attention KV of one token over all layers.
        state_bytes: recurrent state over all layers, while it runs.
        layer_state_bytes: the same of one linear layer; 0 if there are none.
        checkpoint_bytes: recurrent state over all layers, as it is kept.
        drafter: what drafts with weights, if anything does; its entries are in `bytes_per_token`.
        draft_parameters: weights of a drafter that has files of its own; they are in `num_parameters`.
        quantization: what weights are rounded to at load; None = nothing.
        quantized_bytes_saved: by which that makes them smaller.
    """

    model_type: str
    dtype: str
    layer_kinds: tuple[str, ...]
    num_moe_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    num_parameters: int
    bytes_per_token: int
    state_bytes: int
    layer_state_bytes: int
    checkpoint_bytes: int
    layout: CacheLayout
    drafter: DrafterSpec | None = None
    draft_parameters: int = 0
    quantization: Quantization | None = None
    quantized_bytes_saved: int = 0

    @property
    def num_draft_modules(self) -> int:
        """Modules of the drafter, 0 without one."""
        return 0 if self.drafter is None else self.drafter.num_modules

    @property
    def precision(self) -> str:
        """Dtype and quantisation, for people."""
        return self.dtype if self.quantization is None else f"{self.dtype}, {self.quantization.name} weights"

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens whose attention KV takes as many bytes as one checkpoint; None without attention layers."""
        return self.checkpoint_bytes / self.bytes_per_token if self.bytes_per_token else None


def expands_latents(layer_kinds: Iterable[str], exactness: str) -> bool:
    """Whether some rows of a model's attention work on expanded latents, see `runner.expansion`."""
    return exactness != EXACT and "mla" in layer_kinds


def read_spec(path: str | Path) -> DecoderSpec:
    """The decoder that `path/config.json` describes."""
    return parse_config(read_json_object(model_directory(path) / CONFIG_FILE))


def resolve_dtype(spec: DecoderSpec, dtype: str | None) -> str:
    """Dtype to run in: `None` or "auto" = what the checkpoint asks for."""
    if dtype is None or dtype == "auto":
        return spec.dtype
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError("dtype", f"{dtype!r} is not supported; use auto or one of {list(COMPUTE_DTYPES)}")
    return dtype


def describe(
    path: str | Path,
    *,
    dtype: str | None = None,
    num_draft_tokens: int = 0,
    draft_method: str = MTP,
    draft_model: str | Path | None = None,
    draft_confidence: float = 0.0,
    quantization: str | None = None,
    state_dtype: str = FP32,
) -> ModelDescription:
    """Layers and cache sizes from `config.json` alone, and from that of a drafter with files of its own.

    Args:
        num_draft_tokens, draft_method, draft_model, draft_confidence, quantization, state_dtype: see
            `load_model`.
    """
    spec = read_spec(path)
    drafter = read_drafter(spec, num_draft_tokens, draft_method, draft_model, draft_confidence)
    coding = quantization_of(quantization)
    return describe_spec(spec, resolve_dtype(spec, dtype), drafter, coding, state_dtype)


def describe_spec(
    spec: DecoderSpec,
    dtype: str,
    drafter: DrafterSpec | None = None,
    quantization: Quantization | None = None,
    state_dtype: str = FP32,
) -> ModelDescription:
    group = None if drafter is None else drafter.group(dtype)
    layout = cache_layout(spec, dtype, group).kept_in(state_dtype)
    geometry = layout.geometry(match_unit=1)
    counts = count_by_role(spec)
    drafts = Counter[Role]() if drafter is None else drafter.count_by_role()
    counts.update(drafts)
    return ModelDescription(
        model_type=spec.model_type,
        dtype=dtype,
        layer_kinds=tuple(layer.mixer for layer in spec.layers),
        num_moe_layers=sum(layer.mlp == "moe" for layer in spec.layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        num_parameters=counts.total(),
        bytes_per_token=geometry.bytes_per_token,
        state_bytes=geometry.state_bytes,
        layer_state_bytes=layout.layer_state_bytes,
        checkpoint_bytes=geometry.kept_state_bytes,
        layout=layout,
        drafter=drafter,
        draft_parameters=0 if drafter is None or drafter.directory is None else drafts.total(),
        quantization=quantization,
        quantized_bytes_saved=bytes_saved(spec, dtype, quantization, counts),
    )
