"""Faults in what draft runners are told of processed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from milepost.runner.drafting import ProcessedRows


def record_as(
    runner: type[Any],
    patch: pytest.MonkeyPatch,
    change: Callable[[ProcessedRows], ProcessedRows] = lambda part: part,
    shift: int = 0,
) -> None:
    """`runner.record` gets changed parts, and what it reads from rows that lie `shift` before."""
    record = runner.record

    def changed(self: Any, parts: Any, read: torch.Tensor) -> None:
        record(self, [change(part) for part in parts], read.roll(shift, dims=0))

    patch.setattr(runner, "record", changed)


def forget_accepted(runner: type[Any], patch: pytest.MonkeyPatch) -> None:
    """Of a verified step it records the first row only."""
    record_as(
        runner,
        patch,
        lambda part: (
            part
            if part.end - part.start > 5 or part.start < 20
            else dataclasses.replace(part, end=part.start + 1)
        ),
    )
