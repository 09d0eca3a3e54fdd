"""Drafters that guess a block in one pass: DFlash, and the backbone of DSpark.

The decoder's residual stream is tapped behind a few layers. Of every processed token t

    c_t = norm(projection([tap of layer a; tap of layer b; ...]))

is all the drafter knows, and of c_t each of its layers keeps only a key and a value (or a latent), as it
would of its own rows, at position t. So entry t depends on the decoder's pass over tokens [0, t] and on
nothing the drafter did. A block is the newest token and mask tokens behind it, embedded by the decoder's
embedding; its rows read the entries before them and each other, and go once through all layers and the
decoder's head.

Names: `fc`, `hidden_norm`, `norm` and a Qwen3 layer with grouped-query attention; or `context_proj`,
`context_norm`, `final_norm` and a layer with latent attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from milepost.kernels import reference_gqa
from milepost.kernels.block_attention import BlockContext, attend_block
from milepost.kernels.index import AttentionIndex
from milepost.kernels.reference import per_head_linear, rms_norm, store_rows
from milepost.kernels.reference_gqa import GqaParams, Turns
from milepost.models.block_config import BlockDrafterSpec, BlockGqaSpec, BlockLayerSpec
from milepost.models.draft_target import DraftTarget
from milepost.models.inputs import CacheFields
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.layout import KEY_VALUE_FIELD, LATENT_FIELD
from milepost.models.rope import RopeSpec, inverse_frequencies
from milepost.models.specs import MlaSpec
from milepost.models.weights import WeightReader

_PREFIXES = ("", "model.")


@dataclass(frozen=True, slots=True)
class BlockLane:
    """One request that a block is drafted for.

    Attributes:
        token: the newest token; it stands at `position` and was not processed.
        position: number of processed tokens; their entries are in the pages.
        table: int64 page ids that cover [0, position).
    """

    token: int
    position: int
    table: torch.Tensor


class Rotary:
    """Rotates heads by their position. Pairs that are neighbours in the files are halves in here, for
    queries and keys alike, which changes no product of theirs."""

    def __init__(self, rope: RopeSpec) -> None:
        self._is_interleaved = rope.is_interleaved
        self._amplitude = rope.amplitude
        self._frequencies = torch.tensor(inverse_frequencies(rope), dtype=torch.float32)

    @property
    def plain_frequencies(self) -> torch.Tensor | None:
        """fp32 [width / 2], if that is all there is to it: halves, and nothing is multiplied."""
        return None if self._is_interleaved or self._amplitude != 1.0 else self._frequencies

    def turns(self, positions: torch.Tensor) -> Turns:
        """Of positions int64 [N]."""
        return reference_gqa.turns(positions.float().unsqueeze(1) * self._frequencies)

    def __call__(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        """x fp32 [N, H, width]."""
        if self._is_interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        rotated = reference_gqa.turned(x, turns)
        return rotated if self._amplitude == 1.0 else rotated * self._amplitude


@dataclass(frozen=True, slots=True)
class Block:
    """What all layers of a pass share.

    Attributes:
        turns: of all rows, those of a lane behind each other.
    """

    lanes: Sequence[BlockLane]
    turns: Turns


class BlockAttention(Protocol):
    """Mixer of one layer."""

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        """Stores entries of context rows x [N, D]."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, cache: CacheFields, block: Block
    ) -> torch.Tensor:
        """Rows of blocks [lanes * block rows, D] after the input norm -> residual + output."""


class GqaBlockAttention:
    """Grouped-query attention with per-head norms. Entries: per key-value head value, then rotated key."""

    def __init__(
        self,
        loader: Loader,
        layer: int,
        spec: BlockDrafterSpec,
        sizes: BlockGqaSpec,
        layer_spec: BlockLayerSpec,
        rotary: Rotary,
    ) -> None:
        hidden, width = spec.hidden_size, sizes.num_heads * sizes.head_dim
        self._kernels, self._layer, self._rotary = loader.kernels, layer, rotary
        self._spec, self._sizes, self._layer_spec = spec, sizes, layer_spec
        self._query = loader.pack_linear(loader.linear("q_proj", hidden, width))
        parts = (sizes.kv_width, sizes.kv_width)
        entries = loader.stacked(("k_proj", "v_proj"), hidden, parts)
        self._entries = loader.pack_linear(entries, parts=parts)
        self._out = loader.pack_linear(loader.linear("o_proj", width, hidden))
        self._query_norm = loader.tensor_fp32("q_norm.weight", sizes.head_dim)
        self._key_norm = loader.tensor_fp32("k_norm.weight", sizes.head_dim)
        self._scale = sizes.head_dim**-0.5 * spec.rope.score_factor
        self._stored: GqaParams | None = None
        if rotary.plain_frequencies is not None:
            self._stored = GqaParams(
                num_heads=sizes.num_kv_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                query_norm=self._key_norm,
                key_norm=self._key_norm,
                norm_eps=spec.norm_eps,
                inverse_frequencies=rotary.plain_frequencies,
            )

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        pages = cache[self._layer, KEY_VALUE_FIELD]
        if self._stored is not None:
            key, value = self._kernels.linear_parts(x, self._entries)
            self._kernels.store_keys_values(key, value, self._stored, pages, index)
            return
        key, value = self._keys_values(x, self._rotary.turns(reference_gqa.row_positions(index)))
        store_rows(pages, torch.cat([value, key], dim=-1).flatten(1), index)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, cache: CacheFields, block: Block
    ) -> torch.Tensor:
        sizes = self._sizes
        query = self._kernels.linear(x, self._query).reshape(x.shape[0], sizes.num_heads, sizes.head_dim)
        query = self._rotary(rms_norm(query.float(), self._query_norm, self._spec.norm_eps), block.turns)
        key, value = self._keys_values(x, block.turns)
        pages = cache[self._layer, KEY_VALUE_FIELD]
        mixed = torch.empty_like(query)
        for rows, context in contexts(self._spec, self._layer_spec, block.lanes, pages):
            mixed[rows] = attend_block(
                query[rows],
                key[rows],
                value[rows],
                context,
                self._split,
                is_causal=self._layer_spec.is_causal,
                scale=self._scale,
            )
        return self._kernels.linear(mixed.flatten(1).to(x.dtype), self._out, residual=residual)

    def _keys_values(self, x: torch.Tensor, turns: Turns) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 [N, heads, head_dim] each, keys normed and rotated."""
        shape = (x.shape[0], self._sizes.num_kv_heads, self._sizes.head_dim)
        key, value = self._kernels.linear_parts(x, self._entries)
        key = rms_norm(key.reshape(shape).float(), self._key_norm, self._spec.norm_eps)
        return self._rotary(key, turns), value.reshape(shape).float()

    def _split(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = stored.view(stored.shape[0], self._sizes.num_kv_heads, 2, self._sizes.head_dim).float()
        return rows[:, :, 1], rows[:, :, 0]


class LatentBlockAttention:
    """Latent attention with rotary positions, absorbed. Entries: normed latent, then rotated shared key."""

    def __init__(
        self,
        loader: Loader,
        layer: int,
        spec: BlockDrafterSpec,
        sizes: MlaSpec,
        layer_spec: BlockLayerSpec,
        rotary: Rotary,
    ) -> None:
        hidden, heads, rank = spec.hidden_size, sizes.num_heads, sizes.q_lora_rank
        self._kernels, self._layer, self._rotary = loader.kernels, layer, rotary
        self._spec, self._sizes, self._layer_spec = spec, sizes, layer_spec
        pack, width = loader.pack_linear, heads * sizes.qk_head_dim
        self._low: tuple[Any, RmsNorm] | None = None
        if rank is not None:
            norm = RmsNorm(loader, "q_a_layernorm", rank, sizes.latent_norm_eps)
            self._low = pack(loader.linear("q_a_proj", hidden, rank)), norm
        name, width_in = ("q_proj", hidden) if rank is None else ("q_b_proj", rank)
        self._query = pack(loader.linear(name, width_in, width))
        self._entries = pack(loader.linear("kv_a_proj_with_mqa", hidden, sizes.latent_width))
        self._latent_norm = loader.tensor_fp32("kv_a_layernorm.weight", sizes.kv_lora_rank)
        per_head = sizes.qk_nope_head_dim + sizes.v_head_dim
        expand = loader.linear("kv_b_proj", sizes.kv_lora_rank, heads * per_head).float()
        expand = expand.view(heads, per_head, sizes.kv_lora_rank)
        self._expand_key = expand[:, : sizes.qk_nope_head_dim].contiguous()
        self._expand_value = expand[:, sizes.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self._out = pack(loader.linear("o_proj", heads * sizes.v_head_dim, hidden))
        self._scale = sizes.qk_head_dim**-0.5 * spec.rope.score_factor

    def store(self, x: torch.Tensor, cache: CacheFields, index: AttentionIndex) -> None:
        rows = self._latents(x, self._rotary.turns(reference_gqa.row_positions(index))).squeeze(1)
        store_rows(cache[self._layer, LATENT_FIELD], rows, index)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, cache: CacheFields, block: Block
    ) -> torch.Tensor:
        sizes = self._sizes
        entries = self._latents(x, block.turns)
        read = x
        if self._low is not None:
            down, norm = self._low
            read = norm(self._kernels.linear(x, down))
        query = self._kernels.linear(read, self._query).view(x.shape[0], sizes.num_heads, -1).float()
        content, shared = query.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        absorbed = per_head_linear(content, self._expand_key)
        query = torch.cat([absorbed, self._rotary(shared, block.turns)], dim=-1)
        pages = cache[self._layer, LATENT_FIELD]
        mixed = query.new_empty(x.shape[0], sizes.num_heads, sizes.kv_lora_rank)
        for rows, context in contexts(self._spec, self._layer_spec, block.lanes, pages):
            mixed[rows] = attend_block(
                query[rows],
                *self._split(entries[rows].squeeze(1)),
                context,
                self._split,
                is_causal=self._layer_spec.is_causal,
                scale=self._scale,
            )
        values = per_head_linear(mixed, self._expand_value).to(x.dtype)
        return self._kernels.linear(values.flatten(1), self._out, residual=residual)

    def _latents(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        """fp32 [N, 1, latent + shared]."""
        sizes = self._sizes
        entries = self._kernels.linear(x, self._entries).float().unsqueeze(1)
        latent, shared = entries.split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        latent = rms_norm(latent, self._latent_norm, sizes.latent_norm_eps)
        return torch.cat([latent, self._rotary(shared, turns)], dim=-1)

    def _split(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = stored.float().unsqueeze(1)
        return rows, rows[..., : self._sizes.kv_lora_rank]


def block_positions(spec: BlockDrafterSpec, lanes: Sequence[BlockLane]) -> torch.Tensor:
    """int64 [lanes * block rows]."""
    starts = torch.tensor([lane.position for lane in lanes])
    return (starts.unsqueeze(1) + torch.arange(spec.block_rows)).flatten()


def contexts(
    spec: BlockDrafterSpec, layer: BlockLayerSpec, lanes: Sequence[BlockLane], pages: torch.Tensor
) -> list[tuple[slice, BlockContext]]:
    """Rows of every lane, and what they see before the block."""
    result = []
    for number, lane in enumerate(lanes):
        first_seen = [0] * spec.block_rows
        if layer.window is not None:
            first = lane.position - layer.window
            first_seen = [
                first + (0 if spec.window_from_anchor else 1 + row) for row in range(spec.block_rows)
            ]
        rows = slice(number * spec.block_rows, (number + 1) * spec.block_rows)
        result.append((rows, BlockContext(pages, lane.table, lane.position, first_seen)))
    return result


class BlockLayer:
    """Norm and attention, norm and MLP; each adds to a residual stream in the model dtype."""

    def __init__(
        self, loader: Loader, layer: int, spec: BlockDrafterSpec, layer_spec: BlockLayerSpec, rotary: Rotary
    ) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self._attention_norm = RmsNorm(loader, "input_layernorm", hidden, eps)
        self._mlp_norm = RmsNorm(loader, "post_attention_layernorm", hidden, eps)
        self._mlp = DenseMlp(loader.under("mlp"), hidden, spec.intermediate_size, name="draft.mlp")
        under = loader.under("self_attn")
        self.attention: BlockAttention
        if spec.mla is not None:
            self.attention = LatentBlockAttention(under, layer, spec, spec.mla, layer_spec, rotary)
        else:
            assert spec.gqa is not None
            self.attention = GqaBlockAttention(under, layer, spec, spec.gqa, layer_spec, rotary)

    def __call__(self, x: torch.Tensor, cache: CacheFields, block: Block) -> torch.Tensor:
        """x [lanes * block rows, D]; may be overwritten."""
        x = self.attention(self._attention_norm.new(x), x, cache, block)
        return self._mlp(self._mlp_norm(x), x)


class BlockBackbone:
    """The layers of a block drafter, with the decoder's embedding.

    Attributes:
        spec: its sizes.
        loader: of its files, for the heads behind the layers.
    """

    def __init__(self, spec: BlockDrafterSpec, weights: WeightReader, target: DraftTarget) -> None:
        """
        Args:
            weights: of the drafter's directory.

        Raises:
            CheckpointFileError: a tensor is missing or has another shape.
        """
        self.spec = spec
        self._kernels, self._decoder = target.kernels, target.decoder
        is_latent = spec.mla is not None
        names = ("context_proj", "context_norm", "final_norm") if is_latent else ("fc", "hidden_norm", "norm")
        prefix = weights.prefix(_PREFIXES, f"{names[0]}.weight")
        self.loader = loader = target.loader(weights, prefix)
        hidden, eps, taps = spec.hidden_size, spec.norm_eps, len(spec.target_layers)
        # Files join taps in the order of `target_layers`; here they come in order of their layers.
        places = [spec.target_layers.index(layer) for layer in spec.tap_layers]
        joined = loader.linear(names[0], taps * hidden, hidden).view(hidden, taps, hidden)
        self._projection = loader.pack_linear(joined[:, places].flatten(1))
        self._context_norm = RmsNorm(loader, names[1], hidden, eps)
        self._norm = RmsNorm(loader, names[2], hidden, eps)
        self._tap_norms: list[RmsNorm] = []
        if spec.norms_taps:
            self._tap_norms = [RmsNorm(loader, f"fc_norm.{place}", hidden, eps) for place in places]
        rotary = self._rotary = Rotary(spec.rope)
        self._layers = []
        for number, layer_spec in enumerate(spec.layers):
            under = loader.under(f"layers.{number}")
            self._layers.append(BlockLayer(under, spec.first_layer + number, spec, layer_spec, rotary))
            weights.release()

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """[N, D], what layers keep entries of; taps [N, taps * D] in the order of `spec.tap_layers`."""
        if self._tap_norms:
            normed = torch.empty_like(taps)
            columns = (x.split(self.spec.hidden_size, dim=-1) for x in (taps, normed))
            for norm, part, out in zip(self._tap_norms, *columns, strict=True):
                norm(part, out=out)
            taps = normed
        return self._context_norm.new(self._kernels.linear(taps, self._projection))

    def store(self, taps: torch.Tensor, index: AttentionIndex, cache: CacheFields) -> None:
        """Stores the entries of processed rows, see `context`; `index` has their positions and places."""
        context = self.context(taps)
        for layer in self._layers:
            layer.attention.store(context, cache, index)

    def run(self, lanes: Sequence[BlockLane], cache: CacheFields) -> torch.Tensor:
        """One pass over a block behind each lane: what the head reads, [lanes, block rows, D].

        Nothing is stored.
        """
        spec = self.spec
        token_ids = torch.full((len(lanes), spec.block_rows), spec.mask_token_id, dtype=torch.int64)
        token_ids[:, 0] = torch.tensor([lane.token for lane in lanes])
        x = self._decoder.embed(token_ids.flatten())
        block = Block(lanes, self._rotary.turns(block_positions(spec, lanes)))
        for layer in self._layers:
            x = layer(x, cache, block)
        return self._norm.new(x).view(len(lanes), spec.block_rows, -1)
