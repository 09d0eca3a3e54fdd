"""docs/cli.md and the commands say the same."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from milepost.cli.commands import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def options() -> dict[str, set[str]]:
    """Option -> commands that have it."""
    found: dict[str, set[str]] = {}
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("--"):
                    found.setdefault(option, set()).add(name)
    found.pop("--help", None)
    return found


def test_every_option_is_listed_with_its_commands() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `--")]
    listed: dict[str, set[str]] = {}
    for names, commands, *_ in rows:
        wanted = {command.strip() for command in commands.split(",") if command.strip()}
        for option in re.findall(r"`(--[\w-]+)`", names):
            listed[option] = {"serve", "chat", "complete", "info"} if wanted == {"all"} else wanted
    assert listed.pop("--version") == set()
    assert listed == options()


def test_every_command_is_listed() -> None:
    group = typer.main.get_command(app)
    assert set(re.findall(r"^\| `milepost (\w+)", PAGE, re.MULTILINE)) == set(group.commands)
