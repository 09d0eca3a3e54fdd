"""`--help` at 80 columns: a switch and its opposite get a row each, or neither name would fit."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
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
