"""Every assertion of the fingerprint worker is made to fire once, from a plan that is otherwise right."""

from __future__ import annotations

from array import array

import pytest

from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
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
from milepost.errors import WorkerError
from milepost.sim.fakes import FailAt, WorkerFaults
from milepost.sim.fingerprint import POISON, FingerprintError, FingerprintWorker

UNIT = 4
GEOMETRY = CacheGeometry(
    match_unit=UNIT,
    attention=(AttentionGroupSpec("full", 8), AttentionGroupSpec("drafter", 24, 16)),
    recurrent=(RecurrentGroupSpec("kda", 100), RecurrentGroupSpec("gdn", 5000)),
)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """Builds plans by hand; `run` executes one."""

    def __init__(self, faults: WorkerFaults | None = None, budget_bytes: int | None = None) -> None:
        self.worker = FingerprintWorker(GEOMETRY, faults=faults, budget_bytes=budget_bytes)
        self.num_steps = 0

    def expect(self, request_id: int, prompt: list[int] = PROMPT, **options: object) -> None:
        self.worker.expect(request_id, prompt, GREEDY, **options)  # type: ignore[arg-type]

    def started(self, request_id: int, pages: list[int], prompt: list[int] = PROMPT) -> WorkerRequest:
        return WorkerRequest(request_id, GREEDY, len(prompt), b"", [list(pages), list(pages)])

    def chunk(
        self,
        request_id: int,
        start: int,
        end: int,
        new_pages: list[int],
        initial: int,
        running: int,
        exports: tuple[tuple[int, int], ...] = (),
        num_samples: int = 0,
    ) -> ChunkPlan:
        truth = self.worker.truth(request_id)
        truth.ensure(end)
        return ChunkPlan(
            request_id,
            start,
            end,
            truth.tokens[start:end].tobytes(),
            [list(new_pages), list(new_pages)],
            [],
            [initial, initial],
            [running, running],
            [StateExport(position - start, [slot, slot], position, "tail") for position, slot in exports],
            num_samples,
            end - len(PROMPT),
        )

    def run(self, chunks: list[ChunkPlan], **parts: object) -> object:
        self.num_steps += 1
        return self.worker.execute(StepPlan(self.num_steps, chunks, **parts))  # type: ignore[arg-type]

    def fill(self) -> None:
        """Request 0 computes its whole prompt: pages 0 to 2, running slot 0, a state at 8 in slot 1."""
        self.expect(0)
        chunk = self.chunk(0, 0, 10, [0, 1, 2], ZERO_STATE, 0, exports=((8, 1),), num_samples=1)
        self.run([chunk], started=[self.started(0, [])])


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.fill()
    return bench


def fires(check: str):  # type: ignore[no-untyped-def]
    return pytest.raises(FingerprintError, match=f"^{check}:")


def test_a_right_hit_passes_and_answers_as_a_cold_run(bench: Bench) -> None:
    bench.expect(1)
    result = bench.run(
        [bench.chunk(1, 8, 10, [3], 1, 2, num_samples=1)], started=[bench.started(1, [0, 1])], finished=[0]
    )
    cold = bench.worker.truth(0).outputs(1)
    assert [r.sampled[0].token_id for r in result.chunk_results] == cold  # type: ignore[attr-defined]
    assert bench.worker.counters.computed_by_request == {0: 10, 1: 2}
    assert bench.worker.counters.num_restored == 2


def test_state_of_another_position(bench: Bench) -> None:
    bench.expect(1)
    with fires("state"):
        bench.run([bench.chunk(1, 4, 10, [3, 4], 1, 2)], started=[bench.started(1, [0])])


def test_state_of_another_prefix(bench: Bench) -> None:
    other = [1, *PROMPT[1:]]
    bench.expect(1, other)
    bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 2)], started=[bench.started(1, [])])
    bench.expect(2)
    with fires("state"):
        bench.run([bench.chunk(2, 8, 10, [5], 2, 6)], started=[bench.started(2, [0, 1])])


def test_state_never_written(bench: Bench) -> None:
    bench.expect(1)
    with fires("poison state"):
        bench.run([bench.chunk(1, 8, 10, [3], 7, 2)], started=[bench.started(1, [0, 1])])


def test_zero_state_behind_the_start(bench: Bench) -> None:
    bench.expect(1)
    with fires("zero state"):
        bench.run([bench.chunk(1, 8, 10, [3], ZERO_STATE, 2)], started=[bench.started(1, [0, 1])])


def test_one_group_of_two_has_the_wrong_state(bench: Bench) -> None:
    bench.expect(1)
    chunk = bench.chunk(1, 8, 10, [3], 1, 2)
    chunk.initial_slots = [1, 0]
    with fires("state"):
        bench.run([chunk], started=[bench.started(1, [0, 1])])


def test_page_of_another_prefix(bench: Bench) -> None:
    bench.expect(1)
    with fires("page"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 2])])


def test_one_group_of_two_has_the_wrong_page(bench: Bench) -> None:
    bench.expect(1)
    start = WorkerRequest(1, GREEDY, len(PROMPT), b"", [[0, 1], [1, 0]])
    with fires("page"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[start])


def test_page_never_written(bench: Bench) -> None:
    bench.expect(1)
    with fires("poison page"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 9])])


@pytest.mark.parametrize("position", [7, 9, 10])
def test_tap_of_another_position(bench: Bench, position: int) -> None:
    """The page behind which a request goes on holds the state of a token before, or of one behind."""
    bench.expect(1)
    page = bench.worker.pages[1][1]
    assert page == [*bench.worker.truth(0).path[5:9], bench.worker.truth(0).path[8]]
    page[-1] = bench.worker.truth(0).path[position]
    with fires("tap"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 1])])


def test_tap_of_a_page_that_is_not_full(bench: Bench) -> None:
    """It is the one behind the newest token, and the request itself goes on from it."""
    page = bench.worker.pages[1][2]
    assert page[-1] == bench.worker.truth(0).path[10]
    page[-1] = bench.worker.truth(0).path[9]
    with fires("tap"):
        bench.run([bench.chunk(0, 10, 11, [], 0, 0)])


def test_page_table_too_short(bench: Bench) -> None:
    bench.expect(1)
    with fires("page table"):
        bench.run([bench.chunk(1, 8, 10, [], 1, 2)], started=[bench.started(1, [0, 1])])


def test_page_twice_in_one_table(bench: Bench) -> None:
    bench.expect(1)
    with fires("page table"):
        bench.run([bench.chunk(1, 8, 10, [0], 1, 2)], started=[bench.started(1, [0, 1])])


def test_a_sibling_reads_what_is_written_in_the_same_step() -> None:
    bench = Bench()
    bench.expect(0)
    bench.expect(1)
    with fires("poison page"):
        bench.run(
            [
                bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0),
                bench.chunk(1, 8, 10, [2], 5, 1),
            ],
            started=[bench.started(0, []), bench.started(1, [0, 1])],
        )


def test_write_to_a_slot_another_request_reads(bench: Bench) -> None:
    bench.expect(1)
    bench.expect(2)
    with fires("slot"):
        bench.run(
            [bench.chunk(1, 8, 10, [3], 1, 2), bench.chunk(2, 0, 4, [4], ZERO_STATE, 1)],
            started=[bench.started(1, [0, 1]), bench.started(2, [])],
        )


def test_two_readers_and_one_of_them_writes(bench: Bench) -> None:
    bench.expect(1)
    bench.expect(2)
    with fires("slot"):
        bench.run(
            [bench.chunk(1, 8, 10, [3], 1, 1), bench.chunk(2, 8, 10, [4], 1, 2)],
            started=[bench.started(1, [0, 1]), bench.started(2, [0, 1])],
        )


def test_slot_written_twice(bench: Bench) -> None:
    bench.expect(1)
    with fires("slot"):
        bench.run(
            [bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 2, exports=((4, 2),))], started=[bench.started(1, [])]
        )


def test_slot_is_somebodys_running_slot(bench: Bench) -> None:
    bench.expect(1)
    with fires("slot"):
        bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 0)], started=[bench.started(1, [])])


def test_write_to_the_zero_state(bench: Bench) -> None:
    bench.expect(1)
    with fires("slot"):
        bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, ZERO_STATE)], started=[bench.started(1, [])])


def test_overwriting_a_page_another_request_reads(bench: Bench) -> None:
    other = [1, *PROMPT[1:]]
    bench.expect(1, other)
    with fires("shared page"):
        bench.run(
            [bench.chunk(0, 10, 11, [], 0, 0), bench.chunk(1, 0, 8, [0, 4], ZERO_STATE, 2)],
            started=[bench.started(1, [])],
        )


def test_an_overwritten_page_is_found_by_its_next_reader(bench: Bench) -> None:
    other = [1, *PROMPT[1:]]
    bench.expect(1, other)
    bench.run([bench.chunk(1, 0, 8, [0, 4], ZERO_STATE, 2)], started=[bench.started(1, [])])
    with fires("page"):
        bench.run([bench.chunk(0, 10, 11, [], 0, 0)])


def test_replaced_page_is_read_from_then_on(bench: Bench) -> None:
    bench.expect(1)
    bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 2)], started=[bench.started(1, [])])
    chunk = bench.chunk(1, 8, 10, [5], 2, 2)
    chunk.replaced_pages = [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1)]
    bench.run([chunk], discards=[PoolDiscard(0, [3, 4]), PoolDiscard(1, [3, 4])])
    assert bench.worker.live[1].tables == [[0, 1, 5], [0, 1, 5]]


@pytest.mark.parametrize("replaced", [(0, 5, 9), (0, 0, 4)])
def test_replacement_that_is_impossible(bench: Bench, replaced: tuple[int, int, int]) -> None:
    bench.expect(1)
    bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 2)], started=[bench.started(1, [])])
    chunk = bench.chunk(1, 8, 10, [5], 2, 2)
    chunk.replaced_pages = [replaced]
    with fires("page table"):
        bench.run([chunk])


def test_replacement_by_a_foreign_page(bench: Bench) -> None:
    bench.expect(1)
    bench.run([bench.chunk(1, 0, 8, [3, 4], ZERO_STATE, 2)], started=[bench.started(1, [])])
    chunk = bench.chunk(1, 8, 10, [5], 2, 2)
    chunk.replaced_pages = [(1, 0, 1)]
    with fires("page"):
        bench.run([chunk])


def test_copy_of_a_running_state(bench: Bench) -> None:
    bench.expect(1)
    bench.run(
        [bench.chunk(1, 10, 11, [4], 5, 5)],
        started=[WorkerRequest(1, GREEDY, len(PROMPT), b"", [[0, 1, 2], [0, 1, 2]])],
        copies=[StateCopy(0, 0, 5), StateCopy(1, 0, 5)],
    )


def test_copy_of_nothing(bench: Bench) -> None:
    with fires("copy"):
        bench.run([], copies=[StateCopy(0, 9, 5)])


def test_copy_over_a_source(bench: Bench) -> None:
    with fires("copy"):
        bench.run([], copies=[StateCopy(0, 0, 5), StateCopy(0, 1, 0)])


def test_copy_over_a_running_slot(bench: Bench) -> None:
    with fires("slot"):
        bench.run([], copies=[StateCopy(0, 1, 0)])


@pytest.mark.parametrize("pool", [2, 3])
def test_discard_of_a_running_state(bench: Bench, pool: int) -> None:
    with fires("discard"):
        bench.run([], discards=[PoolDiscard(pool, [0])])


def test_discarded_state_is_poison(bench: Bench) -> None:
    bench.run([], discards=[PoolDiscard(3, [1])])
    bench.expect(1)
    with fires("poison state"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 1])])


def test_discarded_page_is_poison(bench: Bench) -> None:
    bench.run([], finished=[0])
    bench.run([], discards=[PoolDiscard(1, [0])])
    bench.expect(1)
    with fires("poison page"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 1])])


def test_foreign_tokens(bench: Bench) -> None:
    bench.expect(1)
    chunk = bench.chunk(1, 8, 10, [3], 1, 2)
    chunk.tokens = array("I", [13, 15]).tobytes()
    with fires("tokens"):
        bench.run([chunk], started=[bench.started(1, [0, 1])])


def test_history_needed_but_absent(bench: Bench) -> None:
    bench.expect(1)
    start = bench.started(1, [])
    start.sampling = SamplingParams(presence_penalty=0.5)
    with fires("tokens"):
        bench.run([], started=[start])


def test_history_of_another_request(bench: Bench) -> None:
    bench.expect(1)
    start = bench.started(1, [])
    start.tokens = array("I", [1, 2, 3]).tobytes()
    with fires("tokens"):
        bench.run([], started=[start])


@pytest.mark.parametrize(("start", "end"), [(8, 8), (9, 8)])
def test_empty_chunk(bench: Bench, start: int, end: int) -> None:
    bench.expect(1)
    chunk = bench.chunk(1, 8, 10, [3], 1, 2)
    chunk.start, chunk.end = start, end
    with fires("chunk"):
        bench.run([chunk], started=[bench.started(1, [0, 1])])


def test_gap_between_chunks(bench: Bench) -> None:
    with fires("chunk"):
        bench.run([bench.chunk(0, 11, 12, [], 0, 0)])


def test_two_chunks_of_one_request(bench: Bench) -> None:
    with fires("chunk"):
        bench.run([bench.chunk(0, 10, 11, [], 0, 0), bench.chunk(0, 11, 12, [], 0, 3)])


def test_chunk_of_a_request_nobody_started(bench: Bench) -> None:
    bench.expect(1)
    with fires("chunk"):
        bench.run([bench.chunk(1, 0, 4, [3], ZERO_STATE, 2)])


@pytest.mark.parametrize("exports", [((8, 3), (4, 4)), ((4, 3), (4, 4)), ((12, 3),), ((0, 3),)])
def test_export_out_of_order_or_range(bench: Bench, exports: tuple[tuple[int, int], ...]) -> None:
    bench.expect(1)
    with fires("export"):
        bench.run(
            [bench.chunk(1, 0, 10, [3, 4, 5], ZERO_STATE, 2, exports=exports)], started=[bench.started(1, [])]
        )


def test_export_under_another_position(bench: Bench) -> None:
    bench.expect(1)
    chunk = bench.chunk(1, 0, 10, [3, 4, 5], ZERO_STATE, 2, exports=((8, 3),))
    chunk.exports[0].position = 4
    with fires("export"):
        bench.run([chunk], started=[bench.started(1, [])])


@pytest.mark.parametrize(("end", "output_position"), [(8, 0), (10, 1)])
def test_sampling_in_the_wrong_place(bench: Bench, end: int, output_position: int) -> None:
    bench.expect(1)
    chunk = bench.chunk(1, 0, end, [3, 4, 5], ZERO_STATE, 2, num_samples=1)
    chunk.output_position = output_position
    with fires("sampling"):
        bench.run([chunk], started=[bench.started(1, [])])


def test_start_twice_and_end_twice(bench: Bench) -> None:
    with fires("started"):
        bench.run([], started=[bench.started(0, [])])
    bench.run([], finished=[0])
    with fires("finished"):
        bench.run([], finished=[0])


def test_start_of_an_unknown_request(bench: Bench) -> None:
    with fires("started"):
        bench.run([], started=[bench.started(77, [])])


def test_wrong_prompt_length(bench: Bench) -> None:
    bench.expect(1)
    with fires("started"):
        bench.run([], started=[bench.started(1, [], prompt=[1, 2])])


def test_budget() -> None:
    bench = Bench(budget_bytes=sum(GEOMETRY.pool_record_bytes) * 2)
    bench.expect(0)
    bench.run([bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0)], started=[bench.started(0, [])])
    with fires("budget"):
        bench.run([bench.chunk(0, 8, 9, [2], 0, 1)])


def test_discards_give_bytes_back() -> None:
    bench = Bench(budget_bytes=sum(GEOMETRY.pool_record_bytes) * 2)
    bench.expect(0)
    bench.run([bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0)], started=[bench.started(0, [])])
    before = bench.worker.committed_bytes
    bench.run([], finished=[0])
    bench.run([], discards=[PoolDiscard(0, [0]), PoolDiscard(2, [0])])
    sizes = GEOMETRY.pool_record_bytes
    assert bench.worker.committed_bytes == before - sizes[0] - sizes[2]


def test_domains_share_nothing(bench: Bench) -> None:
    bench.expect(1, domain=("tenant",))
    with fires("page"):
        bench.run([bench.chunk(1, 8, 10, [3], 1, 2)], started=[bench.started(1, [0, 1])])


def test_after_close(bench: Bench) -> None:
    bench.worker.close()
    with fires("closed"):
        bench.run([])


def test_unacknowledged_export_is_poison() -> None:
    faults = WorkerFaults(acknowledges=lambda chunk, export: export.position != 8)
    bench = Bench(faults)
    bench.expect(0)
    chunk = bench.chunk(0, 0, 10, [0, 1, 2], ZERO_STATE, 0, exports=((4, 1), (8, 2)))
    result = bench.run([chunk], started=[bench.started(0, [])])
    assert result.chunk_results[0].exported_positions == [4]  # type: ignore[attr-defined]
    assert bench.worker.slots[2][2] == POISON
    bench.expect(1)
    with fires("poison state"):
        bench.run([bench.chunk(1, 8, 10, [3], 2, 4)], started=[bench.started(1, [0, 1])])


def test_dropped_result_is_poison() -> None:
    bench = Bench(WorkerFaults(drops=lambda chunk: chunk.request_id == 0))
    bench.expect(0)
    result = bench.run(
        [bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0, exports=((4, 1),))], started=[bench.started(0, [])]
    )
    assert result.chunk_results == []  # type: ignore[attr-defined]
    assert bench.worker.slots[3][1] == POISON
    bench.expect(1)
    with fires("poison page"):
        bench.run([bench.chunk(1, 4, 10, [3, 4], 1, 2)], started=[bench.started(1, [0])])


def test_torn_step_is_poison_and_raises() -> None:
    bench = Bench(WorkerFaults(fails_torn=FailAt(1)))
    bench.expect(0)
    with pytest.raises(WorkerError):
        bench.run([bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0)], started=[bench.started(0, [])])
    assert bench.worker.slots[2][0] == POISON
    bench.expect(1)
    with fires("poison page"):
        bench.run([bench.chunk(1, 4, 10, [3, 4], 0, 2)], started=[bench.started(1, [0])])


def test_step_that_fails_before_it_begins_changes_nothing() -> None:
    bench = Bench(WorkerFaults(fails_before=FailAt(1)))
    bench.expect(0)
    chunk = bench.chunk(0, 0, 8, [0, 1], ZERO_STATE, 0)
    with pytest.raises(WorkerError):
        bench.run([chunk], started=[bench.started(0, [])])
    assert bench.worker.committed_bytes == 0 and not bench.worker.live
    bench.run([chunk], started=[bench.started(0, [])])


def test_fail_at_counts() -> None:
    once, again = FailAt(3), FailAt(2, every=2)
    assert [once() for _ in range(6)] == [False, False, True, False, False, False]
    assert [again() for _ in range(6)] == [False, True, False, True, False, True]
    assert again.num_failures == 3
    with pytest.raises(ValueError):
        FailAt(0)
