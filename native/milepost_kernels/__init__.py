"""CPU kernels of Milepost. `milepost.kernels.native` is the only intended caller."""

from milepost_kernels._native import (
    AttentionPlan,
    Experts,
    PackedWeight,
    RecurrentPlan,
    Tape,
    add_shared,
    attend,
    attend_latents,
    available_isas,
    embed,
    gate_values,
    gdn_mixer,
    gqa_mixer,
    gumbel_noise,
    isa,
    kda_mixer,
    linear,
    log_probabilities,
    mix_sources,
    moe,
    num_threads,
    numerics_id,
    pack,
    pack_integers,
    pack_mxfp4,
    pack_parts,
    rms_norm,
    rotate_heads,
    sample,
    set_isa,
    set_num_threads,
    store_keys_values,
    store_latents,
)

__version__ = "0.1.0"
API_VERSION = 2
"""Raised with every change of a signature; Milepost refuses another one."""
API_REVISION = 5
"""Raised with every addition; Milepost does without what an older library lacks.

1: coded weights; 2: expanded latents; 3: packing of stored parts, tapes; 4: sampling;
5: any gated experts behind either router, shared experts, output gates, mixes of sources, rotary positions
and storing of keys and values alone, grouped queries without a gate.
"""

__all__ = [
    "API_REVISION",
    "API_VERSION",
    "AttentionPlan",
    "Experts",
    "PackedWeight",
    "RecurrentPlan",
    "Tape",
    "add_shared",
    "attend",
    "attend_latents",
    "available_isas",
    "embed",
    "gate_values",
    "gdn_mixer",
    "gqa_mixer",
    "gumbel_noise",
    "isa",
    "kda_mixer",
    "linear",
    "log_probabilities",
    "mix_sources",
    "moe",
    "num_threads",
    "numerics_id",
    "pack",
    "pack_integers",
    "pack_mxfp4",
    "pack_parts",
    "rms_norm",
    "rotate_heads",
    "sample",
    "set_isa",
    "set_num_threads",
    "store_keys_values",
    "store_latents",
]
