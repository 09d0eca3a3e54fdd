"""How milepost-tiny starts: ordinary fan-in values, and KDA layers that can already copy."""

from __future__ import annotations

import math

import torch
from model import CONV_WIDTH, KimiDeltaAttention, TinyModel


@torch.no_grad()
def initialise(model: TinyModel, seed: int) -> None:
    """Ordinary fan-in init, then the induction-friendly start of the KDA layers."""
    torch.manual_seed(seed)
    depth_scale = (2 * model.config.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        std = parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            std *= depth_scale
        elif name.endswith(("lm_head.weight", "gate.weight")):
            std = 0.02
        elif "embed_tokens" in name:
            std = 0.5
        parameter.normal_(0.0, std)
    for layer in model.kda_layers():
        _induction_start(layer)


def _induction_start(layer: KimiDeltaAttention) -> None:
    """Before any training, let the state map "the last three tokens" to "the next token".

    q and k start with the same projection. Channel c of q looks c % 3 tokens back; channel c of k looks one
    token further; v looks at the current token. So S stores v_t under the three tokens before t, and q asks
    with the three newest tokens: associative recall of what followed them last time.
    Time constants are log-uniform between about 10 and 3,000 tokens.
    """
    width = layer.heads * layer.dim
    layer.k_proj.weight.copy_(layer.q_proj.weight)
    channels = torch.arange(width)
    back = channels % 3
    current = CONV_WIDTH - 1
    for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
        conv.weight.normal_(0.0, 0.1)
    layer.q_conv1d.weight[channels, 0, current - back] += 1.0
    layer.k_conv1d.weight[channels, 0, current - 1 - back] += 1.0
    layer.v_conv1d.weight[:, 0, current] += 1.0
    log_low, log_high = math.log(3e-4), math.log(0.1)
    rate = torch.exp(torch.rand(width) * (log_high - log_low) + log_low)
    layer.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # softplus(dt_bias) = rate
    layer.A_log.zero_()
