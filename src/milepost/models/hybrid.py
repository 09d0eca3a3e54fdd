"""One decoder for every pattern of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from milepost.kernels.api import Kernels
from milepost.kernels.index import MixerRecord, RecurrentIndex
from milepost.kernels.reference_coded import Matrix
from milepost.kernels.tapes import MAX_TAPE_ROWS
from milepost.models.gdn import GdnLayer
from milepost.models.gqa import GqaLayer
from milepost.models.inputs import CacheFields, LayerTaps, StepInputs, StepRows
from milepost.models.kda import KdaLayer
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.mla import MlaLayer
from milepost.models.moe import MoeMlp
from milepost.models.quantization import Quantization
from milepost.models.specs import DecoderSpec, LayerSpec
from milepost.models.weights import WeightReader

PREFIXES = {"model.": "", "language_model.model.": "language_model.", "model.language_model.": ""}
"""Where published checkpoints keep the decoder -> where they keep its head."""
_EMBEDDING = "embed_tokens.weight"
_LOGITS = "step logits"
"""Where the logits of a small step lie: all tapes share the place, those of a large vocabulary are large."""

RecurrentMixer = KdaLayer | GdnLayer
AttentionMixer = MlaLayer | GqaLayer

Steps = Callable[[StepInputs, tuple[int, ...], bool], StepRows]
"""(inputs, layers to be tapped, whether logits of all rows are needed) -> what a step computes."""


class DecoderLayer:
    """Norm and mixer, norm and MLP; each adds to a residual stream that stays in the model dtype."""

    def __init__(self, loader: Loader, index: int, layer: LayerSpec, spec: DecoderSpec) -> None:
        hidden, eps, offset = spec.hidden_size, spec.norm_eps, spec.norm_offset
        self._mixer_norm = RmsNorm(loader, "input_layernorm", hidden, eps, offset)
        self._mlp_norm = RmsNorm(loader, "post_attention_layernorm", hidden, eps, offset)
        self._recurrent, self._attention = _mixer(loader, index, layer, spec)
        self._mlp: DenseMlp | MoeMlp
        if layer.mlp == "moe" and spec.moe is not None:
            self._mlp = MoeMlp(loader.under(spec.moe.names.module), hidden, spec.moe, spec.situ)
        else:
            self._mlp = DenseMlp(loader.under("mlp"), hidden, spec.intermediate_size, situ=spec.situ)

    def mix(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        inputs: StepInputs,
        cache: CacheFields,
        *,
        keeps_residual: bool = False,
    ) -> torch.Tensor:
        """residual + mixer(norm(x)); `residual` (None = zeros) may be overwritten unless it is to be kept."""
        normed = self._mixer_norm(x)
        if self._recurrent is not None:
            assert inputs.recurrent is not None
            return self._recurrent(normed, residual, cache, inputs.recurrent, keeps_residual=keeps_residual)
        assert self._attention is not None and inputs.attention is not None
        return self._attention(normed, residual, cache, inputs.attention, keeps_residual=keeps_residual)

    def store(self, x: torch.Tensor, inputs: StepInputs, cache: CacheFields) -> None:
        """What `mix` keeps of the rows for later ones, and nothing else; for layers with attention."""
        assert self._attention is not None and inputs.attention is not None
        self._attention.store(self._mixer_norm(x), cache, inputs.attention)

    def replay(
        self, record: MixerRecord, places: torch.Tensor, index: RecurrentIndex, cache: CacheFields
    ) -> None:
        """Moves recurrent states over recorded inputs; nothing happens in a layer without any."""
        if self._recurrent is not None:
            self._recurrent.replay(record, places, cache, index)

    def feed(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + mlp(norm(x)); `residual` may be overwritten."""
        return self._mlp(self._mlp_norm(x), residual)


def _mixer(
    loader: Loader, index: int, layer: LayerSpec, spec: DecoderSpec
) -> tuple[RecurrentMixer | None, AttentionMixer | None]:
    attention, hidden = loader.under("self_attn"), spec.hidden_size
    if layer.mixer == "kda" and spec.kda is not None:
        return KdaLayer(attention, index, hidden, spec.kda), None
    if layer.mixer == "gdn" and spec.gdn is not None:
        return GdnLayer(loader.under("linear_attn"), index, hidden, spec.gdn), None
    if layer.mixer == "gqa" and spec.gqa is not None:
        return None, GqaLayer(attention, index, hidden, spec.gqa, spec.norm_offset)
    assert spec.mla is not None
    return None, MlaLayer(attention, index, hidden, spec.mla)


@dataclass(frozen=True, slots=True)
class SourceMix:
    """What one sublayer reads under attention residuals: a softmax mix over blocks.

    Attributes:
        kernels: who mixes.
        query: fp32 [D], norm weight times projection.
    """

    kernels: Kernels
    query: torch.Tensor
    eps: float

    @classmethod
    def load(cls, loader: Loader, name: str, spec: DecoderSpec) -> SourceMix:
        """Hub names `NAME_norm.weight` [D] and `NAME_proj.weight` [1, D]."""
        norm = loader.tensor_fp32(f"{name}_norm.weight", spec.hidden_size)
        projection = loader.tensor_fp32(f"{name}_proj.weight", 1, spec.hidden_size)
        return cls(loader.kernels, norm * projection.squeeze(0), spec.norm_eps)

    def __call__(
        self, blocks: list[torch.Tensor], prefix: torch.Tensor, *, place: str | None = None
    ) -> torch.Tensor:
        """[N, D]. `place`: see `reference_layers.mix_sources`."""
        return self.kernels.mix_sources([*blocks, prefix], self.query, self.eps, place=place)


class AttentionResiduals:
    """Residuals over depth (Kimi K3): sublayers read a mix of finished blocks and the running one.

    Every `attn_res_block_layers` layers the running sum is closed as a block and a new one starts.
    Nothing is carried from token to token.
    """

    def __init__(self, loader: Loader, spec: DecoderSpec, block_layers: int) -> None:
        self._block_layers = block_layers
        layers = [loader.under(f"layers.{index}") for index in range(len(spec.layers))]
        self._before_mixer = [SourceMix.load(layer, "self_attention_res", spec) for layer in layers]
        self._before_mlp = [SourceMix.load(layer, "mlp_res", spec) for layer in layers]
        self._output = SourceMix.load(loader, "output_attn_res", spec)

    def run(
        self,
        x: torch.Tensor,
        layers: list[DecoderLayer],
        inputs: StepInputs,
        cache: CacheFields,
        taps: LayerTaps | None = None,
    ) -> torch.Tensor:
        """Embeddings [N, D] through all layers to the mix that the final norm reads.

        A layer's output is the running sum, without the finished blocks before it.
        """
        blocks: list[torch.Tensor] = []
        prefix = x
        is_kept = False
        for index, layer in enumerate(layers):
            source = self._before_mixer[index](blocks, prefix)
            running: torch.Tensor | None = prefix
            if index % self._block_layers == 0:
                blocks.append(prefix)
                running = None
            prefix = layer.mix(source, running, inputs, cache, keeps_residual=is_kept)
            prefix = layer.feed(self._before_mlp[index](blocks, prefix), prefix)
            is_kept = taps is not None and taps.keep(index, prefix)
        return self._output(blocks, prefix, place="")


class HybridDecoder:
    """Embedding, layers, final norm and head, all tensors loaded.

    Attributes:
        prefix: in front of the names of its tensors.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightReader,
        kernels: Kernels,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        """
        Raises:
            CheckpointFileError: a tensor is missing or has another shape; names file, tensor and shapes.
        """
        prefix = self.prefix = weights.prefix(tuple(PREFIXES), _EMBEDDING)
        loader = Loader(weights, kernels, dtype, prefix, quantization)
        self._kernels = kernels
        self._embedding = loader.tensor(_EMBEDDING, spec.vocab_size, spec.hidden_size)
        self._layers: list[DecoderLayer] = []
        for index, layer in enumerate(spec.layers):
            self._layers.append(DecoderLayer(loader.under(f"layers.{index}"), index, layer, spec))
            weights.release()
        self._residuals: AttentionResiduals | None = None
        if spec.attn_res_block_layers is not None:
            self._residuals = AttentionResiduals(loader, spec, spec.attn_res_block_layers)
        self._norm = RmsNorm(loader, "norm", spec.hidden_size, spec.norm_eps, spec.norm_offset)
        head: Matrix = self._embedding
        head_loader = Loader(weights, kernels, dtype, PREFIXES[prefix], quantization)
        if not spec.tie_word_embeddings:
            head = head_loader.matrix("lm_head", spec.hidden_size, spec.vocab_size)
        elif head_loader.has("lm_head.weight"):
            weights.must_repeat(head_loader.prefix + "lm_head.weight", prefix + _EMBEDDING)
        self._head = head_loader.pack_linear(head, role="head")

    @property
    def head(self) -> Any:
        """The output head, packed for `Kernels.linear`."""
        return self._head

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> embeddings [N, D]."""
        return self._kernels.embedding(token_ids, self._embedding)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of rows [N, D]; a new tensor."""
        return self._norm.new(hidden)

    def forward(self, inputs: StepInputs, cache: CacheFields, taps: LayerTaps | None = None) -> torch.Tensor:
        """Hidden states after the last layer [N, D], before the final norm. Writes the cache.

        Args:
            taps: keeps the outputs of the layers it names.
        """
        x = self.embed(inputs.token_ids)
        if self._residuals is not None:
            return self._residuals.run(x, self._layers, inputs, cache, taps)
        is_kept = False
        for index, layer in enumerate(self._layers):
            x = layer.mix(x, x, inputs, cache, keeps_residual=is_kept)
            x = layer.feed(x, x)
            is_kept = taps is not None and taps.keep(index, x)
        return x

    def steps(self, cache: CacheFields) -> Steps:
        """`forward`, and the head where every row needs it, over one cache, for who calls it step after step:
        small steps cost no Python then."""
        tapes = self._kernels.step_tapes()

        def step(inputs: StepInputs, tap_layers: tuple[int, ...], needs_logits: bool) -> StepRows:
            record = None if inputs.recurrent is None else inputs.recurrent.record

            def run() -> StepRows:
                taps = LayerTaps(tap_layers)
                hidden = self.forward(inputs, cache, taps)
                place = _LOGITS if hidden.shape[0] <= MAX_TAPE_ROWS else ""
                logits = self._logits(hidden, place) if needs_logits else None
                return StepRows(hidden, logits, tuple(taps.kept), {} if record is None else record.inputs)

            if tapes is None:
                return run()
            kind = tap_layers, needs_logits, record is not None
            rows = tapes.run(run, kind, inputs.token_ids, inputs.attention, inputs.recurrent)
            if record is not None:
                record.inputs = rows.mixer_inputs
            return rows

        return step

    def replay(
        self, record: MixerRecord, places: torch.Tensor, index: RecurrentIndex, cache: CacheFields
    ) -> None:
        """Moves the recurrent states of all layers over inputs a pass has recorded, and nothing else.

        Args:
            places: int64, `record.places` of the rows of `index`.
        """
        for layer in self._layers:
            layer.replay(record, places, index, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [M, vocabulary] of rows [M, D] of `forward`; a new tensor."""
        return self._logits(hidden, place="")

    def _logits(self, hidden: torch.Tensor, place: str) -> torch.Tensor:
        return self._kernels.linear(self._norm(hidden), self._head, place=place, dtype=torch.float32)
