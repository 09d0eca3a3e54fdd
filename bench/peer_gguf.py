"""Converts a checkpoint for llama.cpp, with the converter of its own source package.

    .peers/llama/venv/bin/python bench/peer_gguf.py MODEL OUTPUT --source .peers/llama/src/llama.cpp

The requests of `bench/peers.py` are token ids, and its answers are counted in them. The converter knows
published tokenizers only, and the server holds back tokens that end within a character, so that a random
model's answer would come without some. The vocabulary written is therefore one of plain words, one per id,
with the splitting rule of the model's family.
Runs in the environment that `bench/peer_install.py` made for llama.cpp.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SPLITTING_RULE = "qwen35"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--outtype", default="bf16")
    options = parser.parse_args()
    sys.path[:0] = [str(options.source), str(options.source / "gguf-py")]
    import convert_hf_to_gguf
    import gguf
    from conversion.base import TextModel

    def plain_words(model: Any) -> tuple[list[str], list[int], str]:
        size = model.hparams["vocab_size"]
        return [f"w{token_id}" for token_id in range(size)], [gguf.TokenType.NORMAL] * size, SPLITTING_RULE

    TextModel.get_vocab_base = plain_words
    sys.argv[1:] = [str(options.model), "--outfile", str(options.output), "--outtype", options.outtype]
    sys.argv.append("--no-mtp")
    convert_hf_to_gguf.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
