"""A byte-level BPE tokenizer and a chat template, made on the spot; a model directory without weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>")

TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun",
    "user says hello and the assistant says hello to the user; what is the capital of France?",
    "system prompt: you are a helpful assistant. tool declare assistant user system",
    "numbers 0 1 2 3 4 5 6 7 8 9 and text with newlines\n\nlike this\n",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 smile",
]

KIMI_TEMPLATE = """\
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{ message['name'] or 'user' }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>assistant<|im_middle|>
  {%- elif message['role'] == 'tool' -%}
    <|im_system|>tool<|im_middle|>
  {%- else -%}
    <|im_system|>system<|im_middle|>
  {%- endif -%}
  {{ message['content'] }}
  {%- for call in message['tool_calls'] or [] -%}
    <tool_call>{{ call['function'] | tojson }}
  {%- endfor -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


@cache
def tokenizer_spec(*, ignore_merges: bool = False) -> str:
    """tokenizer.json text; the last entries are added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens(list(NOT_SPECIAL))
    return tokenizer.to_str()


def spec(**options: Any) -> dict[str, Any]:
    return json.loads(tokenizer_spec(**options))


@cache
def _merging_spec() -> str:
    """As `tokenizer_spec`, but runs of white space and line breaks become one token, and so do letters
    with the sign before them, as in newer vocabularies: where two texts meet, tokens change."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    gaps = ["\n\n", "\n\n\n", " \n", "  ", "    ", ".\n", ".\n\n", ":\n\n", "\n  ", "\t", ">\n", ">\n\n"]
    tokenizer.train_from_iterator([*TEXT, *(f"a{gap}b" for gap in gaps * 9)], trainer)
    tokenizer.add_tokens(list(NOT_SPECIAL))
    return tokenizer.to_str()


def merging_spec() -> dict[str, Any]:
    return json.loads(_merging_spec())


SETTINGS = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": {"content": "[PAD]"}}


def write_model_directory(directory: Path, *, template: str | None = KIMI_TEMPLATE) -> Path:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_spec(), encoding="utf-8")
    settings = dict(SETTINGS) if template is None else {**SETTINGS, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}), encoding="utf-8")
    return directory
