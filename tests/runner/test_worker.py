"""The worker obeys plans: hits, packing, exports, slots, pages, failures. Plans are written by hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.driver import Driver, TrackedRequest, random_tokens, token_bytes
from tests.support.families import DTYPES, FAMILIES, Shelf, without_experts_in_bf16

from milepost.core.plan import (
    ZERO_STATE,
    ChunkPlan,
    PoolDiscard,
    SamplingParams,
    StateCopy,
    StateExport,
    StepPlan,
    WorkerRequest,
)
from milepost.errors import ConfigError, WorkerError
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

BOUND = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest logit difference between two ways to compute the same rows; logits reach about 5."""
UNIT = 16


@pytest.fixture(scope="module", params=DTYPES, ids=lambda value: "-".join(value))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    family, dtype = request.param
    return shelf.model(family, **without_experts_in_bf16(family, dtype))


@pytest.fixture
def driver(model: LoadedModel) -> Driver:
    driver = Driver(model, match_unit=UNIT)
    driver.poison()
    return driver


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def fp32(request: Any, shelf: Shelf) -> LoadedModel:
    return shelf.model(request.param)


@pytest.fixture
def moe(fp32: LoadedModel) -> Driver:
    """With experts where the family has them."""
    driver = Driver(fp32, match_unit=UNIT)
    driver.poison()
    return driver


def rows_of(driver: Driver) -> torch.Tensor:
    """What the first attention layer keeps, [pages, tokens, width]."""
    field = driver.model.layout.attention[0].token_fields[0]
    return driver.worker.pools.fields[field.layer, field.name]


def matrices_of(driver: Driver) -> torch.Tensor:
    """The first field of the first linear layer, [slots, ...]."""
    field = driver.model.layout.recurrent[0].fields[0]
    return driver.worker.pools.fields[field.layer, field.name]


def close(driver: Driver, ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 1.0
    difference = float((ours - expected).abs().max())
    assert difference <= BOUND[driver.model.dtype], f"logits differ by {difference:.2e}"


def cold(
    driver: Driver, tokens: list[int], slot: int, exports: Any = None
) -> tuple[TrackedRequest, torch.Tensor]:
    request = driver.sequence(tokens, running_slot=slot)
    plan = driver.plan((request, len(tokens)), exports={request.request_id: exports or []})
    return request, driver.logits(plan)


@pytest.mark.parametrize("position", [16, 48, 64, 95])
def test_hit_is_cold(driver: Driver, position: int) -> None:
    tokens = random_tokens(96, driver.model.vocab_size, seed=position)
    first, expected = cold(driver, tokens, 0, [(position, 1)])
    checkpoint = driver.state(1)
    pages = first.pages[: -(-position // UNIT)]
    hit = driver.sequence(tokens, 2, start_slot=1, pages=pages, num_processed=position)
    close(driver, driver.logits(driver.plan((hit, 96 - position))), expected[position:])
    # The checkpoint is only read, and can be used again.
    for name, tensor in driver.state(1).items():
        assert torch.equal(tensor, checkpoint[name])


def test_exports_are_the_states_of_runs_that_stop_there(driver: Driver) -> None:
    tokens = random_tokens(70, driver.model.vocab_size, seed=3)
    positions = [1, 2, 15, 16, 17, 32, 45, 69, 70]
    first, _ = cold(driver, tokens, 0, [(p, 10 + n) for n, p in enumerate(positions)])
    for number, position in enumerate(positions):
        stopped, _ = cold(driver, tokens[:position], 1)
        expected = driver.state(1)
        for name, tensor in driver.state(10 + number).items():
            scale = float(expected[name].float().abs().max())
            worst = float((tensor.float() - expected[name].float()).abs().max())
            assert worst <= scale * (1e-5 if driver.model.dtype == "float32" else 3e-2), (name, position)
        # NoPE attention cannot show a wrong page order in any output: compare what the pages hold.
        left, right = driver.page_rows(first, position), driver.page_rows(stopped, position)
        for name, rows in left.items():
            worst = float((rows.float() - right[name].float()).abs().max())
            assert worst <= (1e-5 if driver.model.dtype == "float32" else 3e-2), (name, position)


def test_export_at_the_end_equals_the_running_state(driver: Driver) -> None:
    for count in (1, 5, 33):
        tokens = random_tokens(count, driver.model.vocab_size, seed=count)
        cold(driver, tokens, 0, [(count, 1)])
        running, exported = driver.state(0), driver.state(1)
        assert all(torch.equal(running[name], exported[name]) for name in running)


def test_packed_is_alone(moe: Driver) -> None:
    """Prefills of different lengths, decodes and a hit in one step."""
    vocab = moe.model.vocab_size
    prompts = [random_tokens(count, vocab, seed=20 + count) for count in (40, 7, 33, 90)]
    alone = [cold(moe, prompt, 0)[1] for prompt in prompts]
    base, _ = cold(moe, prompts[3], 0, [(64, 9)])
    decoding = moe.sequence(prompts[2], 1)
    moe.run(moe.plan((decoding, 32)))
    hit = moe.sequence(prompts[3], 2, start_slot=9, pages=base.pages[:4], num_processed=64)
    long, short = moe.sequence(prompts[0], 3), moe.sequence(prompts[1], 4)
    rows = moe.logits(moe.plan((decoding, 1), (long, 40), (hit, 26), (short, 7)))
    close(moe, rows[0:1], alone[2][32:])
    close(moe, rows[1:41], alone[0])
    close(moe, rows[41:67], alone[3][64:])
    close(moe, rows[67:], alone[1])


def test_batched_decode_is_single_decode(moe: Driver) -> None:
    prompts = [random_tokens(20 + 3 * n, moe.model.vocab_size, seed=n) for n in range(16)]
    alone = [cold(moe, prompt, 0)[1][-1] for prompt in prompts]
    requests = [moe.sequence(prompt, 20 + n) for n, prompt in enumerate(prompts)]
    for request in requests:
        moe.run(moe.plan((request, len(request.tokens) - 1)))
    together = moe.logits(moe.plan(*((request, 1) for request in requests)))
    close(moe, together, torch.stack(alone))


def test_a_broken_request_does_not_reach_the_others(moe: Driver) -> None:
    """One request starts from a NaN state: it alone fails, and the others do not notice."""
    vocab = moe.model.vocab_size
    prompts = [random_tokens(count, vocab, seed=count) for count in (1, 21, 1, 30)]

    def step(bad: bool) -> tuple[torch.Tensor, Any]:
        requests = [moe.sequence(prompt, 1 + n) for n, prompt in enumerate(prompts)]
        if bad:
            requests[1].start_slot = 40  # poisoned by the fixture
        plan = moe.plan(*((request, len(request.tokens)) for request in requests))
        results: list[Any] = []
        original = moe.worker.execute
        moe.worker.execute = lambda plan: results.append(original(plan))  # type: ignore[method-assign]
        try:
            rows = moe.logits(plan)
        finally:
            moe.worker.execute = original  # type: ignore[method-assign]
        return rows, (results[0], [request.request_id for request in requests])

    clean, (_, _) = step(bad=False)
    broken, (result, ids) = step(bad=True)
    keep = [0, *range(22, 53)]
    assert torch.isnan(broken[1:22]).any()
    # Not bitwise: the broken rows choose other experts, so products have other sizes.
    close(moe, broken[keep], clean[keep])
    assert [chunk.request_id for chunk in result.chunk_results] == [ids[0], ids[2], ids[3]]
    assert str(ids[1]) in result.error and "finite" in result.error


def test_running_slot_in_place_and_out_of_place(driver: Driver) -> None:
    tokens = random_tokens(50, driver.model.vocab_size, seed=8)
    _, expected = cold(driver, tokens, 0)
    in_place = driver.sequence(tokens, 1)
    moving = driver.sequence(tokens, 2)
    for at, count in ((0, 20), (20, 1), (21, 29)):
        left = driver.logits(driver.plan((in_place, count)))
        moving.running_slot = 2 + at % 3
        right = driver.logits(driver.plan((moving, count)))
        close(driver, left, expected[at : at + count])
        assert torch.equal(left, right)
    assert torch.isnan(matrices_of(driver)[9]).all()


def test_reads_see_the_contents_from_before_the_step(moe: Driver) -> None:
    """A sibling reads slot 1 in the step in which its owner moves slot 1 on."""
    tokens = random_tokens(40, moe.model.vocab_size, seed=9)
    _, expected = cold(moe, tokens, 0)
    owner = moe.sequence(tokens, 1)
    moe.run(moe.plan((owner, 16)))
    for count in (1, 24):
        sibling = moe.sequence(tokens, 2, start_slot=1, pages=owner.pages[:1], num_processed=16)
        copy_of_owner = copy.deepcopy(owner)
        copy_of_owner.started, copy_of_owner.request_id = False, 1000 + count
        saved = moe.state(1)
        rows = moe.logits(moe.plan((copy_of_owner, count), (sibling, count)))
        close(moe, rows[:count], expected[16 : 16 + count])
        close(moe, rows[count:], expected[16 : 16 + count])
        for name, tensor in saved.items():
            moe.worker.pools.fields[name][1] = tensor


def test_copies_happen_before_the_forward_pass(moe: Driver) -> None:
    tokens = random_tokens(33, moe.model.vocab_size, seed=10)
    _, expected = cold(moe, tokens, 0)
    parent = moe.sequence(tokens, 1)
    moe.run(moe.plan((parent, 32)))
    children = [
        moe.sequence(tokens, 2 + n, start_slot=2 + n, pages=parent.pages, num_processed=32) for n in (0, 1)
    ]
    for child in children:
        child.pages = [*parent.pages[:2]]
    plan = moe.plan(*((child, 1) for child in children))
    plan.copies = [StateCopy(0, 1, 2), StateCopy(0, 1, 3)]
    rows = moe.logits(plan)
    close(moe, rows[0], rows[1])
    close(moe, rows, expected[32:].expand(2, -1))


def test_copies_of_one_step_are_simultaneous(moe: Driver) -> None:
    matrices = matrices_of(moe)
    for slot in (1, 2):
        matrices[slot] = float(slot)
    moe.run(StepPlan(1, [], copies=[StateCopy(0, 1, 2), StateCopy(0, 2, 1)]))
    assert float(matrices[1].mean()) == 2.0
    assert float(matrices[2].mean()) == 1.0


def test_replaced_page_is_read_from_then_on(moe: Driver) -> None:
    """The request's own page is freed (poisoned here); it goes on with the page somebody else published."""
    tokens = random_tokens(48, moe.model.vocab_size, seed=11)
    other, expected = cold(moe, tokens, 0)
    request = moe.sequence(tokens, 1)
    moe.run(moe.plan((request, 40)))
    for page in request.pages[:2]:
        rows_of(moe)[page] = float("nan")
    plan = moe.plan((request, 8))
    plan.chunks[0].replaced_pages = [(0, 0, other.pages[0]), (0, 1, other.pages[1])]
    close(moe, moe.logits(plan), expected[40:])
    # The unit that is still being written cannot be replaced.
    with pytest.raises(WorkerError, match="not complete"):
        moe.run(
            StepPlan(
                9,
                [
                    ChunkPlan(
                        request.request_id, 40, 41, token_bytes([1]), [[]], [(0, 2, 0)], [1], [1], [], 0, 0
                    )
                ],
            )
        )


def test_acknowledges_what_was_written(moe: Driver) -> None:
    tokens = random_tokens(40, moe.model.vocab_size, seed=12)
    request = moe.sequence(tokens, 0)
    first = moe.run(moe.plan((request, 30), exports={request.request_id: [(16, 3), (30, 4)]}, sample=False))
    assert (first.chunk_results[0].end, first.chunk_results[0].exported_positions) == (30, [16, 30])
    assert first.chunk_results[0].sampled == [] and first.error is None
    second = moe.run(moe.plan((request, 10)))
    assert len(second.chunk_results[0].sampled) == 1
    assert second.step_id == first.step_id + 1
    assert moe.run(StepPlan(77, [])).step_id == 77


def test_captured_logits_are_those_of_the_last_row(moe: Driver) -> None:
    tokens = random_tokens(40, moe.model.vocab_size, seed=12)
    for sample in (True, False):
        request = moe.sequence(tokens, 0)
        other = moe.sequence(tokens[:9], 1)
        plan = moe.plan((other, 9), (request, 40), sample=sample)
        plan.chunks[1].captures_logits = True
        expected = moe.logits(copy.deepcopy(plan))[-1]
        moe.run(StepPlan(5, [], finished=[request.request_id, other.request_id]))
        first, second = moe.run(plan).chunk_results
        assert first.logits == b""
        captured = torch.frombuffer(bytearray(second.logits), dtype=torch.float32)
        torch.testing.assert_close(captured, expected, rtol=0, atol=1e-4)
        assert len(second.sampled) == int(sample)


def test_greedy_generation_equals_argmax_of_cold_runs(moe: Driver) -> None:
    tokens = random_tokens(20, moe.model.vocab_size, seed=13)
    request = moe.sequence(tokens, 0)
    generated = [moe.run(moe.plan((request, 20))).chunk_results[0].sampled[0].token_id]
    for _ in range(12):
        request.tokens.append(generated[-1])
        generated.append(moe.run(moe.plan((request, 1))).chunk_results[0].sampled[0].token_id)
    _, rows = cold(moe, tokens + generated[:-1], 1)
    assert rows[19:].argmax(-1).tolist() == generated


def test_penalties_count_the_tokens_the_worker_sampled(moe: Driver) -> None:
    """With a huge frequency penalty no token comes twice, also when the request is restarted in between."""
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1000.0)
    tokens = random_tokens(20, moe.model.vocab_size, seed=14)
    request = moe.sequence(tokens, 0, sampling=sampling)
    generated = [moe.run(moe.plan((request, 20))).chunk_results[0].sampled[0].token_id]
    for step in range(16):
        request.tokens.append(generated[-1])
        if step == 8:  # preempted: everything is computed again from the tokens
            num_prompt = 20
            plan = moe.plan((request, 1))
            again = moe.sequence(request.tokens, 1, sampling=sampling)
            plan = moe.plan((again, len(again.tokens)))
            plan.finished = [request.request_id]
            plan.started[0].num_prompt_tokens = num_prompt
            plan.chunks[0].output_position = len(generated)
            request = again
        else:
            plan = moe.plan((request, 1))
        generated.append(moe.run(plan).chunk_results[0].sampled[0].token_id)
    assert len(set(generated)) == len(generated)


def test_finished_requests_are_forgotten(moe: Driver) -> None:
    request, _ = cold(moe, random_tokens(20, moe.model.vocab_size, seed=15), 0)
    assert moe.worker.num_requests == 1
    moe.run(StepPlan(5, [], finished=[request.request_id, 999]))
    assert moe.worker.num_requests == 0
    with pytest.raises(WorkerError, match="never started"):
        moe.run(moe.plan((request, 1)))


# ------------------------------------------------------------------ memory


@pytest.fixture
def fresh(fp32: LoadedModel) -> Iterator[Driver]:
    driver = Driver(fp32, match_unit=UNIT, cache_bytes=256 << 20)
    yield driver
    driver.worker.close()


def test_memory_is_mapped_by_record_and_given_back(fresh: Driver) -> None:
    """Mapped bytes = records in use, whatever the budget; a discard returns them."""
    page_bytes, state_bytes = fresh.geometry.pool_record_bytes
    assert fresh.worker.mapped_bytes() == 0
    tokens = random_tokens(300, fresh.model.vocab_size, seed=16)
    request = fresh.sequence(tokens, running_slot=7)
    fresh.run(fresh.plan((request, 300), exports={request.request_id: [(160, 100)]}))
    num_pages = -(-300 // UNIT)
    assert fresh.worker.mapped_bytes() == num_pages * page_bytes + 2 * state_bytes
    before = fresh.worker.mapped_bytes()
    fresh.run(StepPlan(2, [], discards=[PoolDiscard(0, request.pages[3:9]), PoolDiscard(1, [100])]))
    assert fresh.worker.mapped_bytes() == before - 6 * page_bytes - state_bytes
    assert float(rows_of(fresh)[request.pages[3]].abs().max()) == 0.0
    assert float(rows_of(fresh)[request.pages[2]].abs().max()) > 0.0
    fresh.run(StepPlan(3, [], finished=[request.request_id], discards=[PoolDiscard(0, request.pages)]))
    assert fresh.worker.mapped_bytes() == state_bytes


def test_a_record_that_was_discarded_can_be_used_again(fresh: Driver) -> None:
    tokens = random_tokens(64, fresh.model.vocab_size, seed=17)
    request, expected = cold(fresh, tokens, 0)
    pages = list(request.pages)
    plan_pages = PoolDiscard(0, pages)
    again = fresh.sequence(tokens, 1)
    fresh._free_pages += pages
    plan = fresh.plan((again, 64))
    assert set(again.pages) == set(pages)
    plan.discards, plan.finished = [plan_pages, PoolDiscard(1, [0, 1])], [request.request_id]
    close(fresh, fresh.logits(plan), expected)


def test_close_gives_everything_back(fp32: LoadedModel) -> None:
    driver = Driver(fp32, match_unit=UNIT)
    cold(driver, random_tokens(64, fp32.vocab_size, seed=18), 0)
    assert driver.worker.mapped_bytes() > 0
    driver.worker.close()
    assert driver.worker.mapped_bytes() == 0


def test_budget_smaller_than_a_record(fp32: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        TorchWorker(fp32, fp32.geometry(UNIT), 4096)


def test_geometry_of_another_model(fp32: LoadedModel) -> None:
    other = dataclasses.replace(fp32.geometry(UNIT), attention=())
    with pytest.raises(ConfigError, match="geometry"):
        TorchWorker(fp32, other, 4 << 20)


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_with_one_kind_of_layer(family: str, kind: str, shelf: Shelf) -> None:
    lists = {"kda_layers": [1, 2], "full_attn_layers": []}
    if kind == "full_attention":
        lists = {"kda_layers": [], "full_attn_layers": [1, 2]}
    kimi = family.startswith("kimi")
    changes: dict[str, Any] = {"linear_attn_config": lists} if kimi else {"layer_types": [kind] * 2}
    driver = Driver(shelf.model(family, num_hidden_layers=2, **changes), match_unit=UNIT)
    groups = driver.geometry.num_attention_groups, driver.geometry.num_recurrent_groups
    assert groups == ((1, 0) if kind == "full_attention" else (0, 1))
    driver.poison()
    tokens = random_tokens(40, driver.model.vocab_size, seed=19)
    _, whole = cold(driver, tokens, 0)
    request = driver.sequence(tokens, 1)
    pieces = torch.cat([driver.logits(driver.plan((request, count))) for count in (17, 1, 22)])
    close(driver, pieces, whole)


# ------------------------------------------------------------------ plans that contradict themselves


def chunk(**changes: Any) -> ChunkPlan:
    values: dict[str, Any] = {
        "request_id": 1,
        "start": 0,
        "end": 4,
        "tokens": token_bytes([1, 2, 3, 4]),
        "new_pages": [[0]],
        "replaced_pages": [],
        "initial_slots": [ZERO_STATE],
        "running_slots": [0],
        "exports": [],
        "num_samples": 1,
        "output_position": 0,
    }
    return ChunkPlan(**{**values, **changes})


def start(request_id: int = 1, tables: int = 1) -> WorkerRequest:
    return WorkerRequest(request_id, SamplingParams(temperature=0.0), 4, b"", [[] for _ in range(tables)])


BAD_PLANS: list[tuple[str, StepPlan]] = [
    ("never started", StepPlan(1, [chunk()])),
    ("second time", StepPlan(1, [], started=[start(), start()])),
    ("page tables", StepPlan(1, [], started=[start(tables=2)])),
    ("token ids", StepPlan(1, [chunk(end=5)], started=[start()])),
    ("outside of vocabulary", StepPlan(1, [chunk(tokens=token_bytes([1, 2, 3, 131]))], started=[start()])),
    ("empty or negative", StepPlan(1, [chunk(end=0, tokens=b"")], started=[start()])),
    ("need 1 pages", StepPlan(1, [chunk(new_pages=[[]])], started=[start()])),
    ("page id", StepPlan(1, [chunk(new_pages=[[10**6]])], started=[start()])),
    ("initial slot", StepPlan(1, [chunk(initial_slots=[10**6])], started=[start()])),
    ("outside of", StepPlan(1, [chunk(running_slots=[-2])], started=[start()])),
    ("written twice", StepPlan(1, [chunk(exports=[StateExport(2, [0], 2, "tail")])], started=[start()])),
    ("ascend", StepPlan(1, [chunk(exports=[StateExport(5, [3], 5, "tail")])], started=[start()])),
    (
        "cannot have position",
        StepPlan(1, [chunk(exports=[StateExport(2, [3], 3, "tail")])], started=[start()]),
    ),
    ("two copies", StepPlan(1, [], copies=[StateCopy(0, 1, 2), StateCopy(0, 3, 2)])),
]


@pytest.mark.parametrize(("message", "plan"), BAD_PLANS, ids=[message for message, _ in BAD_PLANS])
def test_bad_plan_is_refused_and_leaves_nothing(moe: Driver, message: str, plan: StepPlan) -> None:
    with pytest.raises(WorkerError, match=message):
        moe.run(copy.deepcopy(plan))
    assert moe.worker.num_requests == 0
    good = StepPlan(2, [chunk()], started=[start()])
    assert len(moe.run(good).chunk_results) == 1


def test_pages_of_a_failed_step_are_taken_back(moe: Driver) -> None:
    request = moe.sequence(random_tokens(40, moe.model.vocab_size, seed=30), 0)
    moe.run(moe.plan((request, 20)))
    bad = moe.plan((request, 20))
    good = copy.deepcopy(bad)
    bad.chunks[0].tokens = token_bytes([131] * 20)
    with pytest.raises(WorkerError, match="vocabulary"):
        moe.run(bad)
    _, expected = cold(moe, request.tokens, 1)
    close(moe, moe.logits(good), expected[20:])
