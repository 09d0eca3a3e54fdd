"""Native kernels beside torch's own, in one process, as ratios.

Every pair runs alternately; the best of several processor times counts. A ratio above 1 means the
native kernel is faster. The reference column is Milepost's plain-torch twin of the same operation.

    python bench/kernels.py
    python bench/kernels.py --model /tmp/model-140m      # decode steps and prefill of a model as well

Threads: 1 everywhere, set by this script.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, calibration_ms, console, print_machine, print_table, write_json
from kernel_sections import measure_coded, measure_gdn, measure_gqa, measure_sampling, report_sections

from milepost.core.plan import ZERO_STATE, ChunkPlan, SamplingParams, StepPlan, WorkerRequest
from milepost.kernels import reference, reference_layers
from milepost.kernels.api import KdaInputs, KdaParams, select_kernels
from milepost.kernels.index import AttentionIndex, RecurrentIndex, RowSpan
from milepost.kernels.native_library import native_library
from milepost.models import load_model
from milepost.models.description import ModelDescription
from milepost.models.quantization import QUANTIZATIONS
from milepost.models.specs import DecoderSpec
from milepost.runner.worker import TorchWorker

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MATCH_UNIT = 32
STEP_ROWS = 512
MIN_SECONDS = 0.05

Row = dict[str, Any]


def seconds(function: Callable[[], object], repetitions: int) -> float:
    """Best processor time of one call; short calls are repeated within a measurement."""
    start = time.process_time()
    function()
    once = max(time.process_time() - start, 1e-6)
    calls = max(1, int(MIN_SECONDS / once))
    best = float("inf")
    for _ in range(repetitions):
        start = time.process_time()
        for _ in range(calls):
            function()
        best = min(best, (time.process_time() - start) / calls)
    return best


def compare(repetitions: int, **functions: Callable[[], object]) -> dict[str, float]:
    """Seconds per call of each function."""
    return {name: seconds(function, repetitions) for name, function in functions.items()}


def read_bandwidth() -> float:
    """Bytes per second of summing 256 MB that no cache holds, in pages of 2 MiB where there are any."""
    memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.int64).fill_(1)
    return data.nbytes / seconds(data.sum, 5)


def measure_linear(repetitions: int) -> list[Row]:
    library = native_library().module
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for out_features, in_features in ((1024, 1024), (5632, 1024), (1024, 2816)):
            weight = torch.randn(out_features, in_features).to(dtype)
            packed = library.pack(weight)
            for num_rows in (1, 4, 16, 64, STEP_ROWS):
                x = torch.randn(num_rows, in_features).to(dtype)
                out = torch.empty(num_rows, out_features, dtype=dtype)
                times = compare(
                    repetitions,
                    native=lambda x=x, packed=packed, out=out: library.linear(x, packed, out),
                    torch=lambda x=x, weight=weight: F.linear(x, weight),
                )
                flops = 2 * num_rows * out_features * in_features
                rows.append(
                    {
                        "shape": f"{dtype_name} {out_features}x{in_features}",
                        "rows": num_rows,
                        **times,
                        "native_gflops": flops / times["native"] / 1e9,
                    }
                )
    return rows


def recurrent_index(lengths: list[int]) -> RecurrentIndex:
    """Sequences of these lengths that run in place in slots 0, 1, ..."""
    spans, row = [], 0
    for length in lengths:
        spans.append(RowSpan(row, row + length, 0))
        row += length
    slots = tuple(range(len(lengths)))
    return RecurrentIndex(tuple(spans), slots, slots, exports=(), tail_rows=3)


def measure_kda(repetitions: int) -> list[Row]:
    operations = select_kernels("native")
    heads, dim = 8, 128
    width = heads * dim
    rows = []
    params = KdaParams(
        heads,
        dim,
        torch.randn(4, 3 * width) * 0.4,
        torch.randn(heads) * 0.8,
        torch.randn(width) - 2.0,
        torch.ones(dim),
        1e-5,
        None,
    )
    for lengths in ([STEP_ROWS], [1], [1] * 8, [64] * 8):
        count = sum(lengths)
        inputs = KdaInputs(
            *(torch.randn(count, columns).bfloat16() for columns in (3 * width, width, heads, width))
        )
        tails = torch.randn(len(lengths), 3, 3 * width).bfloat16()
        states = torch.randn(len(lengths), heads, dim, dim) * 0.1
        index = recurrent_index(lengths)
        arguments = (inputs, params, tails, states, index)
        times = compare(
            repetitions,
            native=lambda arguments=arguments: operations.kda_mixer(*arguments),
            reference=lambda arguments=arguments: reference_layers.kda_mixer(*arguments),
        )
        rows.append(
            {"rows": f"{len(lengths)} x {lengths[0]}", **times, "tokens_per_s": count / times["native"]}
        )
    return rows


def measure_attention(repetitions: int) -> list[Row]:
    """Absorbed attention over latents of 512 + 64, 8 heads, against SDPA over the same latents."""
    library = native_library().module
    heads, latent, width = 8, 512, 576
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for num_rows, context in ((1, 1024), (1, 8192), (64, 8192), (STEP_ROWS, 1024), (STEP_ROWS, 8192)):
            num_pages = context // MATCH_UNIT
            pages = torch.randn(num_pages, MATCH_UNIT, width).to(dtype)
            query = torch.randn(num_rows, heads, width)
            position = context - num_rows
            table = torch.randperm(num_pages)
            places = torch.arange(position, context)
            index = AttentionIndex(
                (RowSpan(0, num_rows, position),),
                (table,),
                table[places // MATCH_UNIT],
                places % MATCH_UNIT,
            )
            spans = [(0, num_rows, position)]
            plan = library.AttentionPlan(spans, [table], index.write_pages, index.write_offsets)
            out = torch.empty(num_rows, heads, latent)
            keys = pages[table].view(1, 1, context, width)
            values = keys[..., :latent]
            # Heads folded into rows, as all of them read the same latents. Not causal: a chunk behind a
            # prefix would need a mask, which is slower still.
            folded = query.to(dtype).view(1, 1, num_rows * heads, width)
            times = compare(
                repetitions,
                native=lambda q=query, p=pages, plan=plan, out=out: library.attend(
                    q, p, plan, latent, 0.07, out
                ),
                sdpa=lambda q=folded, k=keys, v=values: F.scaled_dot_product_attention(q, k, v, scale=0.07),
                reference=lambda q=query, p=pages, index=index: reference.latent_attention(
                    q, p, index, value_width=latent, scale=0.07
                ),
            )
            read = context * width * dtype.itemsize
            rows.append(
                {
                    "shape": f"{dtype_name}, context {context}",
                    "rows": num_rows,
                    **times,
                    "read_gbs": read / times["native"] / 1e9 if num_rows == 1 else None,
                }
            )
    return rows


class Runner:
    """Drives a worker by hand: no scheduler, no cache, every request in its own slot."""

    def __init__(
        self, directory: Path, implementation: str, quantization: str | None, context: int, batch: int
    ) -> None:
        self.model = load_model(directory, kernels=select_kernels(implementation), quantization=quantization)
        self._geometry = self.model.geometry(MATCH_UNIT)
        pages = batch * (context // MATCH_UNIT + 2)
        sizes = [pages * size for size in self._geometry.page_record_bytes]
        sizes += [(batch + 1) * size for size in self._geometry.state_record_bytes]
        self._worker = TorchWorker(self.model, self._geometry, max(sizes))
        self._positions: dict[int, int] = {}
        self._next_page = 0
        self._step = 0

    def run(self, requests: list[int], count: int, *, sample: bool) -> None:
        """One step over `count` tokens of each request."""
        self._step += 1
        plan = StepPlan(self._step, [])
        attention, recurrent = self._geometry.num_attention_groups, self._geometry.num_recurrent_groups
        for request in requests:
            start = self._positions.get(request, 0)
            if start == 0:
                sampling = SamplingParams(temperature=0.0)
                plan.started.append(WorkerRequest(request, sampling, 0, b"", [[] for _ in range(attention)]))
            needed = -(-(start + count) // MATCH_UNIT) - -(-start // MATCH_UNIT)
            pages = list(range(self._next_page, self._next_page + needed))
            self._next_page += needed
            tokens = array("I", ((7919 * place + request) % self.model.vocab_size for place in range(count)))
            plan.chunks.append(
                ChunkPlan(
                    request_id=request,
                    start=start,
                    end=start + count,
                    tokens=tokens.tobytes(),
                    new_pages=[pages] * attention,
                    replaced_pages=[],
                    initial_slots=[request if start else ZERO_STATE] * recurrent,
                    running_slots=[request] * recurrent,
                    exports=[],
                    num_samples=int(sample),
                    output_position=0,
                )
            )
            self._positions[request] = start + count
        self._worker.execute(plan)

    def close(self) -> None:
        self._worker.close()


def measure_model(directory: Path, prompt_tokens: int, steps: int) -> list[Row]:
    """Prefill in steps of 512 rows, then decode steps of one and of eight sequences, in turns."""
    variants: list[tuple[str, str | None]] = [("native", None), ("reference", None)]
    if native_library().has_coded_weights:
        variants[1:1] = [("native", name) for name in QUANTIZATIONS]
    runners = {variant: Runner(directory, *variant, prompt_tokens + 3 * steps, 9) for variant in variants}
    prefill, decode = {}, {(variant, batch): float("inf") for variant in variants for batch in (1, 8)}
    for variant, runner in runners.items():
        runner.run([8], 16, sample=True)
        start = time.process_time()
        for _ in range(prompt_tokens // STEP_ROWS):
            runner.run([0], STEP_ROWS, sample=False)
        prefill[variant] = (time.process_time() - start) / (prompt_tokens // STEP_ROWS * STEP_ROWS)
        runner.run(list(range(1, 8)), 64, sample=False)
    for batch in (1, 8):
        for _ in range(steps):
            for variant, runner in runners.items():
                start = time.process_time()
                runner.run(list(range(batch)), 1, sample=True)
                took = time.process_time() - start
                decode[variant, batch] = min(decode[variant, batch], took)
    rows = []
    for variant, runner in runners.items():
        one, eight = decode[variant, 1], decode[variant, 8]
        rows.append(
            {
                "kernels": " ".join(part for part in variant if part),
                "prefill_tokens_per_s": 1 / prefill[variant],
                "decode_ms": one * 1e3,
                "decode_8_ms": eight * 1e3,
                "batch_gain": 8 * one / eight,
                "speedup": decode[variants[0], 1] / one,
                "bytes_per_step": decode_step_bytes(runner.model.config, runner.model.describe()),
            }
        )
        runner.close()
    return rows


def decode_step_bytes(spec: DecoderSpec, description: ModelDescription, context: int = 0) -> int:
    """What a decode step of one sequence must move at least.

    Weights without the embedding table, running states read and written, and the KV of `context` tokens.
    """
    item = DTYPES[description.dtype].itemsize
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    weights = (description.num_parameters - embedding) * item - description.quantized_bytes_saved
    return weights + 2 * description.state_bytes + context * description.bytes_per_token


def report(results: dict[str, list[Row]], bandwidth: float) -> None:
    print_table(
        "Linear, microseconds",
        ["weights", "rows", "native", "F.linear", "ratio", "native GFLOP/s"],
        [
            [
                r["shape"],
                r["rows"],
                r["native"] * 1e6,
                r["torch"] * 1e6,
                r["torch"] / r["native"],
                r["native_gflops"],
            ]
            for r in results["linear"]
        ],
    )
    print_table(
        "KDA mixer, 8 heads of 128, bf16, microseconds",
        ["sequences x tokens", "native", "reference", "ratio", "tokens/s"],
        [
            [
                r["rows"],
                r["native"] * 1e6,
                r["reference"] * 1e6,
                r["reference"] / r["native"],
                r["tokens_per_s"],
            ]
            for r in results["kda"]
        ],
    )
    print_table(
        "Absorbed MLA attention, 8 heads, latent 512 + 64, microseconds",
        ["latents", "rows", "native", "SDPA", "ratio", "reference", "ratio", "GB/s"],
        [
            [
                r["shape"],
                r["rows"],
                r["native"] * 1e6,
                r["sdpa"] * 1e6,
                r["sdpa"] / r["native"],
                r["reference"] * 1e6,
                r["reference"] / r["native"],
                r["read_gbs"],
            ]
            for r in results["attention"]
        ],
    )
    report_sections(results)
    for name, rows in results.items():
        if not name.startswith("model "):
            continue
        print_table(
            f"{name}: bf16 and quantised weights; floors at {bandwidth / 1e9:.1f} GB/s",
            ["kernels", "prefill tokens/s", "decode ms", "floor ms", "of 8, ms", "8 over 1", "over bf16"],
            [
                [
                    r["kernels"],
                    r["prefill_tokens_per_s"],
                    r["decode_ms"],
                    r["bytes_per_step"] / bandwidth * 1e3,
                    r["decode_8_ms"],
                    r["batch_gain"],
                    r["speedup"],
                ]
                for r in rows
            ],
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", default=[], help="model directories")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30, help="decode steps of a model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only-models", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "kernels.json")
    options = parser.parse_args()
    library = native_library()
    if library.module is None:
        print(library.reason, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    library.module.set_num_threads(1)
    calibration = calibration_ms()
    print_machine(calibration)
    console.print(library.reason, highlight=False)
    bandwidth = read_bandwidth()
    results: dict[str, list[Row]] = {"linear": [], "kda": [], "attention": []}
    with torch.inference_mode():
        if not options.only_models:
            results["linear"] = measure_linear(options.repetitions)
            results["kda"] = measure_kda(options.repetitions)
            results["attention"] = measure_attention(options.repetitions)
            results["gqa"] = measure_gqa(compare, options.repetitions)
            results["gdn"] = measure_gdn(compare, options.repetitions, recurrent_index)
            if native_library().has_coded_weights:
                results["coded"] = measure_coded(compare, options.repetitions)
            if native_library().samples:
                results["sampling"] = measure_sampling(compare, options.repetitions)
    for directory in options.model:
        results[f"model {directory.name}"] = measure_model(directory, options.prompt_tokens, options.steps)
    report(results, bandwidth)
    write_json(options.json, "kernels", calibration, {"read_bytes_per_s": bandwidth, **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
