"""The embedded model's draft module and the drafters beside it: their files, what they cost who does not use
them, and that training and serving compute the same."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models.test_tiny_assets import FOLDER, read_json, shard_header  # noqa: E402
from tests.support.driver import Driver, random_tokens  # noqa: E402

from milepost.engine.serving import ServingOptions, planned_memory  # noqa: E402
from milepost.engine.speculative import SpeculativeConfig  # noqa: E402
from milepost.kernels.index import AttentionIndex, RowSpan  # noqa: E402
from milepost.models.description import describe  # noqa: E402
from milepost.models.dflash import BlockLane  # noqa: E402
from milepost.models.dry_run import check_checkpoint  # noqa: E402
from milepost.models.dspark import BlockDrafter  # noqa: E402
from milepost.models.inputs import StepInputs  # noqa: E402
from milepost.models.loading import LoadedModel, load_model  # noqa: E402

DRAFTER_FILE = "mtp.safetensors"
PREFIX = "model.layers.4."
TRAINING = Path(__file__).parents[2] / "training" / "milepost_tiny"
UNIT = 16


# -- files -----------------------------------------------------------------------------------------


def test_the_module_is_small_and_has_a_file_of_its_own() -> None:
    assert read_json("config.json")["num_nextn_predict_layers"] == 1
    weight_map = read_json("model.safetensors.index.json")["weight_map"]
    assert {file for name, file in weight_map.items() if name.startswith(PREFIX)} == {DRAFTER_FILE}
    tensors = shard_header(FOLDER / DRAFTER_FILE)
    assert all(name.startswith(PREFIX) for name in tensors)
    assert sum(prod(entry["shape"]) for entry in tensors.values()) <= 400_000
    assert (FOLDER / DRAFTER_FILE).stat().st_size < 1_000_000
    # Embedding and head are the decoder's.
    assert not [name for name in tensors if name.endswith(("shared_head.head.weight", "embed_tokens.weight"))]


def test_every_tensor_is_used_with_the_module_and_none_of_its_own_without() -> None:
    assert check_checkpoint(FOLDER, num_draft_tokens=2).unused_tensors == []
    unused = check_checkpoint(FOLDER).unused_tensors
    assert unused == sorted(shard_header(FOLDER / DRAFTER_FILE))


# -- who does not draft ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_module(tmp_path_factory: Any) -> Path:
    """The checkpoint as if the module had never been made."""
    folder: Path = tmp_path_factory.mktemp("plain") / "milepost-tiny"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(DRAFTER_FILE))
    config = read_json("config.json") | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    index = read_json("model.safetensors.index.json")
    kept = {name: file for name, file in index["weight_map"].items() if not name.startswith(PREFIX)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": kept}))
    return folder


def test_without_drafts_nothing_is_spent_on_the_module(without_module: Path) -> None:
    options = ServingOptions(cache_bytes=32 << 20)
    ours, plain = describe(FOLDER), describe(without_module)
    assert ours == plain and ours.num_draft_modules == 0
    ours_plan, plan = (planned_memory(path, plain, options) for path in (FOLDER, without_module))
    # Planned is also what the files' average layer takes while it is read; the module is not.
    share = (FOLDER / DRAFTER_FILE).stat().st_size // ours.num_layers
    assert 0 <= ours_plan.reading - plan.reading <= share + 1
    assert ours_plan.total - ours_plan.reading == plan.total - plan.reading
    model, bare = load_model(FOLDER), load_model(without_module)
    assert model.drafts is None and model.layout == bare.layout
    assert bare.unused_tensors == [] and all(name.startswith(PREFIX) for name in model.unused_tensors)
    drafting = ServingOptions(cache_bytes=32 << 20, speculative=SpeculativeConfig("mtp", 2))
    about = describe(FOLDER, num_draft_tokens=2)
    assert planned_memory(FOLDER, about, drafting).weights > ours_plan.weights


# -- training and serving --------------------------------------------------------------------------


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`drafter` of the training scripts; nothing of them stays imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(TRAINING))
    import drafter

    yield drafter
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(TRAINING) in str(sys.modules[name].__file__):
            del sys.modules[name]


def trained_chain(training: ModuleType, tokens: list[int], num_steps: int) -> list[Any]:
    """fp32 log-probabilities [vocabulary] behind the last token, by the training code: row k belongs to the
    guess that takes the last k tokens for earlier guesses."""
    from export import load_exported

    target = load_exported(FOLDER)
    module = training.MtpModule(target.config).eval()
    weights = {}
    from safetensors.torch import load_file

    for name, tensor in load_file(FOLDER / DRAFTER_FILE).items():
        weights[name.removeprefix(PREFIX)] = tensor.float()
    module.load_state_dict(weights)
    with torch.no_grad():
        hidden, embedded = training.target_states(target, torch.tensor([tokens]))
        outputs = module.steps(embedded, hidden, num_steps)
        return [
            (module.shared_head.norm(out[:, -1]) @ target.lm_head.weight.T)[0].log_softmax(-1)
            for out in outputs
        ]


def served_chain(model: LoadedModel, tokens: list[int], num_steps: int) -> list[Any]:
    """The same by the serving code: one pass over all tokens that were processed, then one row per guess."""
    drafts = model.drafts
    assert drafts is not None
    driver = Driver(load_model(FOLDER, dtype="float32"), match_unit=UNIT, cache_bytes=16 << 20)
    taps = drafts.taps(driver.decoder_states(tokens, drafts.tap_layers))
    field = model.layout.attention[-1].token_fields[0]
    pages = torch.arange(-(-len(tokens) // UNIT))
    cache = {(field.layer, field.name): torch.zeros(len(pages), UNIT, field.width)}

    def run(start: int, end: int, hidden: Any) -> Any:
        """Entries of positions [start, end); a module's first entry is at position 1."""
        at = torch.arange(start, end) - 1
        index = AttentionIndex((RowSpan(0, end - start, start - 1),), (pages,), at // UNIT, at % UNIT)
        return drafts.run(0, StepInputs(torch.tensor(tokens[start:end]), index, None), hidden, cache)

    results = []
    with torch.inference_mode():
        for num_guessed in range(num_steps):
            known = len(tokens) - num_guessed
            rows = run(1, known, taps[: known - 1])
            for position in range(known, len(tokens)):
                rows = run(position, position + 1, rows.handed_on[-1:].clone())
            results.append(drafts.logits(0, rows.normed[-1:])[0].log_softmax(-1))
    return results


def test_training_and_serving_compute_the_same(training: ModuleType) -> None:
    model = load_model(FOLDER, dtype="float32", num_draft_tokens=1)
    tokens = random_tokens(45, model.vocab_size, seed=4)
    trained, served = trained_chain(training, tokens, 3), served_chain(model, tokens, 3)
    for ours, theirs in zip(trained, served, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert float((served[0] - served[1]).abs().max()) > 0.1, "the steps do not differ at all"


EAGLE3 = {"draft_method": "eagle3", "draft_model": "milepost-tiny/eagle3"}


def test_training_and_serving_of_the_eagle3_drafter_compute_the_same(training: ModuleType) -> None:
    from eagle3_drafter import Eagle3Config, Eagle3Drafter, target_taps
    from export import load_exported
    from safetensors.torch import load_file

    model = load_model(FOLDER, dtype="float32", num_draft_tokens=1, **EAGLE3)
    tokens = random_tokens(45, model.vocab_size, seed=4)
    target, module = load_exported(FOLDER), Eagle3Drafter(Eagle3Config()).eval()
    tensors = load_file(FOLDER / "eagle3" / "model.safetensors")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        taps, _, embedding = target_taps(target, torch.tensor([tokens]), module.config.target_layers)
        outputs = module.steps(embedding(torch.tensor([tokens])), taps, 3)
        trained = [(module.norm(out[:, -1]) @ target.lm_head.weight.T)[0].log_softmax(-1) for out in outputs]
    served = served_chain(model, tokens, 3)
    for ours, theirs in zip(trained, served, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert float((served[0] - served[1]).abs().max()) > 0.1, "the steps do not differ at all"


DSPARK = {"draft_method": "dspark", "draft_model": "milepost-tiny/dspark"}


def test_training_and_serving_of_the_dspark_drafter_compute_the_same(training: ModuleType) -> None:
    """Guesses of a block behind 44 tokens, each row behind the tokens that came before it, and how far
    the drafter trusts them."""
    import block_drafter
    from export import load_exported
    from safetensors.torch import load_file

    model = load_model(FOLDER, dtype="float32", num_draft_tokens=4, **DSPARK)
    drafter, field = model.drafts, model.layout.attention[-1].token_fields
    assert isinstance(drafter, BlockDrafter)
    tokens = random_tokens(48, model.vocab_size, seed=4)
    anchor, rows = 44, drafter.spec.block_rows
    mask = read_json("dspark/config.json")["dflash_config"]["mask_token_id"]
    target = load_exported(FOLDER)
    module = block_drafter.BlockDrafter(block_drafter.BlockConfig(mask_token_id=mask)).eval()
    assert module.config.hub_config() == read_json("dspark/config.json")
    tensors = load_file(FOLDER / "dspark" / "model.safetensors")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    block = torch.tensor([[[tokens[anchor], *[mask] * (rows - 1)]]])
    before = torch.tensor(tokens[anchor : anchor + rows])
    with torch.no_grad():
        taps, _, embedding = block_drafter.target_taps(
            target, torch.tensor([tokens]), module.config.target_layer_ids
        )
        hidden = module.rows(taps, torch.tensor([[anchor]]), embedding(block))[0, 0]
        known = module.markov_head.markov_w1(before)
        trained = hidden @ target.lm_head.weight.T + module.markov_head.markov_w2(known)
        trusted = module.confidence_head.proj(torch.cat([hidden, known], -1)).sigmoid().squeeze(-1)

    driver = Driver(load_model(FOLDER, dtype="float32"), match_unit=UNIT, cache_bytes=16 << 20)
    places, pages = torch.arange(anchor), torch.arange(-(-anchor // UNIT))
    cache = {(each.layer, each.name): torch.zeros(len(pages), UNIT, each.width) for each in field}
    index = AttentionIndex((RowSpan(0, anchor, 0),), (pages,), places // UNIT, places % UNIT)
    with torch.inference_mode():
        drafter.store(driver.decoder_states(tokens, drafter.spec.tap_layers)[:anchor], index, cache)
        guessing = drafter.run([BlockLane(tokens[anchor], anchor, pages)], cache)[0]
        made = drafter.read(guessing, drafter.base_logits(guessing), before, drafter.first_state(rows))
    assert made.confidence is not None
    torch.testing.assert_close(made.logits.log_softmax(-1), trained.log_softmax(-1), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(made.confidence, trusted, atol=2e-3, rtol=1e-3)
    assert float((made.logits[0] - made.logits[1]).abs().max()) > 0.1, "the rows do not differ at all"


@pytest.mark.parametrize(("name", "parameters"), [("eagle3", 420_000), ("dspark", 760_000)])
def test_drafters_beside_it_are_small_and_use_all_they_have(name: str, parameters: int) -> None:
    options = {"draft_method": name, "draft_model": f"milepost-tiny/{name}"}
    report = check_checkpoint(FOLDER, num_draft_tokens=2, **options)
    assert not [tensor for tensor in report.unused_tensors if tensor.startswith("draft_model:")]
    assert 0 < report.description.draft_parameters <= parameters
    assert (FOLDER / name / "model.safetensors").stat().st_size <= 2 * parameters + 10_000
