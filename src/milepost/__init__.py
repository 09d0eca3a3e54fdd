"""Milepost: a serving engine for hybrid language models with exact prefix reuse."""

from __future__ import annotations

__version__ = "0.1.0"
