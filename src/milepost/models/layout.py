"""Where each layer keeps what it caches inside a page or a state slot. No torch.

The model owns this; the geometry gets its bytes per token and per state from here, and the
runner's pools get offsets, shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from milepost.config import BF16, FP32, check_state_dtype
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.units import ceil_to
from milepost.models.specs import ITEM_BYTES, DecoderSpec, GqaSpec, MlaSpec

STATE_FIELD_ALIGNMENT = 64
"""Bytes; every field of a state starts on a cache line."""

DRAFT_COPY_BYTES = 64 << 20
"""Draft entries that are copied at the same time, or those of one request if they are more."""
LATENT_FIELD = "latent"
"""MLA: per token the normed latent followed by the shared key part."""
KEY_VALUE_FIELD = "key_value"
"""GQA: per token and key-value head the value, then the normed and rotated key."""
CONV_TAIL_FIELD = "conv_tail"
"""KDA, GDN: the last conv_kernel - 1 raw q|k|v rows before the convolution, oldest first."""
TAP_FIELD = "tap"
"""Draft modules: per page the hidden state that the module's next entry reads, see `draft_group`."""
STATE_MATRIX_FIELD = "state_matrix"
"""KDA, GDN: S, per (value) head [key dim, value dim]; fp32 while it runs."""
_STATE_DTYPES = {FP32: "float32", BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """One array inside a record.

    Attributes:
        layer: 0-based layer it belongs to.
        offset: bytes from the start of the record.
        dtype: name, a key of `ITEM_BYTES`.
    """

    layer: int
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TokenField:
    """What one layer caches per token: `width` values of `dtype`."""

    layer: int
    name: str
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class AttentionGroupLayout:
    """Attributes:
    token_fields: kept for every token.
    once_per_page: kept once in every page, behind the others.
    """

    name: str
    token_fields: tuple[TokenField, ...]
    once_per_page: tuple[TokenField, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return sum(field.width * ITEM_BYTES[field.dtype] for field in self.token_fields)

    @property
    def bytes_per_page(self) -> int:
        """Of what is kept once in a page."""
        return sum(field.width * ITEM_BYTES[field.dtype] for field in self.once_per_page)

    def page_fields(self, match_unit: int) -> tuple[FieldLayout, ...]:
        """Arrays of a page of `match_unit` tokens: layer after layer, each [match_unit, width], then those
        that it has once, each [width]."""
        fields = []
        offset = 0
        shapes = [(entry, (match_unit, entry.width)) for entry in self.token_fields]
        for token_field, shape in [*shapes, *((entry, (entry.width,)) for entry in self.once_per_page)]:
            page_field = FieldLayout(token_field.layer, token_field.name, offset, shape, token_field.dtype)
            fields.append(page_field)
            offset += page_field.num_bytes
        return tuple(fields)


@dataclass(frozen=True, slots=True)
class RecurrentGroupLayout:
    """Attributes:
    fields: of a running state.
    checkpoint_alignment: see `RecurrentGroupSpec`.
    checkpoint_fields: of a state that is kept, the same ones in the same order; None = it looks like a
        running one. `models.identity` names them apart from the rest of the layout.
    """

    name: str
    fields: tuple[FieldLayout, ...]
    checkpoint_alignment: int | None = 1
    checkpoint_fields: tuple[FieldLayout, ...] | None = dataclasses.field(default=None, repr=False)

    @property
    def state_bytes(self) -> int:
        """Bytes of a running state."""
        return _num_bytes(self.fields)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of a state that is kept; see `RecurrentGroupSpec`."""
        return None if self.checkpoint_fields is None else _num_bytes(self.checkpoint_fields)

    def kept_in(self, dtype: str) -> RecurrentGroupLayout:
        """The group when matrices are kept in `dtype`; convolution tails stay as they are."""
        shapes = [
            (entry.layer, entry.name, entry.shape, dtype if entry.name == STATE_MATRIX_FIELD else entry.dtype)
            for entry in self.fields
        ]
        kept = _packed_fields(shapes)
        return dataclasses.replace(self, checkpoint_fields=None if kept == self.fields else kept)


def _num_bytes(fields: Iterable[FieldLayout]) -> int:
    """Bytes up to the end of the last field, alignment gaps included."""
    return max(entry.offset + entry.num_bytes for entry in fields)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups of a model; group g here is group g of the geometry.

    Attributes:
        has_drafter: the last attention group is a drafter's. Its name says so as well, so it is no part of
            the text that identifies a layout.
    """

    attention: tuple[AttentionGroupLayout, ...]
    recurrent: tuple[RecurrentGroupLayout, ...]
    has_drafter: bool = dataclasses.field(default=False, repr=False)

    @property
    def draft_group(self) -> AttentionGroupLayout | None:
        """What a drafter remembers, the last attention group; None without one."""
        return self.attention[-1] if self.has_drafter else None

    @property
    def layer_state_bytes(self) -> int:
        """Running state bytes of one linear layer, the largest if they differ; 0 if there are none."""
        per_layer: Counter[int] = Counter()
        for group in self.recurrent:
            for entry in group.fields:
                per_layer[entry.layer] += entry.num_bytes
        return max(per_layer.values(), default=0)

    @property
    def rounds_checkpoints(self) -> bool:
        """Whether a state loses bits when it is kept, so that a hit is not what never having stopped is."""
        return any(group.checkpoint_fields is not None for group in self.recurrent)

    def kept_in(self, state_dtype: str) -> CacheLayout:
        """The layout when states are kept in `state_dtype`, a name of `config.STATE_DTYPES`.

        Raises:
            ConfigError: an unknown name.
        """
        check_state_dtype(state_dtype)
        groups = tuple(group.kept_in(_STATE_DTYPES[state_dtype]) for group in self.recurrent)
        return dataclasses.replace(self, recurrent=groups)

    def geometry(self, match_unit: int) -> CacheGeometry:
        """Sizes for the core."""
        return CacheGeometry(
            match_unit=match_unit,
            attention=tuple(
                AttentionGroupSpec(group.name, group.bytes_per_token, group.bytes_per_page)
                for group in self.attention
            ),
            recurrent=tuple(
                RecurrentGroupSpec(
                    group.name, group.state_bytes, group.checkpoint_alignment, group.checkpoint_bytes
                )
                for group in self.recurrent
            ),
        )


def cache_layout(spec: DecoderSpec, dtype: str, drafts: AttentionGroupLayout | None = None) -> CacheLayout:
    """Layout of a decoder whose KV cache and convolution tails are kept in `dtype`.

    Args:
        drafts: what a drafter keeps; it becomes the last attention group.
    """
    attention: list[AttentionGroupLayout] = []
    recurrent: list[RecurrentGroupLayout] = []
    if spec.mla is not None:
        width = spec.mla.latent_width
        fields = tuple(TokenField(layer, LATENT_FIELD, width, dtype) for layer in spec.layer_indices("mla"))
        attention.append(AttentionGroupLayout("mla", fields))
    if spec.gqa is not None:
        width = 2 * spec.gqa.kv_width
        fields = tuple(
            TokenField(layer, KEY_VALUE_FIELD, width, dtype) for layer in spec.layer_indices("gqa")
        )
        attention.append(AttentionGroupLayout("gqa", fields))
    if drafts is not None:
        attention.append(drafts)
    if spec.kda is not None:
        kda = spec.kda
        shapes = (
            (STATE_MATRIX_FIELD, (kda.num_heads, kda.head_dim, kda.head_dim), "float32"),
            (CONV_TAIL_FIELD, (kda.conv_kernel - 1, 3 * kda.width), dtype),
        )
        recurrent.append(RecurrentGroupLayout("kda", _layer_fields(spec.layer_indices("kda"), shapes)))
    if spec.gdn is not None:
        gdn = spec.gdn
        shapes = (
            (STATE_MATRIX_FIELD, (gdn.num_value_heads, gdn.key_dim, gdn.value_dim), "float32"),
            (CONV_TAIL_FIELD, (gdn.conv_kernel - 1, gdn.conv_width), dtype),
        )
        recurrent.append(RecurrentGroupLayout("gdn", _layer_fields(spec.layer_indices("gdn"), shapes)))
    return CacheLayout(tuple(attention), tuple(recurrent), drafts is not None)


def draft_group(
    name: str, layers: Sequence[int], mixer: MlaSpec | GqaSpec, tap_width: int, dtype: str
) -> AttentionGroupLayout:
    """What draft modules keep that hand hidden states on, one module per layer.

    Per module there are, as if it were a further layer of the decoder, the entries of its attention; entry j
    belongs to the token at position j and depends on tokens [0, j] only. Each page also holds one tap per
    module: what the module's first entry behind the page reads. Within a page that is not full it belongs
    to the newest token.

    Args:
        name: of the group.
        layers: under which modules keep their fields, behind those of the decoder.
        tap_width: values of a hidden state.
    """
    if isinstance(mixer, MlaSpec):
        entry, width = LATENT_FIELD, mixer.latent_width
    else:
        entry, width = KEY_VALUE_FIELD, 2 * mixer.kv_width
    return AttentionGroupLayout(
        name,
        tuple(TokenField(layer, entry, width, dtype) for layer in layers),
        tuple(TokenField(layer, TAP_FIELD, tap_width, dtype) for layer in layers),
    )


def _layer_fields(
    layers: tuple[int, ...], shapes: tuple[tuple[str, tuple[int, ...], str], ...]
) -> tuple[FieldLayout, ...]:
    """Fields of every layer, layer after layer."""
    return _packed_fields([(layer, *shape) for layer in layers for shape in shapes])


def _packed_fields(shapes: Iterable[tuple[int, str, tuple[int, ...], str]]) -> tuple[FieldLayout, ...]:
    """(layer, name, shape, dtype) one behind the other, each on a cache line."""
    fields: list[FieldLayout] = []
    end = 0
    for layer, name, shape, dtype in shapes:
        entry = FieldLayout(layer, name, ceil_to(end, STATE_FIELD_ALIGNMENT), shape, dtype)
        fields.append(entry)
        end = entry.offset + entry.num_bytes
    return tuple(fields)
