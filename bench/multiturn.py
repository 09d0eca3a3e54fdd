"""Conversations that take turns, with the prefix cache and without: what is computed, and how long it takes.

    python bench/multiturn.py [MODEL] [--match-units 16 32 64 128] [--dtype float32] [--concurrency 1]

All conversations share a system prompt. A turn adds user tokens and generates an answer, and the next
prompt is the last one plus the answer plus new user tokens, as token ids. With one request at a time the
computed tokens must be exactly  sum of N - U * floor(min(P, N - 1) / U),  where N is the length of a
prompt and P how many of its first tokens earlier requests processed; with several at a time they may be
more for siblings that start together, and the bound is checked instead for what had finished before.
The run without the cache gets the same prompts; its answers must be the same (float32).

Exits with 1 if a check fails. `--json FILE` keeps every turn.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    ROOT,
    calibration_ms,
    console,
    median,
    print_machine,
    print_table,
    write_json,
)
from rich.progress import Progress

from milepost.core.plan import SamplingParams
from milepost.engine.chat import common_prefix
from milepost.engine.messages import Accepted, EngineEvent, Failed, GenerationRequest, OutputDelta
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model

# Long enough for any prompt here, in every checkout, and free to use.
TEXT = ROOT / "LICENSE"
LOGPROB_TOLERANCE = 1e-4
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Workload:
    """Sizes in tokens."""

    num_conversations: int
    num_turns: int
    num_system_tokens: int
    num_user_tokens: int
    num_answer_tokens: int
    concurrency: int


@dataclass
class Turn:
    """One request and its answer.

    Attributes:
        num_processed: P, the longest beginning of the prompt that earlier requests had processed.
        num_expected: computed tokens by the closed form.
        ttft_ms: from submission to the first token.
    """

    conversation: int
    turn: int
    prompt: array[int]
    num_processed: int
    num_expected: int
    num_cached: int = 0
    ttft_ms: float = 0.0
    reason: str = ""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_cached

    @property
    def processed(self) -> array[int]:
        """Everything but the last sampled token, which no forward pass has read."""
        return self.prompt + self.token_ids[:-1]

    def summary(self) -> dict[str, Any]:
        fields = asdict(self)
        return {
            **{
                name: value
                for name, value in fields.items()
                if name not in ("prompt", "token_ids", "logprobs")
            },
            "num_prompt": self.num_prompt,
            "num_computed": self.num_computed,
        }


class Texts:
    """Token ids of the system prompt and of user messages, cut from one text."""

    def __init__(self, model: ServingModel, workload: Workload) -> None:
        text = TEXT.read_text(encoding="utf-8")
        self._ids = array("I", model.tokenizer.encode(text))
        self._encode = model.tokenizer.encode
        self._workload = workload
        self.system = self._slice(0, workload.num_system_tokens)

    def user(self, conversation: int, turn: int) -> array[int]:
        """Differs between conversations and turns from its first words on."""
        count = self._workload.num_user_tokens
        head = array("I", self._encode(f"{turn * 100 + conversation} is the number of this question. "))
        start = 997 * (turn * self._workload.num_conversations + conversation + 1)
        return (head + self._slice(start, count))[:count]

    def _slice(self, start: int, count: int) -> array[int]:
        first = start % len(self._ids)
        repeated = self._ids[first:]
        while len(repeated) < count:
            repeated += self._ids
        return repeated[:count]


def submit(
    model: ServingModel, turn: Turn, workload: Workload, temperature: float
) -> tuple[float, queue.SimpleQueue[tuple[float, EngineEvent]]]:
    """Hand a turn to the engine; returns the time and where its events arrive with theirs."""
    events: queue.SimpleQueue[tuple[float, EngineEvent]] = queue.SimpleQueue()
    sampling = SamplingParams(
        temperature=temperature, seed=1000 * turn.turn + turn.conversation, num_logprobs=0, stop_token_ids=[]
    )
    request = GenerationRequest(
        turn.prompt,
        sampling,
        workload.num_answer_tokens,
        wanted=[(workload.num_system_tokens, "message"), (turn.num_prompt, "history")],
        conversation=f"conversation {turn.conversation}",
    )
    start = time.perf_counter()
    model.engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
    return start, events


def collect(turn: Turn, start: float, events: queue.SimpleQueue[tuple[float, EngineEvent]]) -> None:
    """Wait for the answer and note what came with it."""
    while True:
        at, event = events.get(timeout=TIMEOUT_SECONDS)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Accepted):
            continue
        assert isinstance(event, OutputDelta)
        if event.tokens and not turn.token_ids:
            turn.ttft_ms = (at - start) * 1e3
        turn.token_ids.extend(event.token_ids)
        turn.logprobs.extend(token.logprob or 0.0 for token in event.tokens)
        if event.reuse is not None:
            turn.num_cached = event.reuse.num_cached_tokens
            turn.reason = event.reuse.reason
        if event.finish_reason is not None:
            return


def closed_form(num_tokens: int, num_processed: int, match_unit: int) -> int:
    """Tokens computed for a prompt if the cache reuses all it may: N - U * floor(min(P, N - 1) / U)."""
    return num_tokens - match_unit * (min(num_processed, num_tokens - 1) // match_unit)


def run(
    model: ServingModel,
    workload: Workload,
    match_unit: int,
    temperature: float,
    answers: list[Turn] | None,
    progress: Progress,
) -> list[Turn]:
    """All turns in the order in which they were handed in.

    Args:
        answers: turns of another run; prompts are then built from its answers, so that the two runs
            stay comparable after a token that differs.
    """
    texts = Texts(model, workload)
    histories = [array("I", texts.system) for _ in range(workload.num_conversations)]
    done: list[Turn] = []
    task = progress.add_task("turns", total=workload.num_conversations * workload.num_turns)
    for turn_number in range(workload.num_turns):
        for first in range(0, workload.num_conversations, workload.concurrency):
            group = range(first, min(first + workload.concurrency, workload.num_conversations))
            turns = []
            for conversation in group:
                prompt = histories[conversation] + texts.user(conversation, turn_number)
                processed = max((common_prefix(prompt, earlier.processed) for earlier in done), default=0)
                expected = closed_form(len(prompt), processed, match_unit)
                turns.append(Turn(conversation, turn_number, prompt, processed, expected))
            waiting = [submit(model, turn, workload, temperature) for turn in turns]
            for turn, (start, events) in zip(turns, waiting, strict=True):
                collect(turn, start, events)
                source = turn if answers is None else answers[len(done)]
                histories[turn.conversation] = turn.prompt + source.token_ids
                done.append(turn)
                progress.advance(task)
    progress.remove_task(task)
    return done


def measured(
    directory: Path | None,
    options: ServingOptions,
    workload: Workload,
    temperature: float,
    answers: list[Turn] | None = None,
) -> list[Turn]:
    """A run on a fresh engine."""
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        model = load_serving_model(directory, options)
        model.engine.start()
        try:
            return run(model, workload, options.match_unit, temperature, answers, progress)
        finally:
            model.close()


@dataclass
class Comparison:
    """Answers of a run against those of the run without the cache."""

    num_different_answers: int
    largest_logprob_difference: float
    """Over positions up to the first token that differs."""


def compare(cached: list[Turn], plain: list[Turn]) -> Comparison:
    different = 0
    largest = 0.0
    for left, right in zip(cached, plain, strict=True):
        same = common_prefix(left.token_ids, right.token_ids)
        different += left.token_ids != right.token_ids
        for a, b in zip(left.logprobs[:same], right.logprobs[:same], strict=True):
            largest = max(largest, abs(a - b))
    return Comparison(different, largest)


def check(cached: list[Turn], workload: Workload, match_unit: int) -> list[str]:
    """What the run promises and did not keep."""
    failures = []
    computed = sum(turn.num_computed for turn in cached)
    expected = sum(turn.num_expected for turn in cached)
    if workload.concurrency == 1 and computed != expected:
        failures.append(f"U={match_unit}: {computed} tokens computed, closed form {expected}")
    for turn in cached:
        if turn.num_computed > turn.num_expected:
            failures.append(
                f"U={match_unit}: conversation {turn.conversation} turn {turn.turn}: {turn.num_computed} "
                f"computed, at most {turn.num_expected} allowed ({turn.reason})"
            )
    shared = match_unit * (workload.num_system_tokens // match_unit)
    for turn in cached[workload.concurrency : workload.num_conversations]:
        if turn.num_cached < shared:
            failures.append(
                f"U={match_unit}: conversation {turn.conversation} reused {turn.num_cached} tokens of the "
                f"shared system prompt, {shared} expected"
            )
    return failures


def print_turns(cached: list[Turn], plain: list[Turn], title: str) -> None:
    rows: list[list[object]] = [
        [
            f"{chr(ord('A') + turn.conversation % 26)}{turn.turn + 1}",
            turn.num_prompt,
            turn.num_cached,
            turn.num_computed,
            turn.num_expected,
            turn.ttft_ms,
            other.ttft_ms,
        ]
        for turn, other in zip(cached, plain, strict=True)
    ]
    rows.append(
        [
            "total",
            sum(turn.num_prompt for turn in cached),
            sum(turn.num_cached for turn in cached),
            sum(turn.num_computed for turn in cached),
            sum(turn.num_expected for turn in cached),
            sum(turn.ttft_ms for turn in cached),
            sum(turn.ttft_ms for turn in plain),
        ]
    )
    columns = ["turn", "prompt", "cached", "computed", "closed form", "first token ms", "without cache ms"]
    print_table(title, columns, rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="model directory; default: the embedded model")
    parser.add_argument("--match-units", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or auto")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system-tokens", type=int, default=2000)
    parser.add_argument("--user-tokens", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1, help="requests in flight")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--all-turns", action="store_true", help="a table of turns for every match unit")
    parser.add_argument("--json", type=Path, default=RESULTS / "multiturn.json")
    return parser.parse_args()


def serving_options(
    given: argparse.Namespace, match_unit: int, enable_prefix_caching: bool
) -> ServingOptions:
    return ServingOptions(
        cache_bytes=given.cache_bytes,
        match_unit=match_unit,
        decode_interval=256 if 256 % match_unit == 0 else 8 * match_unit,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_num_seqs=max(1, given.concurrency),
        dtype=given.dtype,
        seed=0,
    )


def main() -> int:
    given = arguments()
    workload = Workload(
        given.conversations,
        given.turns,
        given.system_tokens,
        given.user_tokens,
        given.answer_tokens,
        given.concurrency,
    )
    calibration = calibration_ms()
    failures: list[str] = []
    results = []
    for temperature in given.temperatures:
        plain = measured(
            given.model, serving_options(given, given.match_units[0], False), workload, temperature
        )
        rows: list[list[object]] = []
        for index, match_unit in enumerate(given.match_units):
            options = serving_options(given, match_unit, True)
            cached = measured(given.model, options, workload, temperature, plain)
            comparison = compare(cached, plain)
            if index == 0 or given.all_turns:
                print_turns(cached, plain, f"U = {match_unit}, {given.dtype}, temperature {temperature:g}")
            failures += check(cached, workload, match_unit)
            if given.dtype == "float32" and comparison.num_different_answers:
                failures.append(f"U={match_unit}: {comparison.num_different_answers} answers differ")
            if given.dtype == "float32" and comparison.largest_logprob_difference > LOGPROB_TOLERANCE:
                failures.append(
                    f"U={match_unit}: log-probabilities differ by {comparison.largest_logprob_difference:g}"
                )
            rows.append(
                [
                    f"{match_unit}",
                    sum(turn.num_computed for turn in cached),
                    sum(turn.num_expected for turn in cached),
                    cached[min(1, len(cached) - 1)].num_cached,
                    median([turn.ttft_ms for turn in cached]),
                    median([turn.ttft_ms for turn in plain]),
                    comparison.num_different_answers,
                    f"{comparison.largest_logprob_difference:.1e}",
                ]
            )
            results.append(
                {
                    "match_unit": match_unit,
                    "temperature": temperature,
                    "turns": [turn.summary() for turn in cached],
                    "comparison": asdict(comparison),
                }
            )
        results.append(
            {"match_unit": None, "temperature": temperature, "turns": [turn.summary() for turn in plain]}
        )
        num_prompt = sum(turn.num_prompt for turn in plain)
        print_table(
            f"{len(plain)} requests, {num_prompt:,} prompt tokens, {given.dtype}, T = {temperature:g}",
            [
                "U", "computed", "closed form", "second request reuses", "first token, median ms", "without",
                "answers that differ", "logprob difference",
            ],
            rows,
        )  # fmt: skip
    print_machine(calibration)
    write_json(given.json, "multiturn", calibration, {"workload": asdict(workload), "runs": results})
    for failure in failures:
        console.print(f"failed: {failure}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
