"""`--help` on a terminal of 80 columns."""

from __future__ import annotations

import sys

import pytest
import typer.main
from tests.cli.test_cli_page import commands

from milepost.cli import main
from milepost.cli.commands import app

COMMANDS = commands(typer.main.get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_whole_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["milepost", *name.split(), "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    out = capsys.readouterr().out
    assert "…" not in out and "<bool>" not in out
    assert "{" not in next(line for line in out.splitlines() if "Usage:" in line)
    shown = {word for line in out.splitlines() for word in line.split()}
    for parameter in COMMANDS[name].params:
        for option in [*parameter.opts, *parameter.secondary_opts]:
            if option.startswith("--"):
                assert option in shown, option


def test_the_options_of_serve_are_in_panels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["milepost", "serve", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    panels = [line.split("─ ")[1].split(" ─")[0] for line in out.splitlines() if line.startswith("╭─ ")]
    assert len(panels) == len(set(panels)) >= 8
    alone = [parameter.opts[0] for parameter in COMMANDS["serve"].params
             if parameter.param_type_name == "option" and parameter.rich_help_panel is None]  # fmt: skip
    assert alone == [], "an option of serve is in no panel"
