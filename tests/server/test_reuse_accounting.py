"""A scripted workload with every reason: response, log line and /metrics tell one story, and sums agree."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.server.serving import HTTP, MATCH_UNIT, Running, running_server

from milepost.core.reasons import CHECKPOINT_REASONS
from milepost.engine.audit import RESULTS, AuditConfig
from milepost.server.collectors import REUSE_REASONS

CACHE_BYTES = 4096 * 100


@dataclass
class Script:
    """A server under a workload, and everything it said.

    Attributes:
        reports: the `milepost.reuse` object of every choice, in order.
    """

    server: Running
    reports: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: dict[str, list[int]] = field(default_factory=dict)

    def ask(self, prompt: str | list[int], max_tokens: int = 2, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        response = self.server.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer = response.json()
        reuse = answer["milepost"]["reuse"]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == reuse["cached_tokens"]
        assert usage["prompt_tokens"] == reuse["prompt_tokens"]
        assert reuse["prompt_tokens"] == reuse["cached_tokens"] + reuse["computed_tokens"]
        choices = answer["milepost"].get("choices")
        self.reports.extend([choice["reuse"] for choice in choices] if choices else [reuse])
        return reuse

    def metrics(self, name: str, label: str) -> dict[str, float]:
        """Values of a family by one label."""
        found: Counter[str] = Counter()
        for sample, value in self.server.metrics().items():
            if sample.startswith(f"{name}{{"):
                labels = dict(pair.split("=") for pair in sample[len(name) + 1 : -1].split(","))
                found[labels[label]] += value
        return dict(found)


def ids(start: int, count: int) -> list[int]:
    """Token ids without text that anybody scripted; starts that differ share nothing."""
    return [20 + (start * 7 + index * (start + 3)) % 300 for index in range(count)]


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Iterator[Script]:
    """The workload, run once; log lines of requests are kept."""
    with running_server(
        tmp_path_factory.mktemp("model"), cache_bytes=CACHE_BYTES, audit=AuditConfig(1.0),
        max_states_per_path=4, decode_interval=32,
    ) as server:  # fmt: skip
        yield Script(server)


@pytest.fixture(scope="module")
def lines(script: Script) -> list[str]:
    """Runs the workload; returns the request log."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("milepost.request")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    stop, torn = threading.Event(), []
    scraper = threading.Thread(target=scrape, args=(script.server, stop, torn))
    scraper.start()
    try:
        workload(script)
    finally:
        stop.set()
        scraper.join(20)
        logger.removeHandler(handler)
    while script.server.model.engine.audits().num_waiting:
        time.sleep(0.002)
    script.server.wait_idle()
    assert torn == [], "a scrape saw half of a request"
    return records


def scrape(server: Running, stop: threading.Event, torn: list[str]) -> None:
    """In every scrape, queries = hits + the sum of misses."""
    number = r"^{}.*\}} ([0-9.e+]+)$"
    while not stop.wait(0.003):
        text = HTTP.get(f"{server.url}/metrics").text

        def total(name: str, text: str = text) -> float:
            return sum(float(v) for v in re.findall(number.format(name), text, re.MULTILINE))

        sums = [total(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")]
        if sums[0] != sums[1] + total("milepost:prefix_cache_misses_total"):
            torn.append(text)


def workload(script: Script) -> None:
    ask = script.ask
    base = ids(1, 100)
    assert ask(base)["reason"] == "cold"
    assert ask(base)["reason"] == "hit"
    assert ask(ids(40, 16))["reason"] == "too_short"
    assert ask([*base, *ids(2, 40)])["reason"] == "path_ends"
    parted = ask([*base[:50], *ids(3, 40)])
    assert (parted["reason"], parted["first_divergence"]) == ("no_state", 50)
    assert parted["tokens_lost_to_missing_state"] == 48 and parted["limiting_group"] == "kda"
    again = ask([*base[:50], *ids(4, 40)])
    assert (again["reason"], again["cached_tokens"], again["first_divergence"]) == ("diverged", 48, 50)
    foreign = ask(base, cache_salt="tenant")
    assert (foreign["reason"], foreign["first_divergence"]) == ("cold", None), "another tenant's path"
    assert ask([*base[:8], *ids(5, 40)], cache_salt="tenant")["first_divergence"] == 8
    assert ask(base, cache_prompt=False)["reason"] == "disabled"
    retokenized(script)
    # Siblings: one prompt is computed, three choices wait for it.
    ask(ids(6, 90), n=3, seed=1, temperature=1.0)
    # More than four checkpoints on one path, and answers long enough for decode checkpoints.
    ask(ids(7, 120), 90, prompt_cache_breakpoints=[16, 32, 48, 64, 80])
    # More prompts than the budget holds.
    prompts = [ids(number, 80 + number) for number in range(8, 60)]
    for prompt in prompts:
        ask(prompt, 4)
    evicted, length = next((a, len(p)) for p in prompts if (a := ask(p, 4))["reason"] == "cold")
    assert evicted["cached_tokens"] == 0
    assert evicted["tokens_lost_to_eviction"] == MATCH_UNIT * ((length - 1) // MATCH_UNIT)
    assert evicted["eviction"].startswith("drop:")
    preempt(script)


def retokenized(script: Script) -> None:
    answer = "the quick brown fox and the dog"
    tokenizer = script.server.model.tokenizer
    prompt = tokenizer.encode("some words of a prompt that is long enough {{bytes:" + answer + "}}")
    script.ask(prompt, 60)
    again = [*prompt, *tokenizer.encode(answer), 2, *tokenizer.encode(" next {{x}}")]
    report = script.ask(again)
    assert report["reason"].startswith("retokenized@") and report["retokenized_at"] >= len(prompt)


def preempt(script: Script) -> None:
    """Force a preemption in mid-answer; the request goes on and is still one query."""
    server = script.server
    scheduler, engine = server.scheduler, server.model.engine
    schedule = scheduler.schedule
    done: list[int] = []

    def preempting(now: float):
        for request in list(scheduler.running):
            if request.is_counted and request.num_output_tokens == 5 and request.request_id not in done:
                done.append(request.request_id)
                scheduler.preempt(request.request_id)
        return schedule(now)

    scheduler.schedule = preempting
    script.ask(ids(30, 60), 12)
    script.ask(ids(30, 60), 1, prompt_logprobs=0)
    scheduler.schedule = schedule
    assert len(done) == 1
    assert engine.is_healthy


# ---------------------------------------------------------------- what was said


def test_every_reason_but_those_of_other_models_was_met(script: Script, lines: list[str]) -> None:
    met = {report["reason"].partition("@")[0] for report in script.reports}
    assert set(REUSE_REASONS) - met == {"no_pages", "media_split"}


def test_every_report_has_every_field(script: Script, lines: list[str]) -> None:
    for report in script.reports:
        assert set(report) == {
            "prompt_tokens", "cached_tokens", "computed_tokens", "matched_tokens",
            "tokens_lost_to_missing_state", "limiting_group", "reason", "first_divergence", "retokenized_at",
            "tokens_lost_to_eviction", "eviction",
        }  # fmt: skip
        assert (report["tokens_lost_to_eviction"] > 0) == (report["eviction"] is not None)
        assert set(report["matched_tokens"]) == ({"mla", "kda"} if report["reason"] != "disabled" else set())
        assert report["cached_tokens"] <= min(report["matched_tokens"].values(), default=0)
        lost = max(report["matched_tokens"].get("mla", 0) - report["cached_tokens"], 0)
        assert report["tokens_lost_to_missing_state"] == lost
        divergence = report["first_divergence"]
        assert divergence is None or report["cached_tokens"] <= divergence < report["prompt_tokens"]


def test_the_log_says_what_the_responses_say(script: Script, lines: list[str]) -> None:
    logged = []
    for line in lines:
        fields = dict(pair.split("=", 1) for pair in line.split(" "))
        matched = dict(pair.split(":") for pair in fields["matched_tokens"].split(",") if pair != "-")
        logged.append(
            (
                int(fields["prompt_tokens"]), int(fields["cached_tokens"]), int(fields["computed_tokens"]),
                fields["reason"], {group: int(number) for group, number in matched.items()},
                int(fields["lost_to_missing_state"]), fields["limiting_group"], fields["first_divergence"],
            )
        )  # fmt: skip
    said = [
        (
            report["prompt_tokens"], report["cached_tokens"], report["computed_tokens"], report["reason"],
            report["matched_tokens"], report["tokens_lost_to_missing_state"],
            report["limiting_group"] or "-",
            "-" if report["first_divergence"] is None else str(report["first_divergence"]),
        )
        for report in script.reports
    ]  # fmt: skip
    assert sorted(logged, key=repr) == sorted(said, key=repr)


# ---------------------------------------------------------------- what was counted


def test_sums_over_reasons_are_the_totals(script: Script, lines: list[str]) -> None:
    values = script.server.metrics()
    requests = script.metrics("milepost:request_reuse_total", "reason")
    misses = script.metrics("milepost:prefix_cache_misses_total", "reason")
    by_reason = Counter(report["reason"].partition("@")[0] for report in script.reports)
    assert requests == {**dict.fromkeys(REUSE_REASONS, 0), **by_reason}
    for reason in REUSE_REASONS:
        own = [r for r in script.reports if r["reason"].partition("@")[0] == reason]
        assert misses[reason] == sum(r["computed_tokens"] for r in own), reason
    queries = sum(r["prompt_tokens"] for r in script.reports)
    hits = sum(r["cached_tokens"] for r in script.reports)
    assert values["vllm:prefix_cache_queries_total"] == values["vllm:prompt_tokens_total"] == queries
    assert values["vllm:prefix_cache_hits_total"] == values["vllm:prompt_tokens_cached_total"] == hits
    assert queries == hits + sum(misses.values())
    matched = script.metrics("milepost:matched_tokens_total", "group")
    for group in ("mla", "kda"):
        assert matched[group] == sum(r["matched_tokens"].get(group, 0) for r in script.reports)
    lost = sum(r["tokens_lost_to_missing_state"] for r in script.reports)
    assert values["milepost:tokens_lost_to_missing_state_total"] == lost > 0


def test_the_core_counts_the_same(script: Script, lines: list[str]) -> None:
    counters = script.server.model.engine.fresh_stats().result(10).counters
    values = script.server.metrics()
    assert counters.num_queried_tokens == counters.num_hit_tokens + counters.num_missed_tokens
    assert counters.num_queried_tokens == values["vllm:prefix_cache_queries_total"]
    assert counters.num_hit_tokens == values["vllm:prefix_cache_hits_total"]
    assert sum(counters.missed_tokens_by_reason.values()) == counters.num_missed_tokens
    assert sum(counters.misses_by_reason.values()) == len(script.reports)
    assert counters.num_lost_tokens == values["milepost:tokens_lost_to_missing_state_total"]
    assert values["vllm:num_preemptions_total"] == counters.num_preemptions >= 1
    assert values["milepost:sibling_waits_total"] == counters.num_sibling_waits > 0


def test_checkpoints_published_are_there_or_among_the_evictions(script: Script, lines: list[str]) -> None:
    states = script.metrics("milepost:states", "reason")
    published = script.metrics("milepost:checkpoints_total", "reason")
    moves = script.metrics("milepost:evictions_total", "move")
    state_bytes = script.metrics("milepost:state_bytes", "reason")
    assert set(states) == set(published) == set(state_bytes) == set(CHECKPOINT_REASONS)
    gone = Counter(
        {reason: int(n) for reason, n in script.metrics("milepost:evictions_total", "reason").items()}
    )
    stranded = moves.get("stranded", 0)
    assert sum(published.values()) == sum(states.values()) + sum(gone.values()) - stranded
    for reason in CHECKPOINT_REASONS:
        if reason != "interval" or not stranded:
            assert published[reason] == states[reason] + gone[reason], reason
    size = script.server.model.geometry.checkpoint_bytes
    assert state_bytes == {reason: number * size for reason, number in states.items()}
    assert {"drop", "merge"} <= set(moves) and moves["drop"] > 0
    values = script.server.metrics()
    assert values["milepost:evicted_bytes_total"] > 0 and values["milepost:evicted_tokens_total"] > 0


def test_tokens_lost_to_evictions_are_those_of_the_reports(script: Script, lines: list[str]) -> None:
    lost: Counter[str] = Counter()
    for report in script.reports:
        if report["eviction"] is not None:
            lost[report["eviction"].partition(":")[0]] += report["tokens_lost_to_eviction"]
    moves = script.metrics("milepost:tokens_lost_to_eviction_total", "move")
    assert {move: int(number) for move, number in moves.items()} == dict(lost)
    assert sum(lost.values()) > 0


def test_refusals_name_why_and_what(script: Script, lines: list[str]) -> None:
    whys = script.metrics("milepost:refusals_total", "why")
    kinds = script.metrics("milepost:refusals_total", "reason")
    assert whys["states_per_path"] > 0
    assert set(kinds) <= set(CHECKPOINT_REASONS)
    assert sum(whys.values()) == sum(kinds.values())


def test_bytes_are_bounded_and_add_up(script: Script, lines: list[str]) -> None:
    values = script.server.metrics()
    assert values["milepost:budget_bytes"] == CACHE_BYTES
    assert 0 < values["milepost:committed_bytes"] <= CACHE_BYTES
    used = values["milepost:page_bytes"] + sum(script.metrics("milepost:state_bytes", "reason").values())
    assert used <= values["milepost:committed_bytes"]
    assert values["vllm:kv_cache_usage_perc"] == pytest.approx(used / CACHE_BYTES)
    assert values["milepost:running_state_bytes"] == 0
    assert values["milepost:smallest_hit_prompt_tokens"] == MATCH_UNIT + 1


def test_every_hit_was_audited_and_none_of_that_was_counted(script: Script, lines: list[str]) -> None:
    results = script.metrics("milepost:audits_total", "result")
    assert set(results) == set(RESULTS)
    num_hits = sum(report["cached_tokens"] > 0 for report in script.reports)
    assert sum(results.values()) == num_hits > 5
    assert results["mismatch"] == results["within_bound"] == 0 < results["equal"]
    values = script.server.metrics()
    assert values["milepost:audit_max_difference"] == values["milepost:audit_backlog"] == 0
    assert values["milepost:audit_condemned_checkpoints_total"] == 0
    assert values["vllm:request_success_total{finished_reason=length}"] + values[
        "vllm:request_success_total{finished_reason=stop}"
    ] == len(script.reports)
