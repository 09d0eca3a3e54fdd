"""serve, chat, complete, info, sim: argument parsing, errors as one line on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from milepost import __version__
from milepost.cli import options as opt
from milepost.cli import sim_options, values
from milepost.cli.cache import app as cache_app
from milepost.cli.extras import missing_text
from milepost.cli.help import Command, Group
from milepost.config import DEFAULT_AUDIT_SHARE, DEFAULT_MATCH_UNIT, EXACT, FP32, SchedulerConfig
from milepost.errors import ConfigError, MilepostError, RequestError, naming

EPILOG = (
    "`milepost COMMAND --help` has the options of a command. Try `milepost chat`, or `milepost serve` and "
    "its page /ui: without a MODEL they take a tiny one that is part of the package. docs/glossary.md "
    "explains the words."
)

app = typer.Typer(
    name="milepost",
    help="Serve hybrid language models; a prompt prefix is never computed twice.",
    epilog=EPILOG,
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cache_app)

_DEFAULT_SCHEDULER = SchedulerConfig()


def run() -> None:
    """Parse and run; expected errors end with a message and status 2, not with a traceback."""
    try:
        app()
    except ConfigError as error:
        flag = error.field.replace("_", "-")
        _fail(str(error).replace(error.field, f"--{flag}", 1) if _is_flag(error.field) else str(error))
    except RequestError as error:
        param = error.param or ""
        _fail(f"--{param.replace('_', '-')}: {error}" if _is_flag(param) else naming(error.param, str(error)))
    except MilepostError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        text = missing_text(error.name or "")
        if text is None:
            raise
        _fail(text)


def _fail(message: str) -> None:
    Console(stderr=True).print("error:", message, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)


def _is_flag(field: str) -> bool:
    """Whether some command has the option."""
    flag = f"--{field.replace('_', '-')}"
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    return any(flag in parameter.opts for command in commands for parameter in command.params)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"milepost {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Serve hybrid language models; a prompt prefix is never computed twice."""


@app.command(cls=Command)
def serve(
    model: opt.Model = None,
    offline: opt.Offline = False,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    served_model_name: opt.ServedModelName = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = "auto",
    quantization: opt.Quantization = "none",
    state_dtype: opt.StateDtype = FP32,
    seed: opt.ServerSeed = None,
    cache_bytes: opt.CacheBytes = opt.DEFAULT_CACHE_SIZE,
    prefix_match_unit: opt.MatchUnit = DEFAULT_MATCH_UNIT,
    prefix_cache_retention_interval: opt.RetentionInterval = None,
    decode_interval: opt.DecodeInterval = None,
    max_states_per_path: opt.MaxStatesPerPath = None,
    enable_prefix_caching: opt.PrefixCaching = True,
    max_num_batched_tokens: opt.MaxBatchedTokens = _DEFAULT_SCHEDULER.max_num_batched_tokens,
    max_num_seqs: opt.MaxSeqs = _DEFAULT_SCHEDULER.max_num_seqs,
    exactness: opt.Exactness = EXACT,
    audit_hits: opt.AuditHits = 0.0,
    audit_share: opt.AuditShare = DEFAULT_AUDIT_SHARE,
    tool_call_parser: opt.ToolCallParser = "auto",
    reasoning_parser: opt.ReasoningParser = "auto",
    max_queued_requests: opt.MaxQueuedRequests = opt.DEFAULT_MAX_QUEUED_REQUESTS,
    request_timeout: opt.RequestTimeout = None,
    max_body_bytes: opt.MaxBodyBytes = opt.DEFAULT_BODY_SIZE,
    drain_seconds: opt.DrainSeconds = opt.DEFAULT_DRAIN_SECONDS,
    api_key: opt.ApiKey = None,
    api_key_file: opt.ApiKeyFile = None,
    admin_api_key: opt.AdminApiKey = None,
    share_prefix_across_keys: opt.SharePrefix = False,
    kv_store: opt.KvStore = None,
    persist: opt.Persist = None,
    persist_bytes: opt.PersistBytes = opt.DEFAULT_PERSIST_SIZE,
    kv_load_policy: opt.LoadPolicy = None,
    kv_load_seconds: opt.LoadSeconds = None,
    role: opt.Role = "both",
    serve_kv: opt.ServeKv = None,
    peer_token_file: opt.PeerTokenFile = None,
    verify_weights: opt.VerifyWeights = False,
    kv_events_config: opt.KvEvents = None,
    speculative_config: opt.Speculation = None,
    chat_template: opt.ChatTemplateFile = None,
    generation_config: opt.GenerationConfig = "auto",
    log_format: opt.LogFormat = "text",
    otlp_traces_endpoint: opt.OtlpTraces = None,
    config: opt.ConfigFile = None,
) -> None:
    """Serve a model over the OpenAI API, and Anthropic's.

    Both are below http://HOST:PORT/v1; /ui shows the cache, /docs lists the routes. Ctrl-C stops it.
    """
    from milepost.cli.serve import serve_model

    stores = values.store_options(
        kv_store=kv_store, persist=persist, persist_bytes=persist_bytes, load_policy=kv_load_policy,
        load_seconds=kv_load_seconds, verify_weights=verify_weights, kv_events_config=kv_events_config,
        role=role, serve_kv=serve_kv, peer_token_file=peer_token_file,
    )  # fmt: skip
    options = values.serving_options(
        model=model,
        cache_bytes=cache_bytes,
        prefix_match_unit=prefix_match_unit,
        prefix_cache_retention_interval=prefix_cache_retention_interval,
        decode_interval=decode_interval,
        max_states_per_path=max_states_per_path,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        state_dtype=state_dtype,
        seed=seed,
        served_model_name=served_model_name,
        exactness=exactness,
        audit_hits=audit_hits,
        audit_share=audit_share,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        max_queued_requests=max_queued_requests if max_queued_requests >= 0 else None,
        chat_template=chat_template,
        generation_config=generation_config,
        speculative_config=speculative_config,
        stores=stores,
    )
    server_options = values.server_options(
        request_timeout=request_timeout,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
        api_keys=api_key or [],
        api_key_file=api_key_file,
        admin_api_keys=admin_api_key or [],
        share_prefix_across_keys=share_prefix_across_keys,
        otlp_traces_endpoint=otlp_traces_endpoint,
        role=role,
    )
    serve_model(model, options, server_options, host, port, log_format)


@app.command(cls=Command)
def chat(
    model: opt.Model = None,
    offline: opt.Offline = False,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.", metavar="TEXT")] = None,
    temperature: opt.Temperature = 0.7,
    max_tokens: opt.MaxTokens = 256,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = "auto",
    quantization: opt.Quantization = "none",
    state_dtype: opt.StateDtype = FP32,
    seed: opt.ServerSeed = None,
    cache_bytes: opt.CacheBytes = opt.DEFAULT_CACHE_SIZE,
    prefix_match_unit: opt.MatchUnit = DEFAULT_MATCH_UNIT,
    enable_prefix_caching: opt.PrefixCaching = True,
    speculative_config: opt.Speculation = None,
) -> None:
    """Chat in the terminal; every turn shows what was reused and what was computed.

    /reset starts over, /exit leaves, Ctrl-C stops an answer.
    """
    from milepost.cli.chat import chat_with_model

    options = values.serving_options(
        model=model,
        cache_bytes=cache_bytes,
        prefix_match_unit=prefix_match_unit,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        state_dtype=state_dtype,
        seed=seed,
        speculative_config=speculative_config,
    )
    chat_with_model(model, options, system=system, temperature=temperature, max_tokens=max_tokens)


@app.command(cls=Command)
def complete(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - reads it from standard input.", metavar="PROMPT")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", help=opt.MODEL_HELP, metavar="MODEL"),
    ] = None,
    offline: opt.Offline = False,
    max_tokens: opt.MaxTokens = 64,
    temperature: opt.Temperature = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop string; may be repeated.", metavar="TEXT")
    ] = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = "auto",
    quantization: opt.Quantization = "none",
    seed: opt.ServerSeed = None,
    cache_bytes: opt.CacheBytes = opt.DEFAULT_CACHE_SIZE,
    speculative_config: opt.Speculation = None,
) -> None:
    """Continue a text and print the continuation."""
    from milepost.cli.complete import complete_text

    options = values.serving_options(
        model=model,
        cache_bytes=cache_bytes,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        seed=seed,
        speculative_config=speculative_config,
    )
    complete_text(
        None if model is None else Path(model), options, prompt,
        max_tokens=max_tokens, temperature=temperature, stop=stop or [],
    )  # fmt: skip


@app.command(cls=Command)
def info(
    model: opt.Model = None,
    offline: opt.Offline = False,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = "auto",
    quantization: opt.Quantization = "none",
    state_dtype: opt.StateDtype = FP32,
    cache_bytes: opt.CacheBytes = opt.DEFAULT_CACHE_SIZE,
    prefix_match_unit: opt.MatchUnit = DEFAULT_MATCH_UNIT,
    prefix_cache_retention_interval: opt.RetentionInterval = None,
    speculative_config: opt.Speculation = None,
    check_weights: Annotated[
        bool,
        typer.Option("--check-weights", help="Check the weight files against the config, too.", metavar=""),
    ] = False,
) -> None:
    """Show a model's layers, what a token and a state take, and what fits a budget; reads no weights."""
    from milepost.cli.info import show_info

    options = values.serving_options(
        model=model,
        cache_bytes=cache_bytes,
        prefix_match_unit=prefix_match_unit,
        prefix_cache_retention_interval=prefix_cache_retention_interval,
        max_model_len=max_model_len,
        dtype=dtype,
        speculative_config=speculative_config,
        quantization=quantization,
        state_dtype=state_dtype,
    )
    show_info(model, options, check_weights=check_weights)


@app.command(cls=Command)
def sim(
    trace: sim_options.Trace = None,
    workload: sim_options.Workload = "multiturn",
    scale: sim_options.Scale = 1,
    seed: sim_options.Seed = 0,
    geometry: sim_options.Geometry = "kimi-linear-48b",
    budgets: sim_options.Budgets = "8GiB,64GiB,512GiB",
    policies: sim_options.Policies = "milepost,lru,optimal",
    prefix_match_unit: sim_options.PrefixMatchUnit = None,
    limit: sim_options.Limit = None,
    max_tokens: sim_options.MaxTokens = None,
    max_num_batched_tokens: sim_options.MaxNumBatchedTokens = 8192,
    tokens_per_second: sim_options.TokensPerSecond = None,
    json_path: sim_options.JsonPath = None,
    plot_path: sim_options.PlotPath = None,
    compare: sim_options.Compare = False,
    swarm: sim_options.Swarm = None,
) -> None:
    """Replay a trace or a workload through the real core, with policies side by side; loads no model.

    The table says how much of the prompts would be reused with which budget.
    """
    from milepost.cli.sim import SimOptions, run_comparison, run_replays, run_swarm
    from milepost.cli.sizes import parse_size

    console, status = Console(), Console(stderr=True)
    options = SimOptions(
        trace=trace,
        workload=workload,
        seed=seed,
        scale=scale,
        geometry=geometry,
        budgets=tuple(parse_size(part, "budgets") for part in budgets.split(",")),
        policies=tuple(part.strip() for part in policies.split(",")),
        match_unit=prefix_match_unit,
        limit=limit,
        max_output_tokens=max_tokens,
        step_tokens=max_num_batched_tokens,
        tokens_per_second=tokens_per_second,
        json_path=json_path,
        plot_path=plot_path,
    )
    if swarm is not None:
        run_swarm(seed, swarm, console, status)
    elif compare:
        run_comparison(options, console, status)
    else:
        run_replays(options, console, status)
