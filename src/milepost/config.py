"""Options as frozen dataclasses, validated once at the edge. Stdlib only."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import ConfigError

DEFAULT_MATCH_UNIT = 32
DEFAULT_DECODE_INTERVAL = 256
SPECULATIVE_FIELD = "speculative_config"
"""The option that names a drafter, for messages about it."""

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kb": 10**3, "kib": 1 << 10,
    "m": 1 << 20, "mb": 10**6, "mib": 1 << 20,
    "g": 1 << 30, "gb": 10**9, "gib": 1 << 30,
    "t": 1 << 40, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str, field: str = "cache_bytes") -> int:
    """`1GiB`, `512 MiB`, `1.5g`, `2GB` or a plain number of bytes.

    Raises:
        ConfigError: anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        what = "is not a size" if match is None else f"has the unknown unit {match[2]!r}"
        raise ConfigError(
            field,
            f"{text!r} {what}; write it like 1GiB, 512MiB or 1073741824 (B; KiB, MiB, GiB, TiB count in "
            "1024s, KB, MB, GB, TB in 1000s)",
        )
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


DEFAULT_AUDIT_SHARE = 0.05
"""Tokens that audits may compute per token of users' requests while such are there."""


EXACT, EXACT_PROMPTS, NOT_EXACT = EXACTNESS_MODES = ("exact", "prompt", "off")
"""`--exactness`: reuse leaves every bit of an answer; every bit behind a prompt; nothing is promised."""


def check_exactness(mode: str) -> None:
    """Raises: ConfigError: an unknown mode."""
    if mode not in EXACTNESS_MODES:
        raise ConfigError("exactness", f"must be one of {', '.join(EXACTNESS_MODES)}, not {mode!r}")


FP32, BF16 = STATE_DTYPES = ("fp32", "bf16")
"""`--state-dtype`: in which the matrices of recurrent states are kept; running ones are always fp32."""


def check_state_dtype(name: str) -> None:
    """Raises: ConfigError: an unknown name."""
    if name not in STATE_DTYPES:
        raise ConfigError("state_dtype", f"must be one of {', '.join(STATE_DTYPES)}, not {name!r}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The prefix cache.

    Attributes:
        cache_bytes: one budget for pages and states together.
        match_unit: tokens; the finest boundary where a hit may land (`--prefix-match-unit`).
        enable_prefix_caching: off = every request is computed from its first token.
        checkpoint_interval: tokens between `interval` checkpoints; None = from the model's sizes,
            0 = off (`--prefix-cache-retention-interval`).
        decode_interval: tokens between `decode` checkpoints that stay once half of the budget is used, beside
            the last two of an answer (`--decode-interval`).
        max_states_per_path: upper bound of checkpoints on one path; None = no bound.
        shares_generated_tokens: off = nothing behind a request's prompt is kept for others, because the
            worker computes generated tokens in another way than those of prompts.
    """

    cache_bytes: int
    match_unit: int = DEFAULT_MATCH_UNIT
    enable_prefix_caching: bool = True
    checkpoint_interval: int | None = None
    decode_interval: int = DEFAULT_DECODE_INTERVAL
    max_states_per_path: int | None = None
    shares_generated_tokens: bool = True

    def __post_init__(self) -> None:
        if self.cache_bytes < 1:
            raise ConfigError("cache_bytes", f"must be positive, not {self.cache_bytes}")
        if self.match_unit < 1:
            raise ConfigError("prefix_match_unit", f"must be at least 1 token, not {self.match_unit}")
        interval = self.checkpoint_interval
        if interval is not None and (interval < 0 or interval % self.match_unit):
            raise ConfigError(
                "prefix_cache_retention_interval",
                f"must be 0 or a multiple of the match unit {self.match_unit}, not {interval}",
            )
        if self.decode_interval < 0 or self.decode_interval % self.match_unit:
            raise ConfigError(
                "decode_interval",
                f"must be 0 or a multiple of the match unit {self.match_unit}, not {self.decode_interval}",
            )
        if self.max_states_per_path is not None and self.max_states_per_path < 1:
            raise ConfigError("max_states_per_path", "must be at least 1; leave it out for no bound")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Batching.

    Attributes:
        max_num_batched_tokens: tokens per step over all requests.
        max_num_seqs: requests that run at the same time.
        max_model_len: prompt and output tokens of one request.
        background_share: tokens that background requests may compute per token of other requests while
            such are there; 0.0 = none.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 32768
    background_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        if not 0.0 <= self.background_share <= 1.0:
            raise ConfigError("background_share", f"must be between 0 and 1, not {self.background_share:g}")


def read_private_lines(path: Path, field: str) -> tuple[str, ...]:
    """Lines of a file with keys; empty ones and those that begin with # do not count.

    Raises:
        ConfigError: not readable, readable by others than its owner, or without a line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:  # the latter: not text, or a NUL in the name
        raise ConfigError(field, f"cannot read {path}: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            field, f"{path} can be opened by others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
        )
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(field, f"{path} holds no key")
    return keys


MIN_SECRET_CHARACTERS = 16


def read_secret(path: Path, field: str) -> str:
    """The one secret of a file.

    Raises:
        ConfigError: as above; or not one, or one that is easily guessed or cannot stand in a header.
    """
    lines = read_private_lines(path, field)
    if len(lines) != 1:
        raise ConfigError(field, f"{path} has {len(lines)} lines; one secret is needed")
    secret = lines[0]
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(field, f"the secret in {path} must be printable ASCII without spaces")
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            field,
            f"the secret in {path} has {len(secret)} characters; {MIN_SECRET_CHARACTERS} are needed, as from "
            "`openssl rand -hex 32`",
        )
    return secret


CHECKOUT = Path(__file__).resolve().parents[2]
"""Where the project's sources are, if this package runs from them."""


def install_command(extra: str) -> str:
    """What installs an extra of this package, as it was installed itself: from a checkout, from an archive or
    a repository (PEP 610), or by name from an index."""
    return f"{_short(Path(sys.executable))} -m pip install {_requirement(extra)}"


def _requirement(extra: str) -> str:
    from importlib import metadata

    if (CHECKOUT / "pyproject.toml").is_file():
        return f"-e '{_short(CHECKOUT)}[{extra}]'"
    try:
        text = metadata.distribution("milepost").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    source = json.loads(text) if text else {}
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        return f"'milepost[{extra}] @ {vcs['vcs']}+{source['url']}@{vcs['commit_id']}'"
    return f"'milepost[{extra}] @ {source['url']}'" if "url" in source else f"'milepost[{extra}]'"


def _short(path: Path) -> str:
    """`path` as seen from the checkout, for who stands in it."""
    try:
        return str(path.relative_to(CHECKOUT)) if Path.cwd() == CHECKOUT else str(path)
    except (OSError, ValueError):
        return str(path)
