"""Sections of bench/kernels.py: weights of few bits, grouped-query attention, Gated DeltaNet, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import print_table

from milepost.core.plan import SamplingParams
from milepost.kernels import reference_gdn, reference_gqa
from milepost.kernels.api import select_kernels
from milepost.kernels.index import AttentionIndex, RecurrentIndex, RowSpan
from milepost.kernels.native_library import native_library
from milepost.kernels.reference_coded import quantized
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.kernels.reference_gqa import GqaInputs, GqaParams, inverse_frequencies
from milepost.models.quantization import QUANTIZATIONS, quantization_of
from milepost.runner.sampler import SamplingRow, sample_checked

MATCH_UNIT = 32
STEP_ROWS = 512
CODED_ROWS = (1, 2, 8, 64, STEP_ROWS)
WEIGHT_SET_BYTES = 96 << 20
"""Few rows run over so many bytes of bf16 weights: more than caches hold, as a decode step does."""

Row = dict[str, Any]
Compare = Callable[..., dict[str, float]]


def measure_coded(compare: Compare, repetitions: int) -> list[Row]:
    """Products with bf16 rows: bf16, int8, int4 and MXFP4 weights, a set of weights per call."""
    library = native_library().module
    rows = []
    for out_features, in_features in ((2048, 768), (4096, 4096)):
        copies = max(2, WEIGHT_SET_BYTES // (2 * out_features * in_features))
        source = torch.randn(out_features, in_features).bfloat16()
        packed: dict[str, list[Any]] = {"bf16": [library.pack(source) for _ in range(copies)]}
        for name in QUANTIZATIONS:
            found = quantization_of(name)
            scheme = None if found is None else found.scheme("projection")
            assert scheme is not None
            coded = quantized(source, scheme)
            packed[name] = [
                library.pack_integers(coded.codes, coded.scales, scheme.bits, scheme.group)
                for _ in range(copies)
            ]
        nibbles = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
        exponents = torch.randint(118, 124, (out_features, in_features // 32), dtype=torch.uint8)
        packed["mxfp4"] = [library.pack_mxfp4(nibbles, exponents) for _ in range(copies)]
        for num_rows in CODED_ROWS:
            x = torch.randn(num_rows, in_features).bfloat16()
            out = torch.empty(num_rows, out_features, dtype=torch.bfloat16)
            used = copies if num_rows <= 8 else 2
            times = compare(
                repetitions,
                **{
                    name: lambda weights=weights[:used], x=x, out=out: [
                        library.linear(x, weight, out) for weight in weights
                    ]
                    for name, weights in packed.items()
                },
            )
            rows.append(
                {
                    "shape": f"{out_features}x{in_features}",
                    "rows": num_rows,
                    **{name: time / used for name, time in times.items()},
                    "int4_read_gbs": packed["int4"][0].num_bytes / (times["int4"] / used) / 1e9,
                }
            )
    return rows


def measure_gqa(compare: Compare, repetitions: int) -> list[Row]:
    """8 query and 2 key-value heads of 128 with norms, rotary positions and gate, against SDPA alone."""
    operations = select_kernels("native")
    heads, kv_heads, dim = 8, 2, 128
    params = GqaParams(
        heads, kv_heads, dim, torch.ones(dim), torch.ones(dim), 1e-6, inverse_frequencies(dim // 4, 1e6)
    )
    rows = []
    for num_rows, context in ((1, 1024), (1, 8192), (1, 32768), (STEP_ROWS, 1024), (STEP_ROWS, 8192)):
        num_pages = context // MATCH_UNIT
        pages = torch.randn(num_pages, MATCH_UNIT, kv_heads * 2 * dim).bfloat16()
        position = context - num_rows
        table = torch.randperm(num_pages)
        places = torch.arange(position, context)
        index = AttentionIndex(
            (RowSpan(0, num_rows, position),), (table,), table[places // MATCH_UNIT], places % MATCH_UNIT
        )
        inputs = GqaInputs(
            *(
                torch.randn(num_rows, width).bfloat16()
                for width in (2 * heads * dim, kv_heads * dim, kv_heads * dim)
            )
        )
        query = torch.randn(1, heads, num_rows, dim).bfloat16()
        keys, values = (torch.randn(1, kv_heads, context, dim).bfloat16() for _ in range(2))
        # SDPA's causal flag would align a chunk with the start of the keys; its mask is slower still.
        causal = num_rows == context
        times = compare(
            repetitions,
            native=lambda i=inputs, p=pages, x=index: operations.gqa_mixer(i, params, p, x),
            sdpa=lambda q=query, k=keys, v=values, c=causal: F.scaled_dot_product_attention(
                q, k, v, is_causal=c, enable_gqa=True
            ),
            reference=lambda i=inputs, p=pages, x=index: reference_gqa.gqa_mixer(i, params, p, x),
        )
        read = context * 2 * kv_heads * dim * 2
        rows.append(
            {
                "shape": f"context {context}",
                "rows": num_rows,
                **times,
                "read_gbs": read / times["native"] / 1e9 if num_rows == 1 else None,
            }
        )
    return rows


def measure_gdn(
    compare: Compare, repetitions: int, recurrent_index: Callable[[list[int]], RecurrentIndex]
) -> list[Row]:
    """4 key and 8 value heads of 128, as the reference model of docs/performance.md has them."""
    operations = select_kernels("native")
    key_heads, heads, dim = 4, 8, 128
    channels = 2 * key_heads * dim + heads * dim
    params = GdnParams(
        key_heads,
        heads,
        dim,
        dim,
        torch.randn(4, channels) * 0.4,
        torch.randn(heads) * 0.8,
        torch.randn(heads) - 2.0,
        torch.ones(dim),
        1e-6,
    )
    rows = []
    for lengths in ([STEP_ROWS], [1], [1] * 8, [64] * 8):
        count = sum(lengths)
        inputs = GdnInputs(
            *(torch.randn(count, width).bfloat16() for width in (channels, heads * dim, heads, heads))
        )
        tails = torch.randn(len(lengths), 3, channels).bfloat16()
        states = torch.randn(len(lengths), heads, dim, dim) * 0.1
        arguments = (inputs, params, tails, states, recurrent_index(lengths))
        times = compare(
            repetitions,
            native=lambda arguments=arguments: operations.gdn_mixer(*arguments),
            reference=lambda arguments=arguments: reference_gdn.gdn_mixer(*arguments),
        )
        rows.append(
            {"rows": f"{len(lengths)} x {lengths[0]}", **times, "tokens_per_s": count / times["native"]}
        )
    return rows


def measure_sampling(compare: Compare, repetitions: int) -> list[Row]:
    """One row of logits to a token, with the check that it is finite; normal logits leave wide nuclei."""
    native = select_kernels("native").sampling
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.7},
        "temperature, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
        "temperature, top-p 0.95, top-k 20": {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
        "greedy, 5 log-probabilities": {"temperature": 0.0, "num_logprobs": 5},
    }
    rows = []
    for vocab_size in (163_840, 248_320):
        logits = 3.0 * torch.randn(1, vocab_size)
        for name, options in ways.items():
            row = [SamplingRow(SamplingParams(seed=1, **options), 0)]
            times = compare(
                repetitions,
                native=lambda logits=logits, row=row: sample_checked(logits, row, native),
                reference=lambda logits=logits, row=row: sample_checked(logits, row),
            )
            rows.append({"vocab_size": vocab_size, "rule": name, **times})
    return rows


def report_sections(results: dict[str, list[Row]]) -> None:
    """Tables of the sections that were measured."""
    names = ["int8", "int4", "mxfp4"]
    if results.get("coded"):
        print_table(
            "Linear with bf16 rows: microseconds with bf16 weights, and how much faster coded ones are",
            ["weights", "rows", "bf16", *names, "int4 GB/s"],
            [
                [
                    r["shape"],
                    r["rows"],
                    r["bf16"] * 1e6,
                    *(r["bf16"] / r[name] for name in names),
                    r["int4_read_gbs"],
                ]
                for r in results["coded"]
            ],
        )
    if results.get("gqa"):
        print_table(
            "Grouped-query attention, 8 and 2 heads of 128, bf16, microseconds",
            ["keys", "rows", "native", "SDPA alone", "ratio", "reference", "ratio", "GB/s"],
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
                for r in results["gqa"]
            ],
        )
    if results.get("gdn"):
        print_table(
            "GDN mixer, 4 key and 8 value heads of 128, bf16, microseconds",
            ["sequences x tokens", "native", "reference", "ratio", "tokens/s"],
            [
                [
                    r["rows"],
                    r["native"] * 1e6,
                    r["reference"] * 1e6,
                    r["reference"] / r["native"],
                    r["tokens_per_s"],
                ]
                for r in results["gdn"]
            ],
        )
    if results.get("sampling"):
        print_table(
            "Sampling, one row, microseconds",
            ["vocabulary", "rule", "native", "reference", "ratio"],
            [
                [
                    r["vocab_size"],
                    r["rule"],
                    r["native"] * 1e6,
                    r["reference"] * 1e6,
                    r["reference"] / r["native"],
                ]
                for r in results["sampling"]
            ],
        )
