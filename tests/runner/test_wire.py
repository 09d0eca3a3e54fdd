"""Plans and results survive the wire, and what is not understood is refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core import plan as messages
from milepost.errors import WorkerError
from milepost.runner import wire

ints = st.integers(-1, 2**40)
id_lists = st.lists(st.integers(0, 2**31), max_size=4)
finite = st.floats(allow_nan=False, width=64)

sampling = st.builds(
    messages.SamplingParams,
    temperature=finite,
    top_k=ints,
    logit_bias=st.dictionaries(st.integers(0, 2**17), finite, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    num_logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=id_lists,
)
exports = st.builds(
    messages.StateExport, offset=ints, slots=id_lists, position=ints, reason=st.sampled_from(["tail", "end"])
)
chunks = st.builds(
    messages.ChunkPlan,
    request_id=ints,
    start=ints,
    end=ints,
    tokens=st.binary(max_size=40),
    new_pages=st.lists(id_lists, max_size=2),
    replaced_pages=st.lists(st.tuples(ints, ints, ints), max_size=2),
    initial_slots=st.lists(ints, max_size=2),
    running_slots=id_lists,
    exports=st.lists(exports, max_size=3),
    num_samples=st.integers(0, 1),
    output_position=ints,
    captures_logits=st.booleans(),
    allowed_tokens=st.binary(max_size=8),
    draft_tokens=st.binary(max_size=16),
)
started = st.builds(
    messages.WorkerRequest,
    request_id=ints,
    sampling=sampling,
    num_prompt_tokens=ints,
    tokens=st.binary(max_size=16),
    page_tables=st.lists(id_lists, max_size=2),
)
plans = st.builds(
    messages.StepPlan,
    step_id=ints,
    chunks=st.lists(chunks, max_size=3),
    started=st.lists(started, max_size=2),
    finished=id_lists,
    copies=st.lists(
        st.builds(messages.StateCopy, group=ints, source_slot=ints, destination_slot=ints), max_size=2
    ),
    discards=st.lists(st.builds(messages.PoolDiscard, pool=ints, record_ids=id_lists), max_size=2),
)
sampled = st.builds(
    messages.SampledToken,
    token_id=ints,
    logprob=st.none() | finite,
    top_logprobs=st.lists(st.tuples(st.integers(0, 2**31), finite), max_size=3),
)
results = st.builds(
    messages.StepResult,
    step_id=ints,
    chunk_results=st.lists(
        st.builds(
            messages.ChunkResult,
            request_id=ints,
            end=ints,
            exported_positions=st.lists(ints, max_size=3),
            sampled=st.lists(sampled, max_size=2),
            logits=st.binary(max_size=8),
        ),
        max_size=3,
    ),
    error=st.none() | st.text(max_size=10),
)


@given(plans)
def test_plans_round_trip(plan: messages.StepPlan) -> None:
    assert wire.decode_as(wire.encode(plan), messages.StepPlan) == plan


@given(results)
def test_results_round_trip(result: messages.StepResult) -> None:
    assert wire.decode_as(wire.encode(result), messages.StepResult) == result


def test_infinite_logprobs_survive() -> None:
    result = messages.StepResult(1, [messages.ChunkResult(1, 2, [], [messages.SampledToken(3, -math.inf)])])
    assert wire.decode(wire.encode(result)) == result


def envelope(version: int, kind: str, body: object) -> bytes:
    return msgspec.msgpack.encode([version, kind, body])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (envelope(99, "plan", {"step_id": 1, "chunks": []}), "version 99"),
        (envelope(wire.WIRE_VERSION, "plans", {"step_id": 1, "chunks": []}), "kind 'plans'"),
        (envelope(wire.WIRE_VERSION, "plan", {"step_id": 1}), "chunks"),
        (envelope(wire.WIRE_VERSION, "plan", {"step_id": "1", "chunks": []}), "step_id"),
        (envelope(wire.WIRE_VERSION, "plan", {"step_id": 1, "chunks": [{}]}), "chunks"),
        (envelope(wire.WIRE_VERSION, "result", {"step_id": 1, "chunk_results": [], "error": 5}), "error"),
        (b"", "cannot be read"),
        (b"\xc1garbage", "cannot be read"),
        (msgspec.msgpack.encode({"version": 1}), "cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        wire.decode(data)


def test_another_message_than_expected() -> None:
    with pytest.raises(WorkerError, match="expected a plan message, got close"):
        wire.decode_as(wire.encode(wire.CloseWorker()), messages.StepPlan)
    with pytest.raises(TypeError):
        wire.encode({"step_id": 1})
