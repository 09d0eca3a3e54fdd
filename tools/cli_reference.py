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

Without a model directory every command uses the embedded `milepost-tiny`. A model directory has the hub's layout:
`config.json`, `*.safetensors`, `tokenizer.json` (or `tiktoken.model`), `tokenizer_config.json`. Commands that run a
model need the extras `cpu` and, for `serve`, `server`; each says so when one is missing.

| command | what |
|---|---|
| `milepost serve [MODEL]` | the OpenAI API, see `docs/http.md` |
| `milepost chat [MODEL]` | a conversation in the terminal; each turn shows reused and computed tokens and the time to \
the first token. `/reset` starts over, `/exit` leaves, Ctrl-C stops an answer |
| `milepost complete PROMPT` | continue a text; `-` reads it from standard input |
| `milepost info [MODEL]` | layers, bytes per token and per state, default spacing, smallest prompt that can hit, what \
fits; reads no weights |
| `milepost sim` | replay a trace or a workload through the real core, with policies side by side; loads no model |
| `milepost cache` | list, check and clean a folder of stored prefixes, see `docs/stores.md` |

A setting that cannot work, a budget too small for one request, a taken port or a file that is missing ends the command
with status 2 and one line that names the option, before any weight is read.

Start-up says what is in force and what fits: the longest request, how many of that length run at once, how many tokens
of prefixes are kept, and the smallest prompt that can hit (one token more than the match unit).

The options below are written by `make docs` from the commands' own help; `tests/test_docs.py` compares.
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
