"""One decoder for every pattern of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from milepost.kernels.api import Kernels
from milepost.models.inputs import CacheFields, StepInputs
from milepost.models.kda import KdaLayer
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.mla import MlaLayer
from milepost.models.moe import MoeMlp
from milepost.models.specs import DecoderSpec, LayerSpec
from milepost.models.weights import WeightReader

PREFIXES = ("model.", "language_model.model.")
"""Where published checkpoints keep the decoder; the head is beside the first, or under language_model."""
_EMBEDDING = "embed_tokens.weight"


class DecoderLayer:
    """x + mixer(norm(x)), then + mlp(norm(x)); the sums stay in the model dtype."""

    def __init__(self, loader: Loader, index: int, layer: LayerSpec, spec: DecoderSpec) -> None:
        hidden = spec.hidden_size
        self._mixer_norm = RmsNorm(loader, "input_layernorm", hidden, spec.norm_eps)
        self._mlp_norm = RmsNorm(loader, "post_attention_layernorm", hidden, spec.norm_eps)
        self._kda: KdaLayer | None = None
        self._mla: MlaLayer | None = None
        attention = loader.under("self_attn")
        if layer.mixer == "kda" and spec.kda is not None:
            self._kda = KdaLayer(attention, index, hidden, spec.kda)
        elif spec.mla is not None:
            self._mla = MlaLayer(attention, index, hidden, spec.mla)
        self._mlp: DenseMlp | MoeMlp
        if layer.mlp == "moe" and spec.moe is not None:
            self._mlp = MoeMlp(loader.under("block_sparse_moe"), hidden, spec.moe)
        else:
            self._mlp = DenseMlp(loader.under("mlp"), hidden, spec.intermediate_size)

    def __call__(self, x: torch.Tensor, inputs: StepInputs, cache: CacheFields) -> torch.Tensor:
        """x may be overwritten."""
        normed = self._mixer_norm(x)
        if self._kda is not None:
            assert inputs.recurrent is not None
            x = self._kda(normed, x, cache, inputs.recurrent)
        elif self._mla is not None:
            assert inputs.attention is not None
            x = self._mla(normed, x, cache, inputs.attention)
        return self._mlp(self._mlp_norm(x), x)


class HybridDecoder:
    """Embedding, layers, final norm and head, all tensors loaded."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightReader,
        kernels: Kernels,
        dtype: torch.dtype,
        prefixes: Sequence[str] = PREFIXES,
    ) -> None:
        """
        Raises:
            CheckpointFileError: a tensor is missing or has another shape; names file, tensor and shapes.
        """
        prefix = weights.prefix(prefixes, _EMBEDDING)
        loader = Loader(weights, kernels, dtype, prefix)
        self._kernels = kernels
        self._embedding = loader.tensor(_EMBEDDING, spec.vocab_size, spec.hidden_size)
        self._layers = [
            DecoderLayer(loader.under(f"layers.{index}"), index, layer, spec)
            for index, layer in enumerate(spec.layers)
        ]
        self._norm = RmsNorm(loader, "norm", spec.hidden_size, spec.norm_eps)
        head = self._embedding
        if not spec.tie_word_embeddings:
            head_loader = Loader(weights, kernels, dtype, prefix.removesuffix("model."))
            head = head_loader.linear("lm_head", spec.hidden_size, spec.vocab_size)
        self._head = kernels.pack_linear(head)

    def forward(self, inputs: StepInputs, cache: CacheFields) -> torch.Tensor:
        """Hidden states after the last layer [N, D], before the final norm. Writes the cache."""
        x = self._kernels.embedding(inputs.token_ids, self._embedding)
        for layer in self._layers:
            x = layer(x, inputs, cache)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [M, vocabulary] of rows [M, D] of `forward`."""
        return self._kernels.linear(self._norm(hidden), self._head, dtype=torch.float32)
