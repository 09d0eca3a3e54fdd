"""Method `eagle3`: one layer over outputs of several decoder layers, as its own checkpoint describes it. No
torch.

Two layouts are published: EAGLE-3's own (keys of a Llama, Qwen3 or DeepSeek config, drafter keys beside
them, some under `eagle_config`), and that of the speculators library (`speculators_model_type`, the layer
under `transformer_layer_config`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import CheckpointFileError, ConfigError
from milepost.models.config_reader import ConfigReader, read_json_object
from milepost.models.family_config import read_heads
from milepost.models.kimi_k3 import read_situ
from milepost.models.layout import AttentionGroupLayout, draft_group
from milepost.models.quantization import Role
from milepost.models.rope import read_rope
from milepost.models.safetensors_file import INDEX_FILE, SINGLE_FILE, SafetensorsFile
from milepost.models.specs import DecoderSpec, GqaSpec, MlaSpec, SituSpec

if TYPE_CHECKING:
    from milepost.models.draft_target import DraftTarget
    from milepost.models.eagle3 import Eagle3Module

METHOD = "eagle3"
PREFIXES = ("", "model.")
"""In front of the names of all tensors but the head and `d2t`."""
LAYER_NAMES = ("midlayer", "layers.0")
SKIPPED = ("t2d", "verifier_norm.", "verifier_lm_head.")
"""The inverse of `d2t`, and copies of the decoder's tensors."""
_LAYER_SECTION = "transformer_layer_config"
_TAP_KEY = "eagle_aux_hidden_state_layer_ids"
_FIX = "use the drafter that was made for this model"
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Eagle3Drafter:
    """One drafter; a `drafters.DrafterSpec`.

    Attributes:
        directory: of its checkpoint.
        first_layer: number under which its entries are kept, behind the decoder's layers.
        target_hidden_size, vocab_size: of the decoder.
        draft_vocab_size: tokens it can guess; if they are fewer, a table says which.
        tap_layers: 0-based decoder layers whose outputs it reads, ascending.
        gqa, mla: sizes of its attention, one of them is None.
        situ: activation of its MLP; None = SwiGLU.
        norms_taps: every tap is normed before they are joined.
        norms_joined_taps: they are normed together.
        hands_on_normed: the next guess is made from the normed output.
        adds_to_normed: the residual stream starts with the normed hidden state.
        has_embedding, has_head: its files hold these; else they are the decoder's.
    """

    directory: Path
    first_layer: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    tap_layers: tuple[int, ...]
    gqa: GqaSpec | None
    mla: MlaSpec | None
    situ: SituSpec | None
    norms_taps: bool
    norms_joined_taps: bool
    hands_on_normed: bool
    adds_to_normed: bool
    has_embedding: bool
    has_head: bool
    method: str = METHOD
    runner: str = "chain"
    num_modules: int = 1
    skipped: tuple[str, ...] = SKIPPED

    @property
    def attention(self) -> GqaSpec | MlaSpec:
        spec = self.gqa or self.mla
        assert spec is not None
        return spec

    def group(self, dtype: str) -> AttentionGroupLayout:
        return draft_group(METHOD, (self.first_layer,), self.attention, self.hidden_size, dtype)

    def count_by_role(self) -> Counter[Role]:
        hidden, joined = self.hidden_size, len(self.tap_layers) * self.target_hidden_size
        total = Counter[Role](
            {
                "projection": joined * hidden + 3 * hidden * self.intermediate_size,
                "vector": 4 * hidden + joined * (self.norms_taps + self.norms_joined_taps),
            }
        )
        if self.gqa is not None:
            width = self.gqa.num_heads * self.gqa.head_dim
            total["projection"] += 2 * hidden * (width + 2 * self.gqa.kv_width) + width * hidden
            total["vector"] += 2 * self.gqa.head_dim if self.gqa.head_norms else 0
        if self.mla is not None:
            mla, out = self.mla, self.mla.num_heads * self.mla.v_head_dim
            query_width = mla.num_heads * mla.qk_head_dim
            rank = mla.q_lora_rank
            query = 2 * hidden * query_width if rank is None else rank * (2 * hidden + query_width)
            gate = 2 * hidden * out if mla.output_gate else 0
            total["projection"] += query + 2 * hidden * mla.latent_width + gate + out * hidden
            total["absorbed"] += mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
            total["vector"] += mla.kv_lora_rank + (rank or 0)
        total["table"] += self.vocab_size * hidden if self.has_embedding else 0
        total["head"] += self.draft_vocab_size * hidden if self.has_head else 0
        return total

    def load(self, target: DraftTarget) -> Eagle3Module:
        from milepost.models.eagle3 import Eagle3Module

        return Eagle3Module(self, target)


def recognises(config: ConfigReader) -> bool:
    """Whether a config is one of EAGLE-3."""
    if config.has("speculators_model_type"):
        return bool(config.as_dict()["speculators_model_type"] == METHOD)
    names = config.as_dict().get("architectures")
    if isinstance(names, list) and any(METHOD in str(name).lower() for name in names):
        return True
    # Drafters that guess a block at once may name taps in the same way.
    return config.has(_TAP_KEY) and not config.has("mask_token_id") and not config.has("dflash_config")


def read(
    decoder: DecoderSpec, config: ConfigReader | None, directory: Path | None, num_draft_tokens: int
) -> Eagle3Drafter:
    """The drafter that a checkpoint's config describes; `drafters.DraftMethod.read`.

    Raises:
        ConfigError: a key is missing, wrong or asks for something that is not supported, or the drafter was
            made for another decoder; names the key and what to do.
    """
    assert config is not None and directory is not None
    is_speculators = config.has("speculators_model_type")
    if is_speculators:
        config.must_equal("speculators_model_type", METHOD, f"it is no drafter of method {METHOD!r}")
    layer = config.section(_LAYER_SECTION) if config.has(_LAYER_SECTION) else config
    own = config.section("eagle_config") if config.has("eagle_config") else config
    _refuse_unsupported(layer, own)
    names = _tensor_names(directory)
    is_latent = layer.has("kv_lora_rank")
    drafter = Eagle3Drafter(
        directory=directory,
        first_layer=len(decoder.layers),
        target_hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        draft_vocab_size=config.integer(
            "draft_vocab_size", layer.integer("vocab_size"), maximum=layer.integer("vocab_size")
        ),
        hidden_size=layer.integer("hidden_size"),
        intermediate_size=layer.integer("intermediate_size"),
        norm_eps=layer.positive_number("rms_norm_eps", _NORM_EPS),
        tap_layers=_tap_layers(config, own, len(decoder.layers)),
        gqa=None if is_latent else _gqa(layer, names),
        mla=_mla(layer) if is_latent else None,
        situ=read_situ(layer) if layer.has("hidden_act") else None,
        norms_taps=_flag(config, own, "fc_norm"),
        norms_joined_taps=_flag(config, own, "norm_before_fc"),
        hands_on_normed=_flag(config, own, "norm_output"),
        # Drafters in speculators' layout that do not say it were trained so.
        adds_to_normed=_flag(config, own, "norm_before_residual", default=is_speculators),
        has_embedding=any(prefix + "embed_tokens.weight" in names for prefix in PREFIXES),
        has_head="lm_head.weight" in names,
    )
    _check_decoder(drafter, config, layer)
    return drafter


def _check_decoder(drafter: Eagle3Drafter, config: ConfigReader, layer: ConfigReader) -> None:
    """Refuses a drafter that was made for another decoder."""
    vocab_size = layer.integer("vocab_size")
    if vocab_size != drafter.vocab_size:
        raise ConfigError(
            layer.field("vocab_size"), f"is {vocab_size}, but the model's is {drafter.vocab_size}; {_FIX}"
        )
    width, wanted = drafter.hidden_size, drafter.target_hidden_size
    if config.has("target_hidden_size"):
        read = config.integer("target_hidden_size")
        if read != wanted:
            raise ConfigError(
                config.field("target_hidden_size"),
                f"is {read}, but the model's hidden_size is {wanted}; {_FIX}",
            )
    elif width != wanted:
        raise ConfigError(
            layer.field("hidden_size"),
            f"is {width}, but the model's is {wanted}, and no target_hidden_size says that it reads "
            f"states of another size; {_FIX}",
        )
    if width != wanted and not (drafter.has_embedding and drafter.has_head):
        raise ConfigError(
            layer.field("hidden_size"),
            f"is {width}, but the model's is {wanted}: the drafter needs an embedding and a head of "
            f"its own, and its files lack embed_tokens.weight or lm_head.weight; {_FIX}",
        )
    if drafter.draft_vocab_size < drafter.vocab_size and not drafter.has_head:
        raise ConfigError(
            config.field("draft_vocab_size"),
            f"is {drafter.draft_vocab_size}, fewer than the {drafter.vocab_size} tokens of the model, so "
            f"that the drafter needs a head of its own, but its files lack lm_head.weight; {_FIX}",
        )


def _refuse_unsupported(layer: ConfigReader, own: ConfigReader) -> None:
    """Keys that would change what is computed."""
    plain = "the drafter is computed without"
    layer.must_equal("num_hidden_layers", 1, "drafters of method 'eagle3' have one layer here")
    layer.must_equal("attention_bias", False, f"{plain} biases in attention")
    layer.must_equal("qkv_bias", False, f"{plain} biases in attention")
    layer.must_equal("mlp_bias", False, f"{plain} biases in the MLP")
    layer.must_equal("logit_scale", 1.0, f"{plain} scaled logits")
    layer.must_equal("use_sliding_window", False, f"{plain} sliding windows")
    own.must_equal("use_aux_hidden_state", True, "the drafter reads outputs of several layers")
    own.must_equal("parallel_drafting", False, "tokens are guessed one after the other")
    if layer.has("layer_types") and "sliding_attention" in layer.values("layer_types"):
        raise ConfigError(
            layer.field("layer_types"), "sliding windows are not supported for drafters of 'eagle3'"
        )
    if layer.has("quantization_config"):
        raise ConfigError(
            layer.field("quantization_config"), "is not supported; use a drafter in bf16 or fp32"
        )


def _tap_layers(config: ConfigReader, own: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """0-based; published ids count from one: id i is the output of layer i - 1."""
    reader = config if config.has(_TAP_KEY) else own
    if reader.has(_TAP_KEY):
        ids = reader.integers(_TAP_KEY)
    else:
        ids = [2, num_layers // 2, num_layers - 3]
    field = reader.field(_TAP_KEY)
    outside = [number for number in ids if not 1 <= number <= num_layers]
    if not ids or outside:
        raise ConfigError(
            field,
            f"{'names no layer' if not ids else f'names layer {outside[0]}'}; the model has {num_layers} "
            f"layers, counted from 1; {_FIX}",
        )
    if any(one >= other for one, other in itertools.pairwise(ids)):
        given = "must ascend, not" if reader.has(_TAP_KEY) else "is missing, and the usual layers would be"
        raise ConfigError(field, f"{given} {ids}; name the layers that the drafter was trained with")
    if config.has("num_aux_hidden_states") and config.integer("num_aux_hidden_states") != len(ids):
        raise ConfigError(
            config.field("num_aux_hidden_states"),
            f"is {config.integer('num_aux_hidden_states')}, but {len(ids)} layers are named: {ids}",
        )
    return tuple(number - 1 for number in ids)


def _flag(config: ConfigReader, own: ConfigReader, key: str, *, default: bool = False) -> bool:
    return (own if own.has(key) else config).boolean(key, default)


def _gqa(layer: ConfigReader, names: frozenset[str]) -> GqaSpec:
    num_heads, num_kv_heads = read_heads(layer)
    is_qwen = layer.text("model_type", "llama").startswith("qwen3")
    head_dim = layer.integer("head_dim", 128 if is_qwen else layer.integer("hidden_size") // num_heads)
    rope = read_rope(layer, head_dim, is_interleaved=False, scales_scores=False)
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope_theta=rope.theta,
        norm_eps=layer.positive_number("rms_norm_eps", _NORM_EPS),
        rope=rope,
        output_gate=False,
        head_norms=is_qwen or any(name.endswith("self_attn.q_norm.weight") for name in names),
    )


def _mla(layer: ConfigReader) -> MlaSpec:
    num_heads, rotary_dim = layer.integer("num_attention_heads"), layer.integer("qk_rope_head_dim")
    rope = None
    if not layer.boolean("mla_use_nope", False):
        is_interleaved = layer.boolean("rope_interleave", True)
        rope = read_rope(
            layer,
            rotary_dim,
            is_interleaved=is_interleaved,
            scales_scores=True,
            width_key="qk_rope_head_dim",
        )
    norm_eps = layer.positive_number("rms_norm_eps", _NORM_EPS)
    return MlaSpec(
        num_heads=num_heads,
        q_lora_rank=layer.optional_integer("q_lora_rank"),
        kv_lora_rank=layer.integer("kv_lora_rank"),
        qk_nope_head_dim=layer.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rotary_dim,
        v_head_dim=layer.integer("v_head_dim"),
        latent_norm_eps=layer.positive_number("mla_latent_norm_eps", norm_eps),
        output_gate=layer.boolean("mla_use_output_gate", False),
        rope=rope,
    )


def _tensor_names(directory: Path) -> frozenset[str]:
    """Names in the checkpoint's files.

    Raises:
        CheckpointFileError: there are none.
    """
    if (directory / INDEX_FILE).exists():
        weight_map = read_json_object(directory / INDEX_FILE).get("weight_map")
        return frozenset(weight_map if isinstance(weight_map, dict) else ())
    if not (directory / SINGLE_FILE).exists():
        raise CheckpointFileError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return frozenset(SafetensorsFile(directory / SINGLE_FILE).entries)
