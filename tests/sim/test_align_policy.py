"""The upstream policy as a whole: pool, tables over a request's life, budget, preemption, random worlds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import InvariantError
from milepost.sim.policies.align import DENSE, WAIT, AlignConfig, AlignPolicy
from milepost.sim.policies.block_pool import NULL_BLOCK, BlockKey, BlockPool


def key(num_tokens: int, group: int = 0, name: str = "a") -> BlockKey:
    return BlockKey(f"{name}{num_tokens}".encode(), group, num_tokens)


def make(unit: int, block: int, attention: int | None = None, **options: Any) -> AlignPolicy:
    options.setdefault("retention_interval", DENSE)
    return AlignPolicy(AlignConfig(unit, block, attention or block, **options))


def advance(policy: AlignPolicy, name: str, chunk_end: int | None = None, budget: int = 10**6) -> int:
    end = policy.schedule(name, budget, chunk_end=chunk_end)
    assert end != WAIT, policy.wait_reason
    policy.commit(name)
    policy.manager.audit()
    return end


# ------------------------------------------------------------------ block pool


def test_free_blocks_are_reused_unkeyed_first_then_fresh_then_least_recently_freed() -> None:
    pool = BlockPool(6)
    first, second, third = (pool.allocate() for _ in range(3))
    assert (first, second, third) == (1, 2, 3)
    pool.cache_full(first, key(4))
    pool.cache_full(second, key(8))
    pool.free([second, third, NULL_BLOCK, first])
    assert pool.num_used == 0
    assert pool.allocate() == third  # unkeyed
    assert [pool.allocate(), pool.allocate()] == [4, 5]  # never used
    pool.touch(second)  # a hit leaves the queue ...
    pool.free([second])  # ... and comes back behind the others
    assert pool.allocate() == first
    assert pool.lookup(key(4)) is None and pool.num_evicted_blocks == 1
    assert pool.allocate() == second
    assert not pool.can_allocate(1)
    with pytest.raises(InvariantError, match="exhausted"):
        pool.allocate()


def test_unkeyed_blocks_are_reused_last_freed_first() -> None:
    pool = BlockPool(None)
    blocks = [pool.allocate() for _ in range(4)]
    pool.free(blocks)
    assert [pool.allocate() for _ in range(4)] == blocks[::-1]


def test_a_full_key_promotes_a_partial_one_and_nothing_else() -> None:
    pool = BlockPool(None, record_events=True)
    block = pool.allocate()
    pool.cache_partial(block, key(2))
    pool.cache_partial(block, key(2))
    pool.cache_partial(block, key(3))  # a longer tail replaces a shorter one
    pool.cache_full(block, key(4))
    pool.cache_full(block, key(4))
    pool.cache_partial(block, key(2))  # a shorter one beside a full key stays beside it
    assert pool.keys_of(block) == [key(4), key(2)]
    events = [(event.kind, event.key.num_tokens) for event in pool.take_events() if event.key]
    assert events == [
        ("stored", 2),
        ("removed", 2),
        ("stored", 3),
        ("removed", 3),
        ("stored", 4),
        ("stored", 2),
    ]
    with pytest.raises(InvariantError, match="already covers 4"):
        pool.cache_full(block, key(4, name="b"))


def test_replacing_the_contents_of_a_block_removes_every_key() -> None:
    pool = BlockPool(None)
    block = pool.allocate()
    pool.cache_full(block, key(8))
    pool.cache_partial(block, key(6))
    pool.cache_partial(block, key(4), replace_existing_hashes=True)
    assert pool.keys_of(block) == [key(4)]
    assert pool.keys() == {key(4)}


def test_moving_keys_keeps_duplicates_findable() -> None:
    pool = BlockPool(None, record_events=True)
    source, copy, duplicate = (pool.allocate() for _ in range(3))
    for block in (source, duplicate):
        pool.cache_full(block, key(8))
    pool.cache_partial(source, key(6))
    pool.take_events()
    assert pool.move_keys(source, copy) == [key(8), key(6)]
    assert pool.keys_of(source) == [] and pool.lookup(key(6)) == copy
    assert pool.lookup(key(8)) in (copy, duplicate)
    assert pool.take_events() == []
    pool.remove_keys(copy)
    assert pool.lookup(key(8)) == duplicate
    assert pool.is_writable(copy) and not pool.is_writable(duplicate) and not pool.is_writable(NULL_BLOCK)
    pool.touch(copy)
    assert not pool.is_writable(copy)


def test_the_null_block_takes_no_key_and_a_double_free_is_found() -> None:
    pool = BlockPool(3)
    pool.cache_partial(NULL_BLOCK, key(2))
    assert not pool.keys()
    block = pool.allocate()
    pool.free([block])
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free([block])


# ------------------------------------------------------------------ hash chain


def test_a_hash_commits_to_the_whole_prefix_and_to_its_lookahead() -> None:
    def chain(tokens: list[int], lookahead: int = 0, known: tuple[bytes, ...] = ()) -> list[bytes]:
        return AlignConfig(4, 4, 4, num_hash_lookahead_tokens=lookahead).hash_chain(tokens, known)

    tokens = list(range(20))
    assert len(chain(tokens)) == 5 and len(chain(tokens, 1)) == 4 and len(chain(tokens[:2], 3)) == 0
    assert chain(tokens)[:3] == chain(tokens[:12])
    assert chain([99, *tokens[1:]])[4] != chain(tokens)[4]
    changed = [*tokens[:17], 99, *tokens[18:]]
    assert chain(changed)[3] == chain(tokens)[3]
    assert chain(changed, 1)[3] == chain(tokens, 1)[3]
    assert chain(changed, 2)[3] != chain(tokens, 2)[3]
    assert chain(tokens, 0, tuple(chain(tokens[:9]))) == chain(tokens)


# ------------------------------------------------------------------ the table over a request's life


def shape(table: list[int]) -> str:
    return "".join("x" if block else "." for block in table)


def test_scratch_blocks_move_with_the_running_state() -> None:
    """B = 32, two scratch blocks, a prompt of 200 cut at 64 and 128, then decode."""
    policy = make(16, 32, num_scratch_blocks=2)
    policy.admit("a", list(range(200)))
    table = policy.request("a").tables
    policy.schedule("a", 1000, chunk_end=64)
    table = policy.request("a").tables[1]
    assert shape(table) == ".xxx"
    running_64, *scratch = table[1:]
    policy.commit("a")
    policy.schedule("a", 1000, chunk_end=128)
    assert shape(table) == ".x.xxx"
    assert table[1] == running_64 and table[3] == scratch[1] and table[4] == scratch[0]
    policy.commit("a")
    running_128 = table[3]
    policy.schedule("a", 1000, chunk_end=200)
    assert shape(table) == "...x..xxx" and table[3] == running_128
    policy.commit("a")
    for token in range(200, 300):
        policy.append("a", [token])
        advance(policy, "a")
        policy.manager.sweep(policy.request("a"))
        assert sum(block > 0 for block in table) == 3
        assert len(table) == -(-(token + 1) // 32) + 2


def test_new_state_blocks_per_step_match_upstreams_count() -> None:
    """required - owned, capped by one block, one for a checkpoint, and the scratch of a first step."""
    for scratch in (0, 1, 2, 5):
        for ends in ([96, 192, 300], [64, 300], [300], [40, 70, 100, 300], [10, 300]):
            policy = make(16, 32, checkpoint_alignment=16, num_scratch_blocks=scratch, retention_interval=0)
            policy.admit("a", list(range(300)))
            request = policy.request("a")
            for end in ends:
                owned = len(request.tables[1]) if request.tables else 0
                first = not request.is_allocated
                policy.schedule("a", 1000, chunk_end=end)
                required = -(-end // 32) + scratch
                cap = 1 + (request.checkpoint is not None) + (scratch if first else 0)
                assert len(request.new_blocks[1]) == min(max(0, required - owned), cap)
                assert len(request.tables[1]) == max(owned, required)
                policy.commit("a")
                policy.manager.audit()


def test_decode_keys_block_ends_densely_and_not_with_sparse_retention() -> None:
    for retention, expected in ((DENSE, [32, 48, 64, 96]), (0, [32, 48])):
        policy = make(16, 32, retention_interval=retention)
        tokens = list(range(50))
        policy.admit("a", tokens)
        while policy.request("a").num_computed_tokens < 50:
            advance(policy, "a")
        for token in range(50, 100, 2):
            policy.append("a", [token, token + 1])
            advance(policy, "a")
        assert policy.keyed_positions(policy.request("a").tokens) == expected


def test_an_internal_checkpoint_after_a_partial_resume_leaves_the_first_column_alone() -> None:
    """The private copy holds the state it was resumed from, never the end of its block."""
    policy = make(4, 16, checkpoint_alignment=4)
    head = list(range(13))
    policy.admit("donor", head)
    while policy.request("donor").num_computed_tokens < 13:
        advance(policy, "donor")
    tokens = head + list(range(100, 130))
    assert policy.admit("a", tokens).num_tokens == 12
    assert advance(policy, "a") == 43
    assert policy.keyed_positions(tokens) == [12, 40]


@pytest.mark.parametrize(
    ("lookahead", "ends", "hit"),
    # with three lookahead tokens the attention tail, 32, has no hash yet and is not registered
    [(0, [32, 34], 32), (1, [32, 34], 32), (3, [16, 28, 32, 34], 16)],
)
def test_lookahead_hashes_replace_the_drop(lookahead: int, ends: list[int], hit: int) -> None:
    policy = make(4, 16, num_hash_lookahead_tokens=lookahead)
    tokens = list(range(34))
    policy.admit("a", tokens)
    assert [advance(policy, "a") for _ in ends] == ends
    assert policy.lookup(tokens).num_tokens == hit
    # with one lookahead token, a prompt that goes on differently right behind 32 stops short of it
    if lookahead < 2:
        assert policy.lookup([*tokens[:32], 77, 78]).num_tokens == (32 if lookahead == 0 else 0)


def test_lookahead_and_drop_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="replaces drop_eagle_block"):
        AlignConfig(4, 16, 16, num_hash_lookahead_tokens=1, drop_eagle_block=True)


def test_a_separate_draft_group_drops_alone() -> None:
    tokens = list(range(61))
    for draft in (None, 16):
        policy = make(4, 16, draft_attention_block_size=draft, drop_eagle_block=True)
        policy.admit("a", tokens)
        while policy.request("a").num_computed_tokens < 61:
            advance(policy, "a")
        hit = policy.lookup([*tokens, 1, 2])
        assert hit.num_tokens == 56
        assert len(hit.attention_blocks) == (1 if draft is None else 2)
        assert policy.config.state_group == len(hit.attention_blocks)


def test_several_mtp_modules_reserve_their_lookahead_and_register_finalized_tokens_only() -> None:
    policy = make(16, 16, prefill_lookahead=4, max_tokens_per_step=10)
    policy.admit("a", list(range(45)))
    ends = []
    while policy.request("a").num_computed_tokens < 45:
        ends.append(advance(policy, "a", budget=10))
        attention = {found.num_tokens for found in policy.keys() if found.group == 0}
        assert all(position <= ends[-1] - 3 for position in attention)
    assert ends == [10, 16, 26, 32, 41, 45]


# ------------------------------------------------------------------ budget, preemption, the engine


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    policy = make(16, 16, num_blocks=8)
    policy.admit("a", list(range(48)))
    assert advance(policy, "a") == 32
    policy.admit("b", list(range(100, 200)))
    used, found = policy.manager.pool.num_used, policy.keys()
    assert policy.schedule("b", 1000) == WAIT
    assert policy.wait_reason == "blocks"
    assert (policy.manager.pool.num_used, policy.keys()) == (used, found)
    policy.abort("a")
    assert policy.manager.pool.num_used == 0


def test_blocks_of_a_hit_that_lie_in_the_queue_count_as_taken() -> None:
    """A pool of 7: the hit itself uses up what its own request would need."""
    policy = make(16, 16, num_blocks=7)
    tokens = list(range(40))
    policy.admit("a", tokens)
    while policy.request("a").num_computed_tokens < 40:
        advance(policy, "a")
    policy.finish("a")
    policy.admit("b", [*tokens, *range(500, 524)])
    assert policy.lookup(policy.request("b").tokens).num_tokens == 32
    # 3 hit blocks + 2 attention blocks + 1 state block = 6 usable blocks
    assert policy.schedule("b", 100, chunk_end=64) == 64
    policy.abort("b")
    smaller = make(16, 16, num_blocks=6)
    smaller.admit("a", tokens)
    while smaller.request("a").num_computed_tokens < 40:
        advance(smaller, "a")
    smaller.finish("a")
    assert smaller.lookup([*tokens, *range(500, 524)]).num_tokens == 32
    smaller.admit("b", [*tokens, *range(500, 524)])
    assert smaller.schedule("b", 100, chunk_end=64) == WAIT


def test_tails_are_evicted_before_heads_and_the_least_recent_prompt_first() -> None:
    policy = make(16, 16, num_blocks=13, retention_interval=0)
    prompts = [[1000 * i + j for j in range(65)] for i in range(3)]
    for i, tokens in enumerate(prompts[:2]):
        policy.admit(i, tokens)
        while policy.request(i).num_computed_tokens < 65:
            advance(policy, i)
        policy.finish(i)
    assert [policy.lookup(tokens).num_tokens for tokens in prompts[:2]] == [64, 64]
    policy.admit(2, prompts[2])
    advance(policy, 2)
    # five blocks were needed, one unkeyed block was free: the tail of prompt 0 went first
    assert policy.keyed_positions(prompts[0], group=0) != [16, 32, 48, 64]
    assert 16 in policy.keyed_positions(prompts[0], group=0)
    assert policy.lookup(prompts[0]).num_tokens == 0
    assert policy.lookup(prompts[1]).num_tokens == 64


def test_a_preempted_request_resumes_from_its_own_entries_and_its_outputs_are_prefill() -> None:
    policy = make(16, 64, retention_interval=0)
    tokens = list(range(150))
    policy.admit("a", tokens)
    while policy.request("a").num_computed_tokens < 150:
        advance(policy, "a")
    for token in range(150, 200):
        policy.append("a", [token])
        advance(policy, "a")
    policy.append("a", [200])
    policy.preempt("a")
    assert policy.manager.pool.num_used == 0 and policy.num_preemptions == 1
    ends = []
    while policy.request("a").num_computed_tokens < 201:
        ends.append(advance(policy, "a"))
    assert policy.request("a").scheduled_start >= 144
    assert ends == [192, 201]  # prefill_end is 200 and the next block end comes first


def test_the_engine_runs_everything_and_siblings_take_a_step_more() -> None:
    policy = make(16, 32, max_tokens_per_step=256)
    shared = list(range(112))
    for i in range(3):
        policy.admit(i, [*shared, *range(1000 * (i + 1), 1000 * (i + 1) + 5)])
    policy.admit("other", list(range(9000, 9100)))
    steps = []
    for _ in range(12):
        chunks = policy.step()
        steps.append([(chunk.request_id, chunk.start, chunk.end) for chunk in chunks])
        for chunk in chunks:
            policy.commit(chunk.request_id)
    # the second sibling would hit what the first is writing: it waits, and with it all behind it
    assert steps[0] == [(0, 0, 96)]
    assert policy.wait_reason != "blocks"
    done = {name for step in steps for name, _, end in step if end in (117, 100)}
    assert done == {0, 1, 2, "other"}
    started = {name: start for step in reversed(steps) for name, start, _ in step}
    assert started[1] > 0 and started[2] > 0 and started["other"] == 0


def test_a_preempted_request_comes_before_those_that_wait() -> None:
    policy = make(16, 16, max_tokens_per_step=32)
    for name, base in (("a", 0), ("b", 1000), ("c", 2000)):
        policy.admit(name, list(range(base, base + 40)))
    assert policy.step() == [("a", 0, 32)]
    policy.commit("a")
    policy.preempt("a")
    assert policy.step() == [("a", 32, 40), ("b", 0, 16)]


def test_the_threshold_holds_back_a_prefill_that_is_not_alone() -> None:
    policy = make(16, 16, long_prefill_threshold=32)
    policy.admit("a", list(range(100)))
    assert policy.step() == [("a", 0, 96)]
    policy.commit("a")
    policy.admit("b", list(range(1000, 1100)))
    assert policy.step() == [("a", 96, 100), ("b", 0, 32)]


def test_the_engine_preempts_the_last_request_when_blocks_run_out() -> None:
    policy = make(16, 16, num_blocks=12, retention_interval=0, max_tokens_per_step=64)
    for name, base in (("a", 0), ("b", 5000)):
        policy.admit(name, list(range(base, base + 60)))
    finished: dict[Any, int] = {}
    for _ in range(200):
        for chunk in policy.step():
            policy.commit(chunk.request_id)
            request = policy.request(chunk.request_id)
            if request.num_computed_tokens == len(request.tokens):
                policy.append(chunk.request_id, [7])
                if len(request.tokens) == 110:
                    finished[chunk.request_id] = request.num_computed_tokens
                    policy.finish(chunk.request_id)
        policy.manager.audit()
    assert finished == {"a": 109, "b": 109}
    assert policy.num_preemptions > 0
    assert policy.manager.pool.num_used == 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"dcp": 0}, "dcp"),
        ({"mamba_block_size": 24}, "mamba_block_size"),
        ({"attention_block_size": 0}, "attention_block_size"),
        ({"draft_attention_block_size": 20}, "draft_attention_block_size"),
        ({"num_scratch_blocks": -1}, "num_scratch_blocks"),
        ({"retention_interval": 48}, "retention_interval"),
        ({"num_blocks": 1}, "num_blocks"),
    ],
)
def test_a_bad_configuration_names_its_field(options: dict[str, int], name: str) -> None:
    good = {"hash_block_size": 16, "mamba_block_size": 32, "attention_block_size": 32}
    AlignConfig(**good)
    with pytest.raises(ValueError, match=name):
        AlignConfig(**{**good, **options})


def test_misuse_is_refused() -> None:
    policy = make(16, 32)
    policy.admit("a", list(range(200)))
    with pytest.raises(ValueError, match="already admitted"):
        policy.admit("a", [1])
    with pytest.raises(ValueError, match="must not be empty"):
        policy.admit("b", [])
    policy.schedule("a", 100)
    with pytest.raises(ValueError, match="commit it first"):
        policy.schedule("a", 100)


# ------------------------------------------------------------------ random worlds


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    geometry=st.sampled_from(
        [(2, 4, 4), (2, 8, 4), (4, 4, 4), (4, 16, 8), (2, 4, 2), (4, 8, 16), (8, 8, 32)]
    ),
    dcp=st.sampled_from([1, 1, 2]),
    alignment=st.sampled_from([None, 1, 2, 4, 8, 16]),
    drop=st.booleans(),
    scratch=st.sampled_from([0, 0, 1, 3]),
    retention=st.sampled_from([DENSE, 0, 1, 2]),
    junctions=st.booleans(),
    num_blocks=st.sampled_from([None, 40, 80]),
    flagged=st.booleans(),
)
def test_every_entry_holds_the_state_it_is_keyed_by_and_no_block_leaks(
    seed: int,
    geometry: tuple[int, int, int],
    dcp: int,
    alignment: int | None,
    drop: bool,
    scratch: int,
    retention: int | None,
    junctions: bool,
    num_blocks: int | None,
    flagged: bool,
) -> None:
    chance = random.Random(seed)
    config = AlignConfig(
        *geometry,
        dcp=dcp,
        checkpoint_alignment=alignment,
        drop_eagle_block=drop,
        num_scratch_blocks=scratch,
        junction_feature=junctions,
        num_blocks=num_blocks,
        max_tokens_per_step=48,
        eagle_flags_all_groups=flagged,
    )
    if retention:
        retention *= config.scheduler_block_size
    policy = AlignPolicy(
        AlignConfig(**{**{n: getattr(config, n) for n in config.__slots__}, "retention_interval": retention})
    )
    texts = [[i * 10_000 + j for j in range(70)] for i in range(3)]
    name = 0
    live: list[int] = []
    for _ in range(60):
        if len(live) < 4 and chance.random() < 0.5:
            head = chance.choice(texts)[: chance.randint(1, 70)]
            policy.admit(name, head + [name * 10_000 + 500_000 + j for j in range(chance.randint(0, 20))])
            live.append(name)
            name += 1
        chunks = policy.step(chance.randint(1, 48))
        for chunk in chunks:
            assert chunk.start < chunk.end
            if chance.random() < 0.05:
                policy.abort(chunk.request_id)
                live.remove(chunk.request_id)
                continue
            policy.commit(chunk.request_id)
            request = policy.request(chunk.request_id)
            if request.num_computed_tokens == len(request.tokens):
                if chance.random() < 0.3:
                    policy.finish(chunk.request_id)
                    live.remove(chunk.request_id)
                else:
                    more = chance.randint(1, scratch + 1)
                    policy.append(chunk.request_id, [chance.randint(0, 99) for _ in range(more)])
        if live and chance.random() < 0.05:
            policy_running = [i for i in live if policy.request(i).is_allocated]
            if policy_running:
                policy.preempt(policy_running[-1])
        policy.manager.audit()
        assert policy.manager.cached_this_step == set()
        assert num_blocks is None or policy.manager.pool.num_used < num_blocks
        for i in live:
            tables = policy.request(i).tables
            held = [block for table in tables for block in table if block]
            assert len(held) == len(set(held))
    for i in list(live):
        policy.abort(i)
    assert policy.manager.pool.num_used == 0
