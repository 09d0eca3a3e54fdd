"""The operations models call, composed from `reference` and `reference_kda`.

"Packing" keeps the tensors as they are. A result is always a new tensor here; other implementations
may return memory that the next call with the same `name` overwrites, and may write into `residual`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.kernels import reference, reference_gdn, reference_gqa, reference_residuals
from milepost.kernels.arguments import KdaInputs, KdaParams, MoeParams
from milepost.kernels.index import AttentionIndex, RecurrentIndex, RowSpan
from milepost.kernels.reference import ExpertWeights
from milepost.kernels.reference_coded import Matrix, ReadMatrix, read
from milepost.kernels.reference_experts import SWIGLU, GluActivation, softmax_route
from milepost.kernels.reference_kda import KdaRows, kda


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """Attributes:
    weight: [out, in], coded or not.
    parts: columns of the parts into which the product is split; () = one.
    """

    weight: ReadMatrix
    parts: tuple[int, ...] = ()


def pack_linear(weight: Matrix, *, name: str = "", parts: Sequence[int] = ()) -> ReferenceLinear:
    """Prepares a weight [out, in] for `linear`, or for `linear_parts` if `parts` are given.

    Args:
        name: result buffers may be shared by all weights of one name; "" = always a new result.
        parts: column counts, sum = out.
    """
    return ReferenceLinear(read(weight), tuple(parts))


@dataclass(frozen=True, slots=True)
class ReferenceGlu:
    """Attributes:
    gate_up: [2 * inner, in], gate over up, coded or not.
    """

    gate_up: ReadMatrix
    activation: GluActivation


def pack_swiglu(gate_up: Matrix, *, name: str = "", activation: GluActivation = SWIGLU) -> ReferenceGlu:
    """Prepares [2 * inner, in], gate over up, for `linear_swiglu`."""
    return ReferenceGlu(read(gate_up), activation)


def pack_heads(weight: torch.Tensor) -> torch.Tensor:
    """Prepares one weight per head, [heads, out, in], for `attend_latents`."""
    # Widened once instead of in every step.
    return weight.float().contiguous()


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Attributes:
    weights: of every expert.
    """

    weights: tuple[ExpertWeights, ...]
    activation: GluActivation


def pack_experts(
    experts: Iterable[tuple[Matrix, Matrix, Matrix]],
    *,
    activation: GluActivation = SWIGLU,
    composed_if_old: bool = False,
) -> ReferenceExperts:
    """Prepares (gate, up, down) of every expert for `moe`.

    Args:
        composed_if_old: the layer is more than SwiGLU experts behind a sigmoid router, so that an older
            native library has no call for it.
    """
    weights = tuple((read(gate), read(up), read(down)) for gate, up, down in experts)
    return ReferenceExperts(weights, activation)


def step_tapes() -> None:
    """There is nothing to write down: every operation is Python."""
    return None


def sampling() -> None:
    """The twin is `milepost.runner.sampler`, the only caller."""
    return None


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [vocabulary, D] for int64 ids [N]; a new tensor."""
    return F.embedding(token_ids, table)


def linear(
    x: torch.Tensor,
    weight: ReferenceLinear,
    *,
    residual: torch.Tensor | None = None,
    place: str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [N, in] times the weight -> [N, out].

    Args:
        residual: [N, out], added to the rounded product; the sum is rounded again.
        place: None = the result may overwrite `residual`, or lie in a buffer that the next product of the
            same name uses again; "" = it is a new tensor; else, only calls with this place use its buffer.
        dtype: of the result; None = the weight's.
    """
    if x.dtype != weight.weight.dtype:
        x = x.to(weight.weight.dtype)
    result = reference.linear(x, weight.weight)
    if residual is not None:
        result = residual + result
    return result if dtype is None else result.to(dtype)


def linear_parts(
    x: torch.Tensor, weight: ReferenceLinear, *, place: str | None = None
) -> tuple[torch.Tensor, ...]:
    """`linear`, its columns split into the parts the weight was packed with (views)."""
    return torch.split(linear(x, weight), list(weight.parts), dim=-1)


def linear_swiglu(x: torch.Tensor, weight: ReferenceGlu) -> torch.Tensor:
    """silu(gate) * up of x [N, in] -> [N, inner], or what the weight's activation makes of them; both
    products are rounded to the dtype first."""
    products = reference.linear(x, weight.gate_up)
    if weight.activation == SWIGLU:
        return reference.swiglu(products)
    return weight.activation(*products.chunk(2, dim=-1))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.rms_norm` of rows x [N, D].

    Args:
        out: [N, D], where the result goes; None = a new tensor, or a buffer that the next call uses again.
    """
    result = reference.rms_norm(x, weight, eps)
    return result if out is None else out.copy_(result)


gdn_mixer = reference_gdn.gdn_mixer
gqa_mixer = reference_gqa.gqa_mixer
store_keys_values = reference_gqa.store_keys_values
rotate_heads = reference_gqa.rotate_heads
gate_values = reference_residuals.gate_values


def store_latents(
    x: torch.Tensor, weight: torch.Tensor, eps: float, pages: torch.Tensor, index: AttentionIndex
) -> None:
    """Stores rows [N, latent + shared]: rms_norm of the first len(weight) values, the rest as it is."""
    latent, shared = torch.split(x, [weight.shape[0], x.shape[1] - weight.shape[0]], dim=-1)
    reference.store_rows(pages, torch.cat([rms_norm(latent, weight, eps), shared], dim=-1), index)


def attend_latents(
    query: torch.Tensor,
    absorb_key: torch.Tensor,
    absorb_value: torch.Tensor,
    pages: torch.Tensor,
    index: AttentionIndex,
    scale: float,
    expand_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Absorbed attention: query -> key expansion -> `latent_attention` -> value expansion.

    Spans that `index.expanded` names go through keys and values instead that every head expands from the
    latents, rounded as if they had been stored: the same up to rounding, and another amount of work.

    Args:
        query: [N, heads * (nope + shared)] in the model dtype.
        absorb_key: packed [heads, latent, nope].
        absorb_value: packed [heads, value, latent].
        expand_key: packed [heads, nope, latent], the transpose of `absorb_key`; needed if spans are expanded.

    Returns:
        [N, heads * value] in the model dtype.
    """
    num_heads, latent_width, nope = absorb_key.shape
    per_head = query.view(query.shape[0], num_heads, -1)
    if index.expanded:
        if expand_key is None:
            raise ValueError("expand_key is missing, but the index has expanded spans")
        return _attend_some_expanded(per_head, absorb_key, absorb_value, expand_key, pages, index, scale)
    content, shared = per_head[..., :nope], per_head[..., nope:]
    absorbed = reference.per_head_linear(content, absorb_key.transpose(1, 2))
    absorbed = torch.cat([absorbed, shared.float()], dim=-1)
    mixed = reference.latent_attention(absorbed, pages, index, value_width=latent_width, scale=scale)
    values = reference.per_head_linear(mixed, absorb_value.transpose(1, 2))
    return values.to(query.dtype).reshape(query.shape[0], -1)


def _attend_some_expanded(
    query: torch.Tensor,
    absorb_key: torch.Tensor,
    absorb_value: torch.Tensor,
    expand_key: torch.Tensor,
    pages: torch.Tensor,
    index: AttentionIndex,
    scale: float,
) -> torch.Tensor:
    """`attend_latents` span by span; query [N, heads, nope + shared]."""
    parts = []
    for number, (span, table) in enumerate(zip(index.spans, index.page_tables, strict=True)):
        rows = query[span.first_row : span.end_row]
        places = slice(span.first_row, span.end_row)
        alone = AttentionIndex(
            (RowSpan(0, span.length, span.position),),
            (table,),
            index.write_pages[places],
            index.write_offsets[places],
        )
        if number in index.expanded:
            values = reference.expanded_attention(rows, pages, alone, expand_key, absorb_value, scale)
            parts.append(values.to(query.dtype).flatten(1))
        else:
            flat = rows.reshape(span.length, -1)
            parts.append(attend_latents(flat, absorb_key, absorb_value, pages, alone, scale))
    return torch.cat(parts)


def kda_mixer(
    inputs: KdaInputs,
    params: KdaParams,
    tails: torch.Tensor,
    states: torch.Tensor,
    index: RecurrentIndex,
) -> torch.Tensor:
    """Convolution, SiLU, L2 norm, gates, recurrence and gated norm of all sequences of a step.

    Args:
        tails: [slots, taps - 1, channels] in the model dtype; states: fp32 [slots, heads, key, value].
            Initial records of all sequences are read, then running and exported ones are written.

    Returns:
        [N, heads * value] in the model dtype.
    """
    shape = (inputs.raw.shape[0], params.num_heads, params.head_dim)
    width = params.num_heads * params.head_dim
    mixed = reference.short_conv(inputs.raw, params.conv_taps.t(), tails, index)
    q, k, v = (mixed[:, part * width : (part + 1) * width].view(shape) for part in range(3))
    g = reference.kda_gate(
        inputs.decay.reshape(shape), params.decay_log, params.dt_bias.view(shape[1:]), params.lower_bound
    )
    beta = torch.sigmoid(inputs.beta.float())
    q = reference.l2_norm(q) * params.head_dim**-0.5
    out = kda(KdaRows(q, reference.l2_norm(k), v, g, beta), states, index)
    normed = reference.gated_rms_norm(out, inputs.gate.reshape(shape), params.norm_weight, params.norm_eps)
    return normed.reshape(shape[0], -1)


def moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    params: MoeParams,
    *,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + (routed experts + sigmoid(shared_gate) * shared), [N, D] in the model dtype.

    Args:
        logits: fp32 [N, experts] of the router.
        shared: output of the shared experts, or None.
        residual: None = nothing is added to the rounded sum.
        shared_gate: fp32 [N, 1]; None = 1.
    """
    ids, weights = routed(logits, params)
    experts: ReferenceExperts = params.experts
    total = reference.routed_experts(x, ids, weights, experts.weights, experts.activation)
    return reference.add_shared(total, shared, shared_gate, residual, x.dtype)


def routed(logits: torch.Tensor, params: MoeParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int64 [N, k], ascending per row, and weights fp32 [N, k] of either router."""
    if params.bias is None:
        ids, weights = softmax_route(logits, params.experts_per_token, renormalize=params.renormalize)
        return ids, weights * params.scaling_factor
    return reference.route(
        logits,
        params.bias,
        params.experts_per_token,
        renormalize=params.renormalize,
        scaling_factor=params.scaling_factor,
    )


def add_shared(
    x: torch.Tensor, shared: torch.Tensor, *, residual: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + (x + sigmoid(gate) * shared), [N, D] in the model dtype; `reference.add_shared`."""
    return reference.add_shared(x, shared, gate, residual, x.dtype)


def mix_sources(
    sources: Sequence[torch.Tensor], query: torch.Tensor, eps: float, *, place: str | None = None
) -> torch.Tensor:
    """`reference_residuals.mix_sources`.

    Args:
        place: None = the result may lie in a buffer that the next mix uses again; "" = it is a new tensor,
            but a single source comes back as it is.
    """
    return reference_residuals.mix_sources(sources, query, eps)
