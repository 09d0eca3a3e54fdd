"""Logits of mlx-lm on the CPU, from a checkpoint in hub layout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch


@functools.cache
def mlx_logits(
    directory: Path, tokens: tuple[int, ...], sizes: tuple[int, ...] | None = None
) -> torch.Tensor:
    """fp32 [tokens, vocabulary] of one pass, or of passes of the given sizes over one cache."""
    import mlx.core as mx

    _, model = _loaded(directory)
    cache = model.make_cache()
    parts = []
    first = 0
    for size in sizes or (len(tokens),):
        logits = model(mx.array([tokens[first : first + size]]), cache)
        parts.append(torch.tensor(logits[0].astype(mx.float32).tolist()))
        first += size
    return torch.cat(parts)


def mlx_layer_outputs(directory: Path, tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """What every decoder layer of Kimi K3 hands on, fp32 [tokens, D] each."""
    import mlx.core as mx

    module, model = _loaded(directory)
    call, outputs = module.KimiK3DecoderLayer.__call__, []

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        x, blocks = call(self, *args, **options)
        outputs.append(torch.tensor(x[0].astype(mx.float32).tolist()))
        return x, blocks

    module.KimiK3DecoderLayer.__call__ = spy
    try:
        model(mx.array([tokens]), model.make_cache())
    finally:
        module.KimiK3DecoderLayer.__call__ = call
    return outputs


def _loaded(directory: Path) -> tuple[Any, Any]:
    """The module of a checkpoint's family, and its model with the weights."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    config = json.loads((directory / "config.json").read_text())
    module = _module(config["model_type"])
    model = module.Model(module.ModelArgs.from_dict(config))
    weights: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights.update(mx.load(str(path)))
    model.load_weights(list(model.sanitize(weights).items()))
    return module, model


def _module(model_type: str) -> Any:
    from mlx_lm.models import kimi_k3, kimi_linear

    return {"kimi_k3": kimi_k3, "kimi_linear": kimi_linear}[model_type]


def dequantized(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What mlx makes of MXFP4 bytes, [out, in]."""
    import mlx.core as mx

    words = mx.array(packed.contiguous().view(torch.int32).numpy()).view(mx.uint32)
    values = mx.dequantize(words, mx.array(scales.numpy()), group_size=32, bits=4, mode="mxfp4")
    return torch.tensor(values.astype(mx.float32).tolist()).to(dtype)
