"""`--state-dtype` where a model is described or loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.cli.test_quantization_option import shown  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from milepost.cli.commands import app  # noqa: E402
from milepost.engine.memory import memory_plan, staged_state_bytes  # noqa: E402
from milepost.engine.serving import EMBEDDED_MODEL  # noqa: E402
from milepost.errors import ConfigError  # noqa: E402
from milepost.models import describe  # noqa: E402


def number(cell: str) -> int:
    return int(cell.split()[0].replace(",", ""))


def test_info_shows_the_smaller_states_and_what_they_make_room_for() -> None:
    plain, small = shown(), shown("--state-dtype", "bf16")
    assert "while it runs" not in plain
    assert small["while it runs"] == plain["bytes per state"]
    assert number(small["bytes per state"]) < 0.6 * number(plain["bytes per state"])
    assert number(small["one state costs as much as"]) < 0.6 * number(plain["one state costs as much as"])
    kept = [int(rows["prefixes kept"].split()[4].replace(",", "")) for rows in (plain, small)]
    assert kept[1] > 1.1 * kept[0], "checkpoints"


@pytest.mark.parametrize("command", ["info", "serve", "chat"])
def test_unknown_names_are_refused(command: str) -> None:
    arguments = [command, "--state-dtype", "int8"]
    with pytest.raises(ConfigError, match="state_dtype: must be one of fp32, bf16, not 'int8'"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_memory_plan_counts_the_scratch_of_one_layer() -> None:
    exact, small = (describe(EMBEDDED_MODEL, state_dtype=name) for name in ("fp32", "bf16"))
    sizes = {"cache_bytes": 1 << 26, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    plans = [memory_plan(EMBEDDED_MODEL, about, match_unit=32, **sizes) for about in (exact, small)]
    assert staged_state_bytes(exact, 9, 16) == 0
    assert plans[1].workspace - plans[0].workspace == (9 + 16) * small.layer_state_bytes
