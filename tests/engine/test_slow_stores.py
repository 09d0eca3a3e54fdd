"""Stores that fail, hang or dribble: how long a request is held for them, and what is said of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from tests.engine.engines import collect
from tests.engine.replicas import FINGERPRINT, UNIT, Kept, Replica, memory_store, replica, words
from tests.engine.test_named import Caller

from milepost.core.hashing import CacheDomain, KeyChain
from milepost.engine import load_outcomes
from milepost.engine import tiering_limits as limits
from milepost.engine.load_outcomes import LOOKUP_OUTCOMES, MEANINGS, outcome_of_silence
from milepost.engine.manifests import StoresUnavailable
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import StoreError
from milepost.models.loading import LoadedModel
from milepost.stores import outcomes as oc
from milepost.stores.memory import MemoryStore
from milepost.stores.port import Loaded, LookedUp, Unanswered
from milepost.stores.segment_format import Identity


class Scripted(MemoryStore):
    """Lookups and loads do first what they are told.

    Attributes:
        before: (operation, keys, seconds of the call) -> answers for the call, or None to go on.
    """

    def __init__(self) -> None:
        super().__init__(Identity(FINGERPRINT), budget_bytes=1 << 30)
        self.before: Callable[[str, Sequence[bytes], float], list[Unanswered] | None] = _nothing

    def lookup(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[LookedUp]:
        said = self.before(oc.LOOKUP, keys, deadline_seconds)
        return super().lookup(keys, deadline_seconds=deadline_seconds) if said is None else [*said]

    def load(self, keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        said = self.before(oc.LOAD, keys, deadline_seconds)
        return super().load(keys, deadline_seconds=deadline_seconds) if said is None else [*said]

    def close(self) -> None:
        """It outlives the engine that closes it."""


def _nothing(operation: str, keys: Sequence[bytes], seconds: float) -> None:
    return None


def failing(operation: str, how: str) -> Callable[[str, Sequence[bytes], float], list[Unanswered] | None]:
    def before(called: str, keys: Sequence[bytes], seconds: float) -> list[Unanswered] | None:
        if called != operation:
            return None
        if how == "raises":
            raise StoreError("the cable is out")
        if how == "hangs":
            time.sleep(seconds + 0.3)
        if how in (oc.TIMEOUT, oc.ERROR):
            return [Unanswered(how)] * len(keys)
        return None

    return before


def forgotten(here: Replica) -> None:
    """The cache is empty; the stores, and what is known of them, are as they were."""
    here.settle()
    assert here.tiers is not None and here.tiers.flush(10)
    assert here.engine.reset_prefix_cache().result(10)


# ------------------------------------------------------------------ what is said


@pytest.mark.parametrize("operation", [oc.LOOKUP, oc.LOAD])
@pytest.mark.parametrize(
    ("how", "outcome"),
    [("raises", "failed"), ("hangs", "too_late"), (oc.TIMEOUT, "too_late"), (oc.ERROR, "failed")],
)
def test_a_store_that_does_not_answer_is_not_said_to_lack_it(
    model: LoadedModel, tokenizer: Tokenizer, operation: str, how: str, outcome: str
) -> None:
    store, prompt = Scripted(), words(1, 300)
    with replica(model, tokenizer, store, max_load_seconds=0.8) as here:
        cold = here.ask(prompt)
        forgotten(here)
        tiering = here.engine.tiering
        assert tiering is not None
        known = [bytes.fromhex(name) for name in store._objects]
        assert known and all(key in tiering.saves.known for key in known)
        store.before = failing(operation, how)
        answer = here.ask(prompt)
        assert answer.same_as(cold)
        assert answer.load.outcome == outcome and answer.reuse.num_cached_tokens == 0
        assert answer.load.num_tokens == 0
        assert tiering.outcomes[outcome] == 1
        # Nothing that was stored is taken for lost.
        assert all(key in tiering.saves.known for key in known)
        store.before = _nothing
        time.sleep(0.4)
        forgotten(here)
        assert here.ask(prompt).load.outcome == "loaded"


def test_a_store_that_is_left_alone_is_said_to_have_failed(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store, prompt = Scripted(), words(1, 300)
    with replica(model, tokenizer, store) as here:
        here.ask(prompt)
        forgotten(here)
        assert here.tiers is not None
        for _ in range(3):
            here.tiers._stores[0].breaker.failed()
        assert here.tiers.counters()[0].breaker_is_open
        assert here.ask(prompt).load.outcome == "failed"


def test_one_store_that_fails_does_not_hide_what_another_has_or_lacks(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    fast, slow, prompt = Scripted(), memory_store(), words(1, 300)
    slow.name = "slow"
    with replica(model, tokenizer, fast, Kept(slow)) as here:  # type: ignore[arg-type]
        here.ask(prompt)
        forgotten(here)
        fast.before = failing(oc.LOOKUP, "raises")
        assert here.ask(prompt).load.outcome == "loaded"
        assert here.ask(words(2, 300)).load.outcome == "failed"
        fast.before = _nothing
        assert here.ask(words(3, 300)).load.outcome == "not_found"


def test_what_is_gone_is_forgotten(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """The other side: a store that says so is believed, and the prompt is saved again."""
    store, prompt = Scripted(), words(1, 300)
    with replica(model, tokenizer, store) as here:
        here.ask(prompt)
        forgotten(here)
        store.remove([bytes.fromhex(name) for name in list(store._objects)], deadline_seconds=1)
        assert here.ask(prompt).load.outcome == "not_found"
        forgotten(here)
        assert here.ask(prompt).load.outcome == "loaded"


def test_a_prompt_that_is_being_forgotten_is_not_asked_for(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store, prompt = Scripted(), words(1, 300)
    asked: list[str] = []
    with replica(model, tokenizer, store) as here:
        here.ask(prompt)
        forgotten(here)
        tiering = here.engine.tiering
        assert tiering is not None
        store.before = lambda operation, keys, seconds: asked.append(operation)
        chain = KeyChain(array("I", prompt), CacheDomain(), UNIT)
        chain.extend(len(prompt) // UNIT)
        here.engine.look(lambda scheduler, now: tiering.saves.shun(chain.keys)).result(10)
        answer = here.ask(prompt)
        assert answer.load.outcome == "not_asked" and not asked
        assert "no store was asked" in answer.load.as_dict()["meaning"]


def test_every_outcome_has_a_meaning() -> None:
    names = {
        value for name, value in vars(load_outcomes).items() if name.isupper() and isinstance(value, str)
    }
    assert names == set(MEANINGS) == {*LOOKUP_OUTCOMES, "cached"}
    assert len(set(MEANINGS.values())) == len(MEANINGS) and all(len(each) > 30 for each in MEANINGS.values())
    late, broken, alone = (Unanswered(each) for each in (oc.TIMEOUT, oc.ERROR, oc.BREAKER_OPEN))
    assert outcome_of_silence([late, late]) == "too_late"
    assert outcome_of_silence([late, broken]) == outcome_of_silence([alone]) == "failed"


# ------------------------------------------------------------------ how long


@pytest.mark.parametrize("operation", [oc.LOOKUP, oc.LOAD])
def test_a_request_is_not_held_beyond_the_limit(
    model: LoadedModel, tokenizer: Tokenizer, operation: str
) -> None:
    """A store that hangs, whatever deadline it is given, with the policy that loads always."""
    store, prompt = Scripted(), words(1, 700)
    with replica(model, tokenizer, store) as here:
        cold = here.ask(prompt)
        here.settle()
    store.before = failing(operation, "hangs")
    with replica(model, tokenizer, store, max_load_seconds=0.5) as second:
        begin = time.monotonic()
        answer = second.ask(prompt)
        assert time.monotonic() - begin < 5
        assert answer.same_as(cold) and answer.load.outcome == "too_late"
        assert 0.4 < answer.load.seconds < 1.5


def test_the_lookup_and_the_load_have_one_limit_together(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store, prompt = Scripted(), words(1, 700)
    with replica(model, tokenizer, store) as here:
        here.ask(prompt)
        here.settle()
    granted: list[tuple[str, float]] = []

    def slow_lookup(operation: str, keys: Sequence[bytes], seconds: float) -> None:
        granted.append((operation, seconds))
        if operation == oc.LOOKUP:
            time.sleep(0.6)

    store.before = slow_lookup
    with replica(model, tokenizer, store, max_load_seconds=2.0) as second:
        assert second.ask(prompt).load.outcome == "loaded"
    (first, of_lookup), (then, of_load) = granted[:2]
    assert (first, then) == (oc.LOOKUP, oc.LOAD)
    assert of_lookup <= 2.0 and of_load <= limits.LOAD_SHARE * (2.0 - 0.6)


def test_what_came_before_the_limit_is_used(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """A load that goes on for ever, segment after segment, as from a peer that dribbles."""
    store, prompt = Scripted(), words(1, 2100)
    with replica(model, tokenizer, store) as here:
        cold = here.ask(prompt)
        here.settle()

    def dribble(keys: Sequence[bytes], *, deadline_seconds: float) -> list[Loaded]:
        (first,) = MemoryStore.load(store, keys[:1], deadline_seconds=deadline_seconds)
        time.sleep(deadline_seconds)
        return [first, *[Unanswered(oc.TIMEOUT)] * (len(keys) - 1)]

    store.load = dribble  # type: ignore[method-assign, assignment]
    with replica(model, tokenizer, store, max_load_seconds=0.6) as second:
        begin = time.monotonic()
        answer = second.ask(prompt)
        assert time.monotonic() - begin < 10
        assert answer.same_as(cold) and answer.load.outcome == "loaded"
        assert 0 < answer.load.num_tokens < 2048 and answer.load.seconds < 1.5
        tiering = second.engine.tiering
        assert tiering is not None and tiering.num_loaded_tokens == answer.load.num_tokens


def test_what_the_limit_is_unless_it_is_given(model: LoadedModel, tokenizer: Tokenizer) -> None:
    def patience(num_tokens: int, **policy: object) -> float:
        with replica(model, tokenizer, memory_store(), **policy) as here:  # type: ignore[arg-type]
            tiering = here.engine.tiering
            assert tiering is not None
            tiering.seconds_per_token = 0.001
            return tiering._patience_seconds(num_tokens)

    assert (
        patience(100, always_loads=True) == patience(10**6, always_loads=True) == limits.ALWAYS_LOAD_SECONDS
    )
    assert patience(10**6, always_loads=True, max_load_seconds=3.0) == 3.0
    assert patience(100, always_loads=False) == pytest.approx(0.1)
    assert patience(10**6, always_loads=False) == pytest.approx(1000)
    assert patience(10**6, always_loads=False, max_load_seconds=3.0) == 3.0


def test_computing_speed_is_learned_from_prompts_only(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """Else a step of many decoding requests would let a request wait as if prompts were as slow."""
    with replica(model, tokenizer, memory_store(), max_num_seqs=24) as here:
        tiering = here.engine.tiering
        assert tiering is not None
        noted: list[tuple[int, float]] = []
        note_step = tiering.note_step

        def note(plan: object, seconds: float) -> None:
            before = tiering.seconds_per_token
            note_step(plan, seconds)  # type: ignore[arg-type]
            rows = [chunk.last_row_end - chunk.start for chunk in plan.chunks]  # type: ignore[attr-defined]
            noted.append((max(rows, default=0), tiering.seconds_per_token - before))

        tiering.note_step = note  # type: ignore[method-assign]
        for events in [here.start(words(seed, 40), 12) for seed in range(20)]:
            collect(events, timeout=120)
    assert any(rows >= limits.MIN_MEASURED_TOKENS and change for rows, change in noted)
    assert not any(change for rows, change in noted if rows < limits.MIN_MEASURED_TOKENS)
    assert any(rows < limits.MIN_MEASURED_TOKENS for rows, _ in noted)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("operation", [oc.LOOKUP, oc.LOAD])
@pytest.mark.parametrize("how", ["raises", oc.TIMEOUT])
def test_names_are_not_forgotten_because_a_store_fails_once(
    model: LoadedModel, tokenizer: Tokenizer, operation: str, how: str
) -> None:
    """One failure opens no breaker: nothing but the answer itself says that there was none."""
    store = Scripted()
    with replica(model, tokenizer, store) as here:
        caller = Caller(model, here)
        for name in ("one", "two"):
            here.ask(words(len(name) + len(name[0]), 100))
            caller.save(name, words(len(name) + len(name[0]), 100))
        fails = failing(operation, how)
        left = 1

        def once(called: str, keys: Sequence[bytes], seconds: float) -> list[Unanswered] | None:
            nonlocal left
            if called != operation or not left:
                return None
            left -= 1
            return fails(called, keys, seconds)

        store.before = once
        with pytest.raises(StoresUnavailable):
            caller.load("one")
        assert caller.load("one").cached_tokens == 96
        left = 1
        with pytest.raises(StoresUnavailable):
            caller.names()
        assert caller.names() == ["one", "two"]
        # Whatever fails while another name is saved, none goes off the list.
        here.ask(words(9, 100))
        for number in range(5):
            store.before, left = _nothing, 0
            skip = number

            def later(called: str, keys: Sequence[bytes], seconds: float) -> list[Unanswered] | None:
                nonlocal skip
                if called != operation:
                    return None
                skip -= 1
                return fails(called, keys, seconds) if skip == -1 else None

            store.before = later
            with suppress(StoresUnavailable):
                caller.save("three", words(9, 100))
            store.before = _nothing
            assert {"one", "two"} <= set(caller.names()), number
