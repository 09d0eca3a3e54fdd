"""Bounds and first guesses of `engine.tiering`."""

from __future__ import annotations

INITIAL_SECONDS_PER_TOKEN = 1 / 4000
"""Until prefill speed was measured: low, so that a load must be clearly worth it."""
ALWAYS_LOAD_SECONDS = 10.0
"""Longest that a request is held for stores where loading is not weighed against computing."""
LOAD_SHARE = 0.9
"""Of the time that is left: what came until then is to be in the cache before the request is computed."""
SPEED_SMOOTHING = 0.2
MIN_MEASURED_TOKENS = 16
"""Of one request in a step: fewer say little about prefill."""
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
