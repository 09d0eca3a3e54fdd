"""What `--state-dtype bf16` costs in quality: logits after one and after many resumptions, and recall.

    python bench/kept_states.py
    python bench/kept_states.py --recall-cases 20 --skip-random

A text is computed by requests one after the other: each starts from the checkpoint the one before left,
reads so many tokens and leaves one itself. Every checkpoint rounds what it is made of, so errors add up,
as far as the decay of the states lets them. The logits of every part are compared with those of one cold pass
over the whole text in the same dtype: the root mean square of the difference over that of the logits, the
largest difference, the mean Kullback-Leibler divergence, how often the likeliest token is the same, and the
share of rows that an audit would call a mismatch.
Text of the embedded model is the play in tests/data; a random model reads random tokens. Recall as in
tests/support/recall.py: a fact, 500 tokens of the play, a question; every token of the answer must be right.

Speed, of the random model: CPU time of a cold prompt with a checkpoint every 64 tokens, of a prompt that is a
hit but for a few tokens, and of eight requests that decode together; interleaved runs, ratios run by run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from common import RESULTS, ROOT, calibration_ms, console, median, print_machine, print_table, write_json
from make_model import EMBEDDED, make_size

sys.path.insert(0, str(ROOT))

from tests.support.driver import Driver, random_tokens  # noqa: E402
from tests.support.kept_states import kept_in  # noqa: E402
from tests.support.recall import RecallCases  # noqa: E402

from milepost.config import BF16, FP32, CacheConfig, SchedulerConfig  # noqa: E402
from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.core.request import Request  # noqa: E402
from milepost.core.scheduler import Scheduler  # noqa: E402
from milepost.engine.audit import ROUNDED_STATE_LOGIT_BOUND  # noqa: E402
from milepost.models import load_model  # noqa: E402
from milepost.models.loading import LoadedModel  # noqa: E402
from milepost.runner.worker import TorchWorker  # noqa: E402

TEXT = ROOT / "tests" / "data" / "the_tempest.txt"
MATCH_UNIT = 32
STEP = 512
DISTANCE = 500
CACHE_BYTES = 512 << 20
SHOWN = (1, 4, 16, 64)
"""Resumptions behind which an error is shown; that of 16 is the mean over numbers 13 to 16, and so on."""

Row = dict[str, Any]


@contextmanager
def driven(model: LoadedModel, state_dtype: str) -> Iterator[Driver]:
    driver = Driver(kept_in(model, state_dtype), match_unit=MATCH_UNIT, cache_bytes=CACHE_BYTES)
    try:
        yield driver
    finally:
        driver.worker.close()


def resumed_logits(driver: Driver, tokens: list[int], every: int) -> torch.Tensor:
    """Logits of all rows when a new request takes over behind every `every` tokens."""
    rows: list[torch.Tensor] = []
    pages: list[int] = []
    for number, start in enumerate(range(0, len(tokens), every)):
        begins = {"start_slot": 2 + (number - 1) % 2, "pages": pages, "num_processed": start} if start else {}
        request = driver.sequence(tokens, number % 2, **begins)
        end = min(start + every, len(tokens))
        while request.num_processed < end:
            count = min(STEP, end - request.num_processed)
            is_last = request.num_processed + count == end
            exports = {request.request_id: [(end, 2 + number % 2)]} if is_last else {}
            rows.append(driver.logits(driver.plan((request, count), exports=exports, sample=False)))
        pages = request.pages
    return torch.cat(rows)


def compared(found: torch.Tensor, expected: torch.Tensor) -> Row:
    wanted, logs = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "relative_error": float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()),
        "largest_difference": float((found - expected).abs().max()),
        "kl_divergence": float((wanted.exp() * (wanted - logs)).sum(-1).mean()),
        "same_top_token": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        "beyond_audit_bound": float(
            ((found - expected).abs().amax(-1) > ROUNDED_STATE_LOGIT_BOUND).float().mean()
        ),
    }


def measure_logits(name: str, model: LoadedModel, tokens: list[int], every: int) -> list[Row]:
    with driven(model, FP32) as exact:
        expected = resumed_logits(exact, tokens, len(tokens))
    with driven(model, BF16) as small:
        found = resumed_logits(small, tokens, every)
    result = []
    for number in SHOWN:
        first, end = (number - max(1, number // 4) + 1) * every, (number + 1) * every
        if end <= len(tokens):
            row = {"model": name, "dtype": model.dtype, "tokens_each": every, "resumptions": number}
            result.append(row | compared(found[first:end], expected[first:end]))
    return result


def recall(model: LoadedModel, num_cases: int) -> list[Row]:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    cases = RecallCases(
        lambda part: tokenizer.encode(part, add_special_tokens=False).ids,
        lambda part: tokenizer.decode(list(part), skip_special_tokens=False),
        TEXT.read_text(encoding="utf-8"),
    )
    made = [cases.make(seed, DISTANCE) for seed in range(num_cases)]
    rows = []
    for state_dtype, every in ((FP32, MATCH_UNIT), (BF16, 10 * MATCH_UNIT), (BF16, MATCH_UNIT)):
        right = 0
        for case in made:
            tokens = [*case.prompt_ids, *case.answer_ids]
            with driven(model, state_dtype) as driver:
                chosen = resumed_logits(driver, tokens, every)[-len(case.answer_ids) - 1 : -1].argmax(-1)
            right += chosen.tolist() == list(case.answer_ids)
        rows.append(
            {
                "dtype": model.dtype,
                "states_kept_in": state_dtype,
                "tokens_each": every,
                "recall": right / max(1, len(made)),
            }
        )
    return rows


class Replica:
    """Scheduler and worker with states kept in one dtype; counts the CPU time of its steps."""

    def __init__(self, model: LoadedModel, state_dtype: str) -> None:
        model = kept_in(model, state_dtype)
        geometry = model.geometry(MATCH_UNIT)
        config = SchedulerConfig(STEP, 64, 1 << 14)
        self.scheduler = Scheduler(geometry, CacheConfig(CACHE_BYTES, MATCH_UNIT), config)
        self.worker = TorchWorker(model, geometry, CACHE_BYTES)
        self._numbers = itertools.count()

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        for prompt in prompts:
            sampling = SamplingParams(temperature=0.0)
            request = Request(next(self._numbers), array("I", prompt), sampling, max_tokens=max_tokens)
            self.scheduler.add(request)
        spent = 0.0
        while self.scheduler.has_unfinished_requests:
            plan = self.scheduler.schedule(0.0)
            start = time.process_time()
            result = self.worker.execute(plan)
            spent += time.process_time() - start
            self.scheduler.commit(result)
        return spent


def measure_speed(model: LoadedModel, runs: int) -> list[Row]:
    """What each run does is new to the caches, but for the hits."""
    vocab, seeds = model.vocab_size, itertools.count()
    replicas = {name: Replica(model, name) for name in (FP32, BF16)}
    spent: dict[str, dict[str, list[float]]] = {}

    def take(what: str, prompts: list[list[int]], max_tokens: int) -> None:
        for name, replica in replicas.items():
            spent.setdefault(what, {}).setdefault(name, []).append(replica.seconds(prompts, max_tokens))

    for run in range(runs + 1):
        long = random_tokens(2048, vocab, next(seeds))
        take("cold prompt of 2,048 tokens", [long], 1)
        take("a hit and 9 tokens", [[*long[:1024], *random_tokens(9, vocab, next(seeds))]], 1)
        take("8 requests, 64 tokens each", [random_tokens(9, vocab, next(seeds)) for _ in range(8)], 64)
        if not run:
            spent.clear()  # warm
    for replica in replicas.values():
        replica.worker.close()
    return [
        {
            "dtype": model.dtype,
            "work": what,
            "fp32_ms": 1e3 * median(times[FP32]),
            "bf16_ms": 1e3 * median(times[BF16]),
            "bf16_over_fp32": median([b / a for a, b in zip(times[FP32], times[BF16], strict=True)]),
        }
        for what, times in spent.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recall-cases", type=int, default=100)
    parser.add_argument("--random-tokens", type=int, default=65 * MATCH_UNIT)
    parser.add_argument("--runs", type=int, default=7, help="of the timed work")
    parser.add_argument("--skip-random", action="store_true", help="only the embedded model")
    parser.add_argument("--json", type=Path, default=RESULTS / "kept_states.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibration = calibration_ms()
    results: dict[str, list[Row]] = {"logits": [], "recall": [], "speed": []}
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    play = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            model = load_model(EMBEDDED, dtype=dtype)
            for every in (MATCH_UNIT, 4 * MATCH_UNIT):
                results["logits"] += measure_logits("embedded", model, play[: 65 * every], every)
            results["recall"] += recall(model, options.recall_cases)
        if not options.skip_random:
            directory = make_size(Path(folder) / "100m", "100m")
            for dtype in ("float32", "bfloat16"):
                model = load_model(directory, dtype=dtype)
                tokens = random_tokens(options.random_tokens, model.vocab_size, 1)
                results["logits"] += measure_logits("random 100m", model, tokens, MATCH_UNIT)
            results["speed"] = measure_speed(model, options.runs)
    titles = {
        "logits": "Logits against one cold pass",
        "recall": f"Recall over {DISTANCE} tokens",
        "speed": "CPU time, random model",
    }
    for name, rows in results.items():
        if not rows:
            continue
        columns = list(rows[0])
        cells = [[row[column] for column in columns] for row in rows]
        print_table(titles[name], [column.replace("_", " ") for column in columns], cells)
    print_machine(calibration)
    write_json(options.json, "kept_states", calibration, results)
    console.print(f"kernels: {load_model(EMBEDDED).kernels.choices[0].reason}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
