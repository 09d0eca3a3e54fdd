"""bench/serving.py: its arithmetic, its checks, and a small run against a real process."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("aiohttp")
pytest.importorskip("uvloop")

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = argparse.Namespace(max_queued_requests=4, max_num_seqs=2)
MIB = 1 << 20


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("serving")


@pytest.fixture
def open_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("open_loop")


def served(open_loop: ModuleType, due: float, first: float, ended: float, **changes: Any) -> Any:
    return replace(open_loop.Outcome(200, None, due, due, due, first, ended, 100, 60), **changes)


def test_quantiles(serving: ModuleType) -> None:
    values = [float(number) for number in range(1, 101)]
    assert [serving.quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert serving.quantile([7.0], 0.5) == 7.0
    assert math.isnan(serving.quantile([], 0.5))


def test_the_slope_of_the_part_that_is_judged(serving: ModuleType) -> None:
    # Ten minutes: a jump in the first five is not seen, three MiB a minute afterwards are.
    samples = [(float(at), (at * 20 if at < 300 else 50) * MIB + max(0, at - 300) * 3 * MIB // 60)
               for at in range(600)]  # fmt: skip
    assert serving.slope_per_minute(samples, 600.0) == pytest.approx(3 * MIB, rel=1e-3)
    assert serving.slope_per_minute(samples[:120], 120.0) == pytest.approx(20 * 60 * MIB, rel=1e-3)
    assert serving.slope_per_minute(samples[:60], 60.0) is None, "half a minute says nothing"


def test_arrivals_are_those_of_the_seed_and_the_rate(open_loop: ModuleType) -> None:
    times = open_loop.poisson_times(20.0, 100.0, 3)
    assert times == open_loop.poisson_times(20.0, 100.0, 3) != open_loop.poisson_times(20.0, 100.0, 4)
    assert times == sorted(times) and 0 < times[0] and times[-1] < 100
    assert len(times) == pytest.approx(2000, abs=5 * math.sqrt(2000))


def test_conversations_grow_only_by_what_was_answered(open_loop: ModuleType) -> None:
    conversations = open_loop.Conversations(1, 2, 8, 1)
    first = conversations.take()
    assert [message["role"] for message in first.messages] == ["system", "user"]
    before = list(first.messages[:1])
    conversations.give_back(first, None)
    again = conversations.take()
    assert again is first and again.messages[:1] == before and len(again.messages) == 2
    conversations.give_back(again, "yes")
    assert conversations.take() is again and len(again.messages) == 4
    other = conversations.take()
    assert other is not again, "nobody speaks twice at a time"
    conversations.give_back(again, "yes")
    assert conversations.take() is not again, "it has had its turns"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "ended early"),
        (['{"choices":[{"delta":{"content":"a"},"token_ids":[1],"finish_reason":"length"}]}'], "ended early"),
        (['{"error":{"message":"broken"}}', "[DONE]"], "broken"),
        (['{"choices":[{"delta":{},"finish_reason":"stop"}]}', "[DONE]"], "finish_reason stop"),
        (
            [
                '{"choices":[{"delta":{},"token_ids":[1],"finish_reason":"length"}]}',
                '{"choices":[],"usage":{"completion_tokens":1}}',
                "[DONE]",
            ],
            "1 tokens instead of 2",
        ),
    ],
)
def test_an_answer_that_is_not_whole(open_loop: ModuleType, lines: list[str], problem: str) -> None:
    answer = open_loop._Answer()
    for line in lines:
        answer.feed(f"data: {line}\n".encode())
    assert problem in answer.problem(2)


def test_a_load_that_keeps_its_bounds(serving: ModuleType, open_loop: ModuleType) -> None:
    outcomes = [served(open_loop, at, at + 0.1, at + 0.2) for at in range(10)]
    result = serving.summarize(0.5, 10.0, 0.0, outcomes, [(0.0, MIB)], 2.0, OPTIONS)
    assert result.bound_ms == 6 * 500.0, "four wait, two run, half a second each"
    assert result.ttft_ms["p99"] == pytest.approx(100) and result.hit_rate == 0.6
    assert (result.num_served, result.served_per_s, result.num_refused) == (10, 1.0, 0)
    assert result.max_ended_before_first == 0 and result.failures() == []
    # At capacity and above, the service time is that of the load itself.
    assert serving.summarize(1.0, 10.0, 0.0, outcomes, [], 2.0, OPTIONS).bound_ms == 6 * 1000.0


def test_checks_bite(serving: ModuleType, open_loop: ModuleType) -> None:
    refused = open_loop.Outcome(429, None, 0.0, 0.0, 0.1, None, 0.1)
    broken = replace(refused, status=503, error="status 503: no")
    slow = [served(open_loop, at, at + 7.5, at + 8) for at in range(10)]
    samples = [(float(at), at * MIB // 30) for at in range(300)]
    result = serving.summarize(2.0, 10.0, 0.0, [*slow, refused, broken], samples, 2.0, OPTIONS)
    assert result.num_refused == 1
    failures = result.failures()
    assert len(failures) == 3 and all(failure.startswith("at 2.0x: ") for failure in failures)
    assert "1 errors, the first: status 503" in failures[0]
    assert "7 requests ended while" in failures[1] and "grows by 2.00 MiB" in failures[2]
    fast = replace(result, bound_ms=7000.0, errors=[])
    assert any("p99 of the time to first token is 7500 ms" in failure for failure in fast.failures())
    assert "nothing was served" in serving.summarize(1.0, 9.0, 0.0, [refused], [], 1.0, OPTIONS).failures()[0]

    held = serving.Held(8, 16, 100)
    gauges = dict.fromkeys(serving.IDLE_GAUGES, 0.0)
    assert serving.leaks(held, serving.Held(7, 16, 999), gauges) == []
    gauges["milepost:running_state_bytes"] = 4096.0
    assert serving.leaks(held, serving.Held(9, 17, 100), gauges) == [
        "milepost:running_state_bytes is 4096 at the end",
        "9 threads at the end, 8 before",
        "17 open files at the end, 16 before",
    ]


def test_a_server_that_is_not_there_is_an_error(open_loop: ModuleType) -> None:
    async def ask() -> Any:
        clients = open_loop.Clients("http://127.0.0.1:9", open_loop.Conversations(1, 1, 4, 1), 1)
        try:
            return (await clients.open_loop([0.0], lambda outcome: None))[0]
        finally:
            await clients.close()

    outcome = asyncio.run(ask())
    assert outcome.status == 0 and "Client" in outcome.error
    assert not (outcome.is_served or outcome.is_refused) and math.isnan(outcome.ttft_ms)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    """Everything but the times, which belong to a machine that does nothing else."""
    result = tmp_path / "result.json"
    command = [
        *(sys.executable, str(ROOT / "bench" / "serving.py"), "--json", str(result)),
        *("--minutes", "0.1", "--capacity-seconds", "4", "--max-queued-requests", "4", "--max-num-seqs", "2"),
        *("--conversations", "8", "--cache-bytes", "32MiB"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.exists(), done.stdout + done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))["results"]
    timed = ("p99 of the time to first token", "requests ended while")
    assert [failure for failure in found["failures"] if not any(word in failure for word in timed)] == []
    assert done.returncode == (1 if found["failures"] else 0)
    assert [load["factor"] for load in found["loads"]] == [0.5, 1.0, 2.0]
    for load in found["loads"]:
        assert load["num_served"] > 0 and load["errors"] == []
        assert load["num_served"] + load["num_refused"] == load["num_offered"]
        assert load["hit_rate"] > 0.3 and len(load["rss_samples"]) >= 4
    assert found["loads"][2]["num_refused"] > found["loads"][0]["num_refused"]
    assert set(found["idle_gauges"].values()) == {0.0}
    assert "bound = (4 queued + 2 running) x mean service time" in done.stdout
