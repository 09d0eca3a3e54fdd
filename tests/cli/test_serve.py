"""`milepost serve` as users start it: a process, a signal, the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

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
    assert process.returncode == 0, text


def common_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length
