"""Numbers that add up, refusals that show, and domains that never meet."""

from __future__ import annotations

from array import array
from itertools import combinations, product

import pytest
from tests.bugs.scene import SHAPES, Scene, Shape, outputs

from milepost.core.hashing import CacheDomain, KeyChain, MediaSpan, domain_root
from milepost.core.plan import ChunkPlan, StateExport
from milepost.sim.fakes import WorkerFaults
from milepost.sim.spec import Outcome
from milepost.sim.workload import seeded

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
half_of_the_shapes = pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
some_shapes = pytest.mark.parametrize("shape", SHAPES[::3], ids=str)


def cached(outcome: Outcome) -> int:
    assert outcome.num_cached_tokens is not None
    return outcome.num_cached_tokens


# --- B60: a silent refusal ---------------------------------------------------------------------


def refused(scene: Scene, why: str) -> int:
    return sum(
        count for (cause, _), count in scene.scheduler.stats().counters.refusals.items() if cause == why
    )


def test_every_kind_of_refused_checkpoint_is_counted_under_its_reason() -> None:
    """No memory, no legal position, no write, too many on the path."""
    full = Shape(step_tokens=400)
    with Scene(full, cache_bytes=full.bytes_of(num_units=9, num_states=1)) as scene:
        scene.send(scene.tokens(130), wanted=((48, "marker"),))
        assert refused(scene, "no_memory") + sum(scene.counters.evictions.values()) > 0

    coarse = Shape(grid=64, step_tokens=400)
    with Scene(coarse) as scene:
        scene.send(scene.tokens(130), wanted=((48, "marker"),))
        assert refused(scene, "not_legal") == 1

    faults = WorkerFaults(acknowledges=lambda chunk, export: export.reason != "marker")
    with Scene(Shape(), faults=faults) as scene:
        scene.send(scene.tokens(130), wanted=((48, "marker"), (64, "message")))
        assert scene.counters.refusals == {("not_written", "marker"): 1}

    with Scene(Shape(), max_states_per_path=2) as scene:
        scene.send(scene.tokens(130), wanted=((48, "marker"), (64, "message")))
        assert refused(scene, "states_per_path") == 1


@shapes
def test_a_shorter_hit_says_why(shape: Shape) -> None:
    """One case per reason code; the code of the report, of the outcome and of the counter agree."""
    with Scene(shape.varied(step_tokens=4096)) as scene:
        unit, branch = shape.unit, 4 * shape.export_grid
        prompt = scene.tokens(branch + 2 * unit + 2)
        probes = [
            ("cold", prompt),
            ("hit", prompt),
            ("too_short", scene.tokens(unit)),
            ("path_ends", prompt + scene.tokens(2 * unit)),
            ("no_state", prompt[:branch] + scene.tokens(2 * unit)),
            ("diverged", prompt[:branch] + scene.tokens(2 * unit)),
        ]
        for reason, tokens in probes:
            outcome = scene.submit(tokens)
            scene.world.schedule()
            report = scene.request(outcome).reuse
            scene.run_until(outcome)
            assert (report.reason, outcome.reuse_reason) == (reason, reason)
            if reason == "no_state":
                assert report.num_tokens_lost_to_missing_state == branch
                assert report.limiting_group in {f"recurrent {i}" for i in range(shape.num_recurrent)}
                assert report.num_matched_tokens["attention 0"] == branch
            if reason == "diverged":
                assert report.num_cached_tokens == report.divergence_position == branch
        assert scene.scheduler.stats().counters.misses_by_reason == {reason: 1 for reason, _ in probes}
    with Scene(shape, enable_prefix_caching=False) as scene:
        assert scene.send(scene.tokens(80)).reuse_reason == "disabled"


# --- B84: wrong counters -----------------------------------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("budget_units", [14, 40, 1000])
def test_counters_agree_with_the_worker_and_with_every_report(shape: Shape, budget_units: int) -> None:
    """Preemptions, evictions, aborts, lost writes, waiting siblings: a query is counted once for each
    request that was admitted, and hits and misses sum up to its prompt."""
    unit = shape.unit

    def acknowledges(chunk: ChunkPlan, export: StateExport) -> bool:
        return export.position % (3 * unit) != 0

    budget = shape.bytes_of(num_units=budget_units, num_states=max(3, budget_units // 5))
    brisk = shape.varied(step_tokens=max(40, shape.step_tokens))
    faults = WorkerFaults(acknowledges=acknowledges)
    with Scene(brisk, cache_bytes=budget, faults=faults, interval=brisk.export_grid) as scene:
        shared = scene.tokens(3 * unit + 1)
        batch = []
        for index in range(14):
            prompt = shared[: scene.rng.randrange(1, len(shared))] + scene.tokens(1 + 5 * index)
            batch.append(scene.submit(prompt, max_tokens=1 + 4 * (index % 4), priority=index % 3))
            if index % 3 == 0:
                scene.world.step()
            if index == 5:
                scene.world.abort(batch[2].request_id)
            if index % 4 == 1:
                scene.world.preempt(scene.rng.choice(batch).request_id)
        scene.world.drain()
        batch += [scene.submit(outcome.spec.prompt) for outcome in batch[:4]]
        scene.world.drain()
        counters = scene.scheduler.stats().counters
        admitted = [outcome for outcome in batch if outcome.num_cached_tokens is not None]
        assert len(admitted) >= 17
        assert counters.num_queried_tokens == sum(outcome.num_prompt_tokens for outcome in admitted)
        assert counters.num_hit_tokens == sum(cached(outcome) for outcome in admitted)
        assert counters.num_missed_tokens == sum(outcome.num_recomputed_tokens for outcome in admitted)
        assert counters.num_hit_tokens + counters.num_missed_tokens == counters.num_queried_tokens
        assert sum(counters.misses_by_reason.values()) == len(admitted)
        rows = scene.world.worker.counters.num_computed_tokens
        assert counters.num_prefill_tokens + counters.num_decode_tokens == rows
        assert counters.num_preemptions == sum(outcome.num_preemptions for outcome in batch)
        stats = scene.scheduler.stats()
        assert sum(stats.states_by_reason.values()) == stats.num_checkpoints
        assert stats.used_bytes == stats.page_bytes + stats.state_bytes + stats.running_state_bytes
        assert stats.running_state_bytes == 0
        assert min(*counters.evictions.values(), *counters.refusals.values(), counters.evicted_bytes, 0) == 0


@some_shapes
def test_looking_again_is_not_another_query(shape: Shape) -> None:
    """A request that waits for memory is matched at every step, and counted when it starts."""
    units = 6
    budget = shape.bytes_of(num_units=units, num_states=2)
    with Scene(shape.varied(max_num_seqs=8), cache_bytes=budget) as scene:
        first = scene.submit(scene.tokens(4 * shape.unit), max_tokens=shape.unit)
        second = scene.submit(scene.tokens(4 * shape.unit + 1))
        while first.finish_reason is None:
            scene.world.step()
            if second.num_cached_tokens is None and first.num_cached_tokens is not None:
                assert scene.counters.num_queried_tokens == first.num_prompt_tokens
        scene.run_until(second)
        assert scene.counters.num_queried_tokens == first.num_prompt_tokens + second.num_prompt_tokens


@some_shapes
def test_a_request_that_never_started_is_no_query(shape: Shape) -> None:
    with Scene(shape) as scene:
        outcome = scene.submit(scene.tokens(100))
        scene.world.abort(outcome.request_id)
        scene.world.drain()
        assert outcome.finish_reason == "abort"
        assert outcome.num_cached_tokens is None
        assert scene.counters.num_queried_tokens == 0


# --- B85: colliding domains --------------------------------------------------------------------


SALTS = (b"", b"x", b"y", b"xy", b"x\x00", b"\x00x", b"adapter", b"\x03\x01\x00\x00\x00\x00\x00\x00\x00x")
ADAPTERS = ("", "x", "y", "xy", "adapter", "x\x00")
DOMAINS = [CacheDomain(salt, adapter) for salt, adapter in product(SALTS, ADAPTERS)]


def test_no_two_domains_have_one_root() -> None:
    roots = {(unit, domain): domain_root(domain, unit) for unit, domain in product((1, 16, 32, 256), DOMAINS)}
    assert len(set(roots.values())) == len(roots)
    assert {len(root) for root in roots.values()} == {32}


def test_equal_prompts_never_hit_across_domains() -> None:
    """Adapter "x" without a salt, salt "x" without an adapter, and all their relatives, on one prompt."""
    with Scene(Shape(step_tokens=200)) as scene:
        prompt = scene.tokens(70)
        for domain in DOMAINS[:24]:
            assert scene.hit(prompt, domain=domain) == 0
            first = scene.send(prompt, domain=domain, max_tokens=3)
            again = scene.send(prompt, domain=domain, max_tokens=3)
            assert (cached(first), cached(again)) == (0, 64)
        answers = {
            adapter: outputs(scene.send(prompt, domain=CacheDomain(b"", adapter), max_tokens=8))
            for adapter in ADAPTERS
        }
        assert len({tuple(answer) for answer in answers.values()}) == len(ADAPTERS)


@shapes
def test_requests_of_two_domains_side_by_side(shape: Shape) -> None:
    """Same tokens, same step: siblings of one domain share, those of another do not wait for them."""
    with Scene(shape) as scene:
        prompt = scene.tokens(2 * shape.unit + 3)
        domains = [CacheDomain(b"a"), CacheDomain(b"b"), CacheDomain(b"", "a")]
        batch = [scene.submit(prompt, domain=domain, max_tokens=2) for domain in domains * 2]
        scene.run_until(*batch)
        assert [cached(outcome) for outcome in batch] == [0] * 3 + [2 * shape.unit] * 3


def unit_keys(tokens: list[int], media: tuple[MediaSpan, ...] = ()) -> tuple[bytes, ...]:
    chain = KeyChain(array("I", tokens), CacheDomain(), 4, media)
    return tuple(chain.extend(2))


def test_no_two_contents_have_one_key() -> None:
    """Token bytes and media fields are never mistaken for one another, nor are spans that move."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    contents = [
        unit_keys(tokens),
        unit_keys([1, 2, 3, 4, 5, 6, 8, 7]),
        unit_keys([256, 2, 3, 4, 5, 6, 7, 8]),
        *(
            unit_keys(tokens, (MediaSpan(start, end, digest),))
            for start, end, digest in product((4, 5), (6, 8), (b"", b"a", b"aa", b"a\x00"))
        ),
        unit_keys(tokens, (MediaSpan(4, 6, b"a"), MediaSpan(6, 8, b"a"))),
        unit_keys(tokens, (MediaSpan(4, 6, b"a"), MediaSpan(6, 8, b"b"))),
        unit_keys(tokens, (MediaSpan(4, 8, b"a"), MediaSpan(6, 8, b"a"))),
    ]
    for one, other in combinations(contents, 2):
        assert one[1] != other[1]


# --- B34: the answer depends on the server's history -------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("is_greedy", [True, False])
def test_the_answer_does_not_depend_on_what_was_served_before(shape: Shape, is_greedy: bool) -> None:
    """Same prompt and seed: on a fresh engine, after five chats with the same header, beside them, after
    evictions, and with other step budgets. States then come from quite different chunk boundaries."""
    answers = set()
    for history in ("nothing", "chats before", "chats beside", "evictions", "other steps"):
        steps = shape.step_tokens + 11 if history == "other steps" else shape.step_tokens
        with Scene(shape.varied(step_tokens=steps)) as scene:
            prompt = scene.tokens(5 * shape.unit + 7)
            options = {} if is_greedy else {"sampling": seeded(scene.rng)}
            if history != "nothing":
                cuts = (3, shape.unit, 2 * shape.unit - 1, 3 * shape.unit + 1, 5 * shape.unit)
                chats = [scene.submit(prompt[:cut] + scene.tokens(9), max_tokens=11) for cut in cuts]
                if history != "chats beside":
                    scene.run_until(*chats)
            if history == "evictions":
                scene.world.evict(5)
            outcome = scene.send(prompt, max_tokens=2 * shape.unit, **options)
            answers.add(tuple(outputs(outcome)))
    assert len(answers) == 1
