"""Command-line options shared by the commands. Names are those users know from other servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.config_file import read_config
from milepost.cli.numbers import decimal, whole
from milepost.config import DEFAULT_DECODE_INTERVAL

MODEL = "Model"
CACHE = "Cache"
CHECKPOINTS = "Checkpoints"
EXACT_REUSE = "Exactness"
BATCHES = "Batches and speculation"
LIMITS = "Network and limits"
KEYS = "API keys"
STORES = "Stores beyond the cache"
PEERS = "Several replicas"
LOGS = "Configuration and logs"
"""Panels of `--help`. Each is a table of its own: twice its longest name, its longest metavar and 8
characters must fit into 76, or names are cut at 80 columns."""


def _stay_offline(wanted: bool) -> bool:
    """Before huggingface_hub is imported, which reads it then."""
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return wanted


MODEL_HELP = "Model directory in hub layout, or a hub id like owner/name. Default: the embedded model."
Model = Annotated[Path | None, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
CacheBytes = Annotated[
    str,
    typer.Option(
        "--cache-bytes",
        help="One budget of memory for pages and states, cached or in use, like 8GiB; auto = what is left.",
        metavar="SIZE",
        rich_help_panel=CACHE,
    ),
]
MatchUnit = Annotated[
    int,
    typer.Option(
        "--prefix-match-unit",
        help="Tokens; the finest boundary where a hit may land.",
        metavar="N",
        rich_help_panel=CACHE,
        parser=whole("prefix_match_unit", example=32),
    ),
]
RetentionInterval = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-retention-interval",
        help="Tokens between checkpoints along a prompt, in free memory; 0 = none of them. Default: 64.",
        metavar="N",
        rich_help_panel=CHECKPOINTS,
        parser=whole("prefix_cache_retention_interval", example=64),
    ),
]
DecodeInterval = Annotated[
    int | None,
    typer.Option(
        "--decode-interval",
        help="Tokens between the checkpoints of an answer that stay once half of the budget is used, beside "
        "its last two; below that every match unit has one. 0 = only the last two. "
        f"Default: {DEFAULT_DECODE_INTERVAL}, rounded up to the match unit.",
        metavar="N",
        rich_help_panel=CHECKPOINTS,
        parser=whole("decode_interval", example=256),
    ),
]
MaxStatesPerPath = Annotated[
    int | None,
    typer.Option(
        "--max-states-per-path",
        help="Checkpoints kept along one path. Default: no bound.",
        metavar="N",
        rich_help_panel=CHECKPOINTS,
        parser=whole("max_states_per_path", example=8),
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse prefixes of earlier requests.",
        metavar="",
        rich_help_panel=CACHE,
        show_default=False,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        help="Name in the API. Default: the directory's, or the hub id.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Most tokens of a request, prompt and answer together. Default: what model and budget allow.",
        metavar="N",
        rich_help_panel=MODEL,
        parser=whole("max_model_len", example=8192),
    ),
]
MaxBatchedTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens",
        help="Tokens computed per step, over all requests.",
        metavar="N",
        rich_help_panel=BATCHES,
        parser=whole("max_num_batched_tokens", example=512),
    ),
]
MaxSeqs = Annotated[
    int,
    typer.Option(
        "--max-num-seqs",
        help="Requests that run at the same time.",
        metavar="N",
        rich_help_panel=BATCHES,
        parser=whole("max_num_seqs", example=64),
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto, float32 or bfloat16.", metavar="DTYPE", rich_help_panel=MODEL)
]
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="Round weights to integers while they are loaded: int8, int4 or none.",
        metavar="KIND",
        rich_help_panel=MODEL,
    ),
]
StateDtype = Annotated[
    str,
    typer.Option(
        "--state-dtype",
        help="Dtype in which the matrices of recurrent states are kept: fp32, or bf16, which takes half the "
        "bytes and makes a hit numeric. Running states are fp32.",
        metavar="DTYPE",
        rich_help_panel=MODEL,
    ),
]
Exactness = Annotated[
    str,
    typer.Option(
        "--exactness",
        help="exact = reuse changes no bit of an answer; prompt = the same, but the next turn computes "
        "answers again, and models with latent attention read long prompts faster; off = no promise.",
        metavar="MODE",
        rich_help_panel=EXACT_REUSE,
    ),
]
AuditHits = Annotated[
    float,
    typer.Option(
        "--audit-hits",
        help="Share of hits that are computed again from the first token and compared, like 0.01; 0 = none.",
        metavar="X",
        rich_help_panel=EXACT_REUSE,
        parser=decimal("audit_hits", example=0.01),
    ),
]
AuditShare = Annotated[
    float,
    typer.Option(
        "--audit-share",
        help="Tokens that audits may compute per token of users' requests; they take all when nobody else is "
        "there. 0 = only then.",
        metavar="X",
        rich_help_panel=EXACT_REUSE,
        parser=decimal("audit_share", example=0.05),
    ),
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        "--tool-call-parser",
        help="Format of tool calls: auto (by the template), hermes, qwen3_coder, kimi_k2, kimi_k3 or none.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        "--reasoning-parser",
        help="Format of reasoning: auto (by the template), qwen3, deepseek_r1, kimi_k3 or none.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
ServerSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Seed for requests that bring none. Default: a random one each.",
        metavar="N",
        rich_help_panel=MODEL,
        parser=whole("seed", example=7),
    ),
]

Host = Annotated[str, typer.Option("--host", help="Address to bind.", metavar="HOST", rich_help_panel=LIMITS)]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        help="Port; 0 = any free one.",
        metavar="N",
        rich_help_panel=LIMITS,
        parser=whole("port", example=8000, least=0, most=65535),
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        "--max-queued-requests",
        help="Requests that may wait; further ones get 429 with Retry-After. -1 = no limit.",
        metavar="N",
        rich_help_panel=LIMITS,
        parser=whole("max_queued_requests", example=1024),
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        "--request-timeout",
        help="Seconds from arrival to the last token. Default: no limit.",
        metavar="SECONDS",
        rich_help_panel=LIMITS,
        parser=decimal("request_timeout", unit="seconds", example=30),
    ),
]
MaxBodyBytes = Annotated[
    str,
    typer.Option(
        "--max-body-bytes",
        help="Largest request body, like 32MiB; a larger one gets 413.",
        metavar="SIZE",
        rich_help_panel=LIMITS,
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-seconds",
        help="How long open requests may go on after SIGTERM or Ctrl-C. The second one ends them at once.",
        metavar="SECONDS",
        rich_help_panel=LIMITS,
        parser=decimal("drain_seconds", unit="seconds", example=20),
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="Key that clients must send; may be repeated. Every user of the machine can see it: better use "
        "--api-key-file. Each key has a cache of its own.",
        metavar="KEY",
        rich_help_panel=KEYS,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        help="File with one key per line, readable by its owner only (0600).",
        metavar="FILE",
        rich_help_panel=KEYS,
    ),
]
AdminApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--admin-api-key",
        help="Key that may also use routes that concern all; may be repeated.",
        metavar="KEY",
        rich_help_panel=KEYS,
    ),
]
SharePrefix = Annotated[
    bool,
    typer.Option(
        "--share-prefix-across-keys",
        help="One cache for all keys: what one caller sent before then shows in the numbers of another.",
        metavar="",
        rich_help_panel=KEYS,
    ),
]
KvStore = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-store",
        help="Where segments live beyond the cache, like memory://?bytes=8GiB, file:///dir?bytes=50GiB, "
        "redis://host:6379/0?bytes=8GiB or peer://host:9400; may be repeated, fastest first.",
        metavar="ADDRESS",
        rich_help_panel=STORES,
    ),
]
Persist = Annotated[
    Path | None,
    typer.Option(
        "--persist",
        help="Folder that keeps what was computed over restarts; it holds prompts in derived form.",
        metavar="DIR",
        rich_help_panel=STORES,
    ),
]
PersistBytes = Annotated[
    str,
    typer.Option(
        "--persist-bytes",
        help="Most that the folder of --persist may take, like 50GiB.",
        metavar="SIZE",
        rich_help_panel=STORES,
    ),
]
LoadPolicy = Annotated[
    str | None,
    typer.Option(
        "--kv-load-policy",
        help="auto = load from a store where that is sooner than computing; always = whenever it can. "
        "Default: auto; always with --role decode.",
        metavar="POLICY",
        rich_help_panel=STORES,
    ),
]
LoadSeconds = Annotated[
    float | None,
    typer.Option(
        "--kv-load-seconds",
        help="Longest that a request waits for stores, look-up and load together; then it is computed. "
        "Default: as long as computing would take; 10 where the policy is always.",
        metavar="SECONDS",
        rich_help_panel=STORES,
        parser=decimal("kv_load_seconds", unit="seconds", example=10),
    ),
]
Role = Annotated[
    str,
    typer.Option(
        "--role",
        help="both, or where prompts and answers are computed by different replicas: prefill = prompts only, "
        "decode = loads them.",
        metavar="ROLE",
        rich_help_panel=PEERS,
    ),
]
ServeKv = Annotated[
    str | None,
    typer.Option(
        "--serve-kv",
        help="HOST:PORT where other replicas get what is cached here, as --kv-store peer://HOST:PORT; with "
        "?bytes=256MiB&transport=auto behind it. Default: nowhere.",
        metavar="ADDRESS",
        rich_help_panel=PEERS,
    ),
]
PeerTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--peer-token-file",
        help="File with the secret of replicas that get from each other, readable by its owner only (0600).",
        metavar="FILE",
        rich_help_panel=PEERS,
    ),
]
VerifyWeights = Annotated[
    bool,
    typer.Option(
        "--verify-weights",
        help="Hash every byte of the weights, instead of samples, before segments of a store are trusted.",
        metavar="",
        rich_help_panel=STORES,
    ),
]
KvEvents = Annotated[
    str | None,
    typer.Option(
        "--kv-events-config",
        help='Publish cache events for routers: JSON such as {"endpoint": "tcp://127.0.0.1:5557"}.',
        metavar="JSON",
        rich_help_panel=STORES,
    ),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="Guess tokens and verify several at once: JSON such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; method mtp = with draft modules of the model, '
        'eagle3, dflash or dspark = with the drafter in "model", a directory or hub id. Default: off.',
        metavar="JSON",
        rich_help_panel=BATCHES,
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="File with a Jinja chat template. Default: the model's own.",
        metavar="FILE",
        rich_help_panel=MODEL,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Where defaults of temperature, top_p and the like come from: auto = the model's "
        "generation_config.json, none, or a path.",
        metavar="SOURCE",
        rich_help_panel=MODEL,
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Take a hub id from the local copies only, without a network.",
        callback=_stay_offline,
        metavar="",
        rich_help_panel=MODEL,
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        help="text, or json = one object per line, start-up included.",
        metavar="FORMAT",
        rich_help_panel=LOGS,
    ),
]
OtlpTraces = Annotated[
    str | None,
    typer.Option(
        "--otlp-traces-endpoint",
        help="Send a span per request there, like http://localhost:4318/v1/traces (extra otel).",
        metavar="URL",
        rich_help_panel=LOGS,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with option names and values; options given here win.",
        callback=read_config,
        is_eager=True,
        metavar="FILE",
        rich_help_panel=LOGS,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", help="0 = greedy.", metavar="X", parser=decimal("temperature", example=0.7)
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", help="Tokens of an answer.", metavar="N", parser=whole("max_tokens", example=256)
    ),
]

DEFAULT_CACHE_SIZE = "1GiB"
DEFAULT_BODY_SIZE = "32MiB"
DEFAULT_MAX_QUEUED_REQUESTS = 1024
DEFAULT_DRAIN_SECONDS = 20.0
DEFAULT_PERSIST_SIZE = "50GiB"
