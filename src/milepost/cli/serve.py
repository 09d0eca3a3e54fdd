"""`milepost serve`."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console

from milepost.cli.extras import check_serving_extras
from milepost.cli.fit import settings_line
from milepost.cli.loading import load

YOUNG_OBJECTS = 20_000
"""Objects made between two collections; Python's own 700 are a step of a few requests."""

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""

if TYPE_CHECKING:
    from milepost.engine.serving import ServingModel, ServingOptions
    from milepost.server.options import ServerOptions


def serve_model(
    directory: Path | None,
    options: ServingOptions,
    server_options: ServerOptions,
    host: str,
    port: int,
    log_format: str = "text",
) -> None:
    """Load a model and serve it until a signal. The port is taken, and answers 503, before anything is
    loaded.

    Raises:
        MilepostError: what keeps it from serving, or why it stopped by itself.
    """
    share_heaps()
    check_serving_extras(options.stores, server_options)
    from milepost.server.app import Server, bind
    from milepost.server.logs import LineLog, configure_logging

    configure_logging(log_format)
    console = (
        Console(stderr=True)
        if log_format == "text"
        else Console(file=cast(IO[str], LineLog("milepost.serve")), width=10_000)
    )

    def load_model() -> ServingModel:
        model = load(directory, options, console)
        console.print(settings_line(model, options, server_options), highlight=False, soft_wrap=True)
        return model

    has_served = False

    def on_listening(address: str) -> None:
        nonlocal has_served
        has_served = True
        spare_collections()
        console.print(
            f"listening on [bold]{address}[/bold] (OpenAI API at {address}/v1; the cache at {address}/ui)",
            highlight=False,
            soft_wrap=True,
        )

    def on_draining(num_open: int) -> None:
        if not has_served:  # the reason comes as an error
            return
        text = "draining: no request is open"
        if num_open:
            requests = "1 open request" if num_open == 1 else f"{num_open} open requests"
            text = (
                f"draining: {requests} may go on for {server_options.drain_seconds:g} s; a second signal "
                "ends them"
            )
        console.print(text, highlight=False, soft_wrap=True)

    with bind(host, port) as listener:
        try:
            Server(load_model, listener, on_listening, server_options, on_draining).serve_until_stopped()
            console.print("stopped", highlight=False)
        finally:
            # Or what start-up left in cycles would be there when the interpreter ends.
            gc.unfreeze()


def share_heaps(max_arenas: int = 2) -> None:
    """Let all threads allocate from few heaps: with one for nearly every thread, as glibc has it, what the
    threads of stores give back stays in holes of each, and a server grows for hours. `MALLOC_ARENA_MAX` wins;
    other C libraries are left alone."""
    if "MALLOC_ARENA_MAX" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max_arenas)


def spare_collections() -> None:
    """What start-up made stays: the collector need not look at it again, which would hold up every request
    for a tenth of a second each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
