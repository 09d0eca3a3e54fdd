"""Experts of every kind, shared experts, output gates, mixes of sources, keys and values stored alone:
shapes, values with a meaning, refusals, and what happens with a library that lacks them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index
from tests.kernels.native_support import DTYPES, FUSED, ISAS, NAN, library, randn, same_bits, using
from tests.support.driver import Driver, random_tokens
from tests.support.families import Shelf

from milepost.errors import ConfigError
from milepost.kernels import api, reference_layers
from milepost.kernels.api import select_kernels
from milepost.kernels.arguments import MoeParams
from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import NativeLibrary, native_library
from milepost.kernels.reference_experts import SWIGLU, GluActivation
from milepost.kernels.reference_gqa import GqaInputs, GqaParams, inverse_frequencies
from milepost.models import load_model

if not native_library().has_mixtures:
    pytest.skip("the native library is older than experts of every kind", allow_module_level=True)

ROWS = 41
WIDTH = 20
SITU = GluActivation(4.0, 25.0)
ACTIVATIONS = {"swiglu": SWIGLU, "situ": SITU, "situ without linear": GluActivation(4.0)}

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2**-6


def experts(dtype: torch.dtype, count: int) -> list[tuple[torch.Tensor, ...]]:
    return [
        tuple(
            randn(*shape, seed=3 * e + n, dtype=dtype) for n, shape in enumerate([(7, 20), (7, 20), (20, 7)])
        )
        for e in range(count)
    ]


# ------------------------------------------------------------------------------------------ experts


@every_isa
@every_dtype
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (5, 2), (5, 5), (37, 10)])
def test_experts_of_every_kind(isa: str, dtype: torch.dtype, name: str, count: int, per_token: int) -> None:
    """Both routers, with and without what is added to the experts; rows alone and together."""
    weights, activation = experts(dtype, count), ACTIVATIONS[name]
    x, logits = randn(ROWS, WIDTH, seed=1, dtype=dtype), 3 * randn(ROWS, count, seed=2)
    shared, residual = (randn(ROWS, WIDTH, seed=seed, dtype=dtype) for seed in (3, 4))
    gate = 3 * randn(ROWS, 1, seed=5)
    packed = reference_layers.pack_experts(weights, activation=activation)
    with using(isa) as ops:
        native = ops.pack_experts(weights, activation=activation)
        for softmax in (False, True):
            bias = None if softmax else 0.2 * randn(count, seed=6)
            settings = bias, per_token, per_token > 1, 1.0 if softmax else 2.4
            for added in ("", "r", "s", "sr", "sg", "sgr"):

                def run(
                    kernels: Any, held: Any, rows: slice, settings: Any = settings, added: str = added
                ) -> Any:
                    return kernels.moe(
                        x[rows],
                        logits[rows],
                        MoeParams(*settings, held),
                        shared=shared[rows] if "s" in added else None,
                        shared_gate=gate[rows] if "g" in added else None,
                        residual=residual[rows].clone() if "r" in added else None,
                    ).clone()

                whole = run(ops, native, slice(0, ROWS))
                assert_close(whole, run(reference_layers, packed, slice(0, ROWS)), tolerance(dtype))
                for rows in (slice(0, 1), slice(40, 41), slice(4, 21), slice(3, 3)):
                    assert same_bits(run(ops, native, rows), whole[rows])
                with using(isa, threads=2):
                    assert same_bits(run(ops, native, slice(0, ROWS)), whole)


@every_isa
def test_a_softmax_router_gives_probabilities(isa: str) -> None:
    """Experts that give the number 2^e tell from the sum who was chosen, and how much each counts."""
    count, per_token = 19, 3
    one, identity = torch.eye(1), torch.tensor([[1.0]])
    # silu(x) * x of x = 1, times what makes it one.
    scale = 1.0 / float(torch.nn.functional.silu(torch.ones(())))
    weights = [(one, identity, torch.full((1, 1), scale * 2.0**e)) for e in range(count)]
    x, logits = torch.ones(9, 1), 4 * randn(9, count, seed=1)
    logits[1] = 0.0
    logits[2] *= 1e4
    logits[3] = -torch.inf
    logits[3, 4:7] = torch.tensor([0.0, 1.0, 2.0])
    logits[4] = torch.tensor([-3e38] + [3e38] * (count - 1))
    probabilities = torch.softmax(logits.double(), dim=-1)
    with using(isa) as ops:
        packed = ops.pack_experts(weights)
        for renormalize in (False, True):
            params = MoeParams(None, per_token, renormalize, 1.0, packed)
            found = ops.moe(x, logits, params, shared=None, residual=None)[:, 0]
            for row in range(9):
                order = sorted(range(count), key=lambda e, row=row: (-float(logits[row, e]), e))
                shares = probabilities[row, order[:per_token]]
                if renormalize:
                    shares = shares / shares.sum()
                expected = (shares * 2.0 ** torch.tensor(order[:per_token]).double()).sum()
                assert float(found[row]) == pytest.approx(float(expected), rel=1e-5)


@every_isa
@pytest.mark.parametrize("softmax", [False, True])
def test_equal_scores_and_scores_that_are_no_numbers(isa: str, softmax: bool) -> None:
    """Of equals the lowest number is chosen; a row with NaN shows it, and no other row does."""
    count, per_token = 40, 3
    one = torch.eye(1)
    weights = [(one, one, torch.full((1, 1), 2.0**e)) for e in range(20)] * 2
    logits = torch.zeros(2 + count, count)
    logits[1, [7, 20, 30, 31]] = 1.0
    logits[2:] = torch.arange(count)
    logits[torch.arange(2, 2 + count), torch.arange(count)] = NAN
    x, bias = torch.ones(2 + count, 1), None if softmax else torch.zeros(count)
    for kernels in (NativeOperations(library), reference_layers):
        with using(isa):
            packed = kernels.pack_experts(weights)
            rows = kernels.moe(
                x, logits, MoeParams(bias, per_token, True, 1.0, packed), shared=None, residual=None
            )
        silu_of_one = float(torch.nn.functional.silu(torch.ones(())))
        for row, chosen in ((0, [0, 1, 2]), (1, [7, 20, 30])):
            expected = silu_of_one * sum(2.0 ** (e % 20) for e in chosen) / per_token
            assert float(rows[row]) == pytest.approx(expected, rel=1e-5)
        assert rows[2:].isnan().all()


@every_isa
def test_situ_keeps_the_relative_precision_of_small_values(isa: str) -> None:
    """tanh of denormals, of values around where its formula changes, and far from zero."""
    exponents = torch.linspace(-40, 4, 400, dtype=torch.float64)
    magnitudes = torch.cat([10.0**exponents, torch.tensor([2.499999, 2.5, 2.500001, 87.3, 88.1, 3e38])])
    gates = torch.cat([magnitudes, -magnitudes]).float().reshape(-1, 1)
    x = torch.cat([gates, torch.ones_like(gates)], dim=1)
    for activation in (SITU, GluActivation(4.0)):
        beta, linear_beta = activation.beta or 0.0, activation.linear_beta
        wide, one = gates.double(), torch.ones(1, dtype=torch.float64)
        up = one if linear_beta is None else linear_beta * torch.tanh(one / linear_beta)
        expected = beta * torch.tanh(wide / beta) * torch.sigmoid(wide) * up
        with using(isa) as ops:
            weight = ops.pack_swiglu(torch.eye(2), activation=activation)
            found = ops.linear_swiglu(x, weight).double()
        # Denormals have fewer digits, and no sigmoid is below that of -88.
        smallest = torch.where(wide < -80.0, 3e-38, 6e-45).double()
        assert ((found - expected).abs() <= 4e-7 * expected.abs() + smallest).all()


@every_dtype
def test_fused_instruction_sets_agree(dtype: torch.dtype) -> None:
    x, logits = randn(ROWS, WIDTH, dtype=dtype), 3 * randn(ROWS, 37, seed=2)
    sources = [randn(ROWS, WIDTH, seed=seed, dtype=dtype) for seed in range(4)]
    found: list[list[torch.Tensor]] = []
    for isa in FUSED:
        with using(isa) as ops:
            packed = ops.pack_experts(experts(dtype, 37), activation=SITU)
            params = MoeParams(None, 10, True, 1.0, packed)
            results = [
                ops.moe(x, logits, params, shared=x, residual=None, shared_gate=logits[:, :1]),
                ops.mix_sources(sources, randn(WIDTH, seed=9), 1e-5),
                ops.gate_values(sources[0], sources[1]),
                ops.add_shared(x, sources[0], residual=sources[1].clone(), gate=logits[:, :1]),
            ]
            found.append([result.clone() for result in results])
    for results in found[1:]:
        assert all(same_bits(left, right) for left, right in zip(results, found[0], strict=True))


@every_dtype
def test_work_that_threads_share(dtype: torch.dtype) -> None:
    """Large enough for every part to be shared out; experts with many rows, with few and with none."""
    rows, width, count = 310, 256, 256
    shapes = list(enumerate([(8, width), (8, width), (width, 8)]))
    weights = [tuple(randn(*shape, seed=3 * e + n, dtype=dtype) for n, shape in shapes) for e in range(count)]
    x, shared, residual = (randn(rows, width, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    logits, gate = 3 * randn(rows, count, seed=4), randn(rows, 1, seed=5)
    logits[:, :3] += 8.0
    logits[:, 200:] = -50.0
    frequencies = inverse_frequencies(64, 1e4)
    index = attention_index([rows], [7], [list(range(20))], 16)

    def run(ops: NativeOperations) -> list[torch.Tensor]:
        packed = ops.pack_experts(weights, activation=SITU)
        found = [
            ops.moe(
                x, logits, MoeParams(bias, 6, True, 1.0, packed), shared=shared, residual=residual.clone(),
                shared_gate=gate,
            )
            for bias in (None, randn(count, seed=6))
        ]  # fmt: skip
        found.append(ops.add_shared(x, shared, residual=residual.clone(), gate=gate))
        found.append(ops.gate_values(x, shared))
        found.append(ops.mix_sources([x, shared, residual], randn(width, seed=7), 1e-5))
        found.append(ops.rotate_heads(x, 2, frequencies, index))
        return [result.clone() for result in found]

    with using(ISAS[-1]) as ops:
        expected = run(ops)
        params = MoeParams(None, 6, True, 1.0, ops.pack_experts(weights, activation=SITU))
        row = slice(200, 201)
        added = {"shared": shared[row], "residual": residual[row].clone(), "shared_gate": gate[row]}
        alone = ops.moe(x[row], logits[row], params, **added)
        assert same_bits(alone, expected[0][200:201])
    for threads in (2, 3):
        with using(ISAS[-1], threads) as ops:
            assert all(same_bits(left, right) for left, right in zip(run(ops), expected, strict=True))


# ---------------------------------------------------------------------------------- mixes and stores


@every_dtype
@pytest.mark.parametrize("count", [1, 2, 3, 17, 256])
def test_mixes_of_any_number_of_sources(dtype: torch.dtype, count: int) -> None:
    sources = [randn(ROWS, WIDTH, seed=seed, dtype=dtype) * (1 + seed % 3) for seed in range(count)]
    query = randn(WIDTH, seed=300)
    with using(ISAS[-1]) as ops:
        whole = ops.mix_sources(sources, query, 1e-5, place="")
        assert_close(whole, reference_layers.mix_sources(sources, query, 1e-5), tolerance(dtype))
        if count == 1:
            assert whole is sources[0]
            return
        assert ops.mix_sources(sources, query, 1e-5, place="").data_ptr() != whole.data_ptr()
        # A row that is not finite stays alone.
        sources[1] = sources[1].clone()
        sources[1][7] = NAN
        others = [row for row in range(ROWS) if row != 7]
        assert same_bits(ops.mix_sources(sources, query, 1e-5)[others], whole[others])


@every_isa
@every_dtype
def test_what_is_stored_alone_is_what_a_mixer_stores(isa: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 6, 3, 24
    norms = [1.0 + 0.1 * randn(dim, seed=seed) for seed in (1, 2)]
    params = GqaParams(heads, kv_heads, dim, *norms, 1e-6, inverse_frequencies(12, 1e4))
    index = attention_index([20, 3], [13, 0], [[4, 0, 2], [1]], 16)
    query = randn(23, 2 * heads * dim, seed=3, dtype=dtype)
    key, value = (randn(23, kv_heads * dim, seed=seed, dtype=dtype) for seed in (4, 5))
    whole = torch.full((6, 16, kv_heads * 2 * dim), NAN, dtype=dtype)
    whole[4, :13] = 0.0  # what the mixer attends to
    alone = whole.clone()
    with using(isa) as ops:
        ops.gqa_mixer(GqaInputs(query, key, value), params, whole, index)
        ops.store_keys_values(key, value, params, alone, index)
        assert same_bits(alone, whole)
        # Nobody reads the context.
        alone[4, :13] = NAN
        ops.store_keys_values(key, value, params, alone, index)
    assert same_bits(alone[2], whole[2]) and bool(alone[4, :13].isnan().all())


# ------------------------------------------------------------------------------------------ refusals


def test_what_does_not_fit_is_refused() -> None:
    x, logits, wide = randn(3, WIDTH), randn(3, 5), randn(3, 21)
    ops = NativeOperations(library)
    packed = library.pack(randn(4, WIDTH))
    bank = ops.pack_experts(experts(torch.float32, 5)).packed  # type: ignore[union-attr]
    pages, norm = torch.zeros(2, 16, 40), torch.ones(10)
    index = attention_index([3], [0], [[0]], 16)
    plan = ops.attention_plan(index)

    def moe(**changes: Any) -> None:
        given: dict[str, Any] = {
            "x": x, "logits": logits, "bias": None, "experts": bank, "experts_per_token": 2,
            "renormalize": True, "scaling": 1.0, "shared": None, "residual": None,
            "out": torch.empty(3, WIDTH),
        }  # fmt: skip
        library.moe(**{**given, **changes})

    def store(key: torch.Tensor = x, value: torch.Tensor = x, norm: torch.Tensor = norm) -> None:
        library.store_keys_values(key, value, norm, 1e-6, torch.ones(5), pages, plan)

    gate = randn(3, 1)
    moe(shared=x, shared_gate=gate)
    store()
    out, none = torch.empty(3, WIDTH), torch.zeros(3, 0, 40)
    for call, message in [
        (lambda: moe(shared_gate=gate), "shared_gate: needs shared experts"),
        (lambda: moe(shared=x, shared_gate=logits), r"shared_gate: must have shape \[3, 1\]"),
        (lambda: moe(shared=wide), r"shared: must have shape \[3, 20\]"),
        (lambda: moe(beta=0.0), "beta: must be positive and finite"),
        (lambda: moe(beta=NAN), "beta: must be positive and finite"),
        (lambda: moe(beta=1.0, linear_beta=-1.0), "linear_beta: must be positive and finite"),
        (lambda: moe(linear_beta=1.0), "linear_beta: needs a beta"),
        (lambda: library.linear(x, packed, out[:, :4], None, 4.0), "beta: needs a weight of gate and up"),
        (lambda: library.add_shared(x, wide, None, x, out), r"shared: must have shape \[3, 20\]"),
        (lambda: library.add_shared(x, x, logits, x, out), r"gate: must have shape \[3, 1\]"),
        (lambda: library.gate_values(x, wide, out), r"gate: must have shape \[3, 20\]"),
        (lambda: library.gate_values(x, x, x), "out: must not overlap gate"),
        (lambda: library.mix_sources([], norm, 1e-5, out), "sources: must be 1 to 256 tensors"),
        (lambda: library.mix_sources([x] * 257, norm, 1e-5, out), "sources: must be 1 to 256 tensors"),
        (lambda: library.mix_sources([x, wide], norm, 1e-5, out), r"sources: must have shape \[3, 20\]"),
        (lambda: library.mix_sources([x], norm, 1e-5, out), r"query: must have shape \[20\]"),
        (lambda: library.mix_sources([x], randn(WIDTH), 1e-5, x), "out: must not overlap sources"),
        (lambda: library.rotate_heads(x, 3, norm[:1], 1.0, False, plan, out), "num_heads: must divide a row"),
        (lambda: library.rotate_heads(x, 4, norm[:3], 1.0, False, plan, out), "not be more than half of"),
        (lambda: library.rotate_heads(x, 4, norm[:2], 1.0, False, plan, x), "out: must not overlap x"),
        (lambda: library.rotate_heads(x[:2], 4, norm[:2], 1.0, False, plan, out), r"must have shape \[3"),
        (lambda: store(key=wide), r"key: must have shape \[3, 20\]"),
        (lambda: store(value=wide), r"value: must have shape \[3, 20\]"),
        (lambda: store(key=x[:2], value=x[:2]), r"key: must have shape \[3, 20\]"),
        (lambda: store(norm=torch.ones(30)), "key_norm: must not be longer than a row of keys"),
        (lambda: store(norm=torch.ones(8)), r"key: must have shape \[3, 16\]"),
        (lambda: store(norm=torch.ones(0)), "key_norm: must not be longer than a row of keys"),
        (lambda: library.attend(none, pages, plan, 40, 1.0, none), "query: must have a head"),
        (
            lambda: library.gqa_mixer(x, x, x, norm[:0], norm[:0], 1e-6, norm[:0], pages, plan, out),
            "query_norm: must not be empty",
        ),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    far = ops.attention_plan(attention_index([3], [0], [[7]], 16))
    with pytest.raises(ValueError, match="plan: a page id is outside of 2 pages"):
        library.store_keys_values(x, x, norm, 1e-6, torch.ones(5), pages, far)


# ------------------------------------------------------------------------------------ older libraries


def older() -> SimpleNamespace:
    """The library as it was: no call that revision 5 brought, and the signatures before."""
    lacking = ("add_shared", "gate_values", "mix_sources", "rotate_heads", "store_keys_values")
    functions = {name: getattr(library, name) for name in dir(library) if name not in lacking}
    old = SimpleNamespace(**functions)
    old.API_REVISION = 4
    old.numerics_id = lambda: "milepost-1-fused"

    def linear(x: Any, weight: Any, out: Any, residual: Any = None) -> None:
        library.linear(x, weight, out, residual)

    def moe(
        x: Any, logits: Any, bias: torch.Tensor, experts: Any, per_token: int, renormalize: bool,
        scaling: float, shared: Any, residual: Any, out: Any,
    ) -> None:  # fmt: skip
        assert isinstance(bias, torch.Tensor)
        library.moe(x, logits, bias, experts, per_token, renormalize, scaling, shared, residual, out)

    def gqa_mixer(query_gate: torch.Tensor, *more: Any) -> None:
        assert query_gate.shape[1] == 2 * more[-1].shape[1]
        library.gqa_mixer(query_gate, *more)

    old.linear, old.moe, old.gqa_mixer = linear, moe, gqa_mixer
    return old


@pytest.fixture
def old_kernels() -> api.Kernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "native_library", lambda: NativeLibrary(older(), "old"))  # type: ignore[arg-type]
        return select_kernels()


def test_an_older_library_leaves_the_rest_to_torch_and_says_why(old_kernels: api.Kernels) -> None:
    assert old_kernels.implementation == "mixed" and old_kernels.numerics == "milepost-1-fused"
    choices = {choice.operation: choice for choice in old_kernels.choices}
    for name in ("add_shared", "gate_values", "mix_sources", "rotate_heads"):
        assert choices[name].implementation == "reference"
        assert "older than experts of every kind" in choices[name].reason
        assert getattr(old_kernels, name) is getattr(reference_layers, name)
    for name in ("moe", "linear_swiglu", "store_keys_values", "gqa_mixer"):
        assert choices[name].implementation == "native"
        assert "in part composed" in choices[name].reason
    assert choices["linear"].reason == "old"
    with pytest.raises(ConfigError, match="unknown"):
        select_kernels("mixed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["kimi_linear", "kimi_k3", "kimi_k3_packed", "qwen3_next", "qwen3_5_moe"])
def test_models_run_with_an_older_library(
    layout: str, dtype: str, shelf: Shelf, old_kernels: api.Kernels
) -> None:
    """Every row alone has the bits it has in company; logits are near those of the library of today.
    Kimi-Linear has nothing that the older one lacks: the same bits."""
    found = []
    for model in (
        shelf.model(layout, dtype=dtype),
        load_model(shelf.directory(layout, dtype=dtype), kernels=old_kernels),
    ):
        driver = Driver(model, match_unit=16)
        driver.poison()
        tokens = random_tokens(20, model.vocab_size, 3)
        request = driver.sequence(tokens, 0)
        whole = driver.logits(driver.plan((request, 20), sample=False)).clone()
        again = driver.sequence(tokens, 1)
        parts = [
            driver.logits(driver.plan((again, count), sample=False)).clone() for count in (7, 1, 1, 3, 8)
        ]
        assert same_bits(torch.cat(parts), whole)
        found.append(whole)
        driver.worker.close()
    if layout == "kimi_linear":
        assert same_bits(*found)
    elif dtype == "float32":
        assert_close(found[1], found[0], 1e-3)


@every_dtype
def test_an_older_library_stores_keys_and_values_as_before(
    dtype: torch.dtype, old_kernels: api.Kernels
) -> None:
    norm = 1.0 + 0.1 * randn(10, seed=1)
    params = GqaParams(4, 2, 10, norm, norm, 1e-6, inverse_frequencies(6, 1e4))
    key, value = (randn(5, 20, seed=seed, dtype=dtype) for seed in (2, 3))
    index = attention_index([5], [0], [[1]], 16)
    pages = [torch.full((2, 16, 40), NAN, dtype=dtype) for _ in range(2)]
    for kernels, each in zip((select_kernels("native"), old_kernels), pages, strict=True):
        kernels.store_keys_values(key, value, params, each, index)
    assert same_bits(*pages)


@every_dtype
def test_an_older_library_takes_queries_without_gates(dtype: torch.dtype, old_kernels: api.Kernels) -> None:
    """The same bits: the sigmoid of a gate that stands in is 1."""
    norm = 1.0 + 0.1 * randn(10, seed=1)
    params = GqaParams(4, 2, 10, norm, norm, 1e-6, inverse_frequencies(6, 1e4), has_gate=False)
    query = randn(5, 40, seed=4, dtype=dtype)
    key, value = (randn(5, 20, seed=seed, dtype=dtype) for seed in (2, 3))
    index = attention_index([5], [0], [[1]], 16)
    found = []
    for kernels in (select_kernels("native"), old_kernels):
        pages = torch.full((2, 16, 40), NAN, dtype=dtype)
        found.append(kernels.gqa_mixer(GqaInputs(query, key, value), params, pages, index).clone())
    assert same_bits(*found)
