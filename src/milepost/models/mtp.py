"""Draft modules that a checkpoint ships for its own decoder (multi-token prediction, MTP).

Module m, at position j, reads token j and the hidden state of the stage before it at position j - 1: of the
decoder for m = 0, of module m - 1 otherwise. So entry j of its attention depends on tokens [0, j] and exists
from position m + 1 on. Its output predicts token j + 1.

    x = projection([norm(embedding of token j); norm(hidden state at j - 1)])
    x = attention layer(x)                     one decoder layer, a plain residual stream
    logits = head(norm(x))

Two layouts are published. DeepSeek-V3 (technical report, section 2.2; also Kimi): each module has its own
parts and hands on x; the decoder's hidden state is the one before its final norm; the embedding of a
module's first entry is zero. Qwen: one projection, one pair of input norms and one output norm serve all
modules, whose layers differ; what is handed on, by the decoder as well, is normed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from milepost.config import SPECULATIVE_FIELD
from milepost.errors import ConfigError
from milepost.models.draft_target import DraftRows, DraftTarget
from milepost.models.hybrid import DecoderLayer
from milepost.models.inputs import CacheFields, StepInputs
from milepost.models.layers import Loader, RmsNorm
from milepost.models.mtp_config import MtpDrafter
from milepost.models.specs import DecoderSpec

_QWEN_MODULES = "mtp"


@dataclass(frozen=True, slots=True)
class _Module:
    """Parts of one module. `head` is packed."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Any
    layer: DecoderLayer
    norm: RmsNorm
    head: Any


class MtpModules:
    """The first modules of a checkpoint, loaded; `draft_target.ChainedModules`.

    Attributes:
        num_modules: how many there are.
        width: of hidden states, D.
        tap_layers: none, they read the hidden states behind the last layer.
    """

    def __init__(self, drafter: MtpDrafter, target: DraftTarget) -> None:
        """
        Raises:
            ConfigError: the files have no tensors of the modules that the config declares.
            CheckpointFileError: a tensor is missing or has another shape.
        """
        spec = target.spec
        self.num_modules = drafter.num_modules
        self.width = spec.hidden_size
        self.tap_layers = drafter.tap_layers
        self._decoder = target.decoder
        self._kernels = target.kernels
        self._is_qwen = drafter.mtp.family == "qwen"
        self._layers = drafter.layers
        build = self._qwen if self._is_qwen else self._deepseek
        self._modules = build(spec, target.loader(target.weights, target.decoder.prefix))
        target.weights.release()

    def first_position(self, module: int) -> int:
        """Token position of the first entry of `module`."""
        return module + 1

    def layer(self, module: int) -> int:
        """Number under which a module's cache fields are kept: as if its layer came behind the decoder's."""
        return self._layers[module]

    def taps(self, read: torch.Tensor) -> torch.Tensor:
        """What the first module reads of the decoder's hidden states [N, D] (`HybridDecoder.forward`)."""
        return self._decoder.normed(read) if self._is_qwen else read

    def run(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> DraftRows:
        """One pass over rows of one module; their entries are stored.

        Args:
            inputs: tokens of the rows, and the index of the module's entries.
            hidden: [N, D], for each row the hidden state of the stage before, at the position before.
        """
        parts = self._modules[module]
        x = self._joined(parts, inputs, hidden)
        x = parts.layer.mix(x, x, inputs, cache)
        x = parts.layer.feed(x, x)
        normed = parts.norm.new(x)
        return DraftRows(normed if self._is_qwen else x, normed)

    def store(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> None:
        """Stores the entries of rows, for modules nothing comes behind; see `run`."""
        parts = self._modules[module]
        parts.layer.store(self._joined(parts, inputs, hidden), inputs, cache)

    def logits(self, module: int, normed: torch.Tensor) -> torch.Tensor:
        """fp32 [M, vocabulary] of rows `DraftRows.normed` [M, D]."""
        return self._kernels.linear(normed, self._modules[module].head, dtype=torch.float32)

    def _joined(self, parts: _Module, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input [N, D]."""
        assert inputs.attention is not None
        embedded = self._decoder.embed(inputs.token_ids)
        if not self._is_qwen:
            for span in inputs.attention.spans:
                if span.position == 0:
                    embedded[span.first_row] = 0.0
        joined = embedded.new_empty(embedded.shape[0], 2 * self.width)
        parts.embedding_norm(embedded, out=joined[:, : self.width])
        parts.hidden_norm(hidden, out=joined[:, self.width :])
        return self._kernels.linear(joined, parts.projection)

    def _qwen(self, spec: DecoderSpec, decoder: Loader) -> list[_Module]:
        loader = dataclasses.replace(decoder, prefix="").under(_QWEN_MODULES)
        _require(loader, "fc.weight")
        hidden, eps, offset = spec.hidden_size, spec.norm_eps, spec.norm_offset
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        embedding_norm, hidden_norm, norm = (RmsNorm(loader, name, hidden, eps, offset) for name in names)
        projection = loader.pack_linear(loader.matrix("fc", 2 * hidden, hidden))
        return [
            _Module(embedding_norm, hidden_norm, projection, layer, norm, self._decoder.head)
            for layer in (
                DecoderLayer(loader.under(f"layers.{number}"), self.layer(number), spec.draft_layer, spec)
                for number in range(self.num_modules)
            )
        ]

    def _deepseek(self, spec: DecoderSpec, decoder: Loader) -> list[_Module]:
        hidden, eps = spec.hidden_size, spec.norm_eps
        modules = []
        for number in range(self.num_modules):
            loader = decoder.under(f"layers.{self.layer(number)}")
            _require(loader, "eh_proj.weight")
            head = self._decoder.head
            shared = loader.under("shared_head")
            if shared.has("head.weight"):
                own = shared.matrix("head", hidden, spec.vocab_size)
                head = loader.pack_linear(own, role="head")
            modules.append(
                _Module(
                    RmsNorm(loader, "enorm", hidden, eps),
                    RmsNorm(loader, "hnorm", hidden, eps),
                    loader.pack_linear(loader.matrix("eh_proj", 2 * hidden, hidden)),
                    DecoderLayer(loader, self.layer(number), spec.draft_layer, spec),
                    RmsNorm(shared, "norm", hidden, eps),
                    head,
                )
            )
        return modules


def _require(loader: Loader, name: str) -> None:
    if not loader.has(name):
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"method 'mtp' needs the draft modules that config.json declares, but the files lack "
            f"{loader.prefix}{name}; use a checkpoint that was published with them, or method 'ngram'",
        )
