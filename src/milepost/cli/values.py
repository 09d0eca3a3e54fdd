"""From values of command-line options to the options of the layers below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from milepost.cli.options import DEFAULT_CACHE_SIZE
from milepost.cli.sizes import parse_size
from milepost.config import DEFAULT_MATCH_UNIT
from milepost.errors import RequestError

AUTO_CACHE = "auto"


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
    load_seconds: float | None,
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
        load_seconds,
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
