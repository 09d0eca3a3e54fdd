"""Bounds and first guesses of `engine.tiering`."""

from __future__ import annotations

INITIAL_SECONDS_PER_TOKEN = 1 / 4000
"""Until prefill speed was measured: low, so that a load must be clearly worth it."""
PATIENT_SECONDS_PER_TOKEN = 1.0
SPEED_SMOOTHING = 0.2
MIN_MEASURED_TOKENS = 16
"""Steps with fewer rows say little about prefill."""
SAVING_SHARE = 8
"""At most a part in so many of the cache is pinned by saves (but always one segment)."""
SAVES_PER_TURN = 8
SETTLE_SECONDS = 30.0
"""Stores end every call long before."""
MAX_PENDING_SAVES = 4096
"""Checkpoints that wait for a slow store; the oldest are given up beyond that."""
LOSS_PAUSE_SECONDS = 60.0
"""A path that a store lost is saved again at most so often: the store may be too small for it."""
MAX_SAVED_AGAIN = 1 << 14
