"""Options of `milepost sim`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.numbers import decimal, whole

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Mooncake-style JSONL to replay, plain, .gz or .xz. Default: a workload.",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        "--workload", metavar="NAME", help="Generated: multiturn, fork, completions, agents or growing."
    ),
]
Scale = Annotated[
    int,
    typer.Option(
        "--scale",
        metavar="N",
        parser=whole("scale", example=2, least=1),
        help="Multiplies a workload's conversations.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        parser=whole("seed", example=7),
        help="Seed of a workload or of the first swarm run.",
    ),
]
Geometry = Annotated[
    str,
    typer.Option(
        "--geometry", metavar="NAME", help="Whose sizes of pages and states: kimi-k3 or kimi-linear-48b."
    ),
]
Budgets = Annotated[
    str, typer.Option("--budgets", metavar="SIZES", help="Cache sizes to try, separated by commas.")
]
Policies = Annotated[
    str,
    typer.Option(
        "--policies",
        metavar="NAMES",
        help="Who decides what is kept, separated by commas: milepost, milepost-lru, lru, optimal, "
        "clairvoyant, align (docs/simulation.md).",
    ),
]
PrefixMatchUnit = Annotated[
    int | None,
    typer.Option(
        "--prefix-match-unit",
        metavar="N",
        parser=whole("prefix_match_unit", example=32, least=1),
        help="Tokens. Default: 512 for a trace, else 32.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        parser=whole("limit", example=100, least=1),
        help="Only the first so many requests.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        parser=whole("max_tokens", example=64, least=1),
        help="Cut answers. Default: 1 for a trace, else as recorded.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        parser=whole("max_num_batched_tokens", example=8192, least=1),
        help="Tokens computed per step.",
    ),
]
TokensPerSecond = Annotated[
    float | None,
    typer.Option(
        "--tokens-per-second",
        metavar="X",
        parser=decimal("tokens_per_second", example=5000, least=0.001),
        help="Let steps take time; shows queues and TTFT.",
    ),
]
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")]
PlotPath = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a chart as SVG.")]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", metavar="", help="Milepost against align on all workloads, request by request."
    ),
]
Swarm = Annotated[
    int | None,
    typer.Option(
        "--swarm",
        metavar="N",
        parser=whole("swarm", example=1000, least=1),
        help="Test the core instead: do so many random actions and check every state.",
    ),
]
