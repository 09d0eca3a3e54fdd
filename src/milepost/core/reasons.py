"""Reason codes: why a checkpoint exists, why a request did not reuse more, why something was refused."""

from __future__ import annotations

TAIL = "tail"
END = "end"
HISTORY = "history"
MESSAGE = "message"
MARKER = "marker"
JUNCTION = "junction"
INTERVAL = "interval"
DECODE = "decode"
FINISH = "finish"

CHECKPOINT_REASONS = (TAIL, END, HISTORY, MESSAGE, MARKER, JUNCTION, INTERVAL, DECODE, FINISH)
"""In order of importance: the first ones are served first while reservations succeed."""
IMPORTANCE = {reason: rank for rank, reason in enumerate(CHECKPOINT_REASONS)}

REQUIRED = frozenset({TAIL, END, HISTORY})
"""Not legal inside a pass: these become a chunk end; others move down or are dropped."""
WANTED_BY_CALLER = (HISTORY, MESSAGE, MARKER)

HIT = "hit"
"""Everything that a hit could serve was reused."""
COLD = "cold"
"""No cached path of this domain shares even one unit."""
DIVERGED = "diverged"
"""The prompt differs from every cached path behind the hit."""
PATH_ENDS = "path_ends"
"""The cached path ends; no further whole unit of the prompt was processed."""
NO_STATE = "no_state"
"""Attention pages reach further, but no state exists there."""
NO_PAGES = "no_pages"
"""A state exists further on, but a group's pages do not."""
TOO_SHORT = "too_short"
"""The prompt has no match unit before its last token."""
DISABLED = "disabled"
"""Prefix caching is off."""
MEDIA_SPLIT = "media_split"
"""The deeper boundary lies inside a media item."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""Log-probabilities of prompt tokens were asked for: they are computed, not stored."""
MISS_REASONS = (
    COLD, DIVERGED, PATH_ENDS, NO_STATE, NO_PAGES, TOO_SHORT, DISABLED, MEDIA_SPLIT, PROMPT_LOGPROBS,
)  # fmt: skip

REFUSED_NO_MEMORY = "no_memory"
"""A checkpoint was not kept because nothing of less value could make room."""
REFUSED_NOT_LEGAL = "not_legal"
"""The kernel cannot export at any position near the wanted one in this pass."""
REFUSED_NOT_WRITTEN = "not_written"
"""The worker did not acknowledge the export."""
REFUSED_STATES_PER_PATH = "states_per_path"
"""`max_states_per_path` was reached."""
