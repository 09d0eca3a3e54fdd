"""Native norms, page writes, experts and embeddings, and how the library is found."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index
from tests.kernels.native_support import (
    DTYPES,
    FUSED,
    ISAS,
    NAN,
    library,
    randn,
    same_bits,
    shifted,
    strided,
    using,
)

from milepost.errors import ConfigError
from milepost.kernels import native_library as finding
from milepost.kernels import reference_layers
from milepost.kernels.api import select_kernels
from milepost.kernels.arguments import MoeParams


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else 2**-7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 37, 192])
def test_rms_norm(isa: str, dtype: torch.dtype, width: int) -> None:
    x, weight = randn(35, width, seed=1, dtype=dtype), randn(width, seed=2)
    x[3] = 0.0
    x[4] *= 1e-20
    expected = reference_layers.rms_norm(x, weight, 1e-5)
    with using(isa) as ops:
        whole = ops.rms_norm(x, weight, 1e-5).clone()
        assert_close(whole, expected, tolerance(dtype))
        for row in (0, 3, 4, 34):
            assert same_bits(ops.rms_norm(x[row : row + 1].clone(), weight, 1e-5), whole[row : row + 1])
        assert same_bits(ops.rms_norm(strided(x), weight, 1e-5), whole)
        assert same_bits(ops.rms_norm(shifted(x), weight, 1e-5), whole)
        assert ops.rms_norm(x[:0], weight, 1e-5).shape == (0, width)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [0, 5])
def test_store_latents(isa: str, dtype: torch.dtype, shared: int) -> None:
    index = attention_index([20, 3], [4, 0], [[5, 0], [3]], 16)
    x, weight = strided(randn(23, 18 + shared, seed=1, dtype=dtype)), randn(18, seed=2)
    expected = torch.full((6, 16, 18 + shared), NAN, dtype=dtype)
    ours = expected.clone()
    reference_layers.store_latents(x, weight, 1e-6, expected, index)
    with using(isa) as ops:
        ops.store_latents(x, weight, 1e-6, ours, index)
    written = ~torch.isnan(expected.float())
    assert torch.equal(written, ~torch.isnan(ours.float()))
    assert int(written.sum()) == 23 * (18 + shared)
    assert_close(ours[written], expected[written], tolerance(dtype))
    assert same_bits(ours[..., 18:][written[..., 18:]], expected[..., 18:][written[..., 18:]])


def experts(
    dtype: torch.dtype, count: int = 5, width: int = 20, inner: int = 7
) -> list[tuple[torch.Tensor, ...]]:
    return [
        (
            randn(inner, width, seed=e, dtype=dtype),
            randn(inner, width, seed=e + 50, dtype=dtype),
            randn(width, inner, seed=e + 90, dtype=dtype),
        )
        for e in range(count)
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [1, 2, 5])
@pytest.mark.parametrize("with_shared", [False, True])
def test_experts(isa: str, dtype: torch.dtype, per_token: int, with_shared: bool) -> None:
    x, residual = randn(30, 20, seed=1, dtype=dtype), randn(30, 20, seed=2, dtype=dtype)
    logits, bias = randn(30, 5, seed=3), 0.2 * randn(5, seed=4)
    shared = randn(30, 20, seed=5, dtype=dtype) if with_shared else None
    weights = experts(dtype)

    def params(packed: object) -> MoeParams:
        return MoeParams(bias, per_token, per_token > 1, 2.4, packed)

    expected = reference_layers.moe(
        x, logits, params(reference_layers.pack_experts(weights)), shared=shared, residual=residual
    )
    with using(isa) as ops:
        native = params(ops.pack_experts(weights))

        def run(rows: slice) -> torch.Tensor:
            part = None if shared is None else shared[rows]
            return ops.moe(x[rows], logits[rows], native, shared=part, residual=residual[rows].clone())

        whole = run(slice(0, 30))
        assert_close(whole, expected, 4e-6 if dtype == torch.float32 else 2**-6)
        for rows in (slice(0, 1), slice(29, 30), slice(4, 17)):
            assert same_bits(run(rows), whole[rows])
        assert run(slice(0, 0)).shape == (0, 20)
        # A row that is not finite stays alone.
        x[7] = NAN
        logits[7] = NAN
        broken = run(slice(0, 30))
        others = [row for row in range(30) if row != 7]
        assert same_bits(broken[others], whole[others])
        assert torch.isnan(broken[7].float()).all()


def test_equal_router_scores_choose_the_lowest_experts() -> None:
    weights = experts(torch.float32)
    x, logits = randn(1, 20), torch.zeros(1, 5)
    with using(ISAS[-1]) as ops:
        packed = ops.pack_experts(weights)
        tied = ops.moe(
            x,
            logits,
            MoeParams(torch.zeros(5), 2, True, 1.0, packed),
            shared=None,
            residual=torch.zeros(1, 20),
        )
        favoured = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
        lowest = ops.moe(
            x, logits, MoeParams(favoured, 2, True, 1.0, packed), shared=None, residual=torch.zeros(1, 20)
        )
    assert same_bits(tied, lowest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_instruction_sets_agree(dtype: torch.dtype) -> None:
    x, weight, logits = randn(30, 20, dtype=dtype), randn(20, seed=1), 3 * randn(30, 5, seed=2)
    norms, mixed = [], []
    for isa in FUSED:
        with using(isa) as ops:
            norms.append(ops.rms_norm(x, weight, 1e-5).clone())
            params = MoeParams(torch.zeros(5), 2, True, 1.0, ops.pack_experts(experts(dtype)))
            mixed.append(ops.moe(x, logits, params, shared=None, residual=x.clone()))
    assert all(same_bits(norm, norms[0]) for norm in norms)
    assert all(same_bits(result, mixed[0]) for result in mixed)


def test_embedding() -> None:
    table = randn(9, 12, dtype=torch.bfloat16)
    ids = torch.tensor([8, 0, 8, 3])
    with using(ISAS[-1]) as ops:
        assert same_bits(ops.embedding(ids, table), table[ids])
        with pytest.raises(ValueError, match="ids: id 9 is outside of 9 rows"):
            ops.embedding(torch.tensor([9]), table)
        with pytest.raises(ValueError, match="ids: id -1"):
            ops.embedding(torch.tensor([-1]), table)


def test_results_of_one_name_share_memory_and_grow() -> None:
    with using(ISAS[-1]) as ops:
        weight = randn(6, 4)
        named, unnamed = ops.pack_linear(weight, name="a", parts=(2, 4)), ops.pack_linear(weight)
        small, large = randn(2, 4, seed=1), randn(300, 4, seed=2)
        first, second = ops.linear_parts(small, named)
        assert (first.shape, second.shape) == ((2, 2), (2, 4))
        kept = ops.linear(small, unnamed)
        assert same_bits(torch.cat([first, second], dim=1), kept)
        assert ops.linear(large, named).shape == (300, 6)
        again = ops.linear(small, named)
        assert same_bits(again, kept)
        assert ops.linear(small, named).data_ptr() == again.data_ptr()
        assert ops.linear(small, unnamed).data_ptr() != kept.data_ptr()


def test_places_of_results() -> None:
    with using(ISAS[-1]) as ops:
        weight = ops.pack_linear(randn(6, 4), name="a", parts=(2, 4))
        x, residual = randn(2, 4, seed=1), randn(2, 6, seed=2)
        untouched = residual.clone()
        added = ops.linear(x, weight, residual=residual, place="")
        assert same_bits(residual, untouched) and added.data_ptr() != residual.data_ptr()
        assert same_bits(added, ops.linear(x, weight, residual=residual)) and same_bits(added, residual)
        kept = [torch.cat(ops.linear_parts(x * n, weight, place=f"kept {n}"), dim=1) for n in (1, 2)]
        first, second = (ops.linear(x * n, weight, place=f"kept {n}") for n in (1, 2))
        ops.linear(x * 3, weight)
        assert same_bits(first, kept[0]) and same_bits(second, kept[1])
        assert ops.linear(x * 4, weight, place="kept 1").data_ptr() == first.data_ptr()
        assert ops.linear(x, weight, place="").data_ptr() != ops.linear(x, weight).data_ptr()


def test_norms_into_columns_of_somebody_else() -> None:
    with using(ISAS[-1]) as ops:
        x, weight = randn(3, 8), randn(8, seed=1)
        wide = torch.full((3, 24), float("nan"))
        assert same_bits(ops.rms_norm(x, weight, 1e-5, out=wide[:, 8:16]), ops.rms_norm(x, weight, 1e-5))
        assert wide[:, :8].isnan().all() and wide[:, 16:].isnan().all()


def test_buffers_of_small_calls_are_one() -> None:
    """Tapes of all numbers of rows keep the same memory."""
    with using(ISAS[-1]) as ops:
        weight = ops.pack_linear(randn(6, 4), name="a")
        places = {ops.linear(randn(rows, 4), weight).data_ptr() for rows in (1, 2, 7, 32)}
        assert len(places) == 1


def test_parts_of_unnamed_results_are_those_of_the_call() -> None:
    with using(ISAS[-1]) as ops:
        one, other = (ops.pack_linear(randn(6, 4, seed=seed), parts=(2, 4)) for seed in (1, 2))
        x = randn(3, 4, seed=3)
        kept = ops.linear_parts(x, one)
        copies = [part.clone() for part in kept]
        different = ops.linear_parts(x, other)
        assert all(same_bits(part, copy) for part, copy in zip(kept, copies, strict=True))
        assert not same_bits(different[0], kept[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_callers_in_several_threads_do_not_disturb_each_other(threads: int) -> None:
    """Buffers, scratch memory and the pool are per caller, or taken by one at a time."""
    with using(ISAS[-1], threads) as ops:
        weight = ops.pack_linear(randn(512, 256, dtype=torch.bfloat16), name="shared")
        inputs = [randn(65, 256, seed=seed, dtype=torch.bfloat16) for seed in range(4)]
        expected = [ops.linear(x, weight).clone() for x in inputs]
        wrong: list[int] = []

        def work(number: int) -> None:
            for _ in range(60):
                if not same_bits(ops.linear(inputs[number], weight), expected[number]):
                    wrong.append(number)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []


@pytest.fixture
def fresh_search() -> Iterator[None]:
    finding.native_library.cache_clear()
    before = library.isa(), library.num_threads()
    yield
    finding.native_library.cache_clear()
    library.set_isa(before[0])
    library.set_num_threads(before[1])


@pytest.mark.usefixtures("fresh_search")
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels().implementation != "reference"
    finding.native_library.cache_clear()
    monkeypatch.setenv("MILEPOST_NATIVE", "0")
    kernels = select_kernels()
    assert kernels.implementation == "reference"
    assert kernels.choices[0].reason == "MILEPOST_NATIVE=0"
    with pytest.raises(ConfigError, match="kernels: MILEPOST_NATIVE=0"):
        select_kernels("native")
    monkeypatch.delenv("MILEPOST_NATIVE")
    for isa in ISAS:
        finding.native_library.cache_clear()
        monkeypatch.setenv("MILEPOST_ISA", isa)
        monkeypatch.setenv("MILEPOST_THREADS", "2")
        assert f", {isa}, numerics milepost-" in select_kernels("native").choices[0].reason
        assert library.num_threads() == 2
    for name, value in (("MILEPOST_ISA", "sse9"), ("MILEPOST_THREADS", "0"), ("MILEPOST_THREADS", "two")):
        finding.native_library.cache_clear()
        monkeypatch.setenv("MILEPOST_ISA", ISAS[-1])
        monkeypatch.setenv("MILEPOST_THREADS", "1")
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=name):
            select_kernels()


@pytest.mark.usefixtures("fresh_search")
def test_a_library_that_is_missing_or_another_version_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "milepost_kernels", None)
    assert "cannot be loaded" in select_kernels().choices[0].reason
    finding.native_library.cache_clear()
    monkeypatch.setitem(sys.modules, "milepost_kernels", SimpleNamespace(API_VERSION=0))
    kernels = select_kernels()
    assert kernels.implementation == "reference"
    assert "has interface 0, not" in kernels.choices[0].reason
