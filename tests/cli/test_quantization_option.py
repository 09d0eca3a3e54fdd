"""`--quantization` where a model is described or loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from milepost.cli.commands import app  # noqa: E402
from milepost.errors import ConfigError  # noqa: E402


def shown(*arguments: str) -> dict[str, str]:
    """Rows of `milepost info`."""
    result = CliRunner().invoke(app, ["info", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in result.output.splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_info_shows_the_weights_as_they_will_lie_in_memory() -> None:
    plain, int8, int4 = (
        shown(*arguments) for arguments in ([], ["--quantization", "int8"], ["--quantization", "int4"])
    )
    assert (plain["dtype"], int4["dtype"]) == ("bfloat16", "bfloat16, int4 weights")
    sizes = [float(rows["weights in memory"].removesuffix(" MiB")) for rows in (plain, int8, int4)]
    # 2.6 M weights; the embedding table, a seventh, keeps its dtype.
    assert sizes[0] == pytest.approx(4.9, abs=0.1) and sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.5 * sizes[0]
    assert plain["bytes per state"] == int4["bytes per state"]


@pytest.mark.parametrize("command", [["info"], ["complete", "x"]])
def test_unknown_names_are_refused(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="'int3' is not supported; use one of none, int8, int4"):
        CliRunner().invoke(app, [*command, "--quantization", "int3"], catch_exceptions=False)
