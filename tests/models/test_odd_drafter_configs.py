"""Configs of drafters with odd values: understood, or refused by the name of a key; nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_odd_configs import ODD_VALUES, sections
from tests.support import block_checkpoints, eagle3_checkpoints

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.description import read_spec
from milepost.models.drafters import METHODS, method_of
from milepost.models.rope import MOST_ROTATED, RopeSpec, inverse_frequencies

LAYOUTS = (*block_checkpoints.LAYOUTS, *eagle3_checkpoints.LAYOUTS)
ABSENT = ("rope_scaling", "quantization_config", "layer_types", "draft_vocab_size", "sliding_window")
ABSENT += (
    "dflash_config",
    "eagle_config",
    "target_hidden_size",
    "num_target_layers",
    "is_causal",
    "head_dim",
)
EXTREME = (1e300, 1e-300, -1e300, 2**39)


class Pair:
    """A decoder and a drafter whose config can be another one."""

    def __init__(self, root: Path, layout: str) -> None:
        is_block = layout in block_checkpoints.LAYOUTS
        module: Any = block_checkpoints if is_block else eagle3_checkpoints
        self.decoder, self.drafter = module.write_pair(root, "kimi_linear", layout)
        self.method = block_checkpoints.method_of(layout) if is_block else "eagle3"
        self.spec = read_spec(self.decoder)
        self.config: dict[str, Any] = json.loads((self.drafter / "config.json").read_text())

    def read(self, config: dict[str, Any]) -> Any:
        """The drafter, as far as it can be told without its weights."""
        reader = ConfigReader(config, "draft_model.")
        for method in METHODS.values():
            if method.recognises is not None:
                method.recognises(reader)
        return METHODS[self.method].read(self.spec, reader, self.drafter, 4)

    def variants(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for number, section in enumerate(sections(self.config)):
            for key in (*section, *(key for key in ABSENT if key not in section)):
                for value in (*ODD_VALUES, *EXTREME):
                    config = copy.deepcopy(self.config)
                    sections(config)[number][key] = value
                    yield key, value, config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_a_key_holds_the_refusal_names_a_field(layout: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, layout)
    num_refused = num_accepted = 0
    for key, value, config in pair.variants():
        try:
            drafter = pair.read(config)
        except ConfigError as error:
            assert (error.field or "").startswith("draft_model."), (key, value, str(error))
            num_refused += 1
        else:
            assert drafter.group("float32").bytes_per_token > 0, (key, value)
            assert min(drafter.count_by_role().values()) >= 0, (key, value)
            for rope in (getattr(drafter, "rope", None), getattr(drafter.mla or drafter.gqa, "rope", None)):
                if isinstance(rope, RopeSpec):
                    assert rope.width <= MOST_ROTATED
                    assert all(0.0 <= angle <= 1.0 for angle in inverse_frequencies(rope)), (key, value)
            num_accepted += 1
    assert num_refused > 300 and num_accepted > 100


@pytest.mark.parametrize(
    ("layout", "section", "key", "value", "named"),
    [
        ("dspark_mla", None, "qk_rope_head_dim", 7, "draft_model.qk_rope_head_dim"),
        ("mla", None, "qk_rope_head_dim", 7, "draft_model.qk_rope_head_dim"),
        ("dflash", None, "head_dim", 10**9, "draft_model.head_dim"),
        ("llama", None, "head_dim", 10**9, "draft_model.head_dim"),
        ("llama", None, "rope_theta", 0.5, "draft_model.rope_theta"),
        ("dspark_mla", "rope_parameters", "mscale_all_dim", 1e300, "rope_parameters.mscale_all_dim"),
        ("mla", "rope_scaling", "factor", 0.5, "rope_scaling.factor"),
        ("mla", "rope_scaling", "mscale", -1e300, "rope_scaling.mscale"),
        ("dspark", "rope_parameters", "beta_fast", 1e308, "rope_parameters.beta_fast"),
        ("dspark", "rope_parameters", "beta_slow", 1e-320, "rope_parameters.beta_slow"),
    ],
)
def test_numbers_that_no_position_could_be_made_of_are_refused(
    layout: str, section: str | None, key: str, value: Any, named: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, layout)
    config = copy.deepcopy(pair.config)
    (config if section is None else config[section])[key] = value
    with pytest.raises(ConfigError) as raised:
        pair.read(config)
    assert raised.value.field.endswith(named)


def test_a_config_of_a_drafter_is_told_by_its_own_method(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        pair = Pair(tmp_path / layout, layout)
        assert method_of(pair.drafter) == pair.method
