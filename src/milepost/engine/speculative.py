"""`--speculative-config`: which drafter, and how many tokens it may guess."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from milepost.config import SPECULATIVE_FIELD as FIELD
from milepost.core.drafts import DraftPlanner
from milepost.core.plan import COUPLED, GREEDY, PROBABILISTIC
from milepost.core.speculation import DraftLengths
from milepost.engine.ngram import MAX_SEARCHED_TOKENS, NgramDrafter
from milepost.errors import ConfigError
from milepost.models import drafters
from milepost.models.block_config import DSPARK
from milepost.models.config_reader import unrepeated

NGRAM = "ngram"
METHODS = (NGRAM, *drafters.METHODS)
MAX_DRAFT_TOKENS = 32
DRAFT_SAMPLE_METHODS = (COUPLED, GREEDY, PROBABILISTIC)
REJECTION_SAMPLE_METHOD = "standard"
DEFAULT_LOOKUP = 5
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    num_speculative_tokens: int
    method: str = ""
    model: str | None = None
    confidence_threshold: float | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculation of one server. Names are those of vLLM's option.

    Attributes:
        method: "ngram", or a key of `models.drafters.METHODS`.
        num_speculative_tokens: most drafts per request and step; fewer where they do not pay.
        prompt_lookup_min, prompt_lookup_max: of ngram: tokens of the text's end that must be, and at most
            are, found again.
        draft_sample_method: how a model drafts for answers that are sampled: the tokens that the noise of
            their positions makes likely (`COUPLED`), the most likely ones (`GREEDY`), or drawn on its own
            and verified by rejection sampling (`PROBABILISTIC`); see `ChunkPlan.draft_sampling`.
        model: directory or hub id of the drafter, for methods with a checkpoint of their own.
        confidence_threshold: of dspark: drafts end before the first one that, by the drafter's estimate,
            is reached and accepted with a smaller chance; 0 = none ends for that.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    draft_sample_method: str = COUPLED
    model: str | None = None
    confidence_threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From JSON. Without a method, it is the one that the config of `model` is for.

        Raises:
            ConfigError: names the key that cannot work.
            CheckpointFileError: there is no method, and `model` cannot be read to find out.
        """
        fields = _read(text)
        method = fields.method
        if not method and fields.model is not None:
            method = drafters.method_of(fields.model)
        if method not in METHODS:
            known = ", ".join(METHODS)
            wrong = f"method {method!r} is not supported" if method else "method is missing"
            raise ConfigError(FIELD, f"{wrong}; use one of: {known}")
        if not 1 <= fields.num_speculative_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                FIELD,
                f"num_speculative_tokens must be 1 to {MAX_DRAFT_TOKENS}, "
                f"not {fields.num_speculative_tokens}",
            )
        longest, shortest = fields.prompt_lookup_max, fields.prompt_lookup_min
        if method != NGRAM and (longest is not None or shortest is not None):
            raise ConfigError(FIELD, "prompt_lookup_max and prompt_lookup_min belong to method 'ngram'")
        drafters.check_model(method, fields.model)
        if method == NGRAM:
            _confidence_threshold(fields, method)
        sample_method = _sample_method(fields, method)
        if method != NGRAM:
            return cls(
                method,
                fields.num_speculative_tokens,
                draft_sample_method=sample_method,
                model=fields.model,
                confidence_threshold=_confidence_threshold(fields, method),
            )
        if longest is None:
            longest = DEFAULT_LOOKUP if shortest is None else shortest
        if shortest is None:
            shortest = longest
        if not 1 <= shortest <= longest <= MAX_SEARCHED_TOKENS:
            raise ConfigError(
                FIELD,
                f"1 <= prompt_lookup_min <= prompt_lookup_max <= {MAX_SEARCHED_TOKENS} is needed, not "
                f"{shortest} and {longest}",
            )
        return cls(method, fields.num_speculative_tokens, shortest, longest)

    @property
    def num_model_tokens(self) -> int:
        """Most drafts that a drafter with weights makes; 0 = none is needed."""
        return 0 if self.method == NGRAM else self.num_speculative_tokens

    def planner(self) -> DraftPlanner:
        """What the scheduler asks for drafts."""
        drafter = None
        if self.method == NGRAM:
            drafter = NgramDrafter(self.prompt_lookup_min, self.prompt_lookup_max)
        lengths = DraftLengths(is_own=drafter is None)
        return DraftPlanner(drafter, self.num_speculative_tokens, lengths, self.draft_sample_method)

    @property
    def keeps_seeds(self) -> bool:
        """Whether a sampled answer is the same with and without drafts."""
        return self.draft_sample_method != PROBABILISTIC


def _read(text: str) -> _Fields:
    """
    Raises:
        ConfigError: it is no JSON, a key is unknown, missing, of another type or given twice, or `model` is
            empty; names the key.
    """
    try:
        fields = msgspec.json.decode(text, type=_Fields)
        json.loads(text, object_pairs_hook=unrepeated)
    except (msgspec.MsgspecError, ValueError) as error:
        keys = ", ".join(_Fields.__struct_fields__)
        raise ConfigError(FIELD, f"{error}. Write it like {EXAMPLE}; there are {keys}") from None
    if fields.model is not None and not fields.model.strip():
        raise ConfigError(FIELD, "model is empty; name the drafter's directory or hub id, or leave it out")
    return fields


def _sample_method(fields: _Fields, drafter: str) -> str:
    """`draft_sample_method`, which a drafter without a distribution cannot have.

    Args:
        drafter: the method of drafting.

    Raises:
        ConfigError: it is unknown or cannot work with the method, or another rule is to reject drafts.
    """
    method = fields.draft_sample_method
    if fields.rejection_sample_method not in (None, REJECTION_SAMPLE_METHOD):
        raise ConfigError(
            FIELD,
            f"rejection_sample_method {fields.rejection_sample_method!r} is not supported; "
            f"leave it out, or use {REJECTION_SAMPLE_METHOD!r}",
        )
    if method is None:
        return COUPLED
    if method not in DRAFT_SAMPLE_METHODS:
        known = ", ".join(DRAFT_SAMPLE_METHODS)
        raise ConfigError(FIELD, f"draft_sample_method {method!r} is not supported; use one of: {known}")
    if drafter == NGRAM and method != GREEDY:
        raise ConfigError(
            FIELD,
            f"draft_sample_method {method!r} needs a drafter with a distribution; method 'ngram' looks "
            "its drafts up, leave it out",
        )
    return method


def _confidence_threshold(fields: _Fields, method: str) -> float:
    """
    Raises:
        ConfigError: it is no chance, or the method's drafters estimate none.
    """
    threshold = fields.confidence_threshold
    if threshold is None:
        return 0.0
    if method != DSPARK:
        raise ConfigError(FIELD, f"confidence_threshold belongs to method {DSPARK!r}; leave it out")
    if not 0.0 <= threshold < 1.0:
        raise ConfigError(FIELD, f"confidence_threshold must be at least 0 and below 1, not {threshold}")
    return threshold
