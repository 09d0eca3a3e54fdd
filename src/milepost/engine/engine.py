"""The engine loop: schedule, execute, commit, in one thread of its own.

Everything from outside comes through an inbox that is emptied between two steps; everything to the
outside goes through sinks that must not block. A worker that fails costs the requests of that plan;
a core that fails, or a worker that keeps failing, turns the engine red: it ends every request with
an error, takes no more, and says so in `failure`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from milepost.core.metrics import CoreStats
from milepost.core.ports import Worker
from milepost.core.request import Request, RequestUpdate
from milepost.core.scheduler import Scheduler
from milepost.engine.answer import Answer, Sink, note_admissions
from milepost.engine.audit import AuditConfig, AuditCounts, HitAuditor
from milepost.engine.explain import ReuseExplainer
from milepost.engine.inbox import Message, nothing
from milepost.engine.load import QueueLimit
from milepost.engine.messages import (
    Accepted,
    EngineError,
    EngineStopped,
    Failed,
    GenerationRequest,
    OutputDelta,
    ReuseExplanation,
)
from milepost.engine.observer import Observer
from milepost.engine.plan_runner import PlanRunner
from milepost.engine.snapshots import Snapshots
from milepost.engine.tiering import Tiering
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import InvariantError, MilepostError, WorkerError

if TYPE_CHECKING:
    from milepost.engine.kv_events import KvEventSource
    from milepost.engine.segments import SegmentCodec
    from milepost.stores.tiers import Tiers

T = TypeVar("T")

log = logging.getLogger(__name__)
request_log = logging.getLogger("milepost.request")

MAX_FAILED_STEPS_IN_A_ROW = 5
FLUSH_SECONDS = 15.0
"""How long the end of the engine may wait for stores."""
IDLE_STEP_WAIT_SECONDS = 0.002
"""Pause after a plan without work while requests are unfinished; new messages end it at once."""


class Engine:
    """Runs one scheduler and one worker.

    Args:
        clock: seconds, monotonic; tests pass their own.
        observers: see `Observer`.
        audit: which hits are recomputed and compared; by default none.
        max_queued_requests: further ones are refused, see `QueueLimit`; None = all wait.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float] = time.monotonic,
        observers: tuple[Observer, ...] = (),
        audit: AuditConfig | None = None,
        max_queued_requests: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._tokenizer = tokenizer
        self._clock = clock
        self._observers = list(observers)
        self.explainer = ReuseExplainer(tokenizer)
        self._ids = itertools.count(1)
        self._auditor = HitAuditor(audit or AuditConfig(), scheduler, lambda: next(self._ids), self._condemn)
        self._limit = QueueLimit(max_queued_requests, scheduler.config.max_num_seqs)
        self._inbox: deque[Message] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._answers: dict[int, Answer] = {}
        self._flushes: list[Callable[[], None]] = []
        self._runs = PlanRunner(worker, clock)
        self._snapshots = Snapshots(scheduler, clock)
        self._needs_flush_step = False
        self._turns: list[Callable[[], None]] = []
        """Called in the engine thread before every step."""
        self._tiering: Tiering | None = None
        self._settles: list[Callable[[], None]] = []
        self.failure: str | None = None

    # ------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Start the engine thread."""
        if self._thread is not None:
            raise EngineError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="milepost-engine", daemon=True)
        # A thread that the interpreter stops in the middle of native code takes the process down with it.
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def use_tiers(
        self,
        tiers: Tiers,
        codec: SegmentCodec,
        *,
        always_loads: bool = False,
        max_load_seconds: float | None = None,
    ) -> None:
        """Load from and save to stores, see `Tiering`; before `start`. The engine closes them."""
        self._tiering = Tiering(
            tiers,
            self._scheduler,
            codec,
            clock=self._clock,
            wake=self._notify,
            always_loads=always_loads,
            max_load_seconds=max_load_seconds,
        )
        self._turns.append(self._tiering.turn)

    def use_events(self, source: KvEventSource) -> None:
        """Announce what the cache holds; before `start`."""
        self._scheduler.cache.tree.listeners.append(source.log)
        self._turns.append(source.flush)

    def before_condemning(self, settle: Callable[[], None]) -> None:
        """`settle` waits for readers of the cache, before a part of it is dropped by force."""
        self._settles.append(settle)

    @property
    def tiering(self) -> Tiering | None:
        """What goes to and comes from the stores; its numbers may be read from any thread."""
        return self._tiering

    @property
    def is_healthy(self) -> bool:
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    def check_room(self, num_before: int) -> None:
        """See `QueueLimit.check`, for a request after `num_before` that are still to be submitted."""
        self._limit.check(self._clock(), self._limit.num_submitted + num_before)

    def submit(self, request: GenerationRequest, sink: Sink) -> int:
        """Hand in a request; `sink` hears `Accepted`, then deltas, or `Failed` at any point."""
        request_id = next(self._ids)
        submitted_at = self._clock()
        self._limit.submitted()
        self._post(
            lambda: self._add(request_id, request, sink, submitted_at),
            lambda: sink(Failed(self._dead())),
        )
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request without an answer; unknown and finished ids are fine."""
        self._post(lambda: self._abort(request_id))

    def reset_prefix_cache(self) -> Future[bool]:
        """Drop every cached prefix that no running request uses; False if some stayed."""
        return self._call(self._scheduler.reset_prefix_cache)

    def fresh_stats(self) -> Future[CoreStats]:
        """Counters as of the end of the current step."""
        return self._call(self._snapshots.fresh)

    def look(self, view: Callable[[Scheduler, float], T]) -> Future[T]:
        """What `view` makes of the core between two steps; it must change nothing."""
        return self.act(view)

    def label(self, request_id: int) -> str:
        """What logs call an open request, "" once it has ended. For the engine thread, see `look`."""
        return "" if (answer := self._answers.get(request_id)) is None else answer.request.label

    def act(self, change: Callable[[Scheduler, float], T]) -> Future[T]:
        """Let `change` work on the core between two steps. It must not raise, or the engine stops."""
        return self._call(lambda: change(self._scheduler, self._clock()))

    def stats(self) -> CoreStats:
        """The last snapshot, usually at most a tenth of a second old while the engine works; never waits."""
        return self._snapshots.latest

    def audits(self) -> AuditCounts:
        """What audits of hits found so far; never waits."""
        return self._auditor.counts

    def add_observer(self, observer: Observer) -> None:
        """Before `start`."""
        self._observers.append(observer)

    def add_flush(self, flush: Callable[[], None]) -> None:
        """`flush` is called in the engine thread whenever a batch of events went to the sinks."""
        self._flushes.append(flush)

    def remove_flush(self, flush: Callable[[], None]) -> None:
        """Undo `add_flush`."""
        self._flushes = [known for known in self._flushes if known != flush]

    def end_requests(self) -> None:
        """Fail every request in progress, because the server is about to stop."""
        self._post(self._end_requests)

    def close(self, timeout: float = 30.0) -> None:
        """Abort what runs, stop the thread, close the worker."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise EngineError(f"the engine thread did not stop within {timeout:g} s")
            atexit.unregister(self._stop_at_exit)
        if self._tiering is not None:
            self._tiering.close()
        self._worker.close()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _stop_at_exit(self) -> None:
        """The process ends and nobody closed the engine."""
        with contextlib.suppress(EngineError):
            self.close()

    def _post(self, apply: Callable[[], None], if_dead: Callable[[], None] = nothing) -> None:
        with self._wake:
            alive = self.failure is None and not self._stopping
            if alive:
                self._inbox.append(Message(apply, if_dead))
                self._wake.notify()
        if not alive:
            if_dead()
            self._flush()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it under the engine thread

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                raise

        self._post(run, lambda: future.set_exception(self._dead()))
        return future

    def _dead(self) -> EngineStopped:
        failure = self.failure
        return EngineStopped(
            f"the engine has stopped: {failure}" if failure else "the engine is shutting down"
        )

    # ------------------------------------------------------------------ in the engine thread

    def _run(self) -> None:
        if self._tiering is not None:
            self._tiering.begin()
        try:
            while self._take_messages():
                self.step()
        except Exception as error:
            log.exception("the engine stops: its own state cannot be trusted any more")
            self._turn_red(f"{type(error).__name__}: {error}")
        finally:
            self._end_all()
            self._save_rest()

    def _save_rest(self) -> None:
        """What was finished is to survive the process, if there is time."""
        if self._tiering is None or self.failure is not None:
            return
        if not self._tiering.drain(FLUSH_SECONDS):
            log.warning("%d checkpoints were not saved before the end", self._tiering.num_pending_saves)

    def _take_messages(self) -> bool:
        """Wait for work, then apply every message; False when the engine is to stop."""
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._has_work()):
                    self._wake.wait()
                if self._stopping:
                    return False
                messages, self._inbox = self._inbox, deque()
            for message in messages:
                message.apply()
            self._flush()
            for turn in self._turns:
                turn()
            if self._needs_step():
                return True
            self._snapshots.take()

    def _needs_step(self) -> bool:
        return self._scheduler.has_unfinished_requests or self._needs_flush_step or self._auditor.has_work

    def _has_work(self) -> bool:
        return self._needs_step() or (self._tiering is not None and self._tiering.has_work)

    def step(self) -> None:
        """One turn of the loop."""
        self._auditor.start_one()
        plan = self._scheduler.schedule(begun := self._clock())
        note_admissions(plan, self._answers, begun)
        result = self._runs.execute(plan, self._answers)
        if self._tiering is not None and self._runs.seconds is not None:
            self._tiering.note_step(plan, self._runs.seconds)
        updates = self._scheduler.commit(result)
        # Finished requests reach the worker with the next plan: make one more when all are done.
        self._needs_flush_step = bool(plan.chunks or updates)
        self._deliver(updates)
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.note_step(plan, result, self._clock() - begun)
        if self._runs.num_failed >= MAX_FAILED_STEPS_IN_A_ROW:
            raise WorkerError(f"{self._runs.num_failed} steps failed in a row, the last with {result.error}")
        if not self._needs_step() or self._snapshots.is_due:
            self._snapshots.take()
        if not plan.chunks and self._scheduler.has_unfinished_requests:
            with self._wake:
                if not (self._inbox or self._stopping or (self._tiering and self._tiering.has_work)):
                    self._wake.wait(IDLE_STEP_WAIT_SECONDS)

    def _add(self, request_id: int, request: GenerationRequest, sink: Sink, submitted_at: float) -> None:
        self._limit.judged()
        try:
            self._limit.check(self._clock())
            self._scheduler.add(
                Request(
                    request_id,
                    request.prompt_token_ids,
                    request.sampling,
                    max_tokens=request.max_tokens,
                    priority=request.priority,
                    domain=request.domain,
                    wanted=request.wanted,
                    conversation=request.conversation,
                    uses_cache=request.uses_cache,
                    captures_logits=self._auditor.wants_logits(request),
                    retention_priority=request.retention_priority,
                    pin_seconds=request.pin_seconds,
                    prompt_logprobs=request.prompt_logprobs,
                    owner=request.owner,
                    is_counted=request.is_counted,
                )
            )
        except InvariantError:
            sink(Failed(EngineError("the engine found its own state inconsistent")))
            raise
        except MilepostError as error:
            sink(Failed(error))
            return
        if self._tiering is not None:
            self._tiering.consider(self._scheduler.requests[request_id])
        self._answers[request_id] = Answer(request_id, request, sink, self._tokenizer, submitted_at)
        self._limit.began(submitted_at)
        sink(Accepted())

    def _abort(self, request_id: int) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._scheduler.abort(request_id)
            self._needs_flush_step = True
            self._record(answer, "abort")

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        now = self._clock()
        for update in updates:
            if self._auditor.take(update):
                continue
            answer = self._answers.get(update.request_id)
            if answer is None:
                continue  # aborted, or ended by a stop string, before this step was committed
            if update.finish_reason in ("error", "abort"):
                self._drop(
                    answer, EngineError(update.error or "the request was aborted"), update.finish_reason
                )
                continue
            delta = answer.advance(update)
            delta.prompt_scores = update.scores
            if answer.failure is not None:
                self._scheduler.abort(answer.request_id)
                self._drop(answer, EngineError(answer.failure), "error")
                continue
            if update.reuse is not None and answer.reuse is None:
                request = answer.request
                answer.reuse = self._explain(request, update)
                delta.reuse = answer.reuse
                if answer.reuse.num_cached_tokens:
                    self._auditor.saw_hit()
                for observer in self._observers_of(request):
                    observer.admitted(answer.reuse)
            if update.logits and answer.reuse is not None:
                self._auditor.saw_logits(answer.request, answer.reuse.num_cached_tokens, update.logits)
            self._note_tokens(answer, len(delta.tokens), now)
            if delta.finish_reason is not None:
                self._finish(answer, update, delta)
            if delta.tokens or delta.finish_reason or delta.reuse or delta.prompt_scores:
                answer.sink(delta)
        self._flush()

    def _explain(self, request: GenerationRequest, update: RequestUpdate) -> ReuseExplanation:
        if update.reuse is None:
            raise ValueError(f"request {update.request_id} was not admitted")
        reuse = self.explainer.explain(request.domain, request.prompt_token_ids, update.reuse)
        note = self._tiering.take_note(update.request_id) if self._tiering is not None else None
        return dataclasses.replace(reuse, load=note) if note is not None else reuse

    def _condemn(self, request: Request, position: int) -> int:
        """An audit failed: drop the path from the cache, and from the stores."""
        scheduler = self._scheduler
        for settle in self._settles:
            settle()
        if self._tiering is None:
            return scheduler.condemn(request, position)
        return self._tiering.condemn(request, lambda: scheduler.condemn(request, position))

    def _finish(self, answer: Answer, update: RequestUpdate, delta: OutputDelta) -> None:
        if update.finish_reason is None:
            self._scheduler.finish(answer.request_id)
        del self._answers[answer.request_id]
        self.explainer.remember(answer.request.domain, answer.request.prompt_token_ids, answer.generated)
        self._record(answer, delta.finish_reason or "stop")

    def _note_tokens(self, answer: Answer, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        since_submission, since_last = answer.note_time(now)
        for observer in self._observers_of(answer.request):
            observer.tokens(num_tokens, since_submission, since_last)

    def _drop(self, answer: Answer, error: MilepostError, finish_reason: str) -> None:
        self._answers.pop(answer.request_id, None)
        self._record(answer, finish_reason)  # first: whoever hears of the end may look at once
        answer.sink(Failed(error))

    def _record(self, answer: Answer, finish_reason: str) -> None:
        now = self._clock()
        self._limit.ended(now)
        if not answer.request.is_counted:
            return
        record = answer.record(finish_reason, now)
        request_log.info("%s", record.log_line(), extra={"fields": record.log_fields()})
        for observer in self._observers:
            observer.finished(record)

    def _observers_of(self, request: GenerationRequest) -> list[Observer]:
        return self._observers if request.is_counted else []

    def _flush(self) -> None:
        for flush in self._flushes:
            flush()

    def _turn_red(self, failure: str) -> None:
        with self._wake:
            self.failure = failure

    def _end_requests(self) -> None:
        for request_id, answer in list(self._answers.items()):
            self._scheduler.abort(request_id)
            self._drop(answer, EngineStopped("the server is shutting down"), "abort")
        self._needs_flush_step = True
        self._flush()

    def _end_all(self) -> None:
        """Nothing may wait for an engine that is gone."""
        with self._wake:
            self._stopping = True
            messages, self._inbox = self._inbox, deque()
        self._auditor.close()
        error: EngineError = self._dead()
        if self.failure is not None:
            # What was being answered failed; what comes later is only refused.
            error = EngineError(str(error))
        for answer in list(self._answers.values()):
            self._drop(answer, error, "abort" if self.failure is None else "error")
        for message in messages:
            message.if_dead()
        self._flush()
