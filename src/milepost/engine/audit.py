"""Recomputes a share of the hits cold and compares: does reuse really change no answer?

Every so many hits one is taken: its logits behind the prompt are kept, and the prompt waits in a
short backlog. The engine computes it once more from its first token, as a background request that
reuses nothing, publishes nothing and counts nowhere: while users' requests are there it gets a small
share of the tokens they compute, and seats and memory they leave. With kernels that
promise bits the logits must be the same bits; elsewhere they may differ by a bound.

A mismatch does not say which page or state of the path is wrong, so the whole path is dropped, with
everything that was built on it, and an ERROR line says so.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from milepost.config import DEFAULT_AUDIT_SHARE, FP32
from milepost.core.plan import SamplingParams
from milepost.core.queues import BACKGROUND_PRIORITY
from milepost.core.request import CacheDomain, Request, RequestUpdate
from milepost.core.scheduler import Scheduler
from milepost.engine.messages import GenerationRequest
from milepost.errors import ConfigError

log = logging.getLogger("milepost.audit")

MAX_BACKLOG = 16
"""Hits that wait for their audit; one more is dropped and counted."""
LOGIT_BOUNDS = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of two logits that is no mismatch where kernels do not promise bits, because a prompt
was cut into other steps. On the embedded model the two implementations of the kernels, which round in
different places, are up to 1.1e-5 and 0.066 apart (logits up to 13.7); wrong states are farther."""
ROUNDED_STATE_LOGIT_BOUND = 0.25
"""The same where states are rounded when they are kept."""
RESULTS = ("equal", "within_bound", "mismatch", "dropped")


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What is audited and what counts as equal.

    Attributes:
        rate: share of hits, 0 to 1; 0 = off.
        logit_bound: largest difference that is no mismatch; 0.0 = the same bits.
        share: tokens that audits may compute per token of users' requests while such are there, 0 to 1.
    """

    rate: float = 0.0
    logit_bound: float = 0.0
    share: float = DEFAULT_AUDIT_SHARE

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError("audit_hits", f"must be a share of hits between 0 and 1, not {self.rate:g}")
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError("audit_share", f"must be a share of tokens between 0 and 1, not {self.share:g}")

    @property
    def background_share(self) -> float:
        """For `SchedulerConfig`."""
        return self.share if self.rate else 0.0

    @property
    def rule(self) -> str:
        """What is no mismatch, in words."""
        return f"logits may differ by {self.logit_bound:g}" if self.logit_bound else "bits must be equal"


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """What audits found so far.

    Attributes:
        num_dropped: hits that were taken and not compared: backlog full, or the audit failed.
        max_difference: largest difference of two logits seen, mismatches included.
        num_condemned_checkpoints: checkpoints that mismatches cost.
        num_waiting: hits in the backlog.
    """

    num_equal: int = 0
    num_within_bound: int = 0
    num_mismatch: int = 0
    num_dropped: int = 0
    max_difference: float = 0.0
    num_condemned_checkpoints: int = 0
    num_waiting: int = 0

    def by_result(self) -> dict[str, int]:
        """Counts under the names of `RESULTS`."""
        return dict(
            zip(
                RESULTS,
                (self.num_equal, self.num_within_bound, self.num_mismatch, self.num_dropped),
                strict=True,
            )
        )


def logit_bound(is_exact: bool, dtype: str, state_dtype: str = FP32) -> float:
    """Bound where the self-test found bits to be promised (`is_exact`), or not, for a model's dtype and the
    one its states are kept in."""
    if is_exact:
        return 0.0
    return LOGIT_BOUNDS[dtype] if state_dtype == FP32 else max(LOGIT_BOUNDS[dtype], ROUNDED_STATE_LOGIT_BOUND)


def largest_difference(left: bytes, right: bytes) -> float:
    """Largest absolute difference of two rows of float32 logits; infinite if they cannot be compared."""
    if left == right:
        return 0.0
    if len(left) != len(right):
        return math.inf
    differences = [abs(a - b) for a, b in zip(array("f", left), array("f", right), strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


@dataclass(frozen=True, slots=True)
class _Hit:
    """A hit that is to be checked.

    Attributes:
        position: tokens it reused.
        logits: float32 logits behind the prompt, as the user's request saw them.
    """

    label: str
    prompt: array[int]
    domain: CacheDomain
    position: int
    logits: bytes

    def shares_path(self, other: _Hit, match_unit: int) -> bool:
        """Whether both start from the same first unit of the cache."""
        return self.domain == other.domain and self.prompt[:match_unit] == other.prompt[:match_unit]


class HitAuditor:
    """Takes hits, runs at most one audit at a time, judges. Lives in the engine thread.

    Args:
        condemn: drops the checkpoint at a position of a request's path and all behind it, and returns how
            many; None = in the scheduler alone.

    Attributes:
        counts: replaced as a whole, so that other threads may read it.
    """

    def __init__(
        self,
        config: AuditConfig,
        scheduler: Scheduler,
        new_id: Callable[[], int],
        condemn: Callable[[Request, int], int] | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._condemn = condemn if condemn is not None else scheduler.condemn
        self._new_id = new_id
        self._backlog: deque[_Hit] = deque()
        self._num_hits = 0
        self._num_taken = 0
        self._current: tuple[Request, _Hit] | None = None
        self.counts = AuditCounts()

    # ------------------------------------------------------------------ hits of users

    def wants_logits(self, request: GenerationRequest) -> bool:
        """Whether an audit is due, so that this request should keep its logits in case it hits."""
        return request.uses_cache and self._is_due(self._num_hits + 1)

    def saw_hit(self) -> None:
        """A user's request was admitted with reused tokens."""
        self._num_hits += 1

    def saw_logits(self, request: GenerationRequest, num_cached_tokens: int, logits: bytes) -> None:
        """A request that kept its logits is through with its prompt."""
        if not num_cached_tokens or not self._is_due(self._num_hits):
            return
        self._num_taken += 1
        if len(self._backlog) == MAX_BACKLOG:
            self._count(num_dropped=1)
            return
        self._backlog.append(
            _Hit(request.label, request.prompt_token_ids, request.domain, num_cached_tokens, logits)
        )
        self._count()

    def _is_due(self, num_hits: int) -> bool:
        return math.floor(num_hits * self._config.rate) > self._num_taken

    # ------------------------------------------------------------------ audits

    @property
    def has_work(self) -> bool:
        """Whether a hit waits."""
        return bool(self._backlog)

    def start_one(self) -> None:
        """Hand the oldest hit to the scheduler, which gives it what users leave and takes its memory if one
        of them needs it."""
        if self._current is not None or not self._backlog:
            return
        hit = self._backlog.popleft()
        request = Request(
            self._new_id(),
            hit.prompt,
            SamplingParams(temperature=0.0),
            max_tokens=1,
            priority=BACKGROUND_PRIORITY,
            domain=hit.domain,
            uses_cache=False,
            is_counted=False,
            captures_logits=True,
        )
        self._scheduler.add(request)
        self._current = request, hit
        self._count()

    def take(self, update: RequestUpdate) -> bool:
        """Judge an update of an audit; False = it belongs to a user. To be called behind `commit`."""
        if self._current is None or self._current[0].request_id != update.request_id:
            return False
        request, hit = self._current
        if update.logits:
            self._judge(request, hit, update.logits)
        if update.finish_reason is not None:
            self._current = None
            if update.finish_reason == "error":
                log.warning("audit of request=%s failed: %s", hit.label, update.error)
            if update.finish_reason in ("error", "abort"):  # the latter where there is no room for it
                self._count(num_dropped=1)
        return True

    def close(self) -> None:
        """Forget the backlog; hits that were not compared count as dropped."""
        num_left = len(self._backlog) + (self._current is not None)
        self._backlog.clear()
        self._current = None
        self._count(num_dropped=num_left)

    def _judge(self, request: Request, hit: _Hit, logits: bytes) -> None:
        if logits == hit.logits:
            self._count(num_equal=1)
            return
        difference = largest_difference(logits, hit.logits)
        if 0.0 < self._config.logit_bound >= difference:
            self._count(difference, num_within_bound=1)
            return
        unit = self._scheduler.geometry.match_unit
        num_condemned = self._condemn(request, unit)
        # What waits on the same path met the same fault; a new path there is sound until shown otherwise.
        others = [other for other in self._backlog if not other.shares_path(hit, unit)]
        num_dropped, self._backlog = len(self._backlog) - len(others), deque(others)
        log.error(
            "audit=mismatch request=%s prompt_tokens=%d reused_tokens=%d max_difference=%g bound=%g "
            "dropped_checkpoints=%d: reuse changed the logits behind this prompt; its whole path is dropped",
            hit.label, len(hit.prompt), hit.position, difference, self._config.logit_bound, num_condemned,
        )  # fmt: skip
        self._count(
            difference, num_mismatch=1, num_dropped=num_dropped, num_condemned_checkpoints=num_condemned
        )

    def _count(self, difference: float = 0.0, **grown: int) -> None:
        counts = self.counts
        self.counts = dataclasses.replace(
            counts,
            max_difference=max(counts.max_difference, difference),
            num_waiting=len(self._backlog),
            **{name: getattr(counts, name) + value for name, value in grown.items()},
        )
