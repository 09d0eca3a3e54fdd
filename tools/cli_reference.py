"""Writes docs/cli.md from the commands themselves.

python tools/cli_reference.py          # write
python tools/cli_reference.py --check  # exit with 1 if the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from milepost.cli.commands import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Command line

Written by `make docs` from the commands' own help; `tests/test_docs.py` fails when it is out of date.
Commands that run a model need the extras `cpu` and, for `serve`, `server`; each says so when one is missing.
"""


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or value == [] or parameter.required:
        return ""
    if value is True:
        return "on"
    return f"`{value}`" if value != "" else ""


def _flags(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    return " ".join(f"`{name}`" for name in names)


def _row(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    if parameter.param_type_name == "argument":
        name = (parameter.name or "").upper()
        return f"| `{name if parameter.required else f'[{name}]'}` | | {text} |"
    return f"| {_flags(parameter)} | {_default(parameter)} | {text} |"


def _section(name: str, command: Any) -> str:
    parameters = [p for p in command.params if not getattr(p, "hidden", False) and "--help" not in p.opts]
    lines = [f"## {name}", "", " ".join((command.help or "").split())]
    if parameters:
        lines += ["", "| option | default | meaning |", "|---|---|---|", *map(_row, parameters)]
    return "\n".join(lines)


def _commands(name: str, command: Any) -> list[tuple[str, Any]]:
    """The command and everything below it."""
    found = [(name, command)]
    for sub_name, sub_command in sorted(getattr(command, "commands", {}).items()):
        found += _commands(f"{name} {sub_name}", sub_command)
    return found


def reference() -> str:
    """The whole page."""
    commands = _commands("milepost", typer.main.get_command(app))
    return "\n\n".join([HEAD.strip(), *(_section(name, command) for name, command in commands)]) + "\n"


def main() -> int:
    text = reference()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
