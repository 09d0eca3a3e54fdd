"""How many weights a decoder has, from its config alone. No torch."""

from __future__ import annotations

from milepost.models.specs import DecoderSpec


def count_parameters(spec: DecoderSpec, num_draft_modules: int = 0) -> int:
    """Weights of the whole decoder, embeddings included, and of that many draft modules; vision is not."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    total = embeddings + spec.hidden_size
    mixers = {"kda": _kda, "mla": _mla, "gdn": _gdn, "gqa": _gqa}
    per_mixer = {name: mixers[name](spec) for name in {layer.mixer for layer in spec.layers}}
    per_mlp = {"moe": _moe(spec), "dense": 3 * spec.hidden_size * spec.intermediate_size}
    for layer in spec.layers:
        total += 2 * spec.hidden_size + per_mixer[layer.mixer] + per_mlp[layer.mlp]
    if spec.attn_res_block_layers is not None:
        total += 2 * spec.hidden_size * (2 * len(spec.layers) + 1)
    return total + _drafts(spec, num_draft_modules)


def _drafts(spec: DecoderSpec, num_modules: int) -> int:
    """With the heads that modules in DeepSeek's layout are published with."""
    if not num_modules or spec.mtp is None:
        return 0
    layer = spec.draft_layer
    mixer = _mla(spec) if layer.mixer == "mla" else _gqa(spec)
    mlp = _moe(spec) if layer.mlp == "moe" else 3 * spec.hidden_size * spec.intermediate_size
    stem = (3 + 2 * spec.hidden_size) * spec.hidden_size
    layers = num_modules * (2 * spec.hidden_size + mixer + mlp)
    if spec.mtp.family == "qwen":
        return layers + stem
    return layers + num_modules * (stem + spec.vocab_size * spec.hidden_size)


def _kda(spec: DecoderSpec) -> int:
    kda = spec.kda
    if kda is None:
        return 0
    projections = 4 * spec.hidden_size * kda.width + 3 * kda.width * kda.conv_kernel
    low_rank = kda.head_dim * (spec.hidden_size + kda.width)
    gate = spec.hidden_size * kda.width if kda.full_rank_gate else low_rank
    small = spec.hidden_size * kda.num_heads + kda.num_heads + kda.width + kda.head_dim
    return projections + low_rank + gate + small


def _mla(spec: DecoderSpec) -> int:
    mla = spec.mla
    if mla is None:
        return 0
    query_out = mla.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        query = spec.hidden_size * query_out
    else:
        query = mla.q_lora_rank * (spec.hidden_size + 1 + query_out)
    latent = spec.hidden_size * mla.latent_width + mla.kv_lora_rank
    expand = mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    outputs = 2 if mla.output_gate else 1
    return query + latent + expand + outputs * mla.num_heads * mla.v_head_dim * spec.hidden_size


def _gdn(spec: DecoderSpec) -> int:
    gdn = spec.gdn
    if gdn is None:
        return 0
    inputs = spec.hidden_size * (gdn.conv_width + gdn.value_width + 2 * gdn.num_value_heads)
    small = gdn.conv_width * gdn.conv_kernel + 2 * gdn.num_value_heads + gdn.value_dim
    return inputs + small + gdn.value_width * spec.hidden_size


def _gqa(spec: DecoderSpec) -> int:
    gqa = spec.gqa
    if gqa is None:
        return 0
    width = gqa.num_heads * gqa.head_dim
    return spec.hidden_size * (3 * width + 2 * gqa.kv_width) + 2 * gqa.head_dim


def _moe(spec: DecoderSpec) -> int:
    moe = spec.moe
    if moe is None:
        return 0
    width = spec.hidden_size if moe.latent is None else moe.latent.width
    total = 3 * width * moe.expert_intermediate_size * moe.num_experts
    total += 3 * spec.hidden_size * moe.shared_intermediate_size
    total += moe.num_experts * (spec.hidden_size + (1 if moe.router == "sigmoid" else 0))
    if moe.shared_gate and moe.shared_intermediate_size:
        total += spec.hidden_size
    if moe.latent is not None:
        total += 2 * spec.hidden_size * width + (0 if moe.latent.norm_eps is None else width)
    return total
