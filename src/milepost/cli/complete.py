"""`milepost complete`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from milepost.cli.loading import load, started
from milepost.cli.values import check_answer_options
from milepost.errors import RequestError

if TYPE_CHECKING:
    from milepost.engine.serving import ServingOptions


def complete_text(
    directory: Path | None,
    options: ServingOptions,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    stop: Sequence[str],
) -> None:
    """Print the continuation of `prompt` as it is generated; everything else goes to stderr."""
    from milepost.engine.blocking import answer
    from milepost.engine.messages import GenerationRequest
    from milepost.engine.params import (
        OutputLimit,
        SamplingOptions,
        checked_max_tokens,
        checked_stop,
        checked_token_ids,
        sampling_params,
    )

    check_answer_options(max_tokens, temperature, stop)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        source = "standard input is empty" if prompt == "-" else "must not be empty; - reads standard input"
        raise RequestError("prompt", source)
    model = load(directory, options, Console(stderr=True))
    with started(model):
        ids = model.encode_prompt(text)
        checked_token_ids("prompt", ids.tolist(), model.vocab_size)
        sampling = sampling_params(
            SamplingOptions(temperature=temperature),
            seed=model.seeds.next(),
            eos_token_ids=model.tokenizer.eos_token_ids,
            vocab_size=model.vocab_size,
        )
        limit = checked_max_tokens(OutputLimit(max_tokens), len(ids), model.max_model_len, 0)
        request = GenerationRequest(ids, sampling, limit, checked_stop(list(stop)))
        for delta in answer(model.engine, request):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
