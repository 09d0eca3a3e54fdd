"""What a number on the command line may look like, and what is said about others."""

from __future__ import annotations

import pytest

from milepost.cli.numbers import decimal, whole
from milepost.errors import ConfigError


def test_numbers_from_the_command_line_and_from_files() -> None:
    assert whole("seed", example=7)("-12") == -12
    assert whole("seed", example=7)(12) == 12
    assert decimal("x", example=0.5)("1e-2") == 0.01
    assert decimal("x", example=0.5)(3) == 3.0
    assert whole("port", example=8000, least=0, most=65535)("65535") == 65535


@pytest.mark.parametrize("text", ["8k", "1.5", "", "0x10", "8192 tokens"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a whole number; write digits alone, like 8192") as found:
        whole("max_model_len", example=8192)(text)
    assert found.value.field == "max_model_len" and repr(text) in str(found.value)


@pytest.mark.parametrize("text", ["30s", "half a minute", "", "1,5"])
def test_what_is_no_number_of_seconds(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of seconds; write it without a unit, like 30"):
        decimal("request_timeout", unit="seconds", example=30)(text)


def test_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 65535, not 65536"):
        whole("port", example=8000, least=0, most=65535)("65536")
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        whole("scale", example=2, least=1)("0")
    with pytest.raises(ConfigError, match=r"must be at least 0\.001, not 0"):
        decimal("tokens_per_second", example=5000, least=0.001)("0")
