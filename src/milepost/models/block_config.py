"""Configs of drafters that guess a block at once: DFlash and DSpark. No torch.

Three layouts are published: DFlash's own (keys of a Qwen3 config, the drafter's under `dflash_config`),
a dense latent-attention one (`k3_dspark`), and that of the speculators library
(`speculators_model_type`, the layers under `transformer_layer_config`, taps counted from one).
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milepost.config import SPECULATIVE_FIELD
from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.family_config import read_heads
from milepost.models.layout import (
    KEY_VALUE_FIELD,
    LATENT_FIELD,
    AttentionGroupLayout,
    TokenField,
)
from milepost.models.quantization import Role
from milepost.models.rope import RopeSpec, read_rope
from milepost.models.specs import DecoderSpec, MlaSpec

if TYPE_CHECKING:
    from milepost.models.draft_target import DraftTarget
    from milepost.models.dspark import BlockDrafter

DFLASH = "dflash"
DSPARK = "dspark"
BLOCK_METHODS = (DFLASH, DSPARK)
RUNNER = "block"
UNUSED_TENSORS = ("embed_tokens.", "lm_head.", "t2d", "d2t", "verifier_norm.", "verifier_lm_head.")
"""Prefixes of copies of the decoder's tensors, and of tables that only a smaller vocabulary needs."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_ROWS = 256
_DRAFTER_KEYS = "dflash_config"

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True)
class BlockLayerSpec:
    """Attributes:
    window: positions a row sees of what lies before it, see `BlockDrafterSpec.window_from_anchor`;
        None = all.
    is_causal: rows see those before them in the block, else the whole block.
    """

    window: int | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class BlockGqaSpec:
    """Grouped-query attention with per-head norms; all entries of a head are rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_width(self) -> int:
        """Values cached per token and layer for keys, and again for values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """A low-rank correction of a row's logits by the token before it."""

    rank: int
    kind: MarkovKind


@dataclass(frozen=True, slots=True)
class BlockDrafterSpec:
    """One block drafter. Implements `models.drafters.DrafterSpec`.

    Attributes:
        method: "dflash" or "dspark".
        directory: of its checkpoint.
        first_layer: number under which the entries of its first layer are kept, behind the decoder's.
        vocab_size: of the decoder. draft_vocab_size: ids it can guess; fewer need a table in its files.
        gqa, mla: sizes of the layers, one of them is None.
        target_layers: 0-based decoder layers behind which the residual stream is tapped, in the order in
            which the drafter joins the taps.
        norms_taps: each tap is normed before they are joined.
        block_rows: rows of a pass: the newest token, then mask tokens.
        samples_from_anchor: row j guesses the token behind its position, so that the newest token's row
            makes the first guess; else row j guesses the token at its position, and the first row none.
        window_from_anchor: a window of W reaches W positions back from the newest token, for all rows;
            else it is W positions up to and with the row itself.
        markov: None = rows are guessed independently.
        has_confidence: whether the checkpoint says that it estimates acceptance; None = its files tell.
        confidence_threshold: guesses end before the first one that, by that estimate, is reached and
            accepted with a smaller chance; 0 = none ends for that.
    """

    method: str
    directory: Path
    first_layer: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    layers: tuple[BlockLayerSpec, ...]
    gqa: BlockGqaSpec | None
    mla: MlaSpec | None
    rope: RopeSpec
    target_layers: tuple[int, ...]
    norms_taps: bool
    block_rows: int
    mask_token_id: int
    samples_from_anchor: bool
    window_from_anchor: bool
    markov: MarkovSpec | None
    has_confidence: bool | None
    confidence_threshold: float = 0.0

    @property
    def runner(self) -> str:
        return RUNNER

    @property
    def num_modules(self) -> int:
        return 1

    @property
    def num_guesses(self) -> int:
        """Tokens a pass guesses."""
        return self.block_rows if self.samples_from_anchor else self.block_rows - 1

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.target_layers))

    @property
    def skipped(self) -> tuple[str, ...]:
        return UNUSED_TENSORS

    def group(self, dtype: str) -> AttentionGroupLayout:
        """Per layer and token an entry; nothing once per page, an entry depends on its own token's taps."""
        if self.mla is not None:
            name, width = LATENT_FIELD, self.mla.latent_width
        else:
            assert self.gqa is not None
            name, width = KEY_VALUE_FIELD, 2 * self.gqa.kv_width
        layers = range(self.first_layer, self.first_layer + len(self.layers))
        return AttentionGroupLayout(
            self.method, tuple(TokenField(layer, name, width, dtype) for layer in layers)
        )

    def count_by_role(self) -> Counter[Role]:
        hidden, num_layers, num_taps = self.hidden_size, len(self.layers), len(self.target_layers)
        total = Counter[Role](
            {
                "projection": num_taps * hidden * hidden + num_layers * 3 * hidden * self.intermediate_size,
                "vector": (2 + num_taps * self.norms_taps + 2 * num_layers) * hidden,
            }
        )
        for _ in self.layers:
            total.update(_count_attention(self))
        if self.markov is not None:
            rank = self.markov.rank
            joint = {"vanilla": (0, 0), "gated": (hidden + rank, rank), "rnn": (2 * rank + hidden, 3 * rank)}
            width_in, width = joint[self.markov.kind]
            total["table"] += self.vocab_size * rank
            total["projection"] += self.draft_vocab_size * rank
            total["vector"] += (width_in + 1) * width
        if self.has_confidence is not False:
            total["vector"] += hidden + (0 if self.markov is None else self.markov.rank) + 1
        if self.draft_vocab_size < self.vocab_size:
            total["head"] += self.draft_vocab_size * hidden
        return total

    def load(self, target: DraftTarget) -> BlockDrafter:
        from milepost.models.dspark import BlockDrafter

        return BlockDrafter(self, target)


def no_confidence(who: str) -> ConfigError:
    """For a threshold without anything it could be held against."""
    return ConfigError(
        SPECULATIVE_FIELD,
        f"confidence_threshold needs a drafter that estimates how likely guesses are accepted, and {who} has "
        "no confidence_head; leave confidence_threshold out",
    )


def _count_attention(spec: BlockDrafterSpec) -> Counter[Role]:
    """Weights of the attention of one layer."""
    hidden = spec.hidden_size
    if spec.mla is None:
        assert spec.gqa is not None
        width = spec.gqa.num_heads * spec.gqa.head_dim
        return Counter[Role](
            {"projection": 2 * hidden * (width + spec.gqa.kv_width), "vector": 2 * spec.gqa.head_dim}
        )
    mla = spec.mla
    rank, query_width = mla.q_lora_rank, mla.num_heads * mla.qk_head_dim
    query = hidden * query_width if rank is None else rank * (hidden + query_width)
    out = hidden * mla.num_heads * mla.v_head_dim
    expand = mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return Counter[Role](
        {
            "projection": query + hidden * mla.latent_width + out,
            "absorbed": expand,
            "vector": (rank or 0) + mla.kv_lora_rank,
        }
    )


def read(
    method: str,
    decoder: DecoderSpec,
    config: ConfigReader | None,
    directory: Path | None,
    num_draft_tokens: int,
) -> BlockDrafterSpec:
    """The drafter that a checkpoint's config describes; `models.drafters.DraftMethod.read`.

    Args:
        method: what was asked for, one of `BLOCK_METHODS`.
        num_draft_tokens: most tokens to be guessed; how large the block is where the config leaves that open.

    Raises:
        ConfigError: it describes something else, a key is missing, wrong or asks for something that is not
            supported, or it was made for another decoder; names the key.
    """
    assert config is not None and directory is not None
    _check_kind(config, method)
    is_speculators, layers = config.has("speculators_model_type"), _layer_section(config)
    own = config.section(_DRAFTER_KEYS) if config.has(_DRAFTER_KEYS) else ConfigReader({}, "")
    _refuse_unsupported(config, layers, own)
    vocab_size = layers.integer("vocab_size")
    is_latent = layers.has("kv_lora_rank")
    gqa, mla = (None, _read_mla(layers)) if is_latent else (_read_gqa(layers), None)
    width = mla.qk_rope_head_dim if mla is not None else gqa.head_dim if gqa is not None else 0
    is_interleaved = is_latent and layers.boolean("rope_interleave", True)
    if not is_latent:
        is_interleaved = not layers.boolean("is_neox_style", True)
    samples_from_anchor = config.boolean("sample_from_anchor", method == DSPARK)
    rows_key = _where(config, own, "block_size")
    first = 0 if samples_from_anchor else 1
    spec = BlockDrafterSpec(
        method=method,
        directory=directory,
        first_layer=len(decoder.layers),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        hidden_size=layers.integer("hidden_size"),
        intermediate_size=layers.integer("intermediate_size"),
        norm_eps=layers.positive_number("rms_norm_eps", 1e-6),
        layers=_read_layers(config, layers, own, is_speculators),
        gqa=gqa,
        mla=mla,
        rope=read_rope(
            layers,
            width,
            is_interleaved=is_interleaved,
            scales_scores=is_latent,
            width_key="qk_rope_head_dim" if is_latent else "head_dim",
        ),
        target_layers=_read_target_layers(config, own, is_speculators),
        norms_taps=_where(config, own, "fc_norm").boolean("fc_norm", False),
        block_rows=rows_key.integer(
            "block_size", num_draft_tokens + first, minimum=1 + first, maximum=_MOST_ROWS
        ),
        mask_token_id=_where(config, own, "mask_token_id").integer("mask_token_id", minimum=0),
        samples_from_anchor=samples_from_anchor,
        window_from_anchor=is_speculators,
        markov=_read_markov(config, own) if method == DSPARK else None,
        has_confidence=_read_confidence(config, own) if method == DSPARK else False,
    )
    _check_decoder(spec, decoder, config, own)
    return spec


read_dflash = functools.partial(read, DFLASH)
read_dspark = functools.partial(read, DSPARK)


def _check_decoder(
    spec: BlockDrafterSpec, target: DecoderSpec, config: ConfigReader, own: ConfigReader
) -> None:
    """Refuses a drafter that was made for another decoder."""
    fix = "use the drafter that was published for this model"
    pairs = {
        "hidden_size": (spec.hidden_size, target.hidden_size),
        "vocab_size": (spec.vocab_size, target.vocab_size),
    }
    for key, (value, wanted) in pairs.items():
        if value != wanted:
            field = _layer_section(config).field(key)
            raise ConfigError(field, f"is {value}, but the model's is {wanted}; {fix}")
    tapped = config.optional_integer("target_hidden_size")
    if tapped is not None and tapped != target.hidden_size:
        raise ConfigError(
            config.field("target_hidden_size"),
            f"is {tapped}, but the model's hidden_size is {target.hidden_size}; {fix}",
        )
    # Some configs count the model's layers under this name, some the taps.
    counted = config.optional_integer("num_target_layers")
    if counted is not None and counted not in (len(target.layers), len(spec.target_layers)):
        raise ConfigError(
            config.field("num_target_layers"),
            f"is {counted}, but the model has {len(target.layers)} layers and "
            f"{len(spec.target_layers)} of them are tapped; {fix}",
        )
    for layer in spec.target_layers:
        if layer >= len(target.layers):
            raise ConfigError(
                _where(config, own, _tap_key(config)).field(_tap_key(config)),
                f"taps layer {layer}, but the model's {len(target.layers)} layers are numbered from 0; {fix}",
            )
    if spec.mask_token_id >= target.vocab_size:
        raise ConfigError(
            _where(config, own, "mask_token_id").field("mask_token_id"),
            f"is {spec.mask_token_id}, but the model's embeddings end at {target.vocab_size - 1}; {fix}",
        )


def recognises_dflash(config: ConfigReader) -> bool:
    """Whether a config is one of DFlash."""
    return _kind_of(config) == DFLASH


def recognises_dspark(config: ConfigReader) -> bool:
    """Whether a config is one of DSpark."""
    return _kind_of(config) == DSPARK


def _kind_key(config: ConfigReader) -> str:
    return "speculators_model_type" if config.has("speculators_model_type") else "architectures"


def _kind_of(config: ConfigReader) -> str | None:
    """The method a config is for; None = neither."""
    value = config.as_dict().get(_kind_key(config))
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    # A variant with other layers, and one for a decoder that is not served.
    if any(name.startswith(("dflash2", "dsv4")) for name in names):
        return None
    return next((kind for kind in (DSPARK, DFLASH) if any(kind in name for name in names)), None)


def _check_kind(config: ConfigReader, method: str) -> None:
    """Refuses a checkpoint that is no drafter, or one of another method."""
    kind, key = _kind_of(config), _kind_key(config)
    if kind == method:
        return
    if not config.has(key):
        raise ConfigError(
            config.field(key), f"is missing from config.json, which says no drafter of {method!r}"
        )
    found = config.as_dict()[key]
    other = "" if kind is None else f"; it is one of method {kind!r}, ask for that"
    raise ConfigError(config.field(key), f"{found!r} is no drafter of method {method!r}{other}")


def _refuse_unsupported(config: ConfigReader, layers: ConfigReader, own: ConfigReader) -> None:
    """Keys that would change what is computed."""
    plain = "the drafter is computed without"
    for reader in (config, layers):
        reader.must_equal("attention_bias", False, f"{plain} biases in attention")
        reader.must_equal("mlp_bias", False, f"{plain} biases in the MLP")
        reader.must_equal("hidden_act", "silu", "the MLP is a SwiGLU")
        reader.must_equal("add_swa_attention_sink_bias", False, f"{plain} attention sinks")
        reader.must_equal("logit_scale", 1.0, f"{plain} scaled logits")
        for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor"):
            reader.must_equal(key, False, f"{plain} it")
        if reader.has("quantization_config"):
            raise ConfigError(
                reader.field("quantization_config"), "is not supported; use a drafter in bf16 or fp32"
            )
    for key in ("n_routed_experts", "num_experts"):
        layers.must_equal(key, 0, "the MLP is dense")
    for reader in (config, own):
        reader.must_equal("projector_type", "dflash", f"{plain} other heads")
        reader.must_equal("shift_label", False, f"{plain} it; sample_from_anchor says what rows guess")
        reader.must_equal("aux_hidden_stream", "prefix", "taps are the residual stream behind a layer")
        reader.must_equal("use_aux_hidden_state", True, "the drafter reads taps")
        reader.must_equal("attention_sink_bias", False, f"{plain} attention sinks")
    if own.has("attention_modes") or own.text("attention_mode", "gqa") not in ("gqa", "mha", "mla"):
        key = "attention_modes" if own.has("attention_modes") else "attention_mode"
        raise ConfigError(own.field(key), "is not supported; all layers are 'gqa' or all are 'mla'")


def _layer_section(config: ConfigReader) -> ConfigReader:
    """Where the sizes of the layers are."""
    return config.section("transformer_layer_config") if config.has("speculators_model_type") else config


def _where(config: ConfigReader, own: ConfigReader, key: str) -> ConfigReader:
    """Where a key of the drafter is that some configs have at the top and some in a section."""
    return own if own.has(key) else config


def _tap_key(config: ConfigReader) -> str:
    return "aux_hidden_state_layer_ids" if config.has("speculators_model_type") else "target_layer_ids"


def _read_target_layers(config: ConfigReader, own: ConfigReader, is_speculators: bool) -> tuple[int, ...]:
    key = _tap_key(config)
    reader = _where(config, own, key)
    # There a layer's number means what enters it.
    first = 1 if is_speculators else 0
    numbers = reader.integers(key)
    if not numbers or min(numbers) < first or len(set(numbers)) < len(numbers):
        raise ConfigError(
            reader.field(key),
            f"must name at least one layer, none twice and none below {first}; not {numbers}",
        )
    return tuple(number - first for number in numbers)


def _read_gqa(layers: ConfigReader) -> BlockGqaSpec:
    num_heads, num_kv_heads = read_heads(layers)
    head_dim = layers.optional_integer("head_dim")
    if head_dim is None:
        head_dim = layers.integer("hidden_size") // num_heads
    return BlockGqaSpec(num_heads, num_kv_heads, head_dim)


def _read_mla(layers: ConfigReader) -> MlaSpec:
    return MlaSpec(
        num_heads=layers.integer("num_attention_heads"),
        q_lora_rank=layers.optional_integer("q_lora_rank"),
        kv_lora_rank=layers.integer("kv_lora_rank"),
        qk_nope_head_dim=layers.integer("qk_nope_head_dim"),
        qk_rope_head_dim=layers.integer("qk_rope_head_dim"),
        v_head_dim=layers.integer("v_head_dim"),
        latent_norm_eps=layers.positive_number("rms_norm_eps", 1e-6),
    )


def _read_layers(
    config: ConfigReader, layers: ConfigReader, own: ConfigReader, is_speculators: bool
) -> tuple[BlockLayerSpec, ...]:
    """Window and causality of every layer.

    `is_causal`, then `dflash_config.causal` hold for all layers. Otherwise full layers see the whole block,
    and sliding ones what is before a row, unless `sliding_window_non_causal`.
    """
    count = layers.num_layers("num_hidden_layers")
    kinds = layers.values("layer_types") if layers.has("layer_types") else [_FULL] * count
    if len(kinds) != count or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise ConfigError(
            layers.field("layer_types"),
            f"must name {count} layers, each {_FULL!r} or {_SLIDING!r}, as num_hidden_layers says",
        )
    if own.boolean("use_swa", False) and _SLIDING not in kinds:
        kinds = [_SLIDING] * count
    window = None
    if _SLIDING in kinds:
        has_own = own.has("swa_window_size")
        window = own.integer("swa_window_size") if has_own else layers.integer("sliding_window")
    explicit = config if config.has("is_causal") else layers
    sliding_is_causal = not (is_speculators and config.boolean("sliding_window_non_causal", False))
    result = []
    for kind in kinds:
        is_causal = kind == _SLIDING and sliding_is_causal
        if explicit.has("is_causal"):
            is_causal = explicit.boolean("is_causal")
        elif own.has("causal"):
            is_causal = own.boolean("causal")
        result.append(BlockLayerSpec(window if kind == _SLIDING else None, is_causal))
    return tuple(result)


def _read_markov(config: ConfigReader, own: ConfigReader) -> MarkovSpec | None:
    rank = _where(config, own, "markov_rank").integer("markov_rank", minimum=0)
    reader = _where(config, own, "markov_head_type")
    kind = reader.text("markov_head_type", "vanilla").lower()
    if kind not in ("vanilla", "gated", "rnn"):
        raise ConfigError(
            reader.field("markov_head_type"), f"{kind!r} is not supported; use 'vanilla', 'gated' or 'rnn'"
        )
    return MarkovSpec(rank, kind) if rank else None  # type: ignore[arg-type]


def _read_confidence(config: ConfigReader, own: ConfigReader) -> bool | None:
    reader = _where(config, own, "enable_confidence_head")
    return reader.boolean("enable_confidence_head") if reader.has("enable_confidence_head") else None
