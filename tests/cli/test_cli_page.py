"""docs/cli.md and the commands say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from milepost.cli.commands import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def sections() -> dict[str, set[str]]:
    """Command -> options its section of the page lists."""
    found = {}
    for section in PAGE.split("\n## milepost ")[1:]:
        name, _, body = section.partition("\n")
        rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `--")]
        found[name] = {option for row in rows for option in re.findall(r"`(--[\w-]+)`", row)}
    return found


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    """Name -> command; those below a group are named like `cache ls`."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found[prefix + name] = command
        if getattr(command, "commands", None):
            found |= commands(command, f"{prefix}{name} ")
    return found


def options() -> dict[str, set[str]]:
    """Command -> options it has."""
    return {
        name: {
            option
            for parameter in command.params
            for option in [*parameter.opts, *parameter.secondary_opts]
            if option.startswith("--") and option != "--help"
        }
        for name, command in commands(typer.main.get_command(app)).items()
    }


def test_every_option_is_listed_with_its_command() -> None:
    assert sections() == options()


def test_every_command_is_listed() -> None:
    group = typer.main.get_command(app)
    assert set(re.findall(r"^\| `milepost (\w+)", PAGE, re.MULTILINE)) == set(group.commands)
