"""A scheduler, a fingerprint worker and a step counter: what most tests of the core need.

Smaller than `sim.world`: it drives one step at a time, counts what is computed per request, and
audits the core after every action. Records of every pool are one page (4,096 bytes), so that a budget
can be given in records.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.hashing import CacheDomain, KeyChain, MediaSpan
from milepost.core.plan import SamplingParams, StepPlan, StepResult
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import Request, RequestUpdate
from milepost.core.scheduler import Scheduler
from milepost.errors import WorkerError
from milepost.sim.fakes import WorkerFaults
from milepost.sim.fingerprint import FingerprintWorker
from milepost.sim.model import FingerprintModel, MediaSymbols

RECORD_BYTES = 4096
ROOMY = 4096
"""Records; more than any test here uses."""


def make_geometry(
    match_unit: int = 4, num_attention: int = 1, num_recurrent: int = 1, alignment: int | None = 1
) -> CacheGeometry:
    """Groups whose records are one page each."""
    return CacheGeometry(
        match_unit,
        tuple(AttentionGroupSpec(f"attention {i}", 8) for i in range(num_attention)),
        tuple(RecurrentGroupSpec(f"recurrent {i}", 4000, alignment) for i in range(num_recurrent)),
    )


def make_cache(
    num_records: int = ROOMY, geometry: CacheGeometry | None = None, **options: Any
) -> PrefixCache:
    """A facade without a scheduler; `options` go to `CacheConfig`."""
    geometry = geometry if geometry is not None else make_geometry()
    options.setdefault("match_unit", geometry.match_unit)
    options.setdefault("decode_interval", 0)
    return PrefixCache(geometry, CacheConfig(num_records * RECORD_BYTES, **options))


def make_chain(
    tokens: Iterable[int],
    match_unit: int = 4,
    domain: CacheDomain | None = None,
    media: Sequence[MediaSpan] = (),
) -> KeyChain:
    return KeyChain(array("I", tokens), domain or CacheDomain(), match_unit, media)


def numbered(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares nothing with one of another seed."""
    return [1000 * (seed + 1) + index for index in range(num_tokens)]


class Harness:
    """One replica.

    Attributes:
        computed: request id -> tokens planned for it in committed steps.
        outputs: request id -> tokens it generated.
        ended: request id -> its last update.
        reuse: request id -> its reuse report.
    """

    def __init__(
        self,
        *,
        geometry: CacheGeometry | None = None,
        num_records: int = ROOMY,
        budget: int = 512,
        max_num_seqs: int = 64,
        max_model_len: int = 32768,
        background_share: float = 0.0,
        faults: WorkerFaults | None = None,
        model: FingerprintModel | None = None,
        **cache: Any,
    ) -> None:
        self.geometry = geometry if geometry is not None else make_geometry()
        self.unit = self.geometry.match_unit
        cache.setdefault("match_unit", self.unit)
        cache.setdefault("checkpoint_interval", 0)
        cache.setdefault("decode_interval", 0)
        budget_bytes = num_records * RECORD_BYTES
        self.scheduler = Scheduler(
            self.geometry,
            CacheConfig(budget_bytes, **cache),
            SchedulerConfig(budget, max_num_seqs, max_model_len, background_share),
        )
        self.cache = self.scheduler.cache
        self.worker = FingerprintWorker(self.geometry, budget_bytes=budget_bytes, faults=faults, model=model)
        self.computed: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, RequestUpdate] = {}
        self.reuse: dict[int, Any] = {}
        self.requests: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self.plan: StepPlan | None = None
        self.now = 0.0
        self._next_id = 0

    def add(self, prompt: Iterable[int], max_tokens: int = 1, **options: Any) -> int:
        """Send a request; returns its id. `options` go to `Request`."""
        tokens = array("I", prompt)
        request_id = self._next_id
        self._next_id += 1
        sampling = options.pop("sampling", None) or SamplingParams(temperature=0.0)
        request = Request(request_id, tokens, sampling, max_tokens=max_tokens, **options)
        self.scheduler.add(request)
        self.worker.expect(
            request_id,
            tokens,
            sampling,
            domain=request.domain,
            weights=request.domain.adapter.encode(),
            media=[MediaSymbols(span.start, span.end, span.digest) for span in request.media],
        )
        self.requests[request_id] = request
        self.computed[request_id] = 0
        self.outputs[request_id] = []
        self.check()
        return request_id

    def schedule(self) -> StepPlan:
        self.plan = self.scheduler.schedule(self.now)
        self.plans.append(self.plan)
        self.check()
        return self.plan

    def execute(self) -> list[RequestUpdate]:
        """Run and commit the plan in flight; a fault of the worker fails the step."""
        plan, self.plan = self.plan, None
        assert plan is not None
        try:
            result = self.worker.execute(plan)
        except WorkerError as error:
            result = StepResult(plan.step_id, [], str(error))
        else:
            for chunk in plan.chunks:
                self.computed[chunk.request_id] += chunk.end - chunk.start
        return self.commit(result)

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        self.plan = None
        self.now += 1.0
        updates = self.scheduler.commit(result)
        for update in updates:
            assert update.request_id not in self.ended
            self.outputs[update.request_id] += [token.token_id for token in update.tokens]
            if update.reuse is not None:
                assert update.request_id not in self.reuse
                self.reuse[update.request_id] = update.reuse
            if update.finish_reason is not None:
                self.ended[update.request_id] = update
        self.check()
        return updates

    def step(self) -> list[RequestUpdate]:
        if self.plan is None:
            self.schedule()
        return self.execute()

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left.

        Raises:
            AssertionError: nobody makes progress, or it takes too long.
        """
        idle = 0
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests:
                self.step()  # updates of requests that ended outside of a step
                return
            before = (sum(self.computed.values()), len(self.ended))
            self.step()
            idle = 0 if before != (sum(self.computed.values()), len(self.ended)) else idle + 1
            assert idle < 4, "nobody makes progress"
        raise AssertionError(f"not done after {max_steps} steps")

    def serve(self, prompt: Iterable[int], max_tokens: int = 1, **options: Any) -> int:
        """Send a request and run until everything is done; returns its id."""
        request_id = self.add(prompt, max_tokens, **options)
        self.run()
        return request_id

    def check(self) -> None:
        problems = self.scheduler.audit()
        assert problems == [], problems

    def cached(self, request_id: int) -> int:
        """Prompt tokens that were not computed for a request."""
        return int(self.reuse[request_id].num_cached_tokens)

    def checkpoints(self, prompt: Iterable[int], domain: CacheDomain | None = None) -> list[int]:
        """Positions (tokens) with a checkpoint on the path of a token sequence."""
        chain = make_chain(prompt, self.unit, domain)
        tree = self.cache.tree
        root = tree.roots.get(chain.root)
        if root is None:
            return []
        limit = len(chain.tokens) // self.unit
        path = tree.walk(root, chain.extend(limit), limit)
        return [node.depth * self.unit for node in path if node.states is not None]

    def tokens_of(self, request_id: int) -> list[int]:
        """Prompt and output of a request."""
        return list(self.requests[request_id].tokens)
