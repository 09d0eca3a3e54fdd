"""From messages to hits: what the renderer asks to keep is what the next rendering finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.bugs.scene import Scene, Shape
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, SETTINGS, spec

from milepost.engine.chat import ChatRenderer, RenderedPrompt, common_prefix
from milepost.engine.template import ChatTemplates
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
STRIPS_THOUGHTS = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    <|im_assistant|>{{ message.content.split('</think>')[-1] }}<|im_end|>
  {%- else -%}<|im_user|>{{ message.content }}<|im_end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|><think>{%- endif -%}"""
EFFORT_FIRST = """\
<|im_system|>effort: {{ effort | default('low') }}<|im_end|>
{%- for message in messages -%}<|im_user|>{{ message.content }}<|im_end|>{%- endfor -%}"""
TOOL_CALLS = """\
{%- for message in messages -%}
  <|im_user|>{{ message.content }}
  {%- for call in message.tool_calls or [] -%}{{ call.function.arguments | tojson }}{%- endfor -%}
  <|im_end|>
{%- endfor -%}"""
SHAPES = [Shape(unit=1), Shape(unit=4, step_tokens=7), Shape(unit=16, grid=None, num_recurrent=2)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def renderer(source: str) -> ChatRenderer:
    return ChatRenderer(TOKENIZER, ChatTemplates({"default": source}, TOKENIZER.named_tokens))


def ask(scene: Scene, prompt: RenderedPrompt) -> Any:
    """Send a rendered prompt; returns its reuse report."""
    outcome = scene.submit(prompt.token_ids, wanted=tuple(prompt.wanted))
    scene.world.schedule()
    report = scene.request(outcome).reuse
    scene.run_until(outcome)
    return report


@shapes
@pytest.mark.parametrize("template", [KIMI_TEMPLATE, STRIPS_THOUGHTS], ids=["kimi", "strips thoughts"])
def test_each_turn_finds_what_the_turn_before_kept(shape: Shape, template: str) -> None:
    """B50 and B66: five turns with thoughts. Nothing that both renderings share is read again."""
    chat = renderer(template)
    messages = []
    with Scene(shape) as scene:
        before: RenderedPrompt | None = None
        for turn in range(5):
            messages.append(
                {"role": "user", "content": f"Question {turn} about the sea and its {turn} ships"}
            )
            prompt = chat.render(messages)
            report = ask(scene, prompt)
            if before is not None:
                shared = common_prefix(before.token_ids, prompt.token_ids)
                history = max(position for position, reason in before.wanted if reason == "history")
                assert history <= shared
                assert report.num_cached_tokens >= shape.floor(history) > 0
                assert report.num_cached_tokens <= shared
            before = prompt
            answer = f"<think>{'well ' * (20 + turn)}</think>Answer {turn}: none."
            messages.append({"role": "assistant", "content": answer})


@shapes
def test_a_flag_near_the_start_is_named_as_the_divergence(shape: Shape) -> None:
    """B67: the reasoning effort is rendered at the very beginning."""
    chat = renderer(EFFORT_FIRST)
    messages = [{"role": "user", "content": "Tell me all about whales. " * 20}]
    low, high = (chat.render(messages, variables={"effort": effort}) for effort in ("low", "high"))
    divergence = common_prefix(low.token_ids, high.token_ids)
    assert 0 < divergence < 12
    with Scene(shape) as scene:
        ask(scene, low)
        report = ask(scene, high)
        assert report.divergence_position == divergence
        assert report.num_cached_tokens <= divergence


@shapes
def test_the_order_of_keys_is_kept_and_another_order_is_named(shape: Shape) -> None:
    """B68: a tool call is rendered with the keys as they came, so an echo of it is found."""
    chat = renderer(TOOL_CALLS)

    def conversation(arguments: dict[str, Any]) -> RenderedPrompt:
        function = {"name": "book", "arguments": json.dumps(arguments)}
        call = {"id": "1", "type": "function", "function": function}
        return chat.render(
            [
                {"role": "user", "content": "Book a cabin on the next ship"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        )

    given = {"to": "Naples", "berth": 2, "at": "dawn"}
    first, echoed = conversation(given), conversation(dict(given))
    other = conversation(dict(sorted(given.items())))
    text = TOKENIZER.decode(first.token_ids)
    assert text.index("Naples") < text.index("berth") < text.index("dawn")
    assert echoed.token_ids == first.token_ids != other.token_ids
    divergence = common_prefix(first.token_ids, other.token_ids)
    with Scene(shape) as scene:
        ask(scene, first)
        assert ask(scene, echoed).num_cached_tokens == shape.floor(len(first.token_ids) - 1)
        report = ask(scene, other)
        assert report.divergence_position == divergence
        assert report.num_cached_tokens <= divergence
