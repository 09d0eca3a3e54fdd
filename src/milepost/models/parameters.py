"""How many weights a decoder has and what quantisation saves, from its config alone. No torch."""

from __future__ import annotations

from collections import Counter

from milepost.models.quantization import Quantization, Role
from milepost.models.specs import ITEM_BYTES, DecoderSpec, LayerSpec


def count_parameters(spec: DecoderSpec) -> int:
    """Weights of the whole decoder, embeddings included; vision and drafters are not."""
    return count_by_role(spec).total()


def count_by_role(spec: DecoderSpec) -> Counter[Role]:
    """The same, by what they are for. A head that is tied to the embeddings counts with these."""
    total = Counter[Role]({"vector": spec.hidden_size, "table": spec.vocab_size * spec.hidden_size})
    if not spec.tie_word_embeddings:
        total["head"] = spec.vocab_size * spec.hidden_size
    counts = {layer: count_layer(spec, layer) for layer in set(spec.layers)}
    for layer in spec.layers:
        total.update(counts[layer])
    if spec.attn_res_block_layers is not None:
        total["vector"] += 2 * spec.hidden_size * (2 * len(spec.layers) + 1)
    return total


def count_layer(spec: DecoderSpec, layer: LayerSpec) -> Counter[Role]:
    """Weights of one layer with such a mixer and MLP, norms included."""
    mixers = {"kda": _kda, "mla": _mla, "gdn": _gdn, "gqa": _gqa}
    total = Counter[Role]({"vector": 2 * spec.hidden_size})
    total.update(mixers[layer.mixer](spec))
    total.update(_moe(spec) if layer.mlp == "moe" else _dense(spec))
    return total


def _dense(spec: DecoderSpec) -> Counter[Role]:
    return Counter[Role]({"projection": 3 * spec.hidden_size * spec.intermediate_size})


def bytes_saved(
    spec: DecoderSpec, dtype: str, quantization: Quantization | None, counts: Counter[Role] | None = None
) -> int:
    """By which quantised weights are smaller than weights of the dtype; packed experts are so anyway.

    Args:
        counts: of all weights that are loaded; None = those of the decoder.
    """
    if quantization is None:
        return 0
    saved = 0
    for role, count in (count_by_role(spec) if counts is None else counts).items():
        scheme = quantization.scheme(role)
        is_packed = role == "expert" and spec.moe is not None and spec.moe.packed_mxfp4
        if scheme is not None and not is_packed:
            saved += count * ITEM_BYTES[dtype] - scheme.num_bytes(count)
    return saved


def _kda(spec: DecoderSpec) -> Counter[Role]:
    kda = spec.kda
    if kda is None:
        return Counter[Role]()
    low_rank = kda.head_dim * (spec.hidden_size + kda.width)
    gate = spec.hidden_size * kda.width if kda.full_rank_gate else low_rank
    projections = 4 * spec.hidden_size * kda.width + spec.hidden_size * kda.num_heads
    vectors = 3 * kda.width * kda.conv_kernel + kda.num_heads + kda.width + kda.head_dim
    return Counter[Role]({"projection": projections + low_rank + gate, "vector": vectors})


def _mla(spec: DecoderSpec) -> Counter[Role]:
    mla = spec.mla
    if mla is None:
        return Counter[Role]()
    query_out = mla.num_heads * mla.qk_head_dim
    rank = mla.q_lora_rank
    query = spec.hidden_size * query_out if rank is None else rank * (spec.hidden_size + query_out)
    outputs = (2 if mla.output_gate else 1) * mla.num_heads * mla.v_head_dim * spec.hidden_size
    return Counter[Role](
        {
            "projection": query + spec.hidden_size * mla.latent_width + outputs,
            "absorbed": mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "vector": mla.kv_lora_rank + (rank or 0),
        }
    )


def _gdn(spec: DecoderSpec) -> Counter[Role]:
    gdn = spec.gdn
    if gdn is None:
        return Counter[Role]()
    inputs = spec.hidden_size * (gdn.conv_width + gdn.value_width + 2 * gdn.num_value_heads)
    return Counter[Role](
        {
            "projection": inputs + gdn.value_width * spec.hidden_size,
            "vector": gdn.conv_width * gdn.conv_kernel + 2 * gdn.num_value_heads + gdn.value_dim,
        }
    )


def _gqa(spec: DecoderSpec) -> Counter[Role]:
    gqa = spec.gqa
    if gqa is None:
        return Counter[Role]()
    width = gqa.num_heads * gqa.head_dim
    return Counter[Role](
        {"projection": spec.hidden_size * (3 * width + 2 * gqa.kv_width), "vector": 2 * gqa.head_dim}
    )


def _moe(spec: DecoderSpec) -> Counter[Role]:
    moe = spec.moe
    if moe is None:
        return Counter[Role]()
    width = spec.hidden_size if moe.latent is None else moe.latent.width
    counts = Counter[Role](
        {
            "expert": 3 * width * moe.expert_intermediate_size * moe.num_experts,
            "projection": 3 * spec.hidden_size * moe.shared_intermediate_size,
            "router": moe.num_experts * spec.hidden_size,
        }
    )
    if moe.router == "sigmoid":
        counts["vector"] += moe.num_experts
    if moe.shared_gate and moe.shared_intermediate_size:
        counts["gate"] += spec.hidden_size
    if moe.latent is not None:
        counts["projection"] += 2 * spec.hidden_size * width
        counts["vector"] += 0 if moe.latent.norm_eps is None else width
    return counts
