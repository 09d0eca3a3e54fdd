"""Facts about a model directory that need neither torch nor the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from milepost.config import EXACT
from milepost.errors import CheckpointFileError, ConfigError
from milepost.models.config_reader import read_json_object
from milepost.models.hub import is_hub_id, snapshot_directory
from milepost.models.layout import CacheLayout, cache_layout
from milepost.models.parameters import bytes_saved, count_parameters
from milepost.models.quantization import Quantization, quantization_of
from milepost.models.registry import parse_config
from milepost.models.specs import COMPUTE_DTYPES, DecoderSpec

CONFIG_FILE = "config.json"
SPECULATIVE_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `milepost info` prints.

    Attributes:
        layer_kinds: mixer of each layer, in order.
        num_parameters: weights of the decoder and the draft modules that run, counted from the config.
        bytes_per_token: attention KV of one token over all layers.
        state_bytes: recurrent state over all layers.
        layer_state_bytes: recurrent state of one linear layer; 0 if there are none.
        num_draft_modules: modules of the checkpoint that draft; their entries are in `bytes_per_token`.
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
    layout: CacheLayout
    num_draft_modules: int = 0
    quantization: Quantization | None = None
    quantized_bytes_saved: int = 0

    @property
    def precision(self) -> str:
        """Dtype and quantisation, for people."""
        return self.dtype if self.quantization is None else f"{self.dtype}, {self.quantization.name} weights"

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens whose attention KV takes as many bytes as one state; None without attention layers."""
        return self.state_bytes / self.bytes_per_token if self.bytes_per_token else None


def model_directory(path: str | Path) -> Path:
    """`path` as a directory that exists, or the local copy of a hub id like `owner/name@revision`.

    Raises:
        CheckpointFileError: it does not exist, is a file, or the hub cannot be reached.
    """
    directory = Path(path)
    if not directory.is_dir():
        if is_hub_id(str(path)) and not directory.exists():
            return snapshot_directory(str(path))
        raise CheckpointFileError(f"{directory} is not a directory; give a local directory with config.json")
    return directory


def expands_latents(layer_kinds: Iterable[str], exactness: str) -> bool:
    """Whether some rows of a model's attention work on expanded latents, see `runner.expansion`."""
    return exactness != EXACT and "mla" in layer_kinds


def model_name(path: str | Path) -> str:
    """What callers know a model by: the name of its directory, or its hub id without the revision."""
    directory = Path(path)
    if not directory.exists() and is_hub_id(str(path)):
        return str(path).partition("@")[0]
    return directory.resolve().name


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


def used_modules(spec: DecoderSpec, num_draft_tokens: int) -> int:
    """Draft modules that drafting so many tokens with `mtp` runs; 0 for 0 tokens.

    Raises:
        ConfigError: the config declares none.
    """
    if not num_draft_tokens:
        return 0
    if spec.mtp is None:
        key = "mtp_num_hidden_layers" if spec.model_type.startswith("qwen") else "num_nextn_predict_layers"
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"method 'mtp' needs a checkpoint with draft modules of its own, and config.json declares none "
            f"({key} is 0 or missing, or its attention is not supported); use method 'ngram'",
        )
    return min(spec.mtp.num_modules, num_draft_tokens)


def describe(
    path: str | Path, *, dtype: str | None = None, num_draft_tokens: int = 0, quantization: str | None = None
) -> ModelDescription:
    """Layers and cache sizes from `config.json` alone.

    Args:
        num_draft_tokens, quantization: see `load_model`.
    """
    spec = read_spec(path)
    num_modules = used_modules(spec, num_draft_tokens)
    return describe_spec(spec, resolve_dtype(spec, dtype), num_modules, quantization_of(quantization))


def describe_spec(
    spec: DecoderSpec,
    dtype: str,
    num_draft_modules: int = 0,
    quantization: Quantization | None = None,
) -> ModelDescription:
    layout = cache_layout(spec, dtype, num_draft_modules)
    geometry = layout.geometry(match_unit=1)
    return ModelDescription(
        model_type=spec.model_type,
        dtype=dtype,
        layer_kinds=tuple(layer.mixer for layer in spec.layers),
        num_moe_layers=sum(layer.mlp == "moe" for layer in spec.layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        num_parameters=count_parameters(spec, num_draft_modules),
        bytes_per_token=geometry.bytes_per_token,
        state_bytes=geometry.state_bytes,
        layer_state_bytes=layout.layer_state_bytes,
        layout=layout,
        num_draft_modules=num_draft_modules,
        quantization=quantization,
        quantized_bytes_saved=bytes_saved(spec, dtype, quantization, num_draft_modules),
    )
