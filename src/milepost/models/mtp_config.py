"""Method `mtp`: draft modules that a checkpoint ships for its own decoder, as its config declares them. No
torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.config import SPECULATIVE_FIELD
from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.layout import AttentionGroupLayout, draft_group
from milepost.models.parameters import count_layer
from milepost.models.quantization import Role
from milepost.models.specs import DecoderSpec, MtpSpec

if TYPE_CHECKING:
    from milepost.models.draft_target import DraftTarget
    from milepost.models.mtp import MtpModules

METHOD = "mtp"


@dataclass(frozen=True, slots=True)
class MtpDrafter:
    """The first modules of a checkpoint; a `drafters.DrafterSpec`."""

    decoder: DecoderSpec
    mtp: MtpSpec
    num_modules: int
    method: str = METHOD
    runner: str = "chain"
    directory: Path | None = None
    tap_layers: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def layers(self) -> range:
        """Under which numbers modules keep cache fields: as if they came behind the decoder's layers."""
        return range(len(self.decoder.layers), len(self.decoder.layers) + self.num_modules)

    def group(self, dtype: str) -> AttentionGroupLayout:
        mixer = self.decoder.mla if self.decoder.draft_layer.mixer == "mla" else self.decoder.gqa
        assert mixer is not None
        return draft_group(METHOD, self.layers, mixer, self.decoder.hidden_size, dtype)

    def count_by_role(self) -> Counter[Role]:
        """With the heads that modules in DeepSeek's layout are published with."""
        total = Counter[Role]()
        layer, hidden = self.decoder.draft_layer, self.decoder.hidden_size
        for _ in range(self.num_modules):
            total.update(count_layer(self.decoder, layer))
        is_qwen = self.mtp.family == "qwen"
        num_stems = 1 if is_qwen else self.num_modules
        total["vector"] += num_stems * 3 * hidden
        total["projection"] += num_stems * 2 * hidden * hidden
        if not is_qwen:
            total["head"] += self.num_modules * self.decoder.vocab_size * hidden
        return total

    def load(self, target: DraftTarget) -> MtpModules:
        from milepost.models.mtp import MtpModules

        return MtpModules(self, target)


def read(
    decoder: DecoderSpec, config: ConfigReader | None, directory: Path | None, num_draft_tokens: int
) -> MtpDrafter:
    """The modules that drafting so many tokens runs: one per token, as far as there are any.

    Raises:
        ConfigError: the decoder's config declares none.
    """
    if decoder.mtp is None:
        key = "mtp_num_hidden_layers" if decoder.model_type.startswith("qwen") else "num_nextn_predict_layers"
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"method 'mtp' needs a checkpoint with draft modules of its own, and config.json declares none "
            f"({key} is 0 or missing, or its attention is not supported); use method 'ngram'",
        )
    return MtpDrafter(decoder, decoder.mtp, min(decoder.mtp.num_modules, num_draft_tokens))
