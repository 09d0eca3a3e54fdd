"""The operations models call, served by the native library. Semantics: `reference_layers`.

Results live in buffers that are shared by all calls of one name and thread, and are valid until the
next such call; `linear` and `moe` write into `residual`. The stream of hidden states therefore is the
only tensor a step allocates, but for copies of it where layers are tapped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from milepost.core.plan import ZERO_STATE
from milepost.errors import ConfigError
from milepost.kernels import native_older
from milepost.kernels.arguments import KdaInputs, KdaParams, MoeParams
from milepost.kernels.index import AttentionIndex, RecurrentIndex
from milepost.kernels.native_library import CODED_REASON, NativeLibrary, packing_threads
from milepost.kernels.native_older import ComposedExperts, ComposedGlu
from milepost.kernels.native_sampling import NativeSampling
from milepost.kernels.native_workspace import AnyLinear, DecodedOnUse, NativeExperts, NativeLinear, Workspace
from milepost.kernels.reference_coded import IntegerWeight, Matrix, Mxfp4Weight, read, stacked
from milepost.kernels.reference_experts import SWIGLU, GluActivation
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.kernels.reference_gqa import GqaInputs, GqaParams
from milepost.kernels.stored import StoredMatrix, StoredPart
from milepost.kernels.tapes import StepTapes

_ZEROS = -1
"""What the library takes for the slot of a sequence that starts from zeros."""
MXFP4_SCALES = (2, 252)
"""E8M0 codes between which no decoded value is denormal or overflows; weights beyond are kept decoded."""


def _betas(activation: GluActivation) -> tuple[float | None, ...]:
    return () if activation.beta is None else (activation.beta, activation.linear_beta)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()
        self.attention: tuple[AttentionIndex | None, Any] = (None, None)
        self.recurrent: tuple[RecurrentIndex | None, Any] = (None, None)


class NativeOperations:
    """Operations over one loaded native library."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        known = NativeLibrary(library, "")
        self._has_coded = known.has_coded_weights
        self._has_mixtures = known.has_mixtures
        self._packs_parts = known.packs_parts
        self._has_tapes = known.has_tapes
        self._samples = known.samples
        self._threads = packing_threads()
        self._local = _PerThread()

    def pack_linear(self, weight: Matrix, *, name: str = "", parts: Sequence[int] = ()) -> AnyLinear:
        bounds = []
        first = 0
        for columns in parts:
            bounds.append((first, first + columns))
            first += columns
        if isinstance(weight, Mxfp4Weight) and not self._has_coded:
            return DecodedOnUse(self._library, weight, name, tuple(bounds))
        return NativeLinear(self._pack(weight), name, weight.shape[0], weight.dtype, tuple(bounds))

    def pack_swiglu(
        self, gate_up: Matrix, *, name: str = "", activation: GluActivation = SWIGLU
    ) -> NativeLinear | ComposedGlu:
        if activation != SWIGLU and not self._has_mixtures:
            return native_older.pack_glu(self, gate_up, name, activation)
        packed = self._pack(gate_up, paired=True)
        return NativeLinear(packed, name, gate_up.shape[0] // 2, gate_up.dtype, betas=_betas(activation))

    def pack_heads(self, weight: torch.Tensor) -> NativeLinear:
        num_heads, out_features, _ = weight.shape
        packed = self._library.pack(weight)
        return NativeLinear(packed, "heads", num_heads * out_features, weight.dtype)

    def pack_experts(
        self,
        experts: Iterable[tuple[Matrix, Matrix, Matrix]],
        *,
        activation: GluActivation = SWIGLU,
        composed_if_old: bool = False,
    ) -> NativeExperts | ComposedExperts:
        if composed_if_old and not self._has_mixtures:
            return ComposedExperts(
                tuple(native_older.pack_expert(self, *expert, activation) for expert in experts)
            )
        gate_up, low = [], []
        for gate, up, down in experts:
            gate_up.append(self._pack(stacked([gate, up]), paired=True))
            low.append(self._pack(down))
        return NativeExperts(self._library.Experts(gate_up, low), _betas(activation))

    def _pack(self, weight: Matrix, *, paired: bool = False) -> Any:
        if isinstance(weight, torch.Tensor | StoredMatrix):
            return self._pack_plain(weight, paired)
        if not self._has_coded:
            raise ConfigError("kernels", CODED_REASON)
        if isinstance(weight, IntegerWeight):
            scheme = weight.scheme
            return self._library.pack_integers(weight.codes, weight.scales, scheme.bits, scheme.group, paired)
        return self._pack_mxfp4(weight, paired)

    def _pack_plain(self, weight: torch.Tensor | StoredMatrix, paired: bool) -> Any:
        has_gaps = isinstance(weight, torch.Tensor) and weight.stride(1) != 1
        if not self._packs_parts or has_gaps:
            return self._library.pack(read(weight), paired=paired)
        parts = weight.parts if isinstance(weight, StoredMatrix) else (StoredPart(weight),)
        packed = self._library.pack_parts([part.tensor for part in parts], paired, self._threads)
        if packed.first_not_finite >= 0:
            refuse = parts[packed.first_not_finite].refuse
            if refuse is not None:
                refuse()
        return packed

    def _pack_mxfp4(self, weight: Mxfp4Weight, paired: bool) -> Any:
        lowest, highest = (int(code) for code in weight.scales.aminmax())
        if MXFP4_SCALES[0] <= lowest and highest <= MXFP4_SCALES[1]:
            return self._library.pack_mxfp4(weight.packed, weight.scales, paired)
        return self._library.pack(weight.decode(), paired=paired)

    def step_tapes(self) -> StepTapes | None:
        """See `Kernels.step_tapes`."""
        return StepTapes(self._library, self) if self._has_tapes else None

    def sampling(self) -> NativeSampling | None:
        """See `Kernels.sampling`."""
        return NativeSampling(self._library) if self._samples else None

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        result = torch.empty(token_ids.shape[0], table.shape[1], dtype=table.dtype)
        self._library.embed(token_ids, table, result)
        return result

    def linear(
        self,
        x: torch.Tensor,
        weight: AnyLinear,
        *,
        residual: torch.Tensor | None = None,
        place: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        result = residual if place is None else None
        if result is None:
            name = weight.name if place is None else place
            workspace = self._local.workspace
            result = workspace.rows(name, x.shape[0], weight.out_features, dtype or weight.dtype)
        self._library.linear(x, weight.packed, result, residual)
        return result

    def linear_parts(
        self, x: torch.Tensor, weight: AnyLinear, *, place: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        name = weight.name if place is None else place
        result, parts = self._local.workspace.parts(weight, name, x.shape[0])
        self._library.linear(x, weight.packed, result)
        return parts

    def linear_swiglu(self, x: torch.Tensor, weight: NativeLinear | ComposedGlu) -> torch.Tensor:
        if isinstance(weight, ComposedGlu):
            return weight.run(self, x)
        result = self._local.workspace.rows(weight.name, x.shape[0], weight.out_features, weight.dtype)
        self._library.linear(x, weight.packed, result, None, *weight.betas)
        return result

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = self._local.workspace.rows("rms_norm", x.shape[0], x.shape[1], x.dtype)
        self._library.rms_norm(x, weight, eps, out)
        return out

    def store_latents(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, pages: torch.Tensor, index: AttentionIndex
    ) -> None:
        self._library.store_latents(x, weight, eps, pages, self.attention_plan(index))

    def attend_latents(
        self,
        query: torch.Tensor,
        absorb_key: NativeLinear,
        absorb_value: NativeLinear,
        pages: torch.Tensor,
        index: AttentionIndex,
        scale: float,
        expand_key: NativeLinear | None = None,
    ) -> torch.Tensor:
        result = self._local.workspace.rows(
            "attend_latents", query.shape[0], absorb_value.out_features, query.dtype
        )
        plan = self.attention_plan(index)
        expansion = () if expand_key is None else (expand_key.packed,)
        self._library.attend_latents(
            query, absorb_key.packed, absorb_value.packed, pages, plan, scale, result, *expansion
        )
        return result

    def kda_mixer(
        self,
        inputs: KdaInputs,
        params: KdaParams,
        tails: torch.Tensor,
        states: torch.Tensor,
        index: RecurrentIndex,
    ) -> torch.Tensor:
        raw, decay, beta, gate = inputs
        width = params.num_heads * params.head_dim
        result = self._local.workspace.rows("kda_mixer", raw.shape[0], width, raw.dtype)
        self._library.kda_mixer(
            raw,
            decay,
            beta,
            gate,
            params.conv_taps,
            params.decay_log,
            params.dt_bias,
            params.norm_weight,
            params.norm_eps,
            params.lower_bound,
            tails,
            states,
            self.recurrent_plan(index),
            result,
        )
        return result

    def gdn_mixer(
        self,
        inputs: GdnInputs,
        params: GdnParams,
        tails: torch.Tensor,
        states: torch.Tensor,
        index: RecurrentIndex,
    ) -> torch.Tensor:
        width = params.num_value_heads * params.value_dim
        result = self._local.workspace.rows("gdn_mixer", inputs.raw.shape[0], width, inputs.raw.dtype)
        self._library.gdn_mixer(
            inputs.raw,
            inputs.decay,
            inputs.beta,
            inputs.gate,
            params.conv_taps,
            params.decay_log,
            params.dt_bias,
            params.norm_weight,
            params.norm_eps,
            tails,
            states,
            self.recurrent_plan(index),
            result,
        )
        return result

    def gqa_mixer(
        self, inputs: GqaInputs, params: GqaParams, pages: torch.Tensor, index: AttentionIndex
    ) -> torch.Tensor:
        if not params.has_gate and not self._has_mixtures:
            inputs = native_older.with_open_gate(inputs, params)
        width = params.num_heads * params.head_dim
        result = self._local.workspace.rows("gqa_mixer", inputs.key.shape[0], width, inputs.key.dtype)
        self._library.gqa_mixer(
            inputs.query_gate,
            inputs.key,
            inputs.value,
            params.query_norm,
            params.key_norm,
            params.norm_eps,
            params.inverse_frequencies,
            pages,
            self.attention_plan(index),
            result,
        )
        return result

    def rotate_heads(
        self,
        x: torch.Tensor,
        num_heads: int,
        inverse_frequencies: torch.Tensor,
        index: AttentionIndex,
        *,
        amplitude: float = 1.0,
        is_interleaved: bool = False,
    ) -> torch.Tensor:
        result = self._local.workspace.rows("rotate_heads", x.shape[0], x.shape[1], x.dtype)
        plan = self.attention_plan(index)
        self._library.rotate_heads(x, num_heads, inverse_frequencies, amplitude, is_interleaved, plan, result)
        return result

    def store_keys_values(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        params: GqaParams,
        pages: torch.Tensor,
        index: AttentionIndex,
    ) -> None:
        if not self._has_mixtures:
            return native_older.store_keys_values(self, key, value, params, pages, index)
        self._library.store_keys_values(
            key,
            value,
            params.key_norm,
            params.norm_eps,
            params.inverse_frequencies,
            pages,
            self.attention_plan(index),
        )

    def moe(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        params: MoeParams,
        *,
        shared: torch.Tensor | None,
        residual: torch.Tensor | None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(params.experts, ComposedExperts):
            return native_older.moe(
                x, logits, params, shared=shared, residual=residual, shared_gate=shared_gate
            )
        experts: NativeExperts = params.experts
        result = residual
        if result is None:
            result = self._local.workspace.rows("moe", x.shape[0], x.shape[1], x.dtype)
        added = (shared_gate, *experts.betas) if self._has_mixtures else ()
        self._library.moe(
            x,
            logits,
            params.bias,
            experts.packed,
            params.experts_per_token,
            params.renormalize,
            params.scaling_factor,
            shared,
            residual,
            result,
            *added,
        )
        return result

    def add_shared(
        self,
        x: torch.Tensor,
        shared: torch.Tensor,
        *,
        residual: torch.Tensor,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._library.add_shared(x, shared, gate, residual, residual)
        return residual

    def gate_values(self, values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        result = self._local.workspace.rows("gate_values", values.shape[0], values.shape[1], values.dtype)
        self._library.gate_values(values, gate, result)
        return result

    def mix_sources(
        self, sources: Sequence[torch.Tensor], query: torch.Tensor, eps: float, *, place: str | None = None
    ) -> torch.Tensor:
        first = sources[0]
        if len(sources) == 1:
            return first
        name = "mix_sources" if place is None else place
        result = self._local.workspace.rows(name, first.shape[0], first.shape[1], first.dtype)
        self._library.mix_sources(list(sources), query, eps, result)
        return result

    def attention_plan(self, index: AttentionIndex) -> Any:
        """The native form of an index; all layers of a step share one."""
        known, plan = self._local.attention
        if known is not index:
            expanded = (sorted(index.expanded),) if index.expanded else ()
            plan = self._library.AttentionPlan(
                list(index.spans),
                list(index.page_tables),
                index.write_pages,
                index.write_offsets,
                *expanded,
            )
            self._local.attention = (index, plan)
        return plan

    def recurrent_plan(self, index: RecurrentIndex) -> Any:
        """The native form of an index, likewise."""
        known, plan = self._local.recurrent
        if known is not index:
            plan = self._library.RecurrentPlan(
                list(index.spans),
                [_ZEROS if slot == ZERO_STATE else slot for slot in index.initial],
                list(index.running),
                list(index.exports),
            )
            self._local.recurrent = (index, plan)
        return plan
