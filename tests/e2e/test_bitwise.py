"""Promise P2 with the native kernels: a hit gives the bits of a cold run, in every family of models.

A case prefills a prompt in chunks of one size, beside other requests, exports a state inside a chunk,
moves it, starts a second request from it and computes the rest in chunks of another size. Every row of
logits must equal, bit for bit, the row of one cold pass over the whole prompt with one thread, in the
widest instruction set that has the same numerics.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.driver import Driver, TrackedRequest, random_tokens
from tests.support.families import FAMILIES, LAYOUTS, Shelf
from tests.support.pairwise import pairwise, random_rows, row_id

from milepost.kernels.api import select_kernels
from milepost.kernels.native_library import native_library
from milepost.models import LoadedModel, load_model
from milepost.models.layout import CONV_TAIL_FIELD, KEY_VALUE_FIELD, LATENT_FIELD, STATE_MATRIX_FIELD

library = native_library().module
if library is None:
    pytest.skip(f"no native kernels: {native_library().reason}", allow_module_level=True)

EMBEDDED = Path(str(resources.files("milepost"))) / "assets" / "milepost-tiny"
UNIT = 16
NUM_TOKENS = 290
"""Longer than one attention tile of 256 keys and than four recurrence blocks of 64 tokens."""
NUM_SLOTS = 24
FACTORS: dict[str, list[Any]] = {
    "dtype": ["float32", "bfloat16"],
    "isa": library.available_isas(),
    "threads": [1, 2],
    "hit": [16, 48, 112, 128, 240, 256, 272, 288],
    "first_chunk": [7, 64, 200, 512],
    "rest_chunk": [1, 3, 16, 33, 100, 512],
    "neighbours": ["none", "decodes", "prefills", "both"],
    "state": ["in_place", "copied", "restored"],
}
EXPANDED = ["kimi_linear, prompt"] if native_library().expands_latents else []
"""Families with the exactness mode in which prompts are computed over expanded latents."""
MODELS = [*sorted(LAYOUTS), *EXPANDED]
FAMILY_FACTORS: dict[str, list[Any]] = {"model": MODELS, **FACTORS}
TINY = "milepost-tiny"
CASES = [{"model": TINY, **case} for case in pairwise(FACTORS)]
FAMILY_CASES = pairwise(FAMILY_FACTORS)
"""Fewer of each family: of two settings, every pair of values; of three, not every triple."""

Drivers = Callable[[dict[str, Any]], Driver]


def loaded(shelf: Shelf, name: str, dtype: str) -> LoadedModel:
    if name == TINY:
        return load_model(EMBEDDED, dtype=dtype)
    family, _, exactness = name.partition(", ")
    if not exactness:
        return shelf.model(family, dtype=dtype)
    kernels = select_kernels("native", exactness=exactness)
    return load_model(shelf.directory(family, dtype=dtype), kernels=kernels)


Fault = Callable[[Driver, int, list[int]], None]
"""Spoils the state in a slot, or pages, before a hit reads them."""


@pytest.fixture(scope="module")
def drivers(shelf: Shelf) -> Iterator[Drivers]:
    made: dict[tuple[str, str], Driver] = {}

    def driver_of(case: dict[str, Any]) -> Driver:
        name, dtype = key = case["model"], case["dtype"]
        if key not in made:
            made[key] = Driver(loaded(shelf, name, dtype), match_unit=UNIT, cache_bytes=24 << 20)
            made[key].poison()
        return made[key]

    yield driver_of
    for driver in made.values():
        driver.worker.close()


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    isa, threads = library.isa(), library.num_threads()
    yield
    library.set_isa(isa)
    library.set_num_threads(threads)


class Neighbours:
    """Other requests in the same steps: some decode, some prefill odd numbers of tokens."""

    def __init__(self, driver: Driver, kind: str, seed: int) -> None:
        vocab = driver.model.vocab_size
        self._rng = random.Random(seed)
        self._decodes, self._prefills = [], []
        if kind in ("decodes", "both"):
            self._decodes = [driver.sequence(random_tokens(900, vocab, seed + i), 10 + i) for i in range(5)]
        if kind in ("prefills", "both"):
            self._prefills = [driver.sequence(random_tokens(900, vocab, seed - i), 16 + i) for i in range(2)]

    def parts(self) -> tuple[list[tuple[TrackedRequest, int]], list[tuple[TrackedRequest, int]]]:
        """What runs before and behind the request under test in one step."""
        decodes = [(request, 1) for request in self._decodes if request.num_processed < 900]
        prefills = [
            (request, min(count, 900 - request.num_processed))
            for request in self._prefills
            for count in (self._rng.choice((2, 13, 19)),)
            if request.num_processed < 900
        ]
        return decodes, prefills


def run_chunks(
    driver: Driver,
    request: TrackedRequest,
    chunk: int,
    neighbours: Neighbours,
    exports: list[tuple[int, int]],
) -> torch.Tensor:
    """Processes the rest of a request; its logits, [tokens, vocabulary]."""
    rows = []
    while request.num_processed < len(request.tokens):
        start = request.num_processed
        count = min(chunk, len(request.tokens) - start)
        before, behind = neighbours.parts()
        wanted = [(p, slot) for p, slot in exports if start < p <= start + count]
        plan = driver.plan(
            *before, (request, count), *behind, exports={request.request_id: wanted}, sample=False
        )
        first = sum(n for _, n in before)
        rows.append(driver.logits(plan)[first : first + count])
    return torch.cat(rows)


def _numerics(isa: str) -> str:
    library.set_isa(isa)
    return str(library.numerics_id())


WIDEST = {_numerics(isa): isa for isa in library.available_isas()}
"""Numerics id -> the last, widest instruction set with it."""

_cold: dict[tuple[str, str, str, int], torch.Tensor] = {}


def cold_logits(driver: Driver, case: dict[str, Any], seed: int) -> torch.Tensor:
    """All rows of one pass over the prompt, in the widest instruction set with the case's numerics."""
    numerics = _numerics(case["isa"])
    key = (case["model"], case["dtype"], numerics, seed)
    if key not in _cold:
        library.set_isa(WIDEST[numerics])
        library.set_num_threads(1)
        request = driver.sequence(random_tokens(NUM_TOKENS, driver.model.vocab_size, seed), 0)
        _cold[key] = driver.logits(driver.plan((request, NUM_TOKENS), sample=False))
        driver.recycle()
    return _cold[key]


def check(driver: Driver, case: dict[str, Any], seed: int, fault: Fault | None = None) -> None:
    expected = cold_logits(driver, case, seed)
    library.set_isa(case["isa"])
    library.set_num_threads(case["threads"])
    tokens = random_tokens(NUM_TOKENS, driver.model.vocab_size, seed)
    hit = case["hit"]

    first = driver.sequence(tokens, 0)
    exports = [(p, slot) for slot, p in enumerate(sorted({5, 64, hit - 1, hit, hit + 2} - {0}), start=1)]
    exports = [(p, slot) for p, slot in exports if p <= NUM_TOKENS]
    checkpoint = next(slot for p, slot in exports if p == hit)
    logits = run_chunks(
        driver, first, case["first_chunk"], Neighbours(driver, case["neighbours"], 50), exports
    )
    assert torch.equal(logits, expected)

    start_slot, running_slot = checkpoint, 7
    pool = driver.worker.pools.checkpoint_pool(0)
    if case["state"] == "in_place":
        running_slot = checkpoint
    elif case["state"] == "copied":
        start_slot = running_slot = 8
        pool.copy([checkpoint], [8])
    else:
        records = pool._bytes.view(pool.num_records, pool.record_bytes)
        stored = records[checkpoint].numpy().tobytes()
        records[checkpoint].fill_(255)
        records[9] = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
        start_slot = 9
    if fault is not None:
        fault(driver, start_slot, first.pages)
    second = driver.sequence(
        tokens, running_slot, start_slot=start_slot, pages=first.pages[: hit // UNIT], num_processed=hit
    )
    rest = run_chunks(driver, second, case["rest_chunk"], Neighbours(driver, case["neighbours"], 70), [])
    assert torch.equal(rest, expected[hit:])
    driver.recycle()


@pytest.mark.parametrize("case", CASES + FAMILY_CASES, ids=row_id)
def test_a_hit_gives_the_bits_of_a_cold_run(drivers: Drivers, case: dict[str, Any]) -> None:
    check(drivers(case), case, seed=1)


def test_the_covering_arrays_are_small_and_span_every_value() -> None:
    assert len(CASES) + len(FAMILY_CASES) <= 400
    for factors, cases in ((FACTORS, CASES), (FAMILY_FACTORS, FAMILY_CASES)):
        for name, values in factors.items():
            assert {case[name] for case in cases} == set(values)


@pytest.mark.slow
@pytest.mark.parametrize("model", [TINY, *MODELS])
def test_a_random_remainder(drivers: Drivers, model: str) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    num_rows = 60 if model == TINY else 20
    for number, row in enumerate(random_rows(FACTORS, random.Random(seed), num_rows)):
        case = {"model": model, **row}
        try:
            check(drivers(case), case, seed=2 + number % 3)
        except AssertionError:
            raise AssertionError(f"seed {seed}, case {row_id(case)}") from None


@pytest.mark.parametrize("name", [TINY, *sorted(FAMILIES)])
def test_the_comparison_would_see_a_difference(name: str, shelf: Shelf) -> None:
    """The plain-torch reference, cut the same way, does not give the same bits: the test can fail.

    In bf16 small sums can come out equal by luck, so the small families are cut in fp32.
    """
    if name == TINY:
        model = load_model(EMBEDDED, dtype="bfloat16", kernels=select_kernels("reference"))
    else:
        model = shelf.model(name, implementation="reference")
    driver = Driver(model, match_unit=UNIT, cache_bytes=24 << 20)
    tokens = random_tokens(NUM_TOKENS, model.vocab_size, 1)
    whole = driver.logits(driver.plan((driver.sequence(tokens, 0), NUM_TOKENS), sample=False))
    cut = run_chunks(driver, driver.sequence(tokens, 0), 33, Neighbours(driver, "none", 0), [])
    assert not torch.equal(whole, cut)
    assert float((whole - cut).abs().max()) < (1.0 if name == TINY else 1e-3)


def flip_bit(view: torch.Tensor, record: int) -> None:
    """Another value in the middle of a record: one bit of its fraction."""
    wanted = {torch.float32: (torch.int32, 1 << 20), torch.bfloat16: (torch.int16, 1 << 5)}[view.dtype]
    values = view[record].view(wanted[0])
    at = tuple(size // 2 for size in values.shape)
    values[at] = values[at] ^ wanted[1]


def flip_in(*names: str) -> Fault:
    def fault(driver: Driver, slot: int, pages: list[int]) -> None:
        fields = driver.worker.pools.fields
        key = min(key for key in fields if key[1] in names)
        flip_bit(fields[key], pages[2] if names == ATTENTION_FIELDS else slot)

    return fault


ATTENTION_FIELDS = (LATENT_FIELD, KEY_VALUE_FIELD)
FAULTS = {
    "state": flip_in(STATE_MATRIX_FIELD),
    "tail": flip_in(CONV_TAIL_FIELD),
    "page": flip_in(*ATTENTION_FIELDS),
}
SIMPLE_CASE = {name: values[0] for name, values in FACTORS.items()} | {
    "hit": 128, "first_chunk": 200, "rest_chunk": 100, "isa": library.available_isas()[-1],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", sorted(FAULTS))
@pytest.mark.parametrize("model", [TINY, *sorted(FAMILIES)])
def test_one_wrong_bit_is_noticed(drivers: Drivers, model: str, where: str, dtype: str) -> None:
    case = SIMPLE_CASE | {"model": model, "dtype": dtype}
    driver = drivers(case)
    check(driver, case, seed=1)
    with pytest.raises(AssertionError):
        check(driver, case, 1, FAULTS[where])
    driver.recycle()


@pytest.mark.parametrize("num_rows", [1, 3, 33])
def test_a_kernel_that_rounds_some_row_counts_differently_is_noticed(shelf: Shelf, num_rows: int) -> None:
    good = select_kernels("native")

    def linear(x: torch.Tensor, weight: Any, **options: Any) -> torch.Tensor:
        result = good.linear(x, weight, **options)
        if x.shape[0] == num_rows:
            result[-1, 0] = torch.nextafter(result[-1, 0], torch.tensor(float("inf")))
        return result

    model = load_model(shelf.directory("kimi_linear"), kernels=dataclasses.replace(good, linear=linear))
    case = SIMPLE_CASE | {"model": "kimi_linear with a fault", "rest_chunk": num_rows}
    with pytest.raises(AssertionError):
        check(Driver(model, match_unit=UNIT, cache_bytes=24 << 20), case, seed=1)
