"""Answers for callers without an event loop: the command line, scripts, tests."""

from __future__ import annotations

import queue
from collections.abc import Generator

from milepost.engine.engine import Engine
from milepost.engine.messages import Accepted, EngineEvent, Failed, GenerationRequest, OutputDelta


def answer(engine: Engine, request: GenerationRequest) -> Generator[OutputDelta, None, None]:
    """Deltas of one answer as they come. Closing the iterator early (or Ctrl-C) aborts the request.

    Raises:
        RequestError: the scheduler refused the request. EngineError: it could not be finished.
    """
    events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
    request_id = engine.submit(request, events.put)
    ended = False
    try:
        while not ended:
            event = events.get()
            if isinstance(event, Failed):
                ended = True
                raise event.error
            if isinstance(event, Accepted):
                continue
            ended = event.finish_reason is not None
            yield event
    finally:
        if not ended:
            engine.abort(request_id)
