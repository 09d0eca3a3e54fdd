"""Kimi Delta Attention layer: linear attention with a per-channel decay.

Formulas: Kimi Linear technical report (KDA); names and orders as in the published checkpoints.
"""

from __future__ import annotations

from functools import partial

import torch

from milepost.kernels.api import KdaInputs, KdaParams
from milepost.kernels.index import MixerRecord, RecurrentIndex
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, place_of_sum
from milepost.models.specs import KdaSpec
from milepost.models.states import run_mixer


class KdaLayer:
    """Mixer of one layer. Caches a convolution tail and a state matrix per slot."""

    def __init__(self, loader: Loader, layer: int, hidden_size: int, spec: KdaSpec) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        heads, dim, width = spec.num_heads, spec.head_dim, spec.width
        # Everything that reads the layer's input is one product: q, k, v, decay, output gate, beta.
        gate_name, gate_width = ("g_proj", width) if spec.full_rank_gate else ("g_a_proj", dim)
        names = ("q_proj", "k_proj", "v_proj", "f_a_proj", gate_name, "b_proj")
        inputs = loader.stacked(names, hidden_size, (width, width, width, dim, gate_width, heads))
        parts = (3 * width, dim, gate_width, heads)
        self._inputs = loader.pack_linear(inputs, name="kda.inputs", parts=parts)
        self._decay = loader.pack_linear(loader.matrix("f_b_proj", dim, width), name="kda.decay")
        self._gate = None
        if not spec.full_rank_gate:
            self._gate = loader.pack_linear(loader.matrix("g_b_proj", dim, width), name="kda.gate")
        self._out = loader.pack_linear(loader.matrix("o_proj", width, hidden_size), name="kda.out")
        taps = [
            loader.tensor_fp32(f"{name}_conv1d.weight", width, 1, spec.conv_kernel).squeeze(1)
            for name in "qkv"
        ]
        self._params = KdaParams(
            num_heads=heads,
            head_dim=dim,
            conv_taps=torch.cat(taps).t().contiguous(),
            decay_log=_decay_log(loader, spec),
            dt_bias=loader.tensor_fp32("dt_bias", width),
            norm_weight=loader.tensor_fp32("o_norm.weight", dim),
            norm_eps=spec.norm_eps,
            lower_bound=spec.gate_lower_bound,
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: CacheFields,
        index: RecurrentIndex,
        *,
        keeps_residual: bool = False,
    ) -> torch.Tensor:
        """x [N, D] after the input norm -> residual + output [N, D]; moves the states of the sequences.

        `residual` (None = zeros) may be overwritten unless it is to be kept.
        """
        ops = self._kernels
        record = index.record
        places = [None] * 3 if record is None else record.buffers(self._layer, "inputs", "gate", "decay")
        raw, decay_in, gate, beta = ops.linear_parts(x, self._inputs, place=places[0])
        if self._gate is not None:
            gate = ops.linear(gate, self._gate, place=places[1])
        inputs = KdaInputs(raw, ops.linear(decay_in, self._decay, place=places[2]), beta, gate)
        if record is not None:
            record.keep(self._layer, inputs)
        mixed = self._mix(inputs, cache, index)
        return ops.linear(mixed, self._out, residual=residual, place=place_of_sum(residual, keeps_residual))

    def replay(
        self, record: MixerRecord, places: torch.Tensor, cache: CacheFields, index: RecurrentIndex
    ) -> None:
        """Moves the states of the sequences once more, over recorded inputs of this layer."""
        self._mix(KdaInputs(*record.take(self._layer, places)), cache, index)

    def _mix(self, inputs: KdaInputs, cache: CacheFields, index: RecurrentIndex) -> torch.Tensor:
        mixer = partial(self._kernels.kda_mixer, inputs, self._params)
        return run_mixer(mixer, cache, self._layer, index)


def _decay_log(loader: Loader, spec: KdaSpec) -> torch.Tensor:
    """fp32 [heads]. Files hold [heads], [1, 1, heads, 1], or more entries of which the first count."""
    heads = spec.num_heads
    if spec.padded_decay_log and loader.has("A_log"):
        shape = loader.weights.shape(loader.prefix + "A_log")
        if len(shape) == 1 and shape[0] > heads:
            return loader.tensor_fp32("A_log", *shape)[:heads].contiguous()
    return loader.tensor_fp32("A_log", heads, also=((1, 1, heads, 1),))
