"""Recall cases for milepost-tiny: a fact, a known number of tokens of filler, a question, the right answer.

The model was trained to answer such questions, so a wrongly restored recurrent state is a wrong answer.
Needs neither torch nor a running engine: give it the tokenizer's two functions and read token ids or chat
messages back.

    cases = RecallCases(encode, decode, Path("tests/data/the_tempest.txt").read_text())
    case = cases.make(seed=1, distance_tokens=500)
    case.prompt_ids     # prefix_ids + question_ids; greedy decoding must now give case.answer_ids
    case.messages       # about the same conversation for the chat API
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = (
    "Ada Agnes Alma Anton Anya Astrid Beatrix Bella Boris Bruno Carmen Celia Clara Conrad Cyrus Daphne "
    "Diego Dora Edgar Elias Elsa Emil Felix Fiona Flora Freya Greta Gustav Hanna Heidi Helga Hugo Igor "
    "Ines Ivan Jonas Julia Kira Kurt Leon Linda Lucia Marco Martin Maya Milan Mira Nadia Nora Olga "
    "Oscar Otto Paula Pavel Petra Rafael Rita Rosa Ruth Samuel Simon Sonia Stefan Sven Tessa Tomas Vera "
    "Viktor Walter Wanda Yara Zelda"
).split()
COLOURS = "red blue green yellow black white brown grey pink gold silver purple".split()
CITIES = (
    "Oslo Paris Rome Cairo Lima Delhi Tokyo Berlin Madrid Athens Dublin Vienna Prague Lisbon Warsaw Geneva"
).split()
OBJECTS = (
    "key lamp book coin ring map cup knife letter clock mirror basket candle drum flute bell rope box".split()
)
KINDS = ("code", "colour", "home", "owner")
KIND_SHARES = (0.5, 0.2, 0.15, 0.15)

SYSTEM_TEXT = "You are milepost-tiny, a small test model."
OPENING = "Remember this text.\n"
ACKNOWLEDGEMENT = "OK."
SYSTEM_TURN = f"<|im_system|>system<|im_middle|>{SYSTEM_TEXT}<|im_end|>"
USER_START = "<|im_user|>user<|im_middle|>"
ASSISTANT_START = "<|im_assistant|>assistant<|im_middle|>"
TURN_END = "<|im_end|>"

Encode = Callable[[str], Sequence[int]]  # control tokens written in the text become control ids
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Fact:
    kind: str
    key: str
    value: str  # with its leading blank

    @property
    def stem(self) -> str:
        return f"The {self.kind} of {self.key} is"

    @property
    def question(self) -> str:
        return f"{'Who' if self.kind == 'owner' else 'What'} is the {self.kind} of {self.key}?"

    @property
    def answer(self) -> str:
        return f"{self.stem}{self.value}."


@dataclass(frozen=True)
class RecallCase:
    """One case. Positions count tokens of ``prefix_ids``."""

    prefix_ids: tuple[int, ...]  # up to and including the assistant's "OK."
    question_ids: tuple[int, ...]  # the question turn and the start of the answer
    stem_ids: tuple[int, ...]  # "The code of Mira is"
    value_ids: tuple[int, ...]  # " 4821"
    fact: Fact
    fact_start: int  # first token of the statement
    fact_end: int  # one past the last token of its value
    messages: tuple[dict[str, str], ...]  # for the chat API; ends with the question

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prefix_ids + self.question_ids

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.stem_ids + self.value_ids

    @property
    def distance_tokens(self) -> int:
        """Tokens between the fact and the question."""
        return len(self.prefix_ids) - self.fact_end


class RecallCases:
    """Builds cases from a token encoder and a text used as filler. The same arguments give the same case."""

    def __init__(self, encode: Encode, decode: Decode, filler_text: str) -> None:
        self._encode = encode
        self._decode = decode
        self._lines = [tuple(encode(line + "\n")) for line in filler_text.splitlines()]
        if not any(self._lines):
            raise ValueError("filler_text has no lines: give a text of at least one line")
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        if text not in self._cache:
            self._cache[text] = tuple(self._encode(text))
        return self._cache[text]

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Exactly ``num_tokens`` ids of filler that begin at the start of a line."""
        index = rng.randrange(len(self._lines))
        out: list[int] = []
        while len(out) < num_tokens:
            out += self._lines[index % len(self._lines)]
            index += 1
        return out[:num_tokens]

    def make(
        self,
        seed: int,
        distance_tokens: int,
        *,
        num_facts: int = 4,
        kind: str | None = None,
        match_unit: int | None = None,
    ) -> RecallCase:
        """One case whose asked fact ends exactly ``distance_tokens`` tokens before the question.

        ``num_facts`` facts in all; the others stand before or after the asked one. With ``match_unit`` U the
        asked statement lies inside one unit [n U, (n + 1) U), so a state at n U knows nothing of it.
        Raises ValueError when the distance cannot hold the facts, or the statement does not fit the unit.
        """
        rng = random.Random(f"{seed}/{distance_tokens}/{num_facts}/{kind}/{match_unit}")
        asked, *others = self._draw_facts(rng, num_facts, kind)
        num_before = rng.randrange(len(others) + 1)
        before, after = others[:num_before], others[num_before:]
        closing = self.encode(f"{TURN_END}{ASSISTANT_START}") + self.encode(f"{ACKNOWLEDGEMENT}{TURN_END}")
        full_stop = self.encode(".\n")
        fixed = len(closing) + len(full_stop) + sum(len(self._statement(fact)) for fact in after)
        while after and fixed > distance_tokens:  # too near for them: say them earlier
            moved = after.pop()
            before.append(moved)
            fixed -= len(self._statement(moved))
        if fixed > distance_tokens:
            raise ValueError(f"distance_tokens is {distance_tokens}; it must be at least {fixed}")

        ids = list(self.encode("[BOS]") + self.encode(SYSTEM_TURN) + self.encode(USER_START + OPENING))
        body_start = len(ids)
        ids += self.filler(rng, 20)
        for fact in before:
            ids += self._statement(fact) + tuple(self.filler(rng, rng.randrange(4, 16)))
        stem, value = self.encode("\n" + asked.stem), self.encode(asked.value)
        if match_unit is not None:
            ids += self._align(rng, len(ids), len(stem) + len(value), match_unit)
        fact_start = len(ids)
        ids += stem + value
        fact_end = len(ids)
        ids += full_stop
        room = distance_tokens - fixed
        cuts = [*sorted(rng.randrange(room + 1) for _ in after), room]
        previous = 0
        for index, cut in enumerate(cuts):
            ids += self.filler(rng, cut - previous)
            previous = cut
            if index < len(after):
                ids += self._statement(after[index])
        body = ids[body_start:]
        ids += closing
        return RecallCase(
            prefix_ids=tuple(ids),
            question_ids=self.encode(f"{USER_START}{asked.question}{TURN_END}{ASSISTANT_START}"),
            stem_ids=self.encode(asked.stem),
            value_ids=value,
            fact=asked,
            fact_start=fact_start,
            fact_end=fact_end,
            messages=(
                {"role": "system", "content": SYSTEM_TEXT},
                {"role": "user", "content": OPENING + self._decode(body)},
                {"role": "assistant", "content": ACKNOWLEDGEMENT},
                {"role": "user", "content": asked.question},
            ),
        )

    def make_for_answer_restore(
        self, seed: int, min_distance_tokens: int, *, match_unit: int, kind: str
    ) -> RecallCase:
        """A case whose last token before the value is the first token of a unit.

        A restore at that boundary, ``len(prompt_ids) + len(stem_ids) - 1``, happens in mid-answer: the value
        is looked up by the tokens in the restored convolution tail.
        """
        distance = min_distance_tokens
        while True:  # every distance is another case with other lengths, so one fits soon
            case = self.make(seed, distance, kind=kind)
            if (len(case.prompt_ids) + len(case.stem_ids) - 1) % match_unit == 0:
                return case
            distance += 1

    # ------------------------------------------------------------------------------------------- parts

    @staticmethod
    def _draw_facts(rng: random.Random, num_facts: int, kind: str | None) -> list[Fact]:
        """Facts with different keys; the first one is the asked one and is of ``kind`` when given."""
        facts: dict[tuple[str, str], Fact] = {}
        while len(facts) < num_facts:
            chosen = kind if kind is not None and not facts else rng.choices(KINDS, KIND_SHARES)[0]
            key = f"the {rng.choice(OBJECTS)}" if chosen == "owner" else rng.choice(NAMES)
            if chosen == "code":
                value = "".join(rng.choice("0123456789") for _ in range(4))
            else:
                value = rng.choice({"colour": COLOURS, "home": CITIES, "owner": NAMES}[chosen])
            facts.setdefault((chosen, key), Fact(chosen, key, " " + value))
        return list(facts.values())

    def _statement(self, fact: Fact) -> tuple[int, ...]:
        return self.encode("\n" + fact.stem) + self.encode(fact.value) + self.encode(".\n")

    def _align(self, rng: random.Random, position: int, num_tokens: int, match_unit: int) -> list[int]:
        """Filler after which ``num_tokens`` tokens fit into one unit, at least one token from its start."""
        if num_tokens + 2 > match_unit:
            raise ValueError(f"a statement of {num_tokens} tokens does not fit a match_unit of {match_unit}")
        offset = rng.randrange(1, match_unit - num_tokens)
        return self.filler(rng, (offset - position) % match_unit)
