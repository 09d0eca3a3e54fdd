"""Which drafters there are that need weights, and what is asked of them before these are loaded. No torch.

A drafter reads the decoder's hidden states and remembers something of processed tokens in pages of its own,
the last attention group. What it is, is read from configs into a `DrafterSpec`; `load` adds its weights, and
a runner (`runner.drafters.RUNNERS`) works with the result. A new method is a module here that reads its
config, one with its layers, a runner unless it can use one that exists, and a line in `METHODS`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from milepost.config import SPECULATIVE_FIELD
from milepost.errors import CheckpointFileError, ConfigError
from milepost.models import block_config, eagle3_config, mtp_config
from milepost.models.config_reader import ConfigReader, read_json_object
from milepost.models.hub import CONFIG_FILE, model_directory
from milepost.models.layout import AttentionGroupLayout
from milepost.models.quantization import Role
from milepost.models.specs import DecoderSpec

if TYPE_CHECKING:
    from milepost.models.draft_target import DraftTarget

MTP = mtp_config.METHOD


class DrafterSpec(Protocol):
    """A drafter as its configs describe it."""

    @property
    def method(self) -> str:
        """Key of `METHODS`, and name of its attention group."""

    @property
    def runner(self) -> str:
        """Key of `runner.drafters.RUNNERS`."""

    @property
    def directory(self) -> Path | None:
        """Where its own checkpoint is; None = its tensors are among the decoder's."""

    @property
    def num_modules(self) -> int:
        """Parts that make one guess each, one after the other; 1 where nothing like that exists."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers whose outputs it reads, 0-based and ascending; () = the hidden states behind the
        last one, which the final norm reads."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """Name prefixes of tensors of its checkpoint that it has no use for."""

    def group(self, dtype: str) -> AttentionGroupLayout:
        """What it keeps of processed tokens, in a model that runs in `dtype`."""

    def count_by_role(self) -> Counter[Role]:
        """Its weights, by what they are for."""

    def load(self, target: DraftTarget) -> Any:
        """Its torch side, with all weights; what that can do is between it and its runner.

        Raises:
            ConfigError: the decoder and the drafter do not fit together.
            CheckpointFileError: a tensor is missing or has another shape.
        """


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """
    Attributes:
        read: (decoder, config of the drafter, its directory, tokens to draft) -> what it is. Config and
            directory are None where the decoder's checkpoint has it all. Raises `ConfigError`.
        recognises: whether a drafter's config is one of this method; None = it has no config of its own.
    """

    read: Callable[[DecoderSpec, ConfigReader | None, Path | None, int], DrafterSpec]
    recognises: Callable[[ConfigReader], bool] | None = None


METHODS: Mapping[str, DraftMethod] = {
    mtp_config.METHOD: DraftMethod(mtp_config.read),
    eagle3_config.METHOD: DraftMethod(eagle3_config.read, eagle3_config.recognises),
    block_config.DFLASH: DraftMethod(block_config.read_dflash, block_config.recognises_dflash),
    block_config.DSPARK: DraftMethod(block_config.read_dspark, block_config.recognises_dspark),
}
"""Method, as in `--speculative-config`, -> how it is read."""


def read_drafter(
    decoder: DecoderSpec,
    num_draft_tokens: int,
    method: str = MTP,
    model: str | Path | None = None,
    confidence: float = 0.0,
) -> DrafterSpec | None:
    """What drafts so many tokens for `decoder`; None for 0 tokens.

    Args:
        model: directory or hub id of the drafter's checkpoint, for methods that have one.
        confidence: see `block_config.BlockDrafterSpec.confidence_threshold`.

    Raises:
        ConfigError: an unknown method, or a drafter that cannot work for this decoder.
        CheckpointFileError: the drafter's directory or config cannot be read.
    """
    if not num_draft_tokens:
        return None
    known = METHODS.get(method)
    if known is None:
        raise ConfigError(SPECULATIVE_FIELD, f"method {method!r} has no drafter with weights")
    check_model(method, model)
    if model is None:
        drafter = known.read(decoder, None, None, num_draft_tokens)
    else:
        directory, config = _files(model)
        drafter = known.read(decoder, config, directory, num_draft_tokens)
    if confidence <= 0.0:
        return drafter
    if not isinstance(drafter, block_config.BlockDrafterSpec) or drafter.has_confidence is False:
        raise block_config.no_confidence(method if model is None else str(model))
    return dataclasses.replace(drafter, confidence_threshold=confidence)


def load_drafter(drafter: DrafterSpec, target: DraftTarget) -> Any:
    """`drafter.load`, with errors that tell the drafter's files from the decoder's.

    Raises:
        ConfigError: the decoder and the drafter do not fit together.
        CheckpointFileError: a tensor is missing or has another shape; for a drafter with files of its own it
            names the option that asked for them.
    """
    try:
        return drafter.load(target)
    except CheckpointFileError as error:
        if drafter.directory is None:
            raise
        raise CheckpointFileError(
            f"{SPECULATIVE_FIELD}: the drafter cannot be loaded: {error}; take config.json and tensors from "
            f"the same checkpoint, one of method {drafter.method!r}"
        ) from error


def check_model(method: str, model: str | Path | None) -> None:
    """Whether a checkpoint is named where a method needs one, and only there.

    Raises:
        ConfigError: it is not.
    """
    known = METHODS.get(method)
    needs_model = known is not None and known.recognises is not None
    if needs_model and model is None:
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"method {method!r} needs a checkpoint of its own; name its directory or hub id as 'model'",
        )
    if model is not None and not needs_model:
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"method {method!r} has no checkpoint of its own; leave 'model' out, or name another method",
        )


def draft_config(directory: Path) -> ConfigReader:
    """The config of a drafter's checkpoint; errors name keys as `draft_model.KEY`."""
    return ConfigReader(read_json_object(directory / CONFIG_FILE), "draft_model.")


def _files(model: str | Path) -> tuple[Path, ConfigReader]:
    """Directory and config of a drafter's checkpoint.

    Raises:
        CheckpointFileError: one of them cannot be read; names the option that asked for it.
    """
    try:
        directory = model_directory(model)
        return directory, draft_config(directory)
    except CheckpointFileError as error:
        raise CheckpointFileError(f"{SPECULATIVE_FIELD}: model {error}") from None


def method_of(model: str | Path) -> str:
    """The method that a drafter's checkpoint is for, by its config.

    Raises:
        ConfigError: none recognises it.
        CheckpointFileError: its directory or config cannot be read.
    """
    _, config = _files(model)
    for name, method in METHODS.items():
        if method.recognises is not None and method.recognises(config):
            return name
    known = ", ".join(name for name, method in METHODS.items() if method.recognises is not None)
    raise ConfigError(
        SPECULATIVE_FIELD,
        f"the config of {model} names no drafter that is known; say its method ({known}) if it is one",
    )
