"""Gated DeltaNet layer: linear attention with one decay per value head."""

from __future__ import annotations

from functools import partial

import torch

from milepost.kernels.index import MixerRecord, RecurrentIndex
from milepost.kernels.reference_coded import Matrix
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader, place_of_sum
from milepost.models.specs import GdnSpec
from milepost.models.states import run_mixer


class GdnLayer:
    """Mixer of one layer. Caches a convolution tail and a state matrix per slot.

    Hub names: in_proj_qkvz, in_proj_ba (interleaved by key head), or in_proj_qkv, in_proj_z,
    in_proj_b, in_proj_a; conv1d, A_log, dt_bias, norm, out_proj.
    """

    def __init__(self, loader: Loader, layer: int, hidden_size: int, spec: GdnSpec) -> None:
        self._kernels = loader.kernels
        self._layer = layer
        heads = spec.num_value_heads
        parts = (spec.conv_width, spec.value_width, heads, heads)
        inputs: Matrix
        if spec.interleaved:
            inputs = _deinterleaved(loader, hidden_size, spec)
        else:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            inputs = loader.stacked(names, hidden_size, parts)
        self._inputs = loader.pack_linear(inputs, name="gdn.inputs", parts=parts)
        out = loader.matrix("out_proj", spec.value_width, hidden_size)
        self._out = loader.pack_linear(out, name="gdn.out")
        taps = loader.tensor_fp32("conv1d.weight", spec.conv_width, 1, spec.conv_kernel).squeeze(1)
        self._params = GdnParams(
            num_key_heads=spec.num_key_heads,
            num_value_heads=heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            conv_taps=taps.t().contiguous(),
            decay_log=loader.tensor_fp32("A_log", heads),
            dt_bias=loader.tensor_fp32("dt_bias", heads),
            norm_weight=loader.tensor_fp32("norm.weight", spec.value_dim),
            norm_eps=spec.norm_eps,
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
        record = index.record
        [place] = [None] if record is None else record.buffers(self._layer, "inputs")
        inputs = GdnInputs(*self._kernels.linear_parts(x, self._inputs, place=place))
        if record is not None:
            record.keep(self._layer, inputs)
        mixed = self._mix(inputs, cache, index)
        return self._kernels.linear(
            mixed, self._out, residual=residual, place=place_of_sum(residual, keeps_residual)
        )

    def replay(
        self, record: MixerRecord, places: torch.Tensor, cache: CacheFields, index: RecurrentIndex
    ) -> None:
        """Moves the states of the sequences once more, over recorded inputs of this layer."""
        self._mix(GdnInputs(*record.take(self._layer, places)), cache, index)

    def _mix(self, inputs: GdnInputs, cache: CacheFields, index: RecurrentIndex) -> torch.Tensor:
        mixer = partial(self._kernels.gdn_mixer, inputs, self._params)
        return run_mixer(mixer, cache, self._layer, index)


def _deinterleaved(loader: Loader, hidden_size: int, spec: GdnSpec) -> torch.Tensor:
    """Rows of both interleaved projections in the plain order q | k | v | z | b | a.

    Per key head the files hold q, k, then v and z of the value heads it serves; and b, then a.
    """
    served = spec.num_value_heads // spec.num_key_heads
    sizes = [spec.key_dim, spec.key_dim, served * spec.value_dim, served * spec.value_dim]
    qkvz = loader.linear("in_proj_qkvz", hidden_size, spec.conv_width + spec.value_width)
    gates = loader.linear("in_proj_ba", hidden_size, 2 * spec.num_value_heads)
    parts = [
        *qkvz.view(spec.num_key_heads, -1, hidden_size).split(sizes, dim=1),
        *gates.view(spec.num_key_heads, -1, hidden_size).split([served, served], dim=1),
    ]
    return torch.cat([part.reshape(-1, hidden_size) for part in parts])
