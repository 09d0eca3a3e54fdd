"""Model directories of the Kimi family without weights: tiktoken.model, named control ids, model_type."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.engine.tokenizer import Tokenizer

LINEAR_TOKENS = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11, "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14, "<|tool_call_end|>": 15, "<|im_middle|>": 17, "[PAD]": 255,
}  # fmt: skip
K3_TOKENS = {
    "[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "[PAD]": 255,
}  # fmt: skip
NOT_SPECIAL = {"<|open|>", "<|close|>", "<|sep|>", *(name for name in LINEAR_TOKENS if "tool" in name)}
"""Left in generated text."""
END_TOKENS = {"kimi_linear": "<|im_end|>", "kimi_k3": "<|end_of_msg|>"}
TOKENS = {"kimi_linear": LINEAR_TOKENS, "kimi_k3": K3_TOKENS}


def ranks() -> list[bytes]:
    """Tokens of the trained tiny tokenizer in order of their ids."""
    base = Tokenizer(spec(), SETTINGS)
    control = {token.token_id for token in base.control_tokens}
    return [base.token_bytes(token_id) for token_id in range(base.vocab_size) if token_id not in control]


def write_directory(directory: Path, model_type: str, *, without: str | None = None) -> Path:
    """`without`: a control token that tokenizer_config.json does not name."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces = ranks()
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate(pieces)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named: dict[str, Any] = {
        str(len(pieces) + offset): {"content": content, "special": content not in NOT_SPECIAL}
        for content, offset in TOKENS[model_type].items()
        if content != without
    }
    settings = {"added_tokens_decoder": named, "eos_token": END_TOKENS[model_type]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory
