"""Where an answer ends, and what a request that says nothing gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny_tokenizer import write_model_directory
from tests.server.serving import MAX_MODEL_LEN, Running, running_server
from tests.server.test_errors import assert_error

from milepost.engine import template
from milepost.engine.chat import ChatRenderer
from milepost.engine.generation_config import GenerationDefaults
from milepost.engine.template import ChatTemplate
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import CheckpointFileError, RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(server: Running, **body: Any) -> dict[str, Any]:
    body.setdefault("messages", [{"role": "user", "content": "{{bytes:abcdefghijklmnopqrstuvwxyz}}"}])
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_context_ends_an_answer_with_length(server: Running) -> None:
    prompt = [40] * (MAX_MODEL_LEN - 5)
    body = {"prompt": prompt, "ignore_eos": True, "max_tokens": 5}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert_error(server.post(COMPLETIONS, {**body, "max_tokens": 6}), 400, "max_tokens", "at most 5")
    # Without a limit a chat answer may fill what is left.
    message = {"role": "user", "content": "word " * 400}
    answer = chat(server, messages=[message], ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_max_completion_tokens_wins_over_the_older_name(server: Running) -> None:
    answer = chat(server, max_completion_tokens=3, max_tokens=9, temperature=0)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_stop_token_ids_and_min_tokens(server: Running) -> None:
    (c,) = server.model.tokenizer.encode("c")
    answer = chat(server, temperature=0, stop_token_ids=[c])
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", c)
    longer = chat(server, temperature=0, stop_token_ids=[c], min_tokens=5, max_tokens=8)
    assert longer["usage"]["completion_tokens"] >= 5


def test_defaults_of_the_model(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        server.model.defaults = GenerationDefaults(temperature=0.0, max_tokens=7)
        greedy = [chat(server)["choices"][0] for _ in range(2)]
        assert greedy[0]["message"]["content"] == "abcdefg" == greedy[1]["message"]["content"]
        assert greedy[0]["finish_reason"] == "length"
        assert chat(server, max_tokens=3)["choices"][0]["message"]["content"] == "abc"
        completion = server.post(COMPLETIONS, {"prompt": "{{bytes:abcdefghijklmnopqrstuvwxyz}}"}).json()
        assert completion["choices"][0]["text"] == "abcdefghijklmnop", "16 tokens, as the API has it"
        texts = {
            chat(server, temperature=50, seed=seed)["choices"][0]["message"]["content"] for seed in range(4)
        }
        assert len(texts) == 4, "what the request says wins"


# ---------------------------------------------------------------- templates


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    tokenizer = Tokenizer.from_directory(directory)
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    ids = ChatRenderer.from_directory(directory, tokenizer, file).render([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids.token_ids) == "[user:hi]"
    file.write_text("{% for %}")
    with pytest.raises(CheckpointFileError, match="mine.jinja.*line 1"):
        ChatRenderer.from_directory(directory, tokenizer, file)
    with pytest.raises(CheckpointFileError, match="missing.jinja"):
        ChatRenderer.from_directory(directory, tokenizer, tmp_path / "missing.jinja")


def rendered(source: str, content: str = "x") -> str:
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(source).render(messages, None, add_generation_prompt=True, variables={})


def test_a_template_that_makes_too_much(monkeypatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 1000)
    assert len(rendered("{{ messages[0].content }}", "x" * 1000)) == 1000
    with pytest.raises(RequestError, match="more than 1,000 characters"):
        rendered("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}")


def test_a_template_that_takes_too_long(monkeypatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDER_SECONDS", 0.05)
    with pytest.raises(RequestError, match="longer than 0.05 s"):
        rendered("{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}.{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ '%s' | format(messages) | attr('__class__') }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        text = rendered(source)
        if text == "":
            raise RequestError(None, "an undefined value: nothing was reached")
