"""`milepost sim`: output, files, errors. Runs in this process; loads no model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from milepost.cli.commands import app
from milepost.errors import ConfigError
from milepost.sim.fingerprint import FingerprintWorker

TRACE = str(Path(__file__).resolve().parents[1] / "data" / "mooncake" / "conversation_trace.jsonl.xz")


def sim(*arguments: str) -> str:
    """Standard output of a run that must succeed."""
    result = CliRunner().invoke(app, ["sim", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_trace_with_policies_side_by_side(tmp_path: Path) -> None:
    json_path, plot_path = tmp_path / "r.json", tmp_path / "r.svg"
    out = sim(
        "--trace", TRACE, "--limit", "150", "--budgets", "4GiB,16GiB", "--policies", "milepost,lru,optimal",
        "--json", str(json_path), "--plot", str(plot_path),
    )  # fmt: skip
    assert "150 requests, kimi-linear-48b, match unit 512" in out
    assert "blocks of 512 tokens are all a trace knows" in out
    results = json.loads(json_path.read_text())["results"]
    assert [(r["policy"], r["cache_bytes"] >> 30) for r in results] == [
        (policy, gib) for gib in (4, 16) for policy in ("milepost", "lru", "optimal")
    ]
    assert all(r["num_cached_tokens"] + r["num_computed_tokens"] == r["num_prompt_tokens"] for r in results)
    assert ElementTree.fromstring(plot_path.read_text()).tag.endswith("svg")


def test_time_to_first_token_needs_a_rate() -> None:
    arguments = ("--trace", TRACE, "--limit", "40", "--budgets", "16GiB", "--policies", "milepost")
    lines = sim(*arguments).splitlines()
    assert "TTFT" not in lines[2] and lines[5].startswith("milepost ")
    lines = sim(*arguments, "--tokens-per-second", "20000").splitlines()
    assert "TTFT" in lines[2]
    row = lines[5].split()
    assert 0.0 < float(row[6]) <= float(row[7])


def test_swarm_counts_its_actions() -> None:
    out = sim("--swarm", "500", "--seed", "3")
    assert int(out.split()[0]) >= 500 and "no finding" in out


def test_a_swarm_finding_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FingerprintWorker, plan: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(FingerprintWorker, "execute", broken)
    with pytest.raises(RuntimeError, match="planted") as caught:
        sim("--swarm", "100", "--seed", "3")
    assert caught.value.__notes__ == ["swarm run with seed 3; repeat with: milepost sim --swarm 1 --seed 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--geometry", "gpt"), "geometry: unknown model 'gpt'"),
        (("--workload", "chats"), "workload: unknown workload 'chats'"),
        (("--policies", "fifo"), "policies: unknown policy 'fifo'"),
        (("--budgets", "lots"), "budgets: 'lots' is not a size"),
        (("--json", "/no/such/folder/x.json"), "json: cannot write /no/such/folder/x.json"),
        (("--plot", "/no/such/folder/x.svg"), "plot: cannot write /no/such/folder/x.svg"),
        (("--trace", "/no/such/trace"), "trace: cannot read /no/such/trace"),
        (("--budgets", "1MiB", "--policies", "milepost", "--trace", TRACE, "--limit", "1"), "cache_bytes"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sim(*arguments)
    assert message in str(caught.value)
