"""Drafters in the torch modules of the speculators library, put together as its models do.

The package pulls in a training stack when it is imported, so its modules are loaded from their files. It is
installed for this with `pip install --no-deps speculators`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def is_installed() -> bool:
    return importlib.util.find_spec("speculators") is not None


def _module(name: str) -> ModuleType:
    """`speculators.models.NAME`, without the packages it lies in."""
    found = importlib.util.find_spec("speculators")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / "models" / f"{name.replace('.', '/')}.py"
    own = f"_oracle_speculators_{name.replace('.', '_')}"
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[own] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[own]


@contextmanager
def _bare_packages(*names: str) -> Iterator[None]:
    """Packages that only say where their modules are, while modules are loaded that name each other."""
    found = importlib.util.find_spec("speculators")
    assert found is not None and found.origin is not None
    root, before = Path(found.origin).parent.parent, dict(sys.modules)
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "speculators"]:
            del sys.modules[name]
        sys.modules.update(
            {name: module for name, module in before.items() if name.startswith("speculators")}
        )


def eagle3_rows(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """What the library's layer makes of embeddings and hidden states [N, D] of one text, [N, D]."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    layer_config, count = Qwen3Config(**config["transformer_layer_config"]), hidden.shape[0]
    layer_config._attn_implementation = "eager"
    with _bare_packages("speculators", "speculators.models", "speculators.models.eagle3"):
        definitions = importlib.import_module("speculators.models.eagle3.model_definitions")
    layer = definitions.Qwen3DecoderEagle3FirstLayer(layer_config, 0, config["norm_before_residual"])
    layer.load_state_dict(_under("layers.0.", tensors))
    joined, positions = (
        torch.cat([embedded, hidden], -1).unsqueeze(0),
        torch.arange(1, count + 1).unsqueeze(0),
    )
    mask = torch.full((count, count), -torch.inf).triu(1).view(1, 1, count, count)
    with torch.no_grad():
        angles = Qwen3RotaryEmbedding(layer_config)(joined, positions)
        rows: torch.Tensor = layer(
            joined, attention_mask=mask, position_ids=positions, position_embeddings=angles
        )
    return rows[0]


def guess_logits(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    taps: torch.Tensor,
    token_ids: list[int],
    anchor: int,
    embedding: torch.Tensor,
    head: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of all rows of one block, fp32 [block rows, draft vocabulary], and confidences.

    Args:
        taps: [T, taps * D], joined as the config says, of a whole text; what lies before the anchor is seen.
        token_ids: the whole text and, behind the anchor, what was guessed.
        anchor: position of the block's first row.
    """
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    layers, definitions = (
        Qwen3Config(**config["transformer_layer_config"]),
        _module("dflash.model_definitions"),
    )
    layers._attn_implementation = "eager"
    hidden, eps, rows = layers.hidden_size, layers.rms_norm_eps, config["block_size"]
    length = taps.shape[0]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3RMSNorm(hidden, eps=eps)
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return module(x)

    with torch.no_grad():
        ids = [token_ids[anchor]] + [config["mask_token_id"]] * (rows - 1)
        x = embedding[ids].unsqueeze(0)
        context = norm("hidden_norm", torch.nn.functional.linear(taps, tensors["fc.weight"])).unsqueeze(0)
        positions = torch.cat([torch.arange(length), anchor + torch.arange(rows)]).unsqueeze(0)
        angles = Qwen3RotaryEmbedding(layers)(x, positions)
        for number in range(layers.num_hidden_layers):
            layer = definitions.Qwen3DFlashDecoderLayer(layers, number)
            at = f"layers.{number}."
            layer.load_state_dict({n.removeprefix(at): t for n, t in tensors.items() if n.startswith(at)})
            is_sliding = layers.layer_types[number] == "sliding_attention"
            sees, num_queries, num_keys = _module("dflash.attention").create_anchor_block_mask_mod(
                torch.zeros(length, dtype=torch.long),
                length,
                torch.tensor([anchor]),
                rows,
                config["transformer_layer_config"]["sliding_window"] if is_sliding else None,
                config["sliding_window_non_causal"],
            )
            queries = torch.arange(num_queries).unsqueeze(1)
            allowed = sees(torch.tensor(0), torch.tensor(0), queries, torch.arange(num_keys).unsqueeze(0))
            mask = torch.where(allowed, 0.0, -torch.inf).view(1, 1, num_queries, num_keys)
            x = layer(target_hidden=context, hidden_states=x, attention_mask=mask, position_embeddings=angles)
        x = norm("norm", x)
        logits = torch.nn.functional.linear(x, head)
        if "markov_rank" not in config:
            return logits[0], None
        heads = _module("dspark.model_definitions")
        markov = heads.MarkovHead(
            verifier_vocab_size=layers.vocab_size,
            draft_vocab_size=config["draft_vocab_size"],
            markov_rank=config["markov_rank"],
            hidden_size=hidden,
            head_type=config["markov_head_type"],
        )
        markov.load_state_dict(_under("markov_head.", tensors))
        # Rows that guess the token behind them read their own; the others the one before them.
        block = token_ids[anchor : anchor + rows]
        before = block if config["sample_from_anchor"] else [block[0], *block[:-1]]
        previous = torch.tensor([before])
        embedded = markov.prev_embeddings(previous)
        logits = logits + markov.block_bias(prev_token_ids=previous, hidden_states=x, prev_emb=embedded)
        confidence = heads.ConfidenceHead(hidden + config["markov_rank"])
        confidence.load_state_dict(_under("confidence_head.", tensors))
        return logits[0], torch.sigmoid(confidence(torch.cat([x, embedded], dim=-1)))[0]


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
