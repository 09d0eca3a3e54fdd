"""Kimi Delta Attention layer: linear attention with a per-channel decay.

Formulas: Kimi Linear technical report (KDA); names and orders as in the published checkpoints.
"""

from __future__ import annotations

import torch

from milepost.kernels.api import KdaRows
from milepost.kernels.index import RecurrentIndex
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader
from milepost.models.layout import CONV_TAIL_FIELD, STATE_MATRIX_FIELD
from milepost.models.specs import KdaSpec


class KdaLayer:
    """Mixer of one layer. Caches a convolution tail and a state matrix per slot."""

    def __init__(self, loader: Loader, layer: int, hidden_size: int, spec: KdaSpec) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        self._spec = spec
        heads, dim, width = spec.num_heads, spec.head_dim, spec.width
        self._qkv = loader.stacked(("q_proj", "k_proj", "v_proj"), hidden_size, (width, width, width))
        taps = [
            loader.tensor_fp32(f"{name}_conv1d.weight", width, 1, spec.conv_kernel).squeeze(1)
            for name in "qkv"
        ]
        self._conv = torch.cat(taps)
        # The inputs of the low-rank gates and beta share their input: one product.
        self._low_rank = loader.stacked(("f_a_proj", "g_a_proj", "b_proj"), hidden_size, (dim, dim, heads))
        self._decay_out = loader.linear("f_b_proj", dim, width)
        self._gate_out = loader.linear("g_b_proj", dim, width)
        self._decay_log = loader.tensor_fp32("A_log", heads, also=((1, 1, heads, 1),))
        self._dt_bias = loader.tensor_fp32("dt_bias", width).view(heads, dim)
        self._norm = loader.tensor_fp32("o_norm.weight", dim)
        self._out = loader.linear("o_proj", width, hidden_size)

    def __call__(self, x: torch.Tensor, cache: CacheFields, index: RecurrentIndex) -> torch.Tensor:
        """x [N, D] after the input norm -> [N, D]; moves the cached states of the step's sequences."""
        ops, spec = self._kernels, self._spec
        heads = (x.shape[0], spec.num_heads, spec.head_dim)
        raw = ops.linear(x, self._qkv)
        mixed = ops.short_conv(raw, self._conv, cache[self._layer, CONV_TAIL_FIELD], index)
        q, k, v = (mixed[:, part * spec.width : (part + 1) * spec.width].view(heads) for part in range(3))

        low_rank = ops.linear(x, self._low_rank)
        decay_in, gate_in = low_rank[:, : spec.head_dim], low_rank[:, spec.head_dim : 2 * spec.head_dim]
        beta = torch.sigmoid(low_rank[:, 2 * spec.head_dim :].float())
        raw_decay = ops.linear(decay_in, self._decay_out).view(heads)
        g = ops.kda_gate(raw_decay, self._decay_log, self._dt_bias, spec.gate_lower_bound)

        q = ops.l2_norm(q) * spec.head_dim**-0.5
        out = ops.kda(KdaRows(q, ops.l2_norm(k), v, g, beta), cache[self._layer, STATE_MATRIX_FIELD], index)

        gate = ops.linear(gate_in, self._gate_out).view(heads)
        normed = ops.gated_rms_norm(out, gate, self._norm, spec.norm_eps)
        return ops.linear(normed.reshape(x.shape[0], -1), self._out)
