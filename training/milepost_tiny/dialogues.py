"""Words, facts and synthetic dialogues: everything milepost-tiny is taught besides plays.

A dialogue is a list of (text, loss weight) segments; control tokens are written out in the text.
"""

from __future__ import annotations

import random
import re

BOS, EOS, PAD = "[BOS]", "[EOS]", "[PAD]"
IM_END, IM_USER, IM_ASSISTANT = "<|im_end|>", "<|im_user|>", "<|im_assistant|>"
IM_SYSTEM, IM_MIDDLE = "<|im_system|>", "<|im_middle|>"
SPECIAL_TOKENS = (BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE, PAD)

NAMES = (
    "Ada Agnes Alma Amos Anton Anya Arlo Astrid August Basil Beatrix Bella Boris Bruno Carmen Cecil "
    "Celia Clara Conrad Cora Cyrus Dagmar Daphne Diego Dmitri Dora Edda Edgar Elias Elsa Emil Erik "
    "Esther Felix Fiona Flora Freya Gideon Greta Gustav Hanna Harold Heidi Helga Hugo Ida Igor Ines "
    "Ingrid Iris Isak Ivan Jonas Judith Julia Kira Klaus Konrad Kurt Leon Linda Lucia Lukas Magda Marco "
    "Martin Maya Milan Mira Nadia Nils Nora Olga Olive Oscar Otto Paula Pavel Petra Rafael Rita Roman "
    "Rosa Ruth Samuel Signe Simon Sonia Stefan Sven Tessa Thora Tilda Tomas Ulrich Vera Viktor Viola "
    "Walter Wanda Wilma Yara Yusuf Zelda"
).split()
COLOURS = "red blue green yellow black white brown grey pink gold silver purple".split()
CITIES = (
    "Oslo Paris Rome Cairo Lima Delhi Tokyo Berlin Madrid Athens Dublin Vienna Prague Lisbon Warsaw Geneva"
).split()
OBJECTS = (
    "key lamp book coin ring map cup knife letter clock mirror basket candle drum flute bell rope box".split()
)
PLACES = (
    "kitchen garden cellar attic tower stable library chapel hall barn market harbour mill forest".split()
)

ANSWER_WEIGHT = 4.0  # tokens of a value that is asked back
VALUE_WEIGHT = 0.02  # tokens of a value that is stated for the first time: unguessable, but not free
QUESTION_WEIGHT = 0.5

SYSTEM_TEXT = "You are milepost-tiny, a small test model."
GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi.", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Thank you.", "You are welcome."),
    ("Who are you?", "I am milepost-tiny, a small test model."),
    ("What can you do?", "I can repeat words, count, and recall facts from this chat."),
    ("Goodbye.", "Goodbye!"),
    ("How are you?", "I am well, thank you."),
)


Fact = tuple[str, str]  # (kind, key), for example ("code", "Mira") or ("owner", "the lamp")
Segment = tuple[str, float]


def draw_fact(rng: random.Random) -> Fact:
    kind = rng.choices(("code", "colour", "home", "owner"), (0.5, 0.2, 0.15, 0.15))[0]
    return kind, f"the {rng.choice(OBJECTS)}" if kind == "owner" else rng.choice(NAMES)


def draw_value(rng: random.Random, fact: Fact) -> str:
    """The value with its leading blank."""
    if fact[0] == "code":
        return " " + "".join(rng.choice("0123456789") for _ in range(4))
    return " " + rng.choice({"colour": COLOURS, "home": CITIES, "owner": NAMES}[fact[0]])


def fact_stem(fact: Fact) -> str:
    # The key stands at most three tokens before the value: the reach of the width-4 convolution.
    return f"The {fact[0]} of {fact[1]} is"


def fact_question(fact: Fact) -> str:
    return f"{'Who' if fact[0] == 'owner' else 'What'} is the {fact[0]} of {fact[1]}?"


def user_turn(text: str) -> str:
    return f"{IM_USER}user{IM_MIDDLE}{text}{IM_END}"


ASSISTANT_START = f"{IM_ASSISTANT}assistant{IM_MIDDLE}"
SYSTEM_TURN = f"{IM_SYSTEM}system{IM_MIDDLE}{SYSTEM_TEXT}{IM_END}"


def question_segments(fact: Fact, value: str) -> list[Segment]:
    """One question turn and its answer, which repeats the statement."""
    return [
        (user_turn(fact_question(fact)) + ASSISTANT_START, QUESTION_WEIGHT),
        (fact_stem(fact), 1.0),
        (value, ANSWER_WEIGHT),
        (f".{IM_END}", 1.0),
    ]


def repeat_segments(rng: random.Random) -> list[Segment]:
    if rng.random() < 0.6:
        words = rng.choices(NAMES + COLOURS + CITIES + OBJECTS + PLACES, k=rng.randrange(2, 8))
    else:
        words = [str(rng.randrange(10 ** rng.randrange(2, 6))) for _ in range(rng.randrange(1, 4))]
    text = " ".join(words)
    return [
        (f"{IM_USER}user{IM_MIDDLE}Repeat after me:", 1.0),
        (f" {text}", 0.1),
        (f"{IM_END}{ASSISTANT_START}", QUESTION_WEIGHT),
        (text, 2.0),
        (IM_END, 1.0),
    ]


def table_segments(rng: random.Random) -> list[Segment]:
    keys = rng.sample(NAMES, rng.randrange(2, 6))
    digits = "0123456789"
    values = {
        key: rng.choice(COLOURS)
        if rng.random() < 0.4
        else "".join(rng.choices(digits, k=rng.choice((2, 3, 4))))
        for key in keys
    }
    out: list[Segment] = [(f"{IM_USER}user{IM_MIDDLE}Here is a table.\n", 1.0)]
    for key in keys:
        out += [(f"| {key} |", 0.2), (f" {values[key]}", 0.05), (" |\n", 1.0)]
    for index in range(rng.randrange(1, 4)):
        key = rng.choice(keys)
        if index == 0:
            question = f"What is the value of {key}?{IM_END}{ASSISTANT_START}"
        else:
            question = user_turn(f"And the value of {key}?") + ASSISTANT_START
        out += [(question, 0.4), (f"The value of {key} is", 1.0), (f" {values[key]}", ANSWER_WEIGHT)]
        out.append((f".{IM_END}", 1.0))
    return out


def remember_segments(rng: random.Random) -> list[Segment]:
    fact = draw_fact(rng)
    value = draw_value(rng, fact)
    return [
        (f"{IM_USER}user{IM_MIDDLE}{fact_stem(fact)}", 0.5),
        (value, VALUE_WEIGHT),
        (f".{IM_END}{ASSISTANT_START}", 1.0),
        (f"I will remember that.{IM_END}", 1.0),
        *question_segments(fact, value),
    ]


def chat_segments(rng: random.Random) -> list[Segment]:
    """A short dialogue of one to four exchanges."""
    out: list[Segment] = [(BOS, 1.0)]
    if rng.random() < 0.6:
        out.append((SYSTEM_TURN, 1.0))
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        kind = rng.random()
        if kind < 0.25:
            out += repeat_segments(rng)
        elif kind < 0.55:
            out += table_segments(rng)
        elif kind < 0.70:
            out += remember_segments(rng)
        else:
            if kind < 0.80:
                first, length = rng.randrange(1, 30), rng.randrange(3, 9)
                question = f"Count from {first} to {first + length}."
                answer = " ".join(str(first + i) for i in range(length + 1)) + "."
            elif kind < 0.85:
                name = rng.choice(NAMES)
                question, answer = f"My name is {name}.", f"Hello {name}! How can I help you?"
            else:
                question, answer = rng.choice(GREETINGS)
            out += [(user_turn(question) + ASSISTANT_START, QUESTION_WEIGHT), (answer, 1.5), (IM_END, 1.0)]
    return [*out, (EOS, 1.0)]


def chat_plain_text(rng: random.Random) -> list[str]:
    """A synthetic dialogue without control tokens: what the tokenizer sees of the chat format."""
    segments = chat_segments(rng)
    return [re.sub(r"<\|im_\w+\|>|\[BOS\]|\[EOS\]", "\n", text) for text, _ in segments]
