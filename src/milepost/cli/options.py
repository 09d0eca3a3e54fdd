"""Command-line options shared by the commands. Names are those users know from other servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.config_file import read_config
from milepost.cli.sizes import parse_size
from milepost.config import DEFAULT_DECODE_INTERVAL, DEFAULT_MATCH_UNIT
from milepost.errors import RequestError


def _stay_offline(wanted: bool) -> bool:
    """Before huggingface_hub is imported, which reads it then."""
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return wanted


Model = Annotated[
    Path | None,
    typer.Argument(
        help="Model directory in hub layout, or a hub id like owner/name. Default: the embedded model."
    ),
]
CacheBytes = Annotated[
    str,
    typer.Option("--cache-bytes", help="One budget for pages and states, like 8GiB, or auto = what is left."),
]
MatchUnit = Annotated[
    int, typer.Option("--prefix-match-unit", help="Tokens; the finest boundary where a hit may land.")
]
RetentionInterval = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-retention-interval",
        help="Tokens between checkpoints along a prompt, in free memory; 0 = none of them. Default: 64.",
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
ServedModelName = Annotated[
    str | None,
    typer.Option("--served-model-name", help="Name in the API. Default: the directory's, or the hub id."),
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
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="Round weights to integers while they are loaded: int8, int4 or none.",
    ),
]
StateDtype = Annotated[
    str,
    typer.Option(
        "--state-dtype",
        help="Dtype in which the matrices of recurrent states are kept: fp32, or bf16, which takes half the "
        "bytes and makes a hit numeric. Running states are fp32.",
    ),
]
Exactness = Annotated[
    str,
    typer.Option(
        "--exactness",
        help="exact = reuse changes no bit of an answer; prompt = none behind a prompt, and long prompts of "
        "models with latent attention are faster; off = nothing is promised.",
    ),
]
AuditHits = Annotated[
    float,
    typer.Option(
        "--audit-hits",
        help="Share of hits that are computed again from the first token and compared, like 0.01; 0 = none.",
    ),
]
AuditShare = Annotated[
    float,
    typer.Option(
        "--audit-share",
        help="Tokens that audits may compute per token of users' requests; they take all when nobody else is "
        "there. 0 = only then.",
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

MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        "--max-queued-requests",
        help="Requests that may wait; further ones get 429 with Retry-After. -1 = no limit.",
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option("--request-timeout", help="Seconds from arrival to the last token. Default: no limit."),
]
MaxBodyBytes = Annotated[
    str, typer.Option("--max-body-bytes", help="Largest request body, like 32MiB; a larger one gets 413.")
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-seconds",
        help="How long open requests may go on after SIGTERM. A second signal ends at once.",
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="Key that clients must send; may be repeated. Every user of the machine can see it: better use "
        "--api-key-file. Each key has a cache of its own.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="File with one key per line, readable by its owner only (0600)."),
]
AdminApiKey = Annotated[
    list[str] | None,
    typer.Option("--admin-api-key", help="Key that may also use routes that concern all; may be repeated."),
]
SharePrefix = Annotated[
    bool,
    typer.Option(
        "--share-prefix-across-keys",
        help="One cache for all keys: what one caller sent before then shows in the numbers of another.",
    ),
]
KvStore = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-store",
        help="Where segments live beyond the cache, like memory://?bytes=8GiB, file:///dir?bytes=50GiB, "
        "redis://host:6379/0?bytes=8GiB or peer://host:9400; may be repeated, fastest first.",
    ),
]
Persist = Annotated[
    Path | None,
    typer.Option(
        "--persist",
        help="Folder that keeps what was computed over restarts; it holds prompts in derived form.",
    ),
]
PersistBytes = Annotated[
    str, typer.Option("--persist-bytes", help="Most that the folder of --persist may take, like 50GiB.")
]
LoadPolicy = Annotated[
    str | None,
    typer.Option(
        "--kv-load-policy",
        help="auto = load from a store where that is sooner than computing; always = whenever it can. "
        "Default: auto; always with --role decode.",
    ),
]
Role = Annotated[
    str,
    typer.Option(
        "--role",
        help="both, or where prompts and answers are computed by different replicas: prefill = prompts only, "
        "decode = loads them.",
    ),
]
ServeKv = Annotated[
    str | None,
    typer.Option(
        "--serve-kv",
        help="HOST:PORT where other replicas get what is cached here, as --kv-store peer://HOST:PORT; with "
        "?bytes=256MiB&transport=auto behind it. Default: nowhere.",
    ),
]
PeerTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--peer-token-file",
        help="File with the secret of replicas that get from each other, readable by its owner only (0600).",
    ),
]
VerifyWeights = Annotated[
    bool,
    typer.Option(
        "--verify-weights",
        help="Hash every byte of the weights, instead of samples, before segments of a store are trusted.",
    ),
]
KvEvents = Annotated[
    str | None,
    typer.Option(
        "--kv-events-config",
        help='Publish cache events for routers: JSON such as {"endpoint": "tcp://127.0.0.1:5557"}.',
    ),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="Guess tokens and verify several at once: JSON such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; method mtp = with draft modules of the model, '
        'eagle3, dflash or dspark = with the drafter in "model", a directory or hub id. Default: off.',
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    typer.Option("--chat-template", help="File with a Jinja chat template. Default: the model's own."),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Where defaults of temperature, top_p and the like come from: auto = the model's "
        "generation_config.json, none, or a path.",
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Take a hub id from the local copies only, without a network.",
        callback=_stay_offline,
    ),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", help="text, or json = one object per line, start-up included.")
]
OtlpTraces = Annotated[
    str | None,
    typer.Option(
        "--otlp-traces-endpoint",
        help="Send a span per request there, like http://localhost:4318/v1/traces (extra otel).",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with option names and values; options given here win.",
        callback=read_config,
        is_eager=True,
    ),
]

DEFAULT_CACHE_SIZE = "1GiB"
AUTO_CACHE = "auto"
DEFAULT_BODY_SIZE = "32MiB"
DEFAULT_MAX_QUEUED_REQUESTS = 1024
DEFAULT_DRAIN_SECONDS = 20.0
DEFAULT_PERSIST_SIZE = "50GiB"


def serving_options(
    *,
    cache_bytes: str = DEFAULT_CACHE_SIZE,
    prefix_match_unit: int = DEFAULT_MATCH_UNIT,
    prefix_cache_retention_interval: int | None = None,
    decode_interval: int | None = None,
    dtype: str = "auto",
    quantization: str = "none",
    model: str | Path | None = None,
    speculative_config: str | None = None,
    **others: Any,
) -> Any:
    """`engine.serving.ServingOptions` from option values (imported late: it needs the extras).

    Args:
        model: whose weights share the memory with a budget of `auto`.

    Raises:
        ConfigError: a value that cannot work, by its name.
    """
    from milepost.engine.serving import ServingOptions
    from milepost.engine.speculative import SpeculativeConfig

    is_auto = cache_bytes.strip().lower() == AUTO_CACHE
    options = ServingOptions(
        cache_bytes=1 if is_auto else parse_size(cache_bytes),
        match_unit=prefix_match_unit,
        checkpoint_interval=prefix_cache_retention_interval,
        decode_interval=decode_interval,
        dtype=None if dtype == "auto" else dtype,
        quantization=None if quantization == "none" else quantization,
        speculative=SpeculativeConfig.parse(speculative_config) if speculative_config else None,
        **others,
    )
    return _with_auto_cache(options, model) if is_auto else options


def _with_auto_cache(options: Any, model: str | Path | None) -> Any:
    from milepost.engine.memory import auto_cache_bytes, available_memory
    from milepost.engine.serving import EMBEDDED_MODEL, planned_memory
    from milepost.models.description import describe
    from milepost.models.hub import model_directory

    directory = model_directory(EMBEDDED_MODEL if model is None else model)
    about = describe(directory, **options.model_options)
    plan = planned_memory(directory, about, options)
    return replace(options, cache_bytes=auto_cache_bytes(plan, available_memory()))


def store_options(
    *,
    kv_store: Sequence[str] | None,
    persist: Path | None,
    persist_bytes: str,
    load_policy: str | None,
    verify_weights: bool,
    kv_events_config: str | None,
    role: str,
    serve_kv: str | None,
    peer_token_file: Path | None,
) -> Any:
    """`engine.stores.StoreOptions` from option values (imported late: it needs the extras).

    Raises:
        ConfigError: a value that cannot work, by its name.
    """
    from milepost.engine.stores import StoreOptions

    return StoreOptions(
        tuple(kv_store or ()),
        persist,
        parse_size(persist_bytes, "persist_bytes"),
        load_policy,
        verify_weights,
        kv_events_config,
        role,
        serve_kv,
        peer_token_file,
    )


def server_options(
    *, max_body_bytes: str, api_keys: Sequence[str], api_key_file: Path | None, **others: Any
) -> Any:
    """`server.options.ServerOptions` from option values (imported late: it needs the extra `server`).

    Raises:
        ConfigError: a value that cannot work, by its name.
    """
    from milepost.server.access import read_key_file
    from milepost.server.options import ServerOptions

    keys = [*api_keys, *(read_key_file(api_key_file) if api_key_file is not None else ())]
    others["admin_api_keys"] = tuple(others.get("admin_api_keys") or ())
    return ServerOptions(
        max_body_bytes=parse_size(max_body_bytes, "max_body_bytes"), api_keys=tuple(keys), **others
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
