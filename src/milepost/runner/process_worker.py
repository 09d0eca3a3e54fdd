"""A worker that runs in a process of its own, driven over a pipe.

Parent and child exchange `wire` messages. Either side's end is noticed: the child leaves when the
pipe closes, the parent raises `WorkerError` when the child is gone.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from milepost.config import FP32
from milepost.core.plan import StepDrafts, StepPlan, StepResult
from milepost.errors import ConfigError, MilepostError, WorkerError
from milepost.runner import wire

_EXIT_SECONDS = 5.0
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker process needs to build its worker.

    Attributes:
        model_path: local model directory.
        dtype: as for `load_model`.
        num_threads: threads torch may use, None = its default.
        num_draft_tokens, draft_method, draft_model, draft_confidence, quantization, state_dtype: as for
            `load_model`.
    """

    model_path: str
    dtype: str | None
    match_unit: int
    cache_bytes: int
    num_threads: int | None = None
    num_draft_tokens: int = 0
    draft_method: str = "mtp"
    draft_model: str | None = None
    draft_confidence: float = 0.0
    quantization: str | None = None
    state_dtype: str = FP32


class ProcessWorker:
    """Worker protocol over a child process that runs a `TorchWorker`."""

    def __init__(self, spec: WorkerSpec, *, start_timeout_s: float = 300.0) -> None:
        """Starts the process and waits until the model is loaded.

        Raises:
            WorkerError: loading failed (the message is the child's), or took longer than the timeout.
        """
        # spawn: a forked torch with running threads may hang.
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, spec), name="milepost-worker", daemon=True)
        self._process.start()
        child.close()
        try:
            if not self._connection.poll(start_timeout_s):
                raise WorkerError(f"the worker process did not load within {start_timeout_s:g} s")
            self._ready = _expect(self._receive(), wire.WorkerReady)
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int | None:
        """Operating-system id of the child."""
        return self._process.pid

    @property
    def num_records(self) -> list[int]:
        """Records per pool."""
        return self._ready.num_records

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step in the child; blocking.

        Raises:
            WorkerError: the child could not execute the plan, or is gone.
        """
        return self._ask(plan, StepResult)

    def draft(self, plan: StepPlan) -> StepDrafts:
        """Makes the drafts of a plan in the child; blocking.

        Raises:
            WorkerError: the child could not make them, or is gone.
        """
        return self._ask(wire.DraftRequest(plan), StepDrafts)

    def close(self) -> None:
        """Ends the child: asks, then terminates it. May be called twice."""
        try:
            self._connection.send_bytes(wire.encode(wire.CloseWorker()))
        except OSError:
            pass
        self._connection.close()
        self._process.join(_EXIT_SECONDS)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_EXIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, message: Any, answer_type: type[_Message]) -> _Message:
        try:
            self._connection.send_bytes(wire.encode(message))
        except OSError:
            raise self._gone() from None
        return _expect(self._receive(), answer_type)

    def _receive(self) -> Any:
        try:
            return wire.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> WorkerError:
        self._process.join(_EXIT_SECONDS)
        return WorkerError(f"the worker process is gone (exit code {self._process.exitcode})")


def _expect(message: Any, message_type: type[_Message]) -> _Message:
    if isinstance(message, wire.WorkerFailure):
        raise WorkerError(f"{message.kind}: {message.message}" if message.kind else message.message)
    if not isinstance(message, message_type):
        raise WorkerError(f"the worker process answered with {type(message).__name__}")
    return message


def serve(connection: Connection, spec: WorkerSpec) -> None:
    """Body of the child process: load, then answer one plan after the other until the pipe closes."""
    try:
        worker = _build(spec)
    except Exception as error:
        connection.send_bytes(wire.encode(_failure(error)))
        return
    pools = worker.pools.pools
    connection.send_bytes(
        wire.encode(wire.WorkerReady(worker.vocab_size, [pool.num_records for pool in pools]))
    )
    while True:
        try:
            message = wire.decode(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if isinstance(message, wire.CloseWorker):
            worker.close()
            return
        try:
            answer: Any
            if isinstance(message, wire.DraftRequest):
                answer = worker.draft(message.plan)
            else:
                answer = worker.execute(message)
        except Exception as error:
            answer = _failure(error)
        try:
            connection.send_bytes(wire.encode(answer))
        except OSError:
            return


def _failure(error: Exception) -> wire.WorkerFailure:
    kind = (
        ""
        if isinstance(error, MilepostError) and not isinstance(error, ConfigError)
        else type(error).__name__
    )
    return wire.WorkerFailure(kind, str(error))


def _build(spec: WorkerSpec) -> Any:
    import torch

    from milepost.models.loading import load_model
    from milepost.runner.worker import TorchWorker

    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    model = load_model(
        spec.model_path,
        dtype=spec.dtype,
        num_draft_tokens=spec.num_draft_tokens,
        draft_method=spec.draft_method,
        draft_model=spec.draft_model,
        draft_confidence=spec.draft_confidence,
        quantization=spec.quantization,
        state_dtype=spec.state_dtype,
    )
    return TorchWorker(model, model.geometry(spec.match_unit), spec.cache_bytes)
