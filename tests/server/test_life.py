"""Clients that leave, many at once, and the routes around generation."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import httpx
import pytest
from tests.server.serving import MATCH_UNIT, Running, running_server

from milepost import __version__

LONG = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 6


def wait_for(condition, message: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_during_prefill_frees_everything(
    server: Running, path: str, stream: bool
) -> None:
    before = server.metrics().get("vllm:request_success_total{finished_reason=abort}", 0)
    body: dict[str, Any] = {"max_tokens": 500, "stream": stream}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": LONG}]
    else:
        body["prompt"] = LONG
    server.worker.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=0.3)
    server.worker.gate.set()
    server.wait_idle()
    name = "vllm:request_success_total{finished_reason=abort}"
    wait_for(lambda: server.metrics().get(name, 0) == before + 1, "the abort was not counted")


def test_a_client_that_leaves_during_decode_frees_everything(server: Running) -> None:
    body = {"prompt": LONG, "max_tokens": 1500, "stream": True, "n": 2}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    generated = server.metrics()["vllm:generation_tokens_total"]
    server.wait_idle()
    assert server.metrics()["vllm:generation_tokens_total"] - generated < 1000
    # What it computed before it left is still worth something.
    again = server.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_connection_that_is_reset(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    server.worker.gate.clear()
    body = b'{"prompt": "' + LONG.encode() + b'", "max_tokens": 500}'
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: server.scheduler.has_unfinished_requests, "the request did not arrive")
    server.worker.gate.set()
    server.wait_idle()


def test_a_slow_reader_does_not_hold_up_others(server: Running) -> None:
    body = {"prompt": LONG, "max_tokens": 600, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as slow:
        lines = slow.iter_lines()
        next(lines)
        quick = server.post("/v1/completions", {"prompt": "{{quick}}", "temperature": 0}).json()
        assert quick["choices"][0]["text"] == "quick"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


def test_two_hundred_at_once_against_a_budget_for_three(tmp_path) -> None:
    """Every one is answered, as it would be alone."""
    prompts = [f"request {number}: " + LONG + f" {{{{answer {number}}}}}" for number in range(200)]
    with running_server(tmp_path, cache_bytes=1 << 30) as server:
        num_tokens = len(server.model.tokenizer.encode(prompts[-1])) + 16
        need = server.model.geometry.request_bytes(num_tokens)
    with running_server(tmp_path, cache_bytes=3 * need) as server:
        assert server.model.max_model_len >= num_tokens

        async def ask_all() -> list[str]:
            client = server.async_client()

            async def ask(prompt: str) -> str:
                answer = await client.completions.create(model="tiny", prompt=prompt, temperature=0)
                return answer.choices[0].text

            return await asyncio.gather(*(ask(prompt) for prompt in prompts))

        answers = asyncio.run(ask_all())
        assert answers == [f"answer {number}" for number in range(200)]
        server.wait_idle()
        metrics = server.metrics()
        assert metrics["vllm:request_success_total{finished_reason=stop}"] == 200
        stats = server.model.engine.stats()
        assert stats.peak_committed_bytes <= stats.budget_bytes
        assert metrics["vllm:prefix_cache_queries_total"] == stats.counters.num_queried_tokens
        assert metrics["vllm:prefix_cache_hits_total"] == stats.counters.num_hit_tokens


def test_routes_around_generation(server: Running) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/version").json() == {"version": __version__}
    client = server.client()
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.object == "model"
    assert card.model_extra["max_model_len"] == server.model.max_model_len
    assert client.models.retrieve("tiny").id == "tiny"
    schema = server.get("/openapi.json").json()
    assert "messages" in str(schema["paths"]["/v1/chat/completions"]["post"]["requestBody"])


def test_reset_prefix_cache(server: Running) -> None:
    def cached() -> int:
        answer = server.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
    assert cached() == 0


def test_metrics_have_the_names_dashboards_read(server: Running) -> None:
    server.post("/v1/completions", {"prompt": LONG, "max_tokens": 3})
    server.wait_idle()
    metrics = server.metrics()
    for name in (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:time_to_first_token_seconds_sum",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:request_queue_time_seconds_sum",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum",
        "vllm:request_success_total{finished_reason=length}",
        "milepost:state_bytes{reason=tail}",
        "milepost:page_bytes",
        "milepost:committed_bytes",
        "milepost:budget_bytes",
        "milepost:evicted_bytes_total",
        "milepost:checkpoint_lifetime_seconds_bucket{le=+Inf}",
        "milepost:checkpoint_idle_before_eviction_seconds_sum",
        "milepost:prefix_reuse_gap_seconds_count",
        "milepost:tokens_lost_to_missing_state_total",
    ):
        assert name in metrics, name
    assert metrics["milepost:smallest_hit_prompt_tokens"] == MATCH_UNIT + 1
    assert any(name.startswith("vllm:cache_config_info{block_size=16") for name in metrics)
    states = {name: value for name, value in metrics.items() if name.startswith("milepost:states{")}
    stats = server.model.engine.stats()
    assert sum(states.values()) == stats.num_checkpoints > 0
    state_bytes = [value for name, value in metrics.items() if name.startswith("milepost:state_bytes{")]
    assert sum(state_bytes) == stats.state_bytes
    assert metrics["vllm:kv_cache_usage_perc"] == stats.used_bytes / stats.budget_bytes


def test_the_smallest_prompt_that_can_hit_is_what_the_metric_says(server: Running) -> None:
    smallest = int(server.metrics()["milepost:smallest_hit_prompt_tokens"])
    for num_tokens, expected in ((smallest - 1, 0), (smallest, smallest - 1)):
        prompt = [30 + num_tokens] * num_tokens
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def test_without_prefix_caching_usage_still_has_the_field(tmp_path) -> None:
    with running_server(tmp_path, caching=False) as server:
        for _ in range(2):
            answer = server.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert answer["milepost"]["reuse"]["reason"] == "disabled"


def test_the_log_has_counts_and_no_text(server: Running, caplog) -> None:
    caplog.set_level(logging.INFO, logger="milepost.request")
    first = server.post("/v1/completions", {"prompt": LONG + "secret", "max_tokens": 2}).json()
    second = server.post("/v1/completions", {"prompt": LONG + "secret", "max_tokens": 2}).json()
    wait_for(lambda: len(caplog.records) >= 2, "no log line")
    lines = [record.getMessage() for record in caplog.records]
    for answer, line in zip((first, second), lines, strict=True):
        assert f"request={answer['id']}" in line
        assert f"cached_tokens={answer['usage']['prompt_tokens_details']['cached_tokens']}" in line
        assert f"reason={answer['milepost']['reuse']['reason']}" in line
        assert "secret" not in line and "fox" not in line


def test_server_seed_makes_unseeded_requests_repeatable(tmp_path) -> None:
    answers = []
    for _ in range(2):
        with running_server(tmp_path, seed=11) as server:
            texts = [
                server.post("/v1/completions", {"prompt": LONG}).json()["choices"][0]["text"]
                for _ in range(2)
            ]
        answers.append(texts)
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
