"""Manager and coordinator scenarios of the conformance file, on the upstream policy.

Each scenario runs under the id of its row; other sizes of the same kind run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.conformance import params, rows

from milepost.sim.policies.align import DENSE, WAIT, AlignConfig, AlignPolicy
from milepost.sim.policies.align_manager import AlignRequest, BlockCopy, BoundaryOffer

Scenario = Callable[[], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(row_id: str) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        assert row_id not in SCENARIOS
        SCENARIOS[row_id] = function
        return function

    return register


def test_every_row_has_a_scenario() -> None:
    assert set(SCENARIOS) == {row["id"] for row in rows("manager")}


@pytest.mark.parametrize("row", params("manager"))
def test_manager_row(row: dict[str, Any]) -> None:
    SCENARIOS[row["id"]]()


# ------------------------------------------------------------------ tools


def make(unit: int, state_block: int, attention_block: int | None = None, **options: Any) -> AlignPolicy:
    options.setdefault("retention_interval", DENSE)
    config = AlignConfig(unit, state_block, attention_block or state_block, **options)
    return AlignPolicy(config, record_events=True)


def prompt(num_tokens: int, *, seed: int = 0, head: Sequence[int] = ()) -> list[int]:
    """`head`, then tokens that differ for every `seed`."""
    return [*head, *(1_000_000 * (seed + 1) + i for i in range(num_tokens - len(head)))]


def run(policy: AlignPolicy, name: str, tokens: list[int], chunk_ends: Sequence[int] = ()) -> AlignRequest:
    """Prefill a request: in the given chunks, or in those the scheduler chooses."""
    policy.admit(name, tokens)
    request = policy.request(name)
    planned = list(chunk_ends)
    while request.num_computed_tokens < len(tokens):
        if chunk_ends and not planned:
            break
        chunk_end = planned.pop(0) if planned else None
        assert policy.schedule(name, policy.config.max_tokens_per_step, chunk_end=chunk_end) != WAIT
        policy.commit(name)
        policy.manager.audit()
    return request


def replay_hit(policy: AlignPolicy, tokens: list[int]) -> int:
    return policy.lookup(tokens).num_tokens


def extension_hit(policy: AlignPolicy, tokens: list[int]) -> int:
    return policy.lookup([*tokens, *prompt(5_000, seed=77)]).num_tokens


# ------------------------------------------------------------------ one pass with a checkpoint inside


@scenario("77")
def checkpoint_inside_one_chunk() -> None:
    for retention in (DENSE, 0):
        policy = make(16, 32, checkpoint_alignment=16, retention_interval=retention)
        tokens = prompt(120)
        request = run(policy, "a", tokens)
        null, also_null, checkpoint, running = request.tables[1]
        assert (null, also_null) == (0, 0)
        assert 0 not in (checkpoint, running) and checkpoint != running
        assert policy.keyed_positions(tokens) == [112]  # the provisional key 96 is gone
        assert policy.take_offers("a") == [BoundaryOffer(1, checkpoint, 112)]
        assert policy.take_offers("a") == []
        assert replay_hit(policy, tokens) == 112
        assert policy.lookup(tokens).state_block == checkpoint
        assert extension_hit(policy, tokens) == 112


@pytest.mark.parametrize("alignment", [16, 32, 48])
@pytest.mark.parametrize("num_tokens", [40, 65, 97, 113, 120, 129, 160, 161, 200])
def test_checkpoint_inside_one_chunk_of_any_size(num_tokens: int, alignment: int) -> None:
    policy = make(16, 32, checkpoint_alignment=alignment)
    tokens = prompt(num_tokens)
    request = run(policy, "a", tokens, [num_tokens])
    tail = (num_tokens - 1) // 16 * 16
    exported = tail % alignment == 0 and tail >= 16 and num_tokens > 32
    at_end = [num_tokens] if num_tokens % 32 == 0 else []
    assert policy.keyed_positions(tokens) == ([tail] if exported else []) + at_end
    assert replay_hit(policy, tokens) == (tail if exported else 0)
    columns = -(-num_tokens // 32)
    assert [block > 0 for block in request.tables[1]] == [False] * (columns - 2) + [exported, True]


@scenario("78")
def a_block_aligned_checkpoint_in_a_later_column() -> None:
    for retention in (DENSE, 0):
        policy = make(
            *(32, 32),
            checkpoint_alignment=16,
            drop_eagle_block=True,
            num_scratch_blocks=3,
            retention_interval=retention,
        )
        assert not policy.config.has_partial_hits
        tokens = prompt(104)
        request = run(policy, "a", tokens)
        table = request.tables[1]
        assert [block > 0 for block in table] == [False, False, True, True, True, True, True]
        assert [key.num_tokens for key in policy.manager.pool.keys_of(table[2])] == [64]
        assert policy.keyed_positions(tokens) == [64]
        assert policy.take_offers("a") == [BoundaryOffer(1, table[2], 64)]
        assert replay_hit(policy, tokens) == 64
        stored = [
            event.key.num_tokens
            for event in policy.manager.pool.take_events()
            if event.key and event.key.group == 1
        ]
        assert stored == ([96, 96, 64] if retention is DENSE else [64])  # stored, removed, stored


@pytest.mark.parametrize("num_tokens", [97, 104, 127, 128, 129, 200, 256, 319])
@pytest.mark.parametrize("scratch", [0, 1, 5])
def test_a_block_aligned_checkpoint_replaces_the_hash_of_its_column(num_tokens: int, scratch: int) -> None:
    policy = make(32, 32, checkpoint_alignment=16, drop_eagle_block=True, num_scratch_blocks=scratch)
    tokens = prompt(num_tokens)
    request = run(policy, "a", tokens)
    wanted = num_tokens // 32 * 32 - 32
    column = -(-num_tokens // 32) - 2
    at_end = [num_tokens] if num_tokens % 32 == 0 else []
    assert policy.keyed_positions(tokens) == [wanted, *at_end]
    assert policy.manager.pool.keys_of(request.tables[1][column])[0].num_tokens == wanted
    assert replay_hit(policy, tokens) == wanted


def scenario_81(retention: int | None) -> None:
    policy = make(16, 32, checkpoint_alignment=16, retention_interval=retention)
    tokens = prompt(240)
    request = run(policy, "a", tokens, [128])
    reserved = retention is DENSE
    assert [block > 0 for block in request.tables[1]] == [False, False, reserved, True]
    first = policy.keyed_positions(tokens)
    assert first == ([128] if reserved else [])
    assert policy.schedule("a", 4096, chunk_end=240) == 240
    policy.commit("a")
    assert policy.keyed_positions(tokens) == [*first, 224]
    assert replay_hit(policy, tokens) == 224


@scenario("81a")
def a_checkpoint_in_mid_prompt_is_not_keyed_dense() -> None:
    scenario_81(DENSE)


@scenario("81b")
def a_checkpoint_in_mid_prompt_is_not_keyed_sparse() -> None:
    scenario_81(0)


@pytest.mark.parametrize("retention", [DENSE, 0, 64])
@pytest.mark.parametrize("first", [64, 80, 96, 100, 128, 160])
def test_mid_prompt_checkpoints_off_the_block_grid_stay_unkeyed(first: int, retention: int | None) -> None:
    policy = make(16, 32, checkpoint_alignment=16, retention_interval=retention)
    tokens = prompt(240)
    run(policy, "a", tokens, [first])
    inside = (first - 1) // 16 * 16
    kept = {
        position
        for position in ({first} if first % 32 == 0 else set()) | ({inside} if inside % 32 == 0 else set())
        if retention is DENSE or (retention and position % retention == 0)
    }
    assert policy.keyed_positions(tokens) == sorted(kept)


def scenario_82(retention: int | None) -> None:
    policy = make(16, 32, checkpoint_alignment=16, retention_interval=retention)
    shared = prompt(96)
    # A donor leaves attention for the shared prefix and no state at or below it.
    donor = prompt(150, head=shared, seed=5)
    run(policy, "donor", donor, [150])
    policy.finish("donor")
    tokens = prompt(240, head=shared)
    assert policy.admit("a", tokens).junction == 96
    assert policy.schedule("a", 4096, chunk_end=128) == 128
    assert policy.request("a").junction == 96
    assert {96, 112}.isdisjoint(policy.keyed_positions(tokens))
    assert policy.keyed_positions(tokens) == ([128] if retention is DENSE else [])
    policy.commit("a")
    policy.manager.audit()


@scenario("82a")
def a_chunk_past_the_junction_keys_neither_dense() -> None:
    scenario_82(DENSE)


@scenario("82b")
def a_chunk_past_the_junction_keys_neither_sparse() -> None:
    scenario_82(0)


def test_a_checkpoint_exactly_at_the_junction_is_published() -> None:
    """The neighbour of 82: here the reserved position is the shared prefix itself."""
    policy = make(16, 32, 16, checkpoint_alignment=16)
    shared = prompt(112)
    run(policy, "donor", prompt(150, head=shared, seed=5), [150])
    tokens = prompt(240, head=shared)
    assert policy.admit("a", tokens).junction == 112
    assert policy.schedule("a", 4096, chunk_end=128) == 128
    assert policy.keyed_positions(tokens) == [112, 128]


@scenario("83a")
def a_hash_aligned_end_off_the_kernel_grid_keys_nothing() -> None:
    policy = make(2, 4, checkpoint_alignment=16)
    tokens = prompt(14)
    request = run(policy, "a", tokens, [14])
    assert [block > 0 for block in request.tables[1]] == [False, False, False, True]
    assert policy.keyed_positions(tokens) == []


@scenario("83b")
def the_same_prompt_cut_at_its_tail_keys_it() -> None:
    for retention in (DENSE, 0):
        policy = make(2, 4, checkpoint_alignment=16, retention_interval=retention)
        tokens = prompt(14)
        request = run(policy, "a", tokens, [12])
        assert policy.take_offers("a") == [BoundaryOffer(1, request.tables[1][2], 12)]  # a whole block
        assert policy.schedule("a", 100) == 14 and request.copies == []
        policy.commit("a")
        assert policy.keyed_positions(tokens) == [12]
        assert replay_hit(policy, tokens) == 12


def test_the_scheduler_makes_that_cut_itself() -> None:
    policy = make(2, 4, checkpoint_alignment=16, retention_interval=0)
    tokens = prompt(14)
    policy.admit("a", tokens)
    assert policy.schedule("a", 100) == 12


# ------------------------------------------------------------------ partial tails and copy-on-write


def owner_past_its_tail(num_tokens: int, tail: int, unit: int, block: int, attention: int) -> None:
    policy = make(unit, block, attention)
    tokens = prompt(num_tokens)
    policy.admit("owner", tokens)
    owner = policy.request("owner")
    while policy.schedule("owner", 100) != tail:  # the scheduler's own stops
        policy.commit("owner")
        policy.take_offers("owner")
    written = owner.tables[1][-1]
    block_ends = [*range(block, tail, block)] if attention == block else []
    assert policy.keyed_positions(tokens) == [*block_ends, tail]
    policy.commit("owner")
    assert policy.take_offers("owner") == []  # the block is about to be overwritten
    num_attention_blocks = len(owner.tables[0])

    assert policy.schedule("owner", 100) == num_tokens
    grown = -(-num_tokens // attention) - num_attention_blocks
    assert len(owner.new_blocks[0]) == grown and owner.new_blocks[1] == []
    (copy,) = policy.request("owner").copies
    assert copy == BlockCopy(1, written, copy.destination) and copy.destination != written
    assert owner.tables[1][-1] == written
    pool = policy.manager.pool
    assert pool.keys_of(written) == []
    assert not pool.is_writable(written)  # held until the copy has run
    assert [key.num_tokens for key in pool.keys_of(copy.destination)] == [tail]
    assert policy.take_offers("owner") == [BoundaryOffer(1, copy.destination, tail)]

    assert policy.admit("sibling", tokens).num_tokens == tail
    assert policy.schedule("sibling", 100) == WAIT
    assert policy.wait_reason == "same_step"
    assert not policy.request("sibling").is_allocated
    policy.commit("owner")
    assert pool.is_writable(written)
    assert policy.schedule("sibling", 100) == num_tokens
    sibling = policy.request("sibling")
    state_copy = sibling.copies[-1]
    assert state_copy.group == 1 and state_copy.source == copy.destination
    assert sibling.tables[1][-1] == state_copy.destination not in (written, copy.destination)
    policy.commit("sibling")
    policy.manager.audit()
    assert policy.keyed_positions(tokens) == [*block_ends, tail]


@scenario("84")
def the_owner_moves_its_entry_before_writing_on() -> None:
    owner_past_its_tail(7, tail=6, unit=2, block=4, attention=2)
    owner_past_its_tail(7, tail=6, unit=2, block=4, attention=4)


@pytest.mark.parametrize(
    ("num_tokens", "tail", "unit", "block", "attention"),
    [
        (11, 10, 2, 4, 2),
        (15, 12, 4, 16, 8),
        (63, 56, 8, 64, 16),
        (39, 36, 4, 32, 32),
        (75, 72, 8, 64, 64),
    ],
)
def test_owners_of_other_sizes(num_tokens: int, tail: int, unit: int, block: int, attention: int) -> None:
    owner_past_its_tail(num_tokens, tail, unit, block, attention)


def test_an_owner_that_fills_its_block_keys_both_copies() -> None:
    policy = make(2, 4)
    tokens = prompt(8)
    owner = run(policy, "a", tokens, [6])
    policy.schedule("a", 100)
    (copy,) = owner.copies
    offers = [BoundaryOffer(1, copy.destination, 6), BoundaryOffer(1, owner.tables[1][-1], 8)]
    assert policy.take_offers("a") == offers
    assert policy.keyed_positions(tokens) == [6, 8]


def test_a_producer_that_finishes_on_its_tail_offers_it_once() -> None:
    policy = make(2, 4)
    tokens = prompt(7)
    run(policy, "a", tokens, [6])
    block = policy.request("a").tables[1][-1]
    assert policy.finish("a") == BoundaryOffer(1, block, 6)
    run(policy, "b", prompt(7, seed=1), [6])
    policy.schedule("b", 10)
    assert policy.finish("b") is None  # a chunk is in flight
    run(policy, "c", prompt(7, seed=2))
    assert policy.finish("c") is None


def test_an_aborted_owner_leaves_no_block_behind() -> None:
    for stop_after in range(3):
        policy = make(2, 4, num_scratch_blocks=2)
        tokens = prompt(7)
        run(policy, "donor", tokens)
        policy.finish("donor")
        policy.admit("a", tokens)
        if stop_after:
            policy.schedule("a", 100)
        if stop_after > 1:
            policy.commit("a")
        policy.abort("a")
        assert policy.manager.pool.num_used == 0
        assert policy.manager.cached_this_step == set()
        assert replay_hit(policy, tokens) == 6


@scenario("93")
def a_partial_hit_copies_in_both_groups() -> None:
    for dcp in (1, 2, 4):
        policy = make(2, 4, dcp=dcp)
        tokens = prompt(8)
        run(policy, "owner", tokens)
        policy.finish("owner")
        hit = policy.admit("a", tokens)
        assert hit.num_tokens == 6
        assert len(hit.attention_blocks[0]) == -(-6 // (4 * dcp))
        assert policy.schedule("a", 100) == 8
        request = policy.request("a")
        assert len(request.tables[0]) == -(-8 // (4 * dcp)) and len(request.tables[1]) == 2
        sources = {copy.group: copy.source for copy in request.copies}
        assert sources == {0: hit.attention_blocks[0][-1], 1: hit.state_block}
        for copy in request.copies:
            assert request.tables[copy.group][-1] == copy.destination != copy.source
            assert request.new_blocks[copy.group] == [copy.destination]
        policy.commit("a")
        assert replay_hit(policy, tokens) == 6


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_tokens", [9, 16, 23, 26, 40])
def test_partial_hits_of_other_sizes(num_tokens: int, dcp: int) -> None:
    policy = make(2, 8, 4, dcp=dcp)
    tokens = prompt(num_tokens)
    run(policy, "owner", tokens)
    tail = (num_tokens - 1) // 2 * 2
    hit = policy.admit("a", tokens)
    assert hit.num_tokens == tail
    assert policy.schedule("a", 100) == num_tokens
    copied = {copy.group for copy in policy.request("a").copies}
    assert copied == ({0} if tail % (4 * dcp) else set()) | ({1} if tail % 8 else set())
    policy.commit("a")
    policy.manager.audit()


@scenario("94")
def an_external_load_is_continued_inside_its_block() -> None:
    for scratch in (0, 2):
        policy = make(2, 8, num_scratch_blocks=scratch)
        tokens = prompt(15)
        policy.admit("a", tokens, num_external_tokens=10)
        assert policy.schedule("a", 100) == 14  # +4
        request = policy.request("a")
        loaded = request.tables[1][1]
        assert [block > 0 for block in request.tables[1]] == [False, True] + [True] * scratch
        policy.commit("a")
        assert policy.keyed_positions(tokens) == [14]
        assert policy.manager.pool.lookup(next(iter(state_keys(policy)))) == loaded
        assert policy.schedule("a", 100) == 15  # +1
        assert request.new_blocks[1] == []
        assert request.tables[1][1] == loaded
        assert policy.manager.pool.keys_of(loaded) == []
        (copy,) = request.copies
        assert policy.lookup(tokens).state_block == copy.destination
        policy.commit("a")
        policy.manager.audit()


def state_keys(policy: AlignPolicy) -> list[Any]:
    return [key for key in policy.keys() if key.group == policy.config.state_group]


def test_a_load_replaces_a_shorter_local_tail_and_yields_to_a_longer_one() -> None:
    """The connector sees the local hit rounded down to the scheduler block."""
    for external, start, copies in ((4, 14, 2), (8, 16, 0), (12, 20, 0)):
        policy = make(2, 8)
        tokens = prompt(15)
        run(policy, "donor", tokens)
        longer = prompt(30, head=tokens)
        assert policy.admit("a", longer, num_external_tokens=external).num_tokens == 14
        policy.schedule("a", 100)
        assert policy.request("a").scheduled_start == start
        assert len(policy.request("a").copies) == copies
        policy.commit("a")
        policy.manager.audit()
        with pytest.raises(ValueError, match="num_external_tokens"):
            policy.admit("b", longer, num_external_tokens=22)


# ------------------------------------------------------------------ exact multiples of the block


def checkpoint_of_8000(drop: bool, expected: int) -> None:
    policy = make(1536, 1536, checkpoint_alignment=16, drop_eagle_block=drop, retention_interval=0)
    tokens = prompt(8000)
    run(policy, "a", tokens)
    assert policy.keyed_positions(tokens) == [expected]
    assert replay_hit(policy, tokens) == expected
    assert extension_hit(policy, tokens) == expected


@scenario("86a")
def checkpoint_of_8000_without_drop() -> None:
    checkpoint_of_8000(False, 7680)


@scenario("86b")
def checkpoint_of_8000_with_drop() -> None:
    checkpoint_of_8000(True, 6144)


@scenario("87a")
def a_prompt_of_whole_blocks_without_drop() -> None:
    policy = make(1536, 1536, checkpoint_alignment=16)
    tokens = prompt(7680)
    request = run(policy, "a", tokens)
    assert request.num_computed_tokens == 7680
    assert policy.keyed_positions(tokens) == [6144, 7680]
    assert replay_hit(policy, tokens) == 6144
    assert extension_hit(policy, tokens) == 7680


@scenario("87b")
def a_prompt_of_whole_blocks_with_drop() -> None:
    for retention in (DENSE, 0):
        policy = make(
            1536, 1536, checkpoint_alignment=16, drop_eagle_block=True, retention_interval=retention
        )
        tokens = prompt(7680)
        run(policy, "a", tokens)
        assert replay_hit(policy, tokens) == 6144
        assert extension_hit(policy, tokens) == 6144


@scenario("99")
def whole_blocks_without_a_checkpoint_backend() -> None:
    for blocks in range(1, 8):
        policy = make(1536, 1536, retention_interval=0)
        tokens = prompt(1536 * blocks)
        policy.admit("a", tokens)
        ends = []
        while policy.request("a").num_computed_tokens < len(tokens):
            ends.append(policy.schedule("a", 16384))
            policy.commit("a")
        assert ends == ([1536 * (blocks - 1)] if blocks > 1 else []) + [1536 * blocks]
        assert replay_hit(policy, tokens) == 1536 * (blocks - 1)
        # without the split, which is what the report was about, nothing can be hit
        whole = make(1536, 1536, retention_interval=0)
        run(whole, "a", tokens, [len(tokens)])
        assert replay_hit(whole, tokens) == 0


def sent_twice(num_tokens: int, expected: int) -> None:
    for retention in (DENSE, 0, 32):
        policy = make(16, 16, retention_interval=retention)
        tokens = prompt(num_tokens)
        run(policy, "a", tokens)
        policy.finish("a")
        assert policy.admit("b", tokens).num_tokens == expected
        assert policy.schedule("b", 1000) == num_tokens
        assert policy.request("b").scheduled_start == expected


@scenario("100a")
def two_blocks_sent_twice() -> None:
    sent_twice(32, 16)


@scenario("100b")
def three_blocks_sent_twice() -> None:
    sent_twice(48, 32)


@pytest.mark.parametrize("num_tokens", [16, 17, 64, 80, 95])
def test_other_prompts_sent_twice(num_tokens: int) -> None:
    sent_twice(num_tokens, (num_tokens - 1) // 16 * 16)


# ------------------------------------------------------------------ junctions


def skipped_stop(drop: bool, junction: int) -> None:
    policy = make(128, 1536, dcp=8, drop_eagle_block=drop, retention_interval=0)
    assert policy.config.scheduler_block_size == 12288
    tokens = prompt(15000)
    run(policy, "a", tokens, [15000])
    hit = policy.lookup(tokens)
    assert (hit.num_tokens, hit.junction) == (0, junction)
    # the same prompt cut where the rules want it hits its tail
    cut = make(128, 1536, dcp=8, drop_eagle_block=drop, retention_interval=0)
    run(cut, "a", tokens)
    hit = cut.lookup(tokens)
    assert (hit.num_tokens, hit.junction) == (junction, None)


@scenario("90a")
def a_skipped_stop_loses_the_hit() -> None:
    skipped_stop(False, 14976)


@scenario("90b")
def a_skipped_stop_loses_the_hit_with_drop() -> None:
    skipped_stop(True, 14848)


@scenario("91")
def a_sibling_of_a_sparse_producer_learns_the_junction() -> None:
    for unit, attention, junction in ((1536, 1536, 4608), (128, 1536, 4608), (128, 128, 4992)):
        policy = make(unit, 1536, attention, retention_interval=0)
        tokens = prompt(8000)
        run(policy, "producer", tokens)
        policy.finish("producer")
        sibling = prompt(8000, head=tokens[:5000], seed=3)
        hit = policy.admit("sibling", sibling)
        assert (hit.num_tokens, hit.junction) == (0, junction)
        # the scheduler ends a chunk there, rounded down to its block, so that the third one hits
        stop = junction // policy.config.split_block_size * policy.config.split_block_size
        ends = []
        while policy.request("sibling").num_computed_tokens < 8000:
            ends.append(policy.schedule("sibling", 16384))
            policy.commit("sibling")
        assert ends[0] == stop
        third = prompt(8000, head=tokens[:5000], seed=4)
        assert replay_hit(policy, third) == (stop if stop % 1536 == 0 else 0)


@scenario("96")
def the_third_sibling_resumes_at_the_dropped_junction() -> None:
    for retention in (DENSE, 0):
        policy = make(4, 16, drop_eagle_block=True, junction_feature=True, retention_interval=retention)
        shared = prompt(24)
        starts = []
        for seed in range(1, 4):
            tokens = prompt(40, head=shared, seed=seed)
            policy.admit(seed, tokens)
            while policy.request(seed).num_computed_tokens < 40:
                policy.schedule(seed, 100)
                if policy.request(seed).num_computed_tokens == 0:
                    starts.append(policy.request(seed).scheduled_start)
                policy.commit(seed)
                policy.manager.audit()
            policy.finish(seed)
        assert starts == [0, 0, 12]


@pytest.mark.parametrize(("shared", "drop"), [(24, False), (50, False), (50, True), (33, True), (64, True)])
def test_third_siblings_of_other_sizes(shared: int, drop: bool) -> None:
    policy = make(4, 16, drop_eagle_block=drop, junction_feature=True, retention_interval=0)
    head = prompt(shared)
    hits = []
    for seed in range(1, 4):
        tokens = prompt(shared + 16, head=head, seed=seed)
        hits.append(policy.admit(seed, tokens).num_tokens)
        while policy.request(seed).num_computed_tokens < len(tokens):
            policy.schedule(seed, 100)
            policy.commit(seed)
    matched = shared // 16 * 16
    assert hits == [0, 0, matched - 4 if drop else matched]


@scenario("97")
def a_longer_sibling_hits_the_dropped_tail() -> None:
    for alignment in (None, 16):
        policy = make(64, 1024, drop_eagle_block=True, retention_interval=0, checkpoint_alignment=alignment)
        tokens = prompt(1600)
        run(policy, "a", tokens)
        assert policy.admit("b", prompt(2100, head=tokens, seed=9)).num_tokens == 1536


# ------------------------------------------------------------------ attention alone, with drop


def attention_of(policy: AlignPolicy, tokens: list[int], max_tokens: int) -> tuple[int, int]:
    policy.admit("ask", tokens)
    matched, blocks = policy.manager.find_attention(0, policy.request("ask").hashes, max_tokens)
    policy.abort("ask")
    return matched, len(blocks)


@scenario("92a")
def a_dropped_unit_keeps_its_block() -> None:
    policy = make(2, 4, drop_eagle_block=True)
    tokens = prompt(8)
    run(policy, "a", tokens)
    assert {key.num_tokens for key in policy.keys() if key.group == 0} >= {4, 8}
    assert attention_of(policy, [*tokens, 1, 2, 3], 8) == (6, 2)


@scenario("92b")
def a_dropped_tail_gives_its_block_back() -> None:
    policy = make(2, 4, drop_eagle_block=True)
    tokens = prompt(7)
    run(policy, "a", tokens)
    assert {key.num_tokens for key in policy.keys() if key.group == 0} == {4, 6}
    assert attention_of(policy, [*tokens, 1, 2, 3], 8) == (4, 1)


@pytest.mark.parametrize("num_tokens", [2, 5, 8, 9, 15, 16, 31])
def test_attention_lookup_of_other_sizes(num_tokens: int) -> None:
    for drop in (False, True):
        policy = make(2, 8, 4, drop_eagle_block=drop)
        tokens = prompt(num_tokens)
        run(policy, "a", tokens)
        longer = [*tokens, 1, 2, 3]
        # without the drop the tail of a prompt of whole units is held one unit lower, unless a block ends
        known = num_tokens if num_tokens % 4 == 0 or drop else num_tokens - 1
        expected = max(0, known // 2 * 2 - (2 if drop else 0))
        assert attention_of(policy, longer, num_tokens) == (expected, -(-expected // 4))


# ------------------------------------------------------------------ retention


def retention_8(retention: int | None) -> None:
    policy = make(2, 4, retention_interval=retention)
    tokens = prompt(16)
    policy.admit("a", tokens)
    request = policy.request("a")
    offers = []
    for chunk_end in (8, 16):
        assert policy.schedule("a", 100, chunk_end=chunk_end) == chunk_end
        table = request.tables[1]
        assert len(table) == chunk_end // 4
        assert all(table[column] == 0 for column in range(0, len(table), 2))
        (offer,) = policy.take_offers("a")
        assert offer.block == table[-1]
        offers.append(offer.num_tokens)
        policy.commit("a")
    assert offers == [8, 16]
    assert policy.keyed_positions(tokens) == [8, 16]


@scenario("95a")
def retention_of_two_blocks() -> None:
    retention_8(8)


@scenario("95b")
def retention_dense() -> None:
    retention_8(DENSE)


@pytest.mark.parametrize(
    ("retention", "expected"),
    [(DENSE, [4, 8, 12, 16, 20, 22]), (8, [8, 16, 20, 22]), (16, [16, 20, 22]), (0, [20, 22])],
)
def test_retention_keeps_a_grid_and_the_reachable_boundaries(
    retention: int | None, expected: list[int]
) -> None:
    """N - 1 = 22 keeps the block below it, 20, and the tail entry is never masked."""
    policy = make(2, 4, retention_interval=retention)
    tokens = prompt(23)
    run(policy, "a", tokens, [4, 8, 12, 16, 20, 22, 23])
    assert policy.keyed_positions(tokens) == expected


@pytest.mark.parametrize(("drop", "expected"), [(False, [64, 72]), (True, [32, 64])])
def test_sparse_retention_with_and_without_drop(drop: bool, expected: list[int]) -> None:
    policy = make(8, 32, drop_eagle_block=drop, retention_interval=0)
    tokens = prompt(73 if not drop else 75)
    run(policy, "a", tokens, [32, 64, 72, len(tokens)])
    assert policy.keyed_positions(tokens) == expected


@pytest.mark.parametrize(("flagged", "expected"), [(False, [64]), (True, [48, 64])])
def test_a_flagged_state_group_also_keeps_the_block_below_a_junction(
    flagged: bool, expected: list[int]
) -> None:
    policy = make(4, 16, drop_eagle_block=True, eagle_flags_all_groups=flagged, retention_interval=0)
    shared = prompt(70)
    run(policy, "donor", prompt(200, head=shared, seed=5), [200])
    tokens = prompt(200, head=shared)
    assert policy.admit("a", tokens).junction == 60
    request = policy.request("a")
    policy.schedule("a", 1000, chunk_end=16)
    request.junction = 64  # on a block, so that only the block below is in question
    for chunk_end in (32, 48, 64, 80, 96):
        policy.commit("a")
        policy.schedule("a", 1000, chunk_end=chunk_end)
    assert policy.keyed_positions(tokens) == expected


@pytest.mark.parametrize(("drop", "expected"), [(False, [16, 32]), (True, [16, 32, 48])])
def test_an_eagle_group_registers_one_block_past_the_scheduler_block(drop: bool, expected: list[int]) -> None:
    policy = make(16, 32, 16, partial_hits=False, drop_eagle_block=drop)
    tokens = prompt(50)
    run(policy, "a", tokens, [50])
    assert policy.keyed_positions(tokens, group=0) == expected
