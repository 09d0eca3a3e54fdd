"""The benchmarks run, their checks bite, and the multi-turn numbers hold at small sizes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from array import array
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from milepost.kernels.native_library import native_library  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def multiturn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("multiturn")


def run_script(name: str, result: Path, *arguments: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
    command = [sys.executable, str(ROOT / "bench" / name), "--json", str(result), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text(encoding="utf-8")), done


def test_multiturn_meets_the_closed_form(tmp_path: Path) -> None:
    document, done = run_script(
        "multiturn.py",
        tmp_path / "result.json",
        *("--turns", "3", "--system-tokens", "150", "--user-tokens", "25", "--answer-tokens", "12"),
        *("--match-units", "16", "64", "--temperatures", "1"),
    )
    runs = {run["match_unit"]: run["turns"] for run in document["results"]["runs"]}
    assert set(runs) == {16, 64, None}
    assert all(turn["num_computed"] == turn["num_expected"] for turn in runs[16] + runs[64])
    assert all(turn["num_cached"] == 0 for turn in runs[None])
    assert runs[16][1]["num_cached"] == 144 and runs[64][1]["num_cached"] == 128
    assert all(run["comparison"]["num_different_answers"] == 0 for run in document["results"]["runs"][:2])
    assert "calibration loop" in done.stdout


def test_multiturn_with_several_requests_in_flight(tmp_path: Path) -> None:
    document, _ = run_script(
        "multiturn.py",
        tmp_path / "result.json",
        *("--turns", "2", "--system-tokens", "150", "--user-tokens", "25", "--answer-tokens", "12"),
        *(
            "--conversations",
            "4",
            "--concurrency",
            "4",
            "--match-units",
            "32",
            "--max-num-batched-tokens",
            "64",
        ),
    )
    turns = document["results"]["runs"][0]["turns"]
    assert all(turn["num_computed"] <= turn["num_expected"] for turn in turns)


@pytest.mark.parametrize(
    ("num_tokens", "num_processed", "match_unit", "computed"),
    [
        (100, 0, 16, 100),
        (100, 64, 16, 36),
        (100, 79, 16, 36),
        (96, 96, 16, 16),
        (97, 500, 16, 1),
        (10, 9, 16, 10),
    ],
)
def test_closed_form(
    multiturn: ModuleType, num_tokens: int, num_processed: int, match_unit: int, computed: int
) -> None:
    assert multiturn.closed_form(num_tokens, num_processed, match_unit) == computed


def test_checks_bite(multiturn: ModuleType) -> None:
    workload = multiturn.Workload(2, 1, 32, 8, 4, 1)
    prompt = array("I", range(40))
    first = multiturn.Turn(0, 0, prompt, 0, 40, token_ids=array("I", [1, 2]), logprobs=[-1.0, -2.0])
    second = multiturn.Turn(
        1, 0, prompt, 40, 8, num_cached=32, token_ids=array("I", [1, 2]), logprobs=[-1.0, -2.0]
    )
    assert multiturn.check([first, second], workload, 16) == []
    assert multiturn.compare([first], [second]).num_different_answers == 0

    second.num_cached = 16
    failures = multiturn.check([first, second], workload, 16)
    assert len(failures) == 3  # the sum, the turn, and the shared system prompt
    second.token_ids = array("I", [1, 3])
    second.logprobs = [-1.5, -2.0]
    comparison = multiturn.compare([first], [second])
    assert comparison.num_different_answers == 1
    assert comparison.largest_logprob_difference == pytest.approx(0.5)


def test_core_bench_prints_its_bound(tmp_path: Path) -> None:
    document, done = run_script(
        "core.py",
        tmp_path / "result.json",
        *("--num-requests", "16", "--max-tokens", "16384", "--repetitions", "2"),
    )
    assert document["results"]["step"]["best_step_ms"] > 0
    assert [entry["num_tokens"] for entry in document["results"]["prompts"]] == [
        1024,
        2048,
        4096,
        8192,
        16384,
    ]
    assert "bound" in done.stdout and document["commit"] != ""


@pytest.mark.slow
def test_a_random_model_is_written_and_measured(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    sizes = (
        "--layers",
        "4",
        "--hidden",
        "128",
        "--intermediate",
        "128",
        "--vocabulary",
        "2100",
        "--experts",
        "4",
    )
    made = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "make_model.py"), str(directory), *sizes],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stderr
    assert "M parameters" in made.stdout
    if native_library().module is None:
        pytest.skip(native_library().reason)
    arguments = ("--only-models", "--model", str(directory), "--prompt-tokens", "512", "--steps", "2")
    document, done = run_script("kernels.py", tmp_path / "result.json", *arguments)
    rows = {row["kernels"]: row for row in document["results"]["model model"]}
    coded = {"native int8", "native int4"} if native_library().has_coded_weights else set()
    assert set(rows) == {"native", "reference", *coded}
    for row in rows.values():
        assert row["prefill_tokens_per_s"] > 0 and row["decode_8_ms"] > 0
    assert "floor ms" in done.stdout


def test_growing_streams_compute_less_with_a_finer_unit(tmp_path: Path) -> None:
    document, _ = run_script(
        "growing.py",
        tmp_path / "result.json",
        "--skip-simulated",
        "--size",
        "5m",
        "--pairs",
        "1",
        "--rounds",
        "3",
    )
    fine, coarse = document["results"]["runs"]
    assert fine["num_prompt_tokens"] == coarse["num_prompt_tokens"]
    streams, rounds = 8, 2
    assert streams * rounds * 50 <= fine["num_computed_tokens"] <= streams * rounds * (50 + 4)
    assert fine["num_computed_tokens"] < coarse["num_computed_tokens"] <= streams * rounds * (50 + 40)


def test_exports_in_a_prefill_are_counted(tmp_path: Path) -> None:
    document, done = run_script(
        "checkpoints.py", tmp_path / "result.json", "--sizes", "embedded", "--tokens", "600", "--pairs", "5"
    )
    assert {len(times) for times in document["results"]["embedded"].values()} == {5}
    assert "exports / none" in done.stdout


def test_bound_of_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    checkpoints = importlib.import_module("checkpoints")
    # P(at most 7 of 9 lie below the median) = 502 / 512, P(at most 6) = 466 / 512.
    assert checkpoints.upper_bound([float(n) for n in range(9)]) == 7.0
    assert checkpoints.upper_bound([3.0, 1.0, 2.0, 5.0, 4.0]) == 5.0
    with pytest.raises(ValueError, match="cannot bound"):
        checkpoints.upper_bound([1.0, 2.0, 3.0])


@pytest.mark.slow
def test_tiers_give_the_same_answers_from_everywhere(tmp_path: Path) -> None:
    document, done = run_script(
        "tiers.py",
        tmp_path / "result.json",
        *("5m", "--lengths", "300", "--repetitions", "2", "--step-tokens", "40"),
    )
    rows = document["results"]["first_token"]
    assert [row["tier"] for row in rows] == ["memory", "file", "peer"]
    assert all(row["loaded_tokens"] >= 256 or row["outcomes"] != "loaded" for row in rows)
    assert "time between tokens" in done.stdout


def test_speculation_gives_the_answers_of_a_run_without(tmp_path: Path) -> None:
    document, _ = run_script(
        "speculation.py",
        tmp_path / "result.json",
        *("5m", "--tokens", "24", "--prompt-tokens", "40", "--repetitions", "1", "--error-rates", "0", "1"),
    )
    rows = {row["error_rate"]: row for row in document["results"]["scripted"]}
    assert rows[0.0]["tokens_per_step"] > 4
    assert rows[1.0]["tokens_per_step"] == 1
    assert document["results"]["copy"][0]["tokens_per_step"] > 3
