"""What quantised weights cost in quality: the embedded model on text and recall, a random model's logits.

    python bench/quantization.py
    python bench/quantization.py --recall-cases 10 --text-tokens 2048 --skip-random

Perplexity over the play in tests/data, in windows of 512 tokens; recall as in tests/support/recall.py: a
fact, 500 tokens of the play, a question, and every token of the answer must be right. Logit errors are those
of a random checkpoint of 100 M weights against itself in fp32: the root mean square of the difference over
that of the logits, the mean Kullback-Leibler divergence, and how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from common import RESULTS, ROOT, calibration_ms, console, print_machine, print_table, write_json
from make_model import EMBEDDED, make_size

sys.path.insert(0, str(ROOT))

from tests.support.driver import Driver, random_tokens  # noqa: E402
from tests.support.recall import RecallCase, RecallCases  # noqa: E402

from milepost.kernels.reference_coded import quantized  # noqa: E402
from milepost.kernels.schemes import IntegerScheme  # noqa: E402
from milepost.models import load_model  # noqa: E402

PRECISIONS: tuple[tuple[str, str | None], ...] = (
    ("float32", None),
    ("bfloat16", None),
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("float32", "int4"),
    ("bfloat16", "int4"),
)
SCHEMES = [IntegerScheme(bits, group) for bits in (8, 4) for group in (32, 64, 128)]
TEXT = ROOT / "tests" / "data" / "the_tempest.txt"
WINDOW = 512
MATCH_UNIT = 32
DISTANCE = 500
CACHE_BYTES = 64 << 20
RANDOM_ROWS = 512

Row = dict[str, Any]


@contextmanager
def driven(directory: Path, dtype: str, quantization: str | None) -> Iterator[Driver]:
    driver = Driver(
        load_model(directory, dtype=dtype, quantization=quantization),
        match_unit=MATCH_UNIT,
        cache_bytes=CACHE_BYTES,
    )
    try:
        yield driver
    finally:
        driver.worker.close()


def perplexity(driver: Driver, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - WINDOW + 1, WINDOW):
        tokens = ids[start : start + WINDOW]
        plan = driver.plan((driver.sequence(tokens, 0), WINDOW), sample=False)
        log_probs = driver.logits(plan)[:-1].log_softmax(-1)
        total -= float(log_probs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).sum())
        count += WINDOW - 1
        driver.recycle()
    return math.exp(total / count)


def is_right(driver: Driver, case: RecallCase) -> bool:
    """Whether greedy decoding gives the answer: each token is the likeliest after those before it."""
    tokens = [*case.prompt_ids, *case.answer_ids]
    plan = driver.plan((driver.sequence(tokens, 0), len(tokens)), sample=False)
    chosen = driver.logits(plan)[-len(case.answer_ids) - 1 : -1].argmax(-1).tolist()
    driver.recycle()
    return bool(chosen == list(case.answer_ids))


def measure_embedded(text_tokens: int, recall_cases: int) -> list[Row]:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:text_tokens]
    cases = RecallCases(
        lambda part: tokenizer.encode(part, add_special_tokens=False).ids,
        lambda part: tokenizer.decode(list(part), skip_special_tokens=False),
        text,
    )
    made = [cases.make(seed, DISTANCE) for seed in range(recall_cases)]
    rows = []
    for dtype, quantization in PRECISIONS:
        with driven(EMBEDDED, dtype, quantization) as driver:
            right = sum(is_right(driver, case) for case in made)
            rows.append(
                {
                    "activations": dtype,
                    "weights": quantization or dtype,
                    "perplexity": perplexity(driver, ids),
                    "recall": right / len(made),
                }
            )
    return rows


def measure_random(directory: Path) -> list[Row]:
    rows, exact = [], torch.empty(0)
    for dtype, quantization in PRECISIONS:
        with driven(directory, dtype, quantization) as driver:
            tokens = random_tokens(RANDOM_ROWS, driver.model.vocab_size, 1)
            plan = driver.plan((driver.sequence(tokens, 0), RANDOM_ROWS), sample=False)
            logits = driver.logits(plan).clone()
        if (dtype, quantization) == PRECISIONS[0]:
            exact = logits
        expected, found = exact.log_softmax(-1), logits.log_softmax(-1)
        rows.append(
            {
                "activations": dtype,
                "weights": quantization or dtype,
                "relative_error": float(
                    (logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                ),
                "kl_divergence": float((expected.exp() * (expected - found)).sum(-1).mean()),
                "same_top_token": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
            }
        )
    return rows


def measure_schemes() -> list[Row]:
    """Error of normal weights per number of bits and group."""
    weight = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    return [
        {
            "scheme": scheme.name,
            "bits_per_weight": 8 * scheme.num_bytes(1 << 20) / (1 << 20),
            "relative_error": float((quantized(weight, scheme).decode() - weight).norm() / weight.norm()),
        }
        for scheme in SCHEMES
    ]


def report(results: dict[str, list[Row]]) -> None:
    titles = {
        "schemes": "Integers for normal weights",
        "embedded": "Embedded model, perplexity of the play and recall over 500 tokens",
        "random": "Random model of 100 M weights, logits against fp32",
    }
    for name, rows in results.items():
        if rows:
            columns = list(rows[0])
            print_table(
                titles[name],
                [column.replace("_", " ") for column in columns],
                [[row[column] for column in columns] for row in rows],
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text-tokens", type=int, default=16 * WINDOW)
    parser.add_argument("--recall-cases", type=int, default=100)
    parser.add_argument("--skip-random", action="store_true", help="only the embedded model")
    parser.add_argument("--json", type=Path, default=RESULTS / "quantization.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibration = calibration_ms()
    print_machine(calibration)
    results: dict[str, list[Row]] = {"schemes": measure_schemes(), "embedded": [], "random": []}
    with torch.inference_mode():
        results["embedded"] = measure_embedded(options.text_tokens, options.recall_cases)
        if not options.skip_random:
            with tempfile.TemporaryDirectory() as folder:
                results["random"] = measure_random(make_size(Path(folder) / "100m", "100m"))
    report(results)
    write_json(options.json, "quantization", calibration, results)
    console.print(f"kernels: {load_model(EMBEDDED).kernels.choices[0].reason}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
