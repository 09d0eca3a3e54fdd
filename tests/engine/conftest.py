"""The embedded model, for tests that run whole replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from milepost.models.loading import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    from milepost.models.loading import load_model

    return load_model(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBEDDED_MODEL)
