"""`milepost serve` as users start it: a process, a signal, the embedded model."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from milepost.cli.serve import YOUNG_OBJECTS, spare_collections

pytest.importorskip("torch")


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, list[str], subprocess.Popen[str]]]:
    """Base URL, the lines of stderr as they come, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "milepost", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "listening on" in line:
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(120), "no start-up line"
        found = re.search(r"listening on (http://\S+) \(", "".join(lines))
        assert found is not None, "".join(lines)
        yield found[1], lines, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
        reader.join(10)


def test_the_embedded_model_chats_and_hits() -> None:
    """Ten turns; in each, recomputed <= (U - 1) + max(1, N - P)."""
    with serving("--max-model-len", "8192", "--cache-bytes", "256MiB") as (url, lines, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        (card,) = client.models.list().data
        assert card.id == "milepost-tiny"
        facts = " ".join(
            f"The code of {name} is {1000 + i}." for i, name in enumerate(["Mira", "Ida", "Nora"])
        )
        messages = [{"role": "system", "content": f"You remember what you are told. {facts}"}]
        history: list[list[int]] = []
        for turn in range(10):
            messages.append({"role": "user", "content": f"What is the code of {['Mira', 'Ida'][turn % 2]}?"})
            answer = client.chat.completions.create(
                model=card.id,
                messages=messages,
                max_tokens=16,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            prompt = answer.model_extra["prompt_token_ids"]
            cached = answer.usage.prompt_tokens_details.cached_tokens
            shared = max((common_prefix(old, prompt) for old in history), default=0)
            assert len(prompt) - cached <= 31 + max(1, len(prompt) - shared), f"turn {turn}"
            history.append([*prompt, *answer.choices[0].model_extra["token_ids"][:-1]])
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert cached > 0
    text = "".join(lines)
    assert "smallest prompt that can hit: 33 tokens" in text
    assert "exactness: " in text
    assert "in force: prefix caching on, match unit 32" in text
    assert text.count("cached_tokens=") == 10 and "Mira" not in text
    assert f"{url}/v1" in text and f"{url}/ui" in text
    assert "draining: no request is open" in text and text.endswith("stopped\n")
    assert process.returncode == 0, text


def common_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}


def test_sigterm_finishes_what_is_open_and_exits_with_0() -> None:
    with serving("--max-model-len", "2048", "--cache-bytes", "64MiB") as (url, lines, process):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            process.send_signal(signal.SIGTERM)
            rest = list(events)
        assert rest[-1] == "[DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0
    text = "".join(lines)
    assert "draining: 1 open request may go on for 20 s" in text and text.endswith("stopped\n")
    assert "Traceback" not in text and "leaked" not in text and "terminate" not in text


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_ends_it_at_once(kind: signal.Signals) -> None:
    with serving("--max-model-len", "2048", "--cache-bytes", "64MiB") as (url, lines, process):
        body = {**STREAM, "max_tokens": 2000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            held = answer.iter_lines()  # an iterator that is let go closes the connection
            next(held)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 20
            while "draining: 1 open" not in "".join(lines):
                assert time.monotonic() < deadline, ("it does not begin to stop", process.poll(), lines)
                time.sleep(0.01)
            begun = time.monotonic()
            process.send_signal(kind)
            assert process.wait(10) == 128 + kind
            assert time.monotonic() - begun < 2
    assert "Traceback" not in "".join(lines)


def test_the_collector_leaves_alone_what_start_up_made() -> None:
    threshold, frozen_before = gc.get_threshold(), gc.get_freeze_count()
    kept = [[] for _ in range(10)]  # type: ignore[var-annotated]
    try:
        spare_collections()
        assert gc.get_freeze_count() > frozen_before + len(kept)
        assert not any(kept is each for each in gc.get_objects())
        assert gc.get_threshold() == (YOUNG_OBJECTS, *threshold[1:])
        assert gc.isenabled(), "what requests leave in cycles is still collected"
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


@pytest.mark.slow
def test_health_answers_while_the_model_is_loaded() -> None:
    """A probe sees 503, then 200; no connection is refused in between."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen: list[int] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(httpx.ConnectError):
                seen.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code)

    prober = threading.Thread(target=probe, daemon=True)
    prober.start()
    with serving("--port", str(port), "--cache-bytes", "64MiB"):
        deadline = time.monotonic() + 20
        while 200 not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()  # a server that ends may cut a connection
        prober.join(10)
    assert (seen[0], seen[-1]) == (503, 200) and seen == sorted(seen, reverse=True), seen
