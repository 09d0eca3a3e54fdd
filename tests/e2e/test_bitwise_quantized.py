"""Promise P2 with weights of few bits: the cases of `test_bitwise`, over int8 and int4."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.test_bitwise import EMBEDDED, FACTORS, TINY, UNIT, check, library, settings
from tests.support.driver import Driver
from tests.support.families import LAYOUTS, Shelf
from tests.support.pairwise import pairwise, random_rows, row_id

from milepost.kernels.native_library import native_library
from milepost.models import load_model
from milepost.models.quantization import QUANTIZATIONS

if library is None or not native_library().has_coded_weights:
    pytest.skip("the native library is older than weights of few bits", allow_module_level=True)

__all__ = ["settings"]

ALL_FACTORS: dict[str, list[Any]] = {
    "quantization": list(QUANTIZATIONS),
    "model": [TINY, *sorted(LAYOUTS)],
    **FACTORS,
    "hit": [16, 128, 256, 288],
    "rest_chunk": [1, 3, 33, 512],
}
CASES = pairwise(ALL_FACTORS)


@pytest.fixture(scope="module")
def drivers(shelf: Shelf) -> Iterator[Callable[[dict[str, Any]], Driver]]:
    made: dict[tuple[str, str, str], Driver] = {}

    def driver_of(case: dict[str, Any]) -> Driver:
        name, dtype, quantization = key = case["model"], case["dtype"], case["quantization"]
        if key not in made:
            directory = EMBEDDED if name == TINY else shelf.directory(name, dtype=dtype)
            model = load_model(directory, dtype=dtype, quantization=quantization)
            made[key] = Driver(model, match_unit=UNIT, cache_bytes=24 << 20)
            made[key].poison()
        return made[key]

    yield driver_of
    for driver in made.values():
        driver.worker.close()


def check_case(driver: Driver, case: dict[str, Any], seed: int) -> None:
    # Cold results are kept by the name of the model.
    check(driver, {**case, "model": f"{case['model']}+{case['quantization']}"}, seed)


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_a_hit_gives_the_bits_of_a_cold_run(
    drivers: Callable[[dict[str, Any]], Driver], case: dict[str, Any]
) -> None:
    check_case(drivers(case), case, seed=1)


def test_the_covering_array_is_small_and_spans_every_value() -> None:
    assert len(CASES) <= 60
    for name, values in ALL_FACTORS.items():
        assert {case[name] for case in CASES} == set(values)


@pytest.mark.slow
def test_a_random_remainder(drivers: Callable[[dict[str, Any]], Driver]) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    for number, case in enumerate(random_rows(ALL_FACTORS, random.Random(seed), 120)):
        try:
            check_case(drivers(case), case, seed=2 + number % 3)
        except AssertionError:
            raise AssertionError(f"seed {seed}, case {row_id(case)}") from None
