"""The `milepost` command."""

from __future__ import annotations


def main() -> None:
    """Entry point. Imports nothing heavy before a command needs it."""
    from milepost.cli.commands import run

    run()
