"""Measure what drafts for an exported milepost-tiny through Milepost's own engine.

    python evaluate_drafter.py --model ../../src/milepost/assets/milepost-tiny --json drafter.json

Its own draft module, or with `--drafter FOLDER` that drafter.

Acceptance by position of the guess, at 1 to 3 guesses per step, greedy and at temperature 0.7, on held-out
prompts: recall cases of tests/support/recall.py (The Tempest as filler), the last turns of synthetic
dialogues of seeds the training never drew, and 100 tokens of The Tempest to be continued. With `--speed`
also the time per token with and without guesses, for the plays and for all that asks something: the same
prompts in turns, one engine after the other, in CPU seconds of the process (other work on the machine counts
little) and in wall seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import dialogues  # noqa: E402
from tests.support.recall import RecallCases  # noqa: E402

from milepost.core.drafts import DraftPlanner  # noqa: E402
from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.engine.blocking import answer  # noqa: E402
from milepost.engine.messages import GenerationRequest  # noqa: E402
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model  # noqa: E402
from milepost.engine.speculative import SpeculativeConfig  # noqa: E402
from milepost.models.drafters import MTP, method_of  # noqa: E402

MAX_DRAFTS = 3
MAX_TOKENS = 64
RECALL_DISTANCES = (200, 500, 1000)
PLAY_TOKENS = 100


@dataclass
class Acceptance:
    """Of some answers.

    Attributes:
        num_tokens: generated, without the first of each answer, which no guess can save.
        num_steps: steps with guesses; `accepted` counts by position what of these was right.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    accepted: Counter[int] | None = None

    def figures(self, num_drafts: int) -> dict[str, Any]:
        by_position = [(self.accepted or {}).get(at, 0) / max(1, self.num_steps) for at in range(num_drafts)]
        return {
            "tokens": self.num_tokens,
            "steps_with_drafts": self.num_steps,
            "accepted_share": round(self.num_accepted / max(1, self.num_drafts), 3),
            "accepted_by_position": [round(share, 3) for share in by_position],
            "tokens_per_pass": round(self.num_tokens / max(1, self.num_tokens - self.num_accepted), 3),
        }


def make_prompts(model: ServingModel, num_cases: int) -> dict[str, list[array[int]]]:
    def encode(text: str) -> list[int]:
        return list(model.tokenizer.encode_with_control(text))

    text = (REPOSITORY / "tests" / "data" / "the_tempest.txt").read_text(encoding="utf-8")
    cases = RecallCases(encode, lambda ids: model.tokenizer.decode(list(ids)), text)
    prompts: dict[str, list[array[int]]] = {
        f"recall at {distance}": [
            array("I", cases.make(seed, distance).prompt_ids) for seed in range(num_cases)
        ]
        for distance in RECALL_DISTANCES
    }
    kinds: dict[str, Callable[[random.Random], list[dialogues.Segment]]] = {
        "remember": dialogues.remember_segments,
        "table": dialogues.table_segments,
        "repeat": dialogues.repeat_segments,
    }
    for name, make in kinds.items():
        prompts[name] = []
        for seed in range(num_cases):
            dialogue = "".join(text for text, _ in make(random.Random(f"{name}/{seed}")))
            question = dialogue.rsplit(dialogues.ASSISTANT_START, 1)[0] + dialogues.ASSISTANT_START
            prompts[name].append(array("I", encode(dialogues.BOS + dialogues.SYSTEM_TURN + question)))
    prompts["greetings"] = [
        array(
            "I",
            encode(
                dialogues.BOS
                + dialogues.SYSTEM_TURN
                + dialogues.user_turn(question)
                + dialogues.ASSISTANT_START
            ),
        )
        for question, _ in dialogues.GREETINGS
    ]
    prompts["plays"] = [
        array("I", encode(dialogues.BOS) + cases.filler(random.Random(f"plays/{seed}"), PLAY_TOKENS))
        for seed in range(num_cases)
    ]
    return prompts


def started(
    folder: Path, num_drafts: int, *, drafter: Path | None = None, always: bool = True
) -> ServingModel:
    """A model that makes so many guesses; 0 = none, and nothing that drafts is loaded.

    Args:
        drafter: its checkpoint; None = the model's own module.
        always: else as many as the server takes to be worth it.
    """
    speculative = None
    if num_drafts and drafter is None:
        speculative = SpeculativeConfig(MTP, num_drafts)
    elif num_drafts:
        speculative = SpeculativeConfig(method_of(drafter), num_drafts, model=str(drafter))
    model = load_serving_model(folder, ServingOptions(cache_bytes=64 << 20, speculative=speculative))
    model.engine.start()
    if num_drafts and always:
        planner = DraftPlanner(None, num_drafts)
        model.engine.act(lambda scheduler, now: setattr(scheduler, "drafts", planner)).result()
    return model


def generate(model: ServingModel, prompt: array[int], temperature: float, seed: int) -> list[int]:
    sampling = SamplingParams(
        temperature=temperature, seed=seed, stop_token_ids=list(model.tokenizer.eos_token_ids)
    )
    deltas = answer(model.engine, GenerationRequest(prompt, sampling, MAX_TOKENS))
    return [token for delta in deltas for token in delta.token_ids]


def acceptance(model: ServingModel, prompts: list[array[int]], temperature: float) -> Acceptance:
    before = model.engine.fresh_stats().result().counters
    num_tokens = sum(
        len(generate(model, prompt, temperature, seed)) - 1 for seed, prompt in enumerate(prompts)
    )
    after = model.engine.fresh_stats().result().counters
    return Acceptance(
        num_tokens,
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
        Counter(after.accepted_drafts_by_position) - Counter(before.accepted_drafts_by_position),
    )


def acceptance_table(
    folder: Path, drafter: Path | None, num_cases: int, tasks: list[str] | None
) -> list[dict[str, Any]]:
    rows = []
    for num_drafts in range(1, MAX_DRAFTS + 1):
        model = started(folder, num_drafts, drafter=drafter)
        try:
            for name, some in make_prompts(model, num_cases).items():
                if tasks is not None and name not in tasks:
                    continue
                for temperature in (0.0, 0.7):
                    figures = acceptance(model, some, temperature).figures(num_drafts)
                    rows.append(
                        {"task": name, "num_drafts": num_drafts, "temperature": temperature, **figures}
                    )
                    print(rows[-1], flush=True)
        finally:
            model.close()
    return rows


def timed(model: ServingModel, prompts: list[array[int]]) -> tuple[float, float]:
    """CPU and wall seconds of greedy answers."""
    begun = time.process_time(), time.perf_counter()
    for prompt in prompts:
        generate(model, prompt, 0.0, 0)
    return time.process_time() - begun[0], time.perf_counter() - begun[1]


def speed(
    folder: Path, drafter: Path | None, num_cases: int, num_drafts: int, num_rounds: int
) -> dict[str, Any]:
    """Seconds per token without guesses over seconds per token with: above 1, guesses are faster."""
    plain = started(folder, 0)
    drafting = {
        "always": started(folder, num_drafts, drafter=drafter),
        "adaptive": started(folder, num_drafts, drafter=drafter, always=False),
    }
    models = [plain, *drafting.values()]
    ratios: dict[str, dict[str, list[float]]] = {}
    try:
        made = make_prompts(plain, num_cases)
        groups = {
            "plays": made.pop("plays"),
            "questions": [prompt for some in made.values() for prompt in some],
        }
        for model in models:  # everything is a hit from here on: what is timed is decoding
            for prompts in groups.values():
                timed(model, prompts)
        for round_ in range(num_rounds):
            for group, prompts in groups.items():
                order = models if round_ % 2 == 0 else models[::-1]
                seconds = {id(model): timed(model, prompts) for model in order}
                for way, model in drafting.items():
                    for at, clock in enumerate(("cpu", "wall")):
                        ratio = seconds[id(plain)][at] / seconds[id(model)][at]
                        ratios.setdefault(f"{group}, {way}", {}).setdefault(clock, []).append(ratio)
                        print(f"round {round_}, {group}, {way}, {clock}: x{ratio:.3f}", flush=True)
    finally:
        for model in models:
            model.close()
    figures: dict[str, Any] = {"num_drafts": num_drafts, "rounds": num_rounds}
    for name, by_clock in ratios.items():
        figures[name] = {
            clock: {"median": round(statistics.median(some), 3), "min": min(some), "max": max(some)}
            for clock, some in by_clock.items()
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=REPOSITORY / "src/milepost/assets/milepost-tiny")
    parser.add_argument("--drafter", type=Path, help="checkpoint of a drafter; default: the model's module")
    parser.add_argument("--cases", type=int, default=40, help="prompts per task")
    parser.add_argument("--tasks", nargs="*", help="acceptance on these only; nothing behind it = on none")
    parser.add_argument("--speed", type=int, default=0, metavar="ROUNDS", help="also time so many rounds")
    parser.add_argument("--speed-drafts", type=int, default=2, help="guesses per step in the timed rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "acceptance": acceptance_table(arguments.model, arguments.drafter, arguments.cases, arguments.tasks)
    }
    if arguments.speed:
        figures["speed"] = speed(
            arguments.model,
            arguments.drafter,
            max(1, arguments.cases // 4),
            arguments.speed_drafts,
            arguments.speed,
        )
        print(figures["speed"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
