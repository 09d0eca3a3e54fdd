"""A model that is ready to serve: directory in, engine out (the caller starts it)."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.config import (
    DEFAULT_AUDIT_SHARE,
    DEFAULT_DECODE_INTERVAL,
    DEFAULT_MATCH_UNIT,
    EXACT,
    EXACT_PROMPTS,
    FP32,
    CacheConfig,
    SchedulerConfig,
    check_exactness,
)
from milepost.core.geometry import CacheGeometry
from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain
from milepost.core.scheduler import Scheduler
from milepost.engine.audit import AuditConfig, logit_bound
from milepost.engine.blocking import answer
from milepost.engine.chat import ChatRenderer
from milepost.engine.engine import Engine
from milepost.engine.generation_config import AUTO as AUTO_DEFAULTS
from milepost.engine.generation_config import GenerationDefaults, generation_defaults
from milepost.engine.messages import GenerationRequest
from milepost.engine.output_parser import AUTO, OutputFormat
from milepost.engine.params import random_seed
from milepost.engine.speculative import SpeculativeConfig
from milepost.engine.stores import PeerOffer, StoreOptions, connect_events, connect_stores
from milepost.engine.structured import GrammarCompiler
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import ConfigError

if TYPE_CHECKING:
    from milepost.engine.kv_publisher import ZmqPublisher
    from milepost.engine.memory import MemoryPlan
    from milepost.models.description import ModelDescription

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "milepost-tiny"
"""The model that ships with the package."""

DEFAULT_CACHE_BYTES = 1 << 30

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What `milepost serve` and its siblings can set; see the command line's help for meanings.

    Attributes:
        max_model_len: None = what the model declares, or what the budget holds if that is less.
        seed: None = requests without a seed get a random one; else theirs are drawn from it.
        decode_interval: None = the default, rounded up to the match unit.
        max_queued_requests: requests that may wait for a seat; further ones are refused. None = no bound.
        chat_template: file that replaces the model's template.
        generation_config: where sampling defaults come from, see `generation_defaults`.
        stores: what lies beyond the process's memory.
        speculative: which drafter, None = no speculation.
        exactness: what reuse may change, one of `config.EXACTNESS_MODES`.
        quantization: what weights are rounded to at load, see `models.quantization`; None = nothing.
        state_dtype: in which states are kept, one of `config.STATE_DTYPES`.
    """

    cache_bytes: int = DEFAULT_CACHE_BYTES
    match_unit: int = DEFAULT_MATCH_UNIT
    enable_prefix_caching: bool = True
    checkpoint_interval: int | None = None
    decode_interval: int | None = None
    max_states_per_path: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    dtype: str | None = None
    seed: int | None = None
    served_model_name: str | None = None
    audit_hits: float = 0.0
    audit_share: float = DEFAULT_AUDIT_SHARE
    reasoning_parser: str = AUTO
    tool_call_parser: str = AUTO
    max_queued_requests: int | None = None
    chat_template: Path | None = None
    generation_config: str = AUTO_DEFAULTS
    stores: StoreOptions = StoreOptions()
    speculative: SpeculativeConfig | None = None
    exactness: str = EXACT
    quantization: str | None = None
    state_dtype: str = FP32

    @property
    def model_options(self) -> dict[str, Any]:
        """How the model is read: keyword arguments of both `describe` and `load_model`."""
        return {
            "dtype": self.dtype,
            **self.draft_options,
            "quantization": self.quantization,
            "state_dtype": self.state_dtype,
        }

    @property
    def draft_options(self) -> dict[str, Any]:
        """Which drafter is loaded: keyword arguments of `describe`, `load_model` and `check_checkpoint`."""
        if self.speculative is None or not self.num_model_drafts:
            return {}
        return {
            "num_draft_tokens": self.num_model_drafts,
            "draft_method": self.speculative.method,
            "draft_model": self.speculative.model,
            "draft_confidence": self.speculative.confidence_threshold,
        }

    @property
    def num_model_drafts(self) -> int:
        """Tokens that a drafter with weights makes, see `load_model`."""
        return 0 if self.speculative is None else self.speculative.num_model_tokens

    def cache_config(self) -> CacheConfig:
        """Raises: ConfigError: an option that cannot work, by its name."""
        interval = self.decode_interval
        if interval is None:
            unit = max(1, self.match_unit)
            interval = -(-DEFAULT_DECODE_INTERVAL // unit) * unit
        return CacheConfig(
            cache_bytes=self.cache_bytes,
            match_unit=self.match_unit,
            enable_prefix_caching=self.enable_prefix_caching,
            checkpoint_interval=self.checkpoint_interval,
            decode_interval=interval,
            max_states_per_path=self.max_states_per_path,
        )


@dataclass(slots=True)
class ServingModel:
    """A model with its engine.

    Attributes:
        name: what `/v1/models` and the `model` field call it.
        output_format: how the model writes reasoning and tool calls.
        max_model_len: prompt and output tokens of one request: declared or asked for, and within budget.
        vocab_size: token ids the model accepts are below it.
        description: None for a model that does not come from a directory (tests).
        audit: which hits are recomputed, and what counts as equal.
        grammars: compiles what structured answers follow.
        defaults: sampling of requests that say nothing about it.
        exactness: what the self-test found a hit to promise on this machine, as one line.
        events: publishes cache events, if asked for.
        offer: what peers can be given, if they are to get it.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatRenderer
    output_format: OutputFormat
    geometry: CacheGeometry
    cache: CacheConfig
    scheduler: SchedulerConfig
    max_model_len: int
    vocab_size: int
    seeds: SeedSource
    description: ModelDescription | None = None
    audit: AuditConfig = field(default_factory=AuditConfig)
    exactness: str = ""
    defaults: GenerationDefaults = GenerationDefaults()
    events: ZmqPublisher | None = None
    offer: PeerOffer | None = None
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size)

    def encode_prompt(self, text: str) -> array[int]:
        """Token ids of a raw text prompt."""
        return array("I", self.tokenizer.encode_prompt(text))

    def close(self) -> None:
        """Stop the engine and give the memory back."""
        self.engine.close()
        if self.events is not None:
            self.events.close()


class SeedSource:
    """Seeds of requests that bring none."""

    def __init__(self, seed: int | None = None) -> None:
        self._drawn = None if seed is None else random.Random(seed)

    def next(self) -> int:
        """A seed below 2**63."""
        return random_seed() if self._drawn is None else self._drawn.getrandbits(63)


def check_budget(
    geometry: CacheGeometry, cache: CacheConfig, declared_max_len: int, wanted_max_len: int | None
) -> int:
    """Longest request that is served, in tokens.

    Raises:
        ConfigError: `wanted_max_len` is more than the model declares or the budget holds, or less than
            two tokens, or the budget cannot hold any request.
    """
    if wanted_max_len is not None and wanted_max_len < 2:
        raise ConfigError(
            "max_model_len", f"must be at least 2, one prompt token and one generated, not {wanted_max_len}"
        )
    fitting = geometry.max_tokens_for(cache.cache_bytes)
    if fitting < 2:
        needed = geometry.request_bytes(2)
        raise ConfigError(
            "cache_bytes",
            f"{cache.cache_bytes:,} bytes cannot hold one request: its first pages and its running state "
            f"take {needed:,} bytes. Give at least --cache-bytes {needed}",
        )
    if wanted_max_len is None:
        return min(declared_max_len, fitting)
    if wanted_max_len > declared_max_len:
        raise ConfigError(
            "max_model_len", f"{wanted_max_len} is more than the {declared_max_len} the model declares"
        )
    if wanted_max_len > fitting:
        needed = geometry.request_bytes(wanted_max_len)
        raise ConfigError(
            "cache_bytes",
            f"{cache.cache_bytes:,} bytes hold a request of {fitting} tokens, but --max-model-len is "
            f"{wanted_max_len}, which needs {needed:,} bytes. Raise --cache-bytes or lower --max-model-len",
        )
    return wanted_max_len


def load_serving_model(
    directory: str | Path | None, options: ServingOptions, progress: Progress | None = None
) -> ServingModel:
    """Check everything that can be checked, then load the weights. The engine is not started yet.

    Args:
        directory: a model directory in hub layout; None = the embedded model.

    Raises:
        ConfigError, CheckpointFileError: before any weight is read, wherever that is possible.
    """
    from milepost.models.description import describe, expands_latents
    from milepost.models.hub import model_directory, model_name

    path = model_directory(EMBEDDED_MODEL if directory is None else directory)
    cache = options.cache_config()
    audit = AuditConfig(options.audit_hits, share=options.audit_share)
    check_exactness(options.exactness)
    options.stores.check()
    description = describe(path, **options.model_options)
    expands = expands_latents(description.layer_kinds, options.exactness)
    if expands and options.exactness == EXACT_PROMPTS:
        cache = dataclasses.replace(cache, shares_generated_tokens=False)
    geometry = description.layout.geometry(options.match_unit)
    max_model_len = check_budget(geometry, cache, description.max_model_len, options.max_model_len)
    planned_memory(path, description, options).check()
    config = SchedulerConfig(
        options.max_num_batched_tokens, options.max_num_seqs, max_model_len, audit.background_share
    )
    tokenizer = Tokenizer.from_directory(path)
    if tokenizer.vocab_size > description.vocab_size:
        raise ConfigError(
            "vocab_size",
            f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, the model has "
            f"{description.vocab_size} embeddings; the tokenizer belongs to another model",
        )
    chat = ChatRenderer.from_directory(path, tokenizer, options.chat_template)
    defaults = generation_defaults(path, options.generation_config)
    output_format = OutputFormat.choose(
        tokenizer, chat.template_source, options.reasoning_parser, options.tool_call_parser
    )
    chat.reads_generated_answers = not output_format.parses
    planner = options.speculative.planner() if options.speculative is not None else None
    scheduler = Scheduler(geometry, cache, config, planner)

    # torch is imported only now: everything above fails in a fraction of a second.
    from milepost.models.loading import load_model
    from milepost.runner.selftest import self_test
    from milepost.runner.worker import TorchWorker

    model = load_model(path, progress=progress, exactness=options.exactness, **options.model_options)
    worker = TorchWorker(model, geometry, options.cache_bytes)
    promise = self_test(model)
    audit = dataclasses.replace(audit, logit_bound=logit_bound(promise.exact, model.dtype, model.state_dtype))
    engine = Engine(
        scheduler, worker, tokenizer, audit=audit, max_queued_requests=options.max_queued_requests
    )
    exactness = "exact" if promise.exact else "numeric"
    if options.exactness != EXACT:
        exactness = f"{options.exactness}, {exactness}"
    offer = connect_stores(engine, scheduler, options.stores, path, model, geometry, worker.pools, exactness)
    return ServingModel(
        name=options.served_model_name or model_name(EMBEDDED_MODEL if directory is None else directory),
        engine=engine,
        tokenizer=tokenizer,
        chat=chat,
        output_format=output_format,
        geometry=geometry,
        cache=cache,
        scheduler=config,
        max_model_len=scheduler.max_model_len,
        vocab_size=description.vocab_size,
        seeds=SeedSource(options.seed),
        description=description,
        audit=audit,
        exactness=promise_text(promise.text, options.speculative),
        defaults=defaults,
        events=connect_events(engine, options.stores, options.match_unit),
        offer=offer,
    )


def promise_text(promise: str, speculative: SpeculativeConfig | None) -> str:
    """What the self-test promises, and what drafts take from it."""
    if speculative is None or speculative.keeps_seeds:
        return promise
    return (
        f"{promise}; sampled answers have the model's distribution, and which ones a seed gives depends on "
        "what was drafted (draft_sample_method probabilistic)"
    )


def planned_memory(directory: Path, about: ModelDescription, options: ServingOptions) -> MemoryPlan:
    """What serving it with these options takes."""
    from milepost.engine.memory import memory_plan

    return memory_plan(
        directory,
        about,
        cache_bytes=options.cache_bytes,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        match_unit=options.match_unit,
        store_bytes=options.stores.memory_bytes(),
    )


WARM_UP_TOKENS = 8


def warm_up(model: ServingModel) -> None:
    """One short answer through the started engine, in no metric and no log; keeps nothing in the cache.

    Raises:
        MilepostError: the engine cannot answer.
    """
    prompt = array("I", [0] * max(1, min(WARM_UP_TOKENS, model.max_model_len - 2)))
    sampling = SamplingParams(temperature=0.0)
    request = GenerationRequest(prompt, sampling, max_tokens=1, uses_cache=False, is_counted=False)
    for _ in answer(model.engine, request):
        pass


def cache_domain(
    cache_salt: str | None, api_key: str | None = None, *, is_separate: bool = False
) -> CacheDomain:
    """The domain of a request: prefixes are shared only where salts, and the keys they came with, are
    equal.

    Args:
        is_separate: the key separates callers also where no salt is sent.
    """
    if not cache_salt and not is_separate:
        return CacheDomain()
    bound_to = blake2b((api_key or "").encode(), digest_size=32).digest()
    salt = blake2b((cache_salt or "").encode(), key=bound_to, digest_size=32).digest()
    return CacheDomain(tenant_salt=salt)
