"""`milepost serve`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from milepost.cli.fit import settings_line
from milepost.cli.loading import load

if TYPE_CHECKING:
    from milepost.engine.serving import ServingOptions


def serve_model(directory: Path | None, options: ServingOptions, host: str, port: int) -> None:
    """Load a model and serve it until interrupted. The port is taken before anything is loaded."""
    from milepost.server.app import Server, bind

    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with bind(host, port) as listener:
        model = load(directory, options, console)
        console.print(settings_line(model), highlight=False, soft_wrap=True)

        def on_listening(address: str) -> None:
            console.print(
                f"listening on [bold]{address}[/bold] (OpenAI API at {address}/v1)",
                highlight=False,
                soft_wrap=True,
            )

        Server(model, listener, on_listening).serve_until_stopped()
