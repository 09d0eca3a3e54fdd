"""`milepost cache`: what is in a folder of stored prefixes, is it whole, and less of it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milepost.cli.help import Command, Group
from milepost.cli.numbers import whole
from milepost.cli.sizes import format_size, parse_size
from milepost.engine.manifests import NAME_REASONS
from milepost.errors import ConfigError
from milepost.stores.inspection import (
    StoredObject,
    choose_garbage,
    open_folder,
    read_objects,
    remove_files,
    scan,
    summarize,
    unusable,
)

app = typer.Typer(
    name="cache",
    help="List, check and clean a folder of stored prefixes (--persist, file://), in use or not.",
    no_args_is_help=True,
    cls=Group,
)

Directory = Annotated[
    Path, typer.Argument(help="The folder given to --persist, or behind file://.", metavar="DIR")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@app.command("ls", cls=Command)
def list_segments(
    directory: Directory,
    fingerprint: Annotated[
        str,
        typer.Option("--fingerprint", metavar="HEX", help="Only of the model whose fingerprint begins so."),
    ] = "",
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", parser=whole("limit", example=50, least=0), help="Rows; 0 = all."
        ),
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List stored segments, the last used first."""
    folder = open_folder(directory)
    files = [file for file in scan(folder) if file.path.startswith(fingerprint)]
    files.sort(key=lambda file: file.used_ns, reverse=True)
    shown = list(read_objects(folder, files[: limit or None]))
    if as_json:
        typer.echo(json.dumps([_row(each) for each in shown], indent=2))
        return
    table = _table(
        f"{_segments(len(files))} in {directory}",
        ("model", "segment", "after", "tokens", "size", "reason", "last used"),
        shortened=("segment", "after"),
    )
    now = time.time()
    for each in shown:
        model, size = each.file.path[:8], format_size(each.file.num_bytes)
        age = _age(now - each.file.used_ns / 1e9)
        header = each.header
        if header is None or each.problem is not None:
            table.add_row(model, Text(each.problem or "", style="red"), "", "", size, "", age)
            continue
        parent = header.parent_key.hex()[:12] if header.parent_key else "(start)"
        tokens = _tokens(header.start, header.position)
        table.add_row(model, header.key.hex()[:12], parent, tokens, size, Text(header.reason), age)
    Console().print(table)
    if len(shown) < len(files):
        typer.echo(f"{len(files) - len(shown):,} more; --limit 0 shows all")


@app.command("stat", cls=Command)
def statistics(directory: Directory, as_json: AsJson = False) -> None:
    """Sum up: models, bytes, tokens, reasons, and what is of no use."""
    summary = summarize(open_folder(directory))
    models = sorted({each.file.path.partition("/")[0] for each in summary.objects})
    rows = [_model_row(model, summary.objects) for model in models]
    if as_json:
        document = {
            "directory": str(directory),
            "bytes": summary.total_bytes,
            "segments": len(summary.objects),
            "unusable": summary.num_unusable,
            "models": [asdict(row) for row in rows],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = _table(
        f"{directory}: {format_size(summary.total_bytes)}",
        ("model", "segments", "size", "tokens", "longest", "damaged", "last used", "reasons"),
        shortened=("model", "reasons"),
    )
    now = time.time()
    for row in rows:
        table.add_row(
            row.fingerprint[:16],
            f"{row.segments:,}",
            format_size(row.bytes),
            f"{row.tokens:,}",
            f"{row.longest_prefix:,}",
            f"{row.unreadable:,}",
            _age(now - row.last_used),
            Text("\n".join(f"{count:,} {reason}" for reason, count in row.reasons.items())),
        )
    Console().print(table)
    if summary.num_unusable:
        typer.echo(
            f"{summary.num_unusable} segments build on ones that are gone; `milepost cache gc` removes them"
        )


_TO_THE_RIGHT = frozenset({"segments", "tokens", "size", "longest", "damaged", "last used"})


def _table(title: str, columns: Sequence[str], shortened: Container[str]) -> Table:
    """Whole at 80 columns: where it does not fit, only the columns `shortened` give way."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        side: Literal["left", "right"] = "right" if column in _TO_THE_RIGHT else "left"
        table.add_column(column, justify=side, no_wrap=column not in shortened)
    return table


def _segments(count: int) -> str:
    return f"{count:,} segment{'' if count == 1 else 's'}"


@app.command(cls=Command)
def verify(
    directory: Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is corrupt.")] = False,
) -> None:
    """Read every byte and compare checksums; status 1 if something is corrupt and stays."""
    folder = open_folder(directory)
    num_sound = num_foreign = 0
    corrupt: list[StoredObject] = []
    for each in read_objects(folder, scan(folder), whole=True):
        if each.problem is None:
            num_sound += 1
        elif each.is_foreign:
            num_foreign += 1
        else:
            corrupt.append(each)
            typer.echo(f"{each.file.path}: {each.problem}")
    foreign = f", {num_foreign:,} of another format version" if num_foreign else ""
    typer.echo(f"{num_sound:,} segments are sound, {len(corrupt):,} corrupt{foreign}")
    if remove and corrupt:
        typer.echo(f"removed {format_size(remove_files(folder, [each.file.path for each in corrupt]))}")
    elif corrupt:
        raise typer.Exit(1)


@app.command(cls=Command)
def gc(
    directory: Directory,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="SIZE", help="What may stay, like 10GiB; least recently used go first."
        ),
    ] = None,
    unused_for: Annotated[
        str | None,
        typer.Option(
            "--unused-for", metavar="AGE", help="Remove what was not used for so long, like 12h or 7d."
        ),
    ] = None,
    fingerprint: Annotated[
        str,
        typer.Option(
            "--fingerprint",
            metavar="HEX",
            help="Remove everything of the model whose fingerprint begins so.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
) -> None:
    """Remove what is corrupt, unfinished or of no use, and what the options name."""
    keep_bytes = None if keep is None else parse_size(keep, "--keep")
    max_unused_seconds = None if unused_for is None else _parse_age(unused_for)
    folder = open_folder(directory)
    objects = list(read_objects(folder, scan(folder)))
    garbage = choose_garbage(
        objects,
        now_ns=time.time_ns(),
        keep_bytes=keep_bytes,
        max_unused_seconds=max_unused_seconds,
        fingerprint=fingerprint,
    )
    num_bytes = sum(each.file.num_bytes for each in garbage)
    if not dry_run:
        num_bytes = remove_files(folder, [each.file.path for each in garbage])
    verb = "would go" if dry_run else "removed"
    typer.echo(
        f"{len(garbage):,} of {len(objects):,} segments {verb}, {format_size(num_bytes)}; "
        f"{format_size(folder.total_bytes)} {'are there' if dry_run else 'stay'}"
    )


def _row(stored: StoredObject) -> dict[str, object]:
    """For JSON."""
    row: dict[str, object] = {
        "path": stored.file.path,
        "bytes": stored.file.num_bytes,
        "last_used": stored.file.used_ns / 1e9,
        "problem": stored.problem,
    }
    header = stored.header
    if header is not None:
        row |= {
            "fingerprint": header.fingerprint,
            "key": header.key.hex(),
            "parent_key": header.parent_key.hex(),
            "start": header.start,
            "position": header.position,
            "match_unit": header.match_unit,
            "reason": header.reason,
            "shard": list(header.shard),
            "created": header.created,
            "payload_bytes": header.payload_bytes,
        }
    return row


@dataclass(frozen=True, slots=True)
class ModelRow:
    """What `stat` says about one fingerprint; `tokens` counts those whose pages are stored."""

    fingerprint: str
    segments: int
    bytes: int
    tokens: int
    longest_prefix: int
    last_used: float
    reasons: dict[str, int]
    unreadable: int
    unusable: int


def _model_row(model: str, objects: Sequence[StoredObject]) -> ModelRow:
    ours = [each for each in objects if each.file.path.startswith(f"{model}/")]
    headers = [each.header for each in ours if each.header is not None]
    segments = [header for header in headers if header.reason not in NAME_REASONS]
    return ModelRow(
        fingerprint=model,
        segments=len(ours),
        bytes=sum(each.file.num_bytes for each in ours),
        tokens=sum(header.position - header.start for header in segments),
        longest_prefix=max((header.position for header in segments), default=0),
        last_used=max(each.file.used_ns for each in ours) / 1e9,
        reasons=dict(Counter(header.reason for header in headers).most_common()),
        unreadable=sum(each.problem is not None for each in ours),
        unusable=len(unusable(ours)),
    )


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--unused-for", f"{text!r} is no duration; write it like 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _AGE_SECONDS[match[2]]


def _tokens(start: int, position: int) -> str:
    return f"{start:,}-{position:,}"


def _age(seconds: float) -> str:
    """With one unit, like `3 h`."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _AGE_SECONDS[unit]:
            return f"{seconds / _AGE_SECONDS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
