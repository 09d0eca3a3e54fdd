"""A request nobody comes back to never costs a live conversation the state it goes on from."""

from __future__ import annotations

import itertools

import pytest
from tests.core.harness import Harness, numbered

from milepost.core import reasons
from milepost.core.queues import BACKGROUND_PRIORITY
from milepost.core.retention import LIVE, LIVE_FLOOR, ORDINARY, SegmentRecord, eviction_rank
from milepost.core.reuse import DEFAULT_LIVE_AGE, MIN_LIVE_AGE, MIN_LIVE_USES, ReuseModel
from milepost.sim.geometries import SHAPES

UNIT = 32


class Talk:
    """A conversation that grows by 48 tokens a turn."""

    def __init__(self, harness: Harness, num_tokens: int, seed: int, name: str | None) -> None:
        self.harness, self.seed, self.name = harness, seed, name
        self.tokens = numbered(num_tokens, seed)
        self.num_turns = 0
        self.last = 0

    def turn(self) -> int:
        """Serve the next one; returns how many tokens of what was known it computes again."""
        known = len(self.tokens) - (40 if self.num_turns else 0)
        self.last = self.harness.serve(self.tokens, 8, conversation=self.name)
        self.num_turns += 1
        self.tokens = self.harness.tokens_of(self.last) + numbered(40, 1000 * self.seed + self.num_turns)
        return known - self.harness.cached(self.last)


def harness_for(num_tokens: int, side: int, room: float, interval: int | None = None) -> Harness:
    geometry = SHAPES["kimi-linear-48b"].geometry(UNIT)
    need = geometry.request_bytes(num_tokens) + room * geometry.request_bytes(side + 8)
    return Harness(
        geometry=geometry, num_records=int(need) // 4096 + 1, checkpoint_interval=interval, budget=512
    )


def harness_of(num_states: int, num_tokens: int) -> Harness:
    """Room for so many states, running ones included, and for the pages of so many tokens."""
    geometry = SHAPES["kimi-linear-48b"].geometry(UNIT)
    need = num_states * geometry.checkpoint_bytes + num_tokens // UNIT * geometry.unit_bytes
    return Harness(geometry=geometry, num_records=need // 4096 + 1, budget=512)


@pytest.mark.parametrize("name", ["talk", None], ids=["named", "unnamed"])
@pytest.mark.parametrize(
    ("first", "side", "room", "interval"),
    [
        (300, 100, 1.5, 0), (300, 1000, 1.5, None), (300, 3000, 1.0, 0), (300, 3000, 2.5, None),
        (1000, 8000, 1.5, 0), (40, 3000, 2.0, None),
    ],
)  # fmt: skip
def test_side_requests_of_any_length(
    first: int, side: int, room: float, interval: int | None, name: str | None
) -> None:
    """Three after every turn, with room for the conversation and `room` of them. From the second turn on
    the conversation computes what is new and what lies between two boundaries."""
    harness = harness_for(first + 8 * 48 + 2 * UNIT, side, room, interval)
    talk = Talk(harness, first, 1, name)
    seeds = itertools.count(5000)
    for _ in range(2):
        talk.turn()
        harness.now += 15
    for _ in range(6):
        assert talk.turn() < 2 * UNIT, harness.reuse[talk.last]
        for _ in range(3):
            harness.now += 5
            harness.serve(numbered(side, next(seeds)), 8)


def test_several_conversations_at_once() -> None:
    harness = harness_for(5 * (300 + 6 * 48) + 10 * UNIT, 2000, 5.0, 0)
    talks = [Talk(harness, 300, seed, None) for seed in range(5)]
    seeds = itertools.count(5000)
    for number in range(6):
        for talk in talks:
            lost = talk.turn()
            assert number < 2 or lost < 2 * UNIT, (number, talk.seed)
            harness.now += 1
            harness.serve(numbered(2000, next(seeds)), 8)


def test_an_abandoned_conversation_makes_room() -> None:
    harness = harness_for(600, 3000, 1.0, 0)
    talk = Talk(harness, 300, 1, None)
    for _ in range(3):
        talk.turn()
        harness.now += 10
    harness.now += DEFAULT_LIVE_AGE
    side = harness.serve(numbered(3000, 5), 8)
    harness.serve(numbered(3000, 6), 8)
    assert not harness.checkpoints(talk.tokens) and not harness.checkpoints(harness.tokens_of(side))


def test_one_that_starts_beside_live_ones_becomes_one_of_them() -> None:
    """Memory is full of live conversations, so its first checkpoint is refused; where it goes on is seen all
    the same, and from then on it counts as much as they do."""
    harness = harness_of(5, 4 * 1500)
    talks = [Talk(harness, 300, seed, None) for seed in range(4)]
    for _ in range(3):
        for talk in talks:
            talk.turn()
            harness.now += 1
    fresh = Talk(harness, 900, 77, None)
    fresh.turn()
    assert not harness.checkpoints(fresh.tokens), "it pushes out nothing"
    assert all(harness.checkpoints(talk.tokens) for talk in talks)
    harness.now += 1
    assert fresh.turn() > 800
    assert harness.reuse[fresh.last].eviction == (reasons.REFUSED_NO_MEMORY, reasons.TAIL)
    harness.now += 1
    assert fresh.turn() < 2 * UNIT, "it went on, so it is one of those"
    assert any(harness.checkpoints(talk.tokens) for talk in talks)


def test_tiers() -> None:
    record = SegmentRecord(num_saved_tokens=1, freed_bytes=1 << 30, reuse_index=1e-9, is_live=True)
    dear = SegmentRecord(num_saved_tokens=1 << 20, freed_bytes=1, reuse_index=1.0)
    assert eviction_rank(dear) < LIVE_FLOOR < eviction_rank(record)
    assert (eviction_rank(dear)[0], eviction_rank(record)[0]) == (ORDINARY, LIVE)


def test_how_long_conversations_live_is_learned() -> None:
    def learned(gaps: list[float]) -> float:
        model, now = ReuseModel(), 0.0
        for number, gap in enumerate(gaps * 16):
            key = number.to_bytes(4, "little")
            model.created(key, (reasons.TAIL, False, 1, 9), now)
            now += gap
            model.used(key, now)
            model.index((reasons.TAIL, False, 1, 9), 0.0, now)
        return model.live_age

    assert ReuseModel().live_age == DEFAULT_LIVE_AGE
    assert learned([1.0] * (MIN_LIVE_USES // 16 - 1)) == DEFAULT_LIVE_AGE, "too few to say"
    assert learned([2.0] * 50) == MIN_LIVE_AGE
    assert 1000 <= learned([10.0] * 40 + [1000.0] * 10) <= 1500
    assert learned([10.0] * 48 + [100000.0] * 2) == MIN_LIVE_AGE, "one in 25 does not count"


def test_an_audit_pushes_out_no_live_conversation() -> None:
    """What it may push out is not enough for it: it does not run, and the live conversations go on."""
    harness = harness_of(6, 4 * 600 + 900)
    talks = [Talk(harness, 300, seed, None) for seed in range(4)]
    for _ in range(3):
        for talk in talks:
            talk.turn()
    before = [harness.checkpoints(talk.tokens)[-1] for talk in talks]
    audit = harness.add(
        numbered(30000, 99), 1, priority=BACKGROUND_PRIORITY, uses_cache=False, is_counted=False
    )
    for _ in range(10):
        harness.step()
    assert audit not in harness.ended
    assert [harness.checkpoints(talk.tokens)[-1] for talk in talks] == before
    harness.scheduler.abort(audit)
    harness.step()
    for talk in talks:
        assert talk.turn() < 2 * UNIT


# ------------------------------------------------------------------ what else says that somebody comes back


@pytest.mark.parametrize("header", [3, 40])
@pytest.mark.parametrize("shape", ["kimi-k3", "kimi-linear-48b"])
def test_history_that_lies_where_the_prompt_ends(shape: str, header: int) -> None:
    """Answers leave their thinking out of the history: the next turn goes on in front of the header of
    the answer, which often is the last boundary of the prompt, and behind which the answer's own lie."""
    geometry = SHAPES[shape].geometry(UNIT)
    need = geometry.request_bytes(1000) + 3 * geometry.request_bytes(1000)
    harness = Harness(geometry=geometry, num_records=need // 4096 + 1)
    history = numbered(300, 1)
    seeds = itertools.count(5000)
    for turn in range(6):
        prompt = history + numbered(header, 2)
        request_id = harness.serve(prompt, 60, wanted=[(len(history), reasons.HISTORY)])
        if turn > 1:
            assert harness.cached(request_id) >= len(history) - 70 - 2 * UNIT, turn
        history = history + numbered(70, 100 + turn)
        for _ in range(4):
            harness.now += 3
            harness.serve(numbered(1000, next(seeds)), 8)


def test_a_document_that_many_ask_about_beside_live_conversations() -> None:
    """Memory is full of what conversations go on from. A second question shows that the document is shared:
    from then on it is worth as much as they are, and it is read once."""
    harness = harness_of(10, 8 * 700 + 4 * 4100)
    talks = [Talk(harness, 300, seed, None) for seed in range(8)]
    document = numbered(4000, 900)
    reused = []
    for number in range(24):
        talks[number % 8].turn()
        harness.now += 1
        question = harness.serve(document + numbered(50, 2000 + number), 8)
        reused.append(harness.cached(question))
        harness.now += 1
    assert sum(count >= 3900 for count in reused) >= 20, reused


def test_a_shared_beginning_is_live_before_it_was_used() -> None:
    harness = Harness()
    shared = numbered(40)
    ids = [harness.add(shared + numbered(20, seed)) for seed in (1, 2)]
    harness.schedule()
    lease = harness.requests[ids[0]].held_lease
    evictor = harness.cache.evictor
    assert lease.is_one_off
    worth = {r: evictor.export_worth(lease, {}, 40, r, 0.0)[0] for r in (reasons.JUNCTION, reasons.MESSAGE)}
    assert worth == {reasons.JUNCTION: LIVE, reasons.MESSAGE: ORDINARY}
    harness.execute()
    harness.run()
    node = harness.cache.node_at(harness.requests[ids[0]].known_chain, 40)
    assert node is not None and node.reason == reasons.JUNCTION
    node.num_hits, node.last_used = 0, node.made_at
    assert evictor.rank(node, node.made_at)[0] == LIVE
    assert evictor.rank(node, node.made_at + DEFAULT_LIVE_AGE + 1)[0] == ORDINARY


@pytest.mark.parametrize("side", [1000, 8000])
def test_several_answers_to_one_prompt_are_no_conversation(side: int) -> None:
    harness = harness_of(6, 2000 + side)
    talk = Talk(harness, 300, 1, None)
    for _ in range(4):
        talk.turn()
        harness.now += 5
    for seed in range(4):
        for _ in range(3):
            harness.serve(numbered(side, 5000 + seed), 8)
    assert talk.turn() < 2 * UNIT


def test_turns_that_go_on_in_front_of_an_answer_the_client_changed() -> None:
    """It cut or rewrote the answer, so every turn goes on at the end of the last prompt, behind which that
    answer's own checkpoints lie. Those are of no use to anybody, this one is."""
    harness = harness_of(8, 3000)
    prompt = numbered(300, 1)
    seeds = itertools.count(5000)
    known = 0
    for turn in range(7):
        request_id = harness.serve(prompt, 100)
        if turn > 2:
            assert harness.cached(request_id) >= known - 2 * UNIT, turn
        known = len(prompt)
        prompt = prompt + numbered(150, 100 + turn)
        for _ in range(4 if turn > 1 else 0):
            harness.now += 3
            harness.serve(numbered(1000, next(seeds)), 8)


def test_the_same_prompt_again_is_no_further_turn() -> None:
    harness = Harness()
    prompt = numbered(41)
    for _ in range(3):
        request_id = harness.serve(prompt)
    assert harness.requests[request_id].num_turns_before == 0
    longer = harness.serve([*prompt, 1, 2])
    assert harness.requests[longer].num_turns_before == 1, "within one unit, but longer"
