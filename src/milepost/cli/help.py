"""`--help` at 80 columns: a switch and its opposite get a row each, or neither name would fit; switches
have no type, and what must be given stands as it is typed."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand, TyperGroup


class _Plain:
    """Of a command or group: usage and options without the signs that depend on typer's version."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class Group(_Plain, TyperGroup):
    """Commands below a name."""


class Command(_Plain, TyperCommand):
    """A command whose help shows every name whole."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy.copy(self)
        shown.params = [row for parameter in self.params for row in _rows(parameter)]
        TyperCommand.format_help(shown, ctx, formatter)


def _rows(parameter: Any) -> list[Any]:
    if not parameter.secondary_opts:
        return [parameter]
    positive, negative = copy.copy(parameter), copy.copy(parameter)
    positive.secondary_opts = negative.secondary_opts = []
    negative.opts, negative.help = parameter.secondary_opts, f"The opposite of {parameter.opts[0]}."
    return [positive, negative]
