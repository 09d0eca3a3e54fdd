"""`--speculative-config`: which drafter, and how many tokens it may guess."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from milepost.config import SPECULATIVE_FIELD as FIELD
from milepost.core.drafts import DraftPlanner
from milepost.core.speculation import DraftLengths
from milepost.engine.ngram import NgramDrafter
from milepost.errors import ConfigError
from milepost.models import drafters
from milepost.models.block_config import DSPARK

NGRAM = "ngram"
METHODS = (NGRAM, *drafters.METHODS)
MAX_DRAFT_TOKENS = 32
DEFAULT_LOOKUP = 5
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    num_speculative_tokens: int
    method: str = ""
    model: str | None = None
    confidence_threshold: float | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculation of one server. Names are those of vLLM's option.

    Attributes:
        method: "ngram", or a key of `models.drafters.METHODS`.
        num_speculative_tokens: most drafts per request and step; fewer where they do not pay.
        prompt_lookup_min, prompt_lookup_max: of ngram: tokens of the text's end that must be, and at most
            are, found again.
        model: directory or hub id of the drafter, for methods with a checkpoint of their own.
        confidence_threshold: of dspark: drafts end before the first one that, by the drafter's estimate,
            is reached and accepted with a smaller chance; 0 = none ends for that.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    model: str | None = None
    confidence_threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From JSON. Without a method, it is the one that the config of `model` is for.

        Raises:
            ConfigError: names the key that cannot work.
            CheckpointFileError: there is no method, and `model` cannot be read to find out.
        """
        try:
            fields = msgspec.json.decode(text, type=_Fields)
        except msgspec.MsgspecError as error:
            raise ConfigError(FIELD, f"{error}. Write it like {EXAMPLE}") from None
        method = fields.method
        if not method and fields.model is not None:
            method = drafters.method_of(fields.model)
        if method not in METHODS:
            known = ", ".join(METHODS)
            raise ConfigError(FIELD, f"method {method!r} is not supported; use one of: {known}")
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
        if method != NGRAM:
            return cls(
                method,
                fields.num_speculative_tokens,
                model=fields.model,
                confidence_threshold=_confidence_threshold(fields, method),
            )
        if longest is None:
            longest = DEFAULT_LOOKUP if shortest is None else shortest
        if shortest is None:
            shortest = longest
        if not 1 <= shortest <= longest:
            raise ConfigError(
                FIELD,
                f"1 <= prompt_lookup_min <= prompt_lookup_max is needed, not {shortest} and {longest}",
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
        return DraftPlanner(drafter, self.num_speculative_tokens, DraftLengths())


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
