"""Converts a checkpoint for llama.cpp, with the converter of its own source package.

    .peers/llama/venv/bin/python bench/peer_gguf.py MODEL OUTPUT --source .peers/llama/src/llama.cpp

The converter knows published tokenizers by what they make of a test text, and refuses others. The requests
of `bench/peers.py` are token ids, so the splitting rule of the model's family is named instead.
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
    from conversion.base import TextModel

    def splitting_rule(_model: Any, _tokenizer: Any) -> str:
        return SPLITTING_RULE

    TextModel.get_vocab_base_pre = splitting_rule
    sys.argv[1:] = [str(options.model), "--outfile", str(options.output), "--outtype", options.outtype]
    sys.argv.append("--no-mtp")
    convert_hf_to_gguf.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
