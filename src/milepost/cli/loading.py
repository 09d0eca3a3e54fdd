"""Loading a model with progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from milepost.cli.extras import MODEL_PACKAGES, check_modules
from milepost.cli.fit import draft_text, fit_line, fit_of, memory_line

if TYPE_CHECKING:
    from milepost.engine.serving import ServingModel, ServingOptions


def load(directory: Path | None, options: ServingOptions, console: Console) -> ServingModel:
    """Load a model, say what it is and what fits.

    Raises:
        ConfigError, CheckpointFileError: see `load_serving_model`.
        MilepostError: a package is missing.
    """
    from milepost.engine.serving import EMBEDDED_MODEL, load_serving_model, planned_memory
    from milepost.models.hub import model_directory

    check_modules(MODEL_PACKAGES)
    with _progress(console) as on_progress:
        model = load_serving_model(directory, options, on_progress)
    about = model.description
    if about is not None:
        kinds = ", ".join(
            f"{about.layer_kinds.count(kind)} {kind}" for kind in sorted(set(about.layer_kinds))
        )
        console.print(
            f"[bold]{model.name}[/bold]: {about.model_type}, {about.num_parameters:,} parameters, "
            f"{about.num_layers} layers ({kinds}), {about.precision}",
            highlight=False,
            soft_wrap=True,
        )
        if about.drafter is not None:
            text = draft_text(about.drafter, model.geometry)
            console.print(f"drafter: {text}", highlight=False, soft_wrap=True)
        path = model_directory(EMBEDDED_MODEL if directory is None else directory)
        plan = planned_memory(path, about, options)
        console.print(memory_line(plan), highlight=False, soft_wrap=True)
    console.print(
        fit_line(fit_of(model.geometry, model.cache, model.max_model_len), model.cache),
        highlight=False,
        soft_wrap=True,
    )
    if model.exactness:
        console.print(model.exactness, highlight=False, soft_wrap=True)
    return model


class _Bytes(DownloadColumn):
    """Nothing until it is known how many there are."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line per quarter."""
    if not console.is_terminal:
        shown = [0]

        def on_quarter(num_done: int, num_all: int) -> None:
            quarter = 4 * num_done // max(1, num_all)
            if quarter > shown[0]:
                shown[0] = quarter
                console.print(f"loading: {25 * quarter} %", highlight=False)

        yield on_quarter
        return
    columns = (TextColumn("loading"), BarColumn(), _Bytes(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda num_done, num_all: progress.update(task, completed=num_done, total=num_all)


@contextmanager
def started(model: ServingModel) -> Iterator[ServingModel]:
    """The model with its engine running; closed at the end."""
    model.engine.start()
    try:
        yield model
    finally:
        model.close()
