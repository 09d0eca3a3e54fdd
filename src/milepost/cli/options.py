"""Command-line options shared by the commands. Names are those users know from other servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.sizes import parse_size
from milepost.config import DEFAULT_DECODE_INTERVAL, DEFAULT_MATCH_UNIT
from milepost.errors import RequestError

Model = Annotated[
    Path | None,
    typer.Argument(
        help="Model directory in hub layout, or a hub id like owner/name. Default: the embedded model."
    ),
]
CacheBytes = Annotated[
    str, typer.Option("--cache-bytes", help="One budget for pages and states, like 1GiB or 512MiB.")
]
MatchUnit = Annotated[
    int, typer.Option("--prefix-match-unit", help="Tokens; the finest boundary where a hit may land.")
]
RetentionInterval = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-retention-interval",
        help="Tokens between checkpoints along a prompt; 0 = semantic ones only. Default: from the model.",
    ),
]
DecodeInterval = Annotated[
    int | None,
    typer.Option(
        "--decode-interval",
        help="Tokens between checkpoints kept along an answer; 0 = none. "
        f"Default: {DEFAULT_DECODE_INTERVAL}, rounded up to the match unit.",
    ),
]
MaxStatesPerPath = Annotated[
    int | None,
    typer.Option("--max-states-per-path", help="Checkpoints kept along one path. Default: no bound."),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse prefixes of earlier requests."
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", help="Prompt and output tokens of a request. Default: what model and budget allow."
    ),
]
MaxBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Tokens computed per step, over all requests.")
]
MaxSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Requests that run at the same time.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
AuditHits = Annotated[
    float,
    typer.Option(
        "--audit-hits",
        help="Share of hits that are computed again from the first token and compared, like 0.01; 0 = none.",
    ),
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        "--tool-call-parser",
        help="Format of tool calls: auto (by the template), hermes, qwen3_coder, kimi_k2, kimi_k3 or none.",
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        "--reasoning-parser",
        help="Format of reasoning: auto (by the template), qwen3, deepseek_r1, kimi_k3 or none.",
    ),
]
ServerSeed = Annotated[
    int | None, typer.Option("--seed", help="Seed for requests that bring none. Default: a random one each.")
]

DEFAULT_CACHE_SIZE = "1GiB"


def serving_options(
    *,
    cache_bytes: str = DEFAULT_CACHE_SIZE,
    prefix_match_unit: int = DEFAULT_MATCH_UNIT,
    prefix_cache_retention_interval: int | None = None,
    decode_interval: int | None = None,
    dtype: str = "auto",
    **others: Any,
) -> Any:
    """`engine.serving.ServingOptions` from option values (imported late: it needs the extras).

    Raises:
        ConfigError: a value that cannot work, by its name.
    """
    from milepost.engine.serving import ServingOptions

    return ServingOptions(
        cache_bytes=parse_size(cache_bytes),
        match_unit=prefix_match_unit,
        checkpoint_interval=prefix_cache_retention_interval,
        decode_interval=decode_interval,
        dtype=None if dtype == "auto" else dtype,
        **others,
    )


def check_answer_options(max_tokens: int, temperature: float, stop: Sequence[str] = ()) -> None:
    """What can be said about them without a model.

    Raises:
        RequestError: a value that cannot work, by its name.
    """
    from milepost.engine.params import SamplingOptions, checked_stop, sampling_params

    if max_tokens < 1:
        raise RequestError("max_tokens", f"must be at least 1, not {max_tokens}")
    sampling_params(SamplingOptions(temperature=temperature), seed=0, eos_token_ids=(), vocab_size=1)
    checked_stop(list(stop))
