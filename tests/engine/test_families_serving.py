"""A directory of every family, served: tokenizer, template, weights; the next turn reuses the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.engine.kimi_tokenizers import TOKENS, write_directory  # noqa: E402
from tests.engine.tiny_tokenizer import write_model_directory  # noqa: E402
from tests.support.families import FAMILIES, write_family  # noqa: E402

from milepost.engine.blocking import answer  # noqa: E402
from milepost.engine.messages import GenerationRequest  # noqa: E402
from milepost.engine.params import SamplingOptions, sampling_params  # noqa: E402
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model  # noqa: E402

VOCAB_SIZE = 768
UNIT = 16
QUESTIONS = ("the quick brown fox jumps over the lazy dog", "what is the capital of France?", "numbers 0 1 2")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    # Tokenizer files first: the checkpoint's config.json is the one that counts.
    if request.param in TOKENS:
        write_directory(path, request.param)
    else:
        write_model_directory(path)
    return write_family(path, request.param, seed=4, vocab_size=VOCAB_SIZE, eos_token_id=None)


def conversation(directory: Path, *, caching: bool) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Answers of three turns; per turn tokens of the prompt, of them cached, and processed before."""
    options = ServingOptions(cache_bytes=16 << 20, match_unit=UNIT, enable_prefix_caching=caching)
    model = load_serving_model(directory, options)
    model.engine.start()
    try:
        return _turns(model)
    finally:
        model.close()


def _turns(model: ServingModel) -> tuple[list[str], list[tuple[int, int, int]]]:
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    reuse: list[tuple[int, int, int]] = []
    before: list[int] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = model.chat.render(messages)
        sampling = sampling_params(
            SamplingOptions(temperature=0.0), seed=1, eos_token_ids=(), vocab_size=model.vocab_size
        )
        request = GenerationRequest(prompt.token_ids, sampling, 24, wanted=prompt.wanted)
        deltas = list(answer(model.engine, request))
        (seen,) = [delta.reuse for delta in deltas if delta.reuse is not None]
        ids = prompt.token_ids.tolist()
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b),
            min(len(ids), len(before)),
        )
        reuse.append((len(ids), seen.num_cached_tokens, shared))
        # The last sampled token is never processed.
        before = ids + [token for delta in deltas for token in delta.token_ids][:-1]
        answers.append("".join(delta.text for delta in deltas))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, reuse


@pytest.mark.parametrize("parsers", ["auto", "none"])
def test_answers_come_back_as_generated_only_where_nobody_parses_them(directory: Path, parsers: str) -> None:
    options = ServingOptions(cache_bytes=16 << 20, reasoning_parser=parsers, tool_call_parser=parsers)
    model = load_serving_model(directory, options)
    assert model.chat.reads_generated_answers == (not model.output_format.parses)
    if parsers == "none":
        assert model.chat.reads_generated_answers
    elif model.description.model_type in TOKENS:
        assert not model.chat.reads_generated_answers


def test_turns_reuse_what_was_read_and_answer_as_without_a_cache(directory: Path) -> None:
    answers, reuse = conversation(directory, caching=True)
    cold_answers, cold_reuse = conversation(directory, caching=False)
    assert answers == cold_answers and all(answers)
    assert all(cached == 0 for _, cached, _ in cold_reuse)
    assert reuse[0][1] == 0
    for num_prompt, cached, shared in reuse[1:]:
        assert cached >= UNIT
        # P1: a unit less one, and the last token of the prompt, are the most that is read again.
        assert num_prompt - cached <= UNIT - 1 + max(1, num_prompt - shared)
