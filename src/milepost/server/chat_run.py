"""A conversation that is being answered: what every chat-like route does before it writes its objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from milepost.engine.markers import MarkerList
from milepost.engine.messages import OutputDelta
from milepost.engine.output_parser import OutputParser
from milepost.engine.params import OutputLimit
from milepost.engine.parts import CallArguments, CallBegun, Content, ParsedAnswer, Part
from milepost.engine.serving import ServingModel
from milepost.errors import RequestError
from milepost.server.conversation import checked_messages, checked_tools
from milepost.server.generation import Choice, Generation, Prompt, Service, begin
from milepost.server.guided import constrained_chat, wants_one_call
from milepost.server.prompt_scores import num_prompt_logprobs
from milepost.server.schema import ChatBody
from milepost.server.streams import merged


@dataclass(slots=True)
class Conversation:
    """Messages and tools in the chat API's form, checked, and where the caller wants checkpoints.

    Attributes:
        tools: None = none, or none that the model is to see.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    found: MarkerList


@dataclass(slots=True)
class Question:
    """A rendered conversation.

    Attributes:
        tools: the declarations the model saw; None = none.
        one_call: the caller takes one call per answer; further ones are dropped.
    """

    prompt: Prompt
    tools: list[dict[str, Any]] | None
    one_call: bool = False


def conversation(body: ChatBody) -> Conversation:
    """What the chat API's fields hold.

    Raises:
        RequestError: names the field.
    """
    found = MarkerList()
    tools = checked_tools(body.tools, found) if body.tool_choice != "none" else None
    return Conversation(checked_messages(body.messages, found), tools, found)


def render(model: ServingModel, body: ChatBody, given: Conversation) -> Question:
    """Messages to token ids and the positions that later turns will share. Takes a while: not for the
    event loop.

    Raises:
        RequestError: names the field.
    """
    tools, found = given.tools, given.found
    rendered = model.chat.render(
        given.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.template_variables(),
        find_boundaries=model.cache.enable_prefix_caching and body.cache_prompt is not False,
        markers=found.markers,
        max_model_len=model.max_model_len,
    )
    if not rendered.token_ids:
        raise RequestError("messages", "the chat template renders this conversation to nothing")
    return Question(
        Prompt(
            rendered.token_ids,
            rendered.wanted,
            found.pin_seconds,
            marks=model.output_format.marks.char_by_id if model.output_format.parses else None,
            new_constraint=constrained_chat(model, body, tools, rendered.token_ids),
        ),
        tools,
        one_call=wants_one_call(body),
    )


class ChatRun:
    """The answers to one question, taken apart as they come.

    Attributes:
        answers: what every choice has said so far, in the order of `generation.choices`.
    """

    def __init__(self, model: ServingModel, question: Question, generation: Generation) -> None:
        self.generation = generation
        self.answers = [ParsedAnswer() for _ in generation.choices]
        self._one_call = question.one_call
        self._num_silent_tokens = [0] * len(generation.choices)
        output_format = model.output_format
        self._parsers: list[OutputParser | None] = [
            output_format.parser(question.prompt.token_ids, question.tools) if output_format.parses else None
            for _ in generation.choices
        ]

    async def updates(self) -> AsyncGenerator[tuple[Choice, OutputDelta, list[Part]], None]:
        """Every delta with the parts it completed. `answers` and the choice hold them already."""
        async with aclosing(merged(self.generation.streams)) as deltas:
            async for index, delta in deltas:
                choice = self.generation.choices[index]
                choice.add(delta)
                parts = self._parts(index, delta)
                answer = self.answers[index]
                answer.add(parts)
                if not (answer.content or answer.calls):
                    self._num_silent_tokens[index] += len(delta.tokens)
                if choice.finish_reason == "stop" and answer.calls:
                    choice.finish_reason = "tool_calls"
                yield choice, delta, parts

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before content or the first call, of the choices that think."""
        numbers = zip(self._num_silent_tokens, self.answers, strict=True)
        return sum(number for number, answer in numbers if answer.reasoning)

    def usage(self) -> dict[str, Any]:
        """Token counts so far, as the chat API has them."""
        usage = self.generation.usage()
        if self.num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage

    def _parts(self, index: int, delta: OutputDelta) -> list[Part]:
        parser = self._parsers[index]
        if parser is None:
            return [Content(delta.text)] if delta.text else []
        parts = parser.feed(delta.marked, is_last=delta.finish_reason is not None)
        if self._one_call:
            parts = [
                part for part in parts if not isinstance(part, CallBegun | CallArguments) or not part.index
            ]
        return parts


async def ask(
    service: Service,
    request: Request,
    body: ChatBody,
    given: Conversation,
    *,
    limit: OutputLimit,
    label: str,
    num_logprobs: int | None = None,
) -> ChatRun:
    """Render a conversation and hand it to the engine.

    Args:
        body: everything but the conversation.

    Raises:
        RequestError: names the field. EngineOverloaded: too many requests wait already.
    """
    with service.front.preparing():
        question = await asyncio.to_thread(render, service.model, body, given)
        generation = begin(
            service,
            request,
            body,
            [question.prompt],
            num_logprobs=num_logprobs,
            limit=limit,
            label=label,
            prompt_logprobs=num_prompt_logprobs(body),
        )
    return ChatRun(service.model, question, generation)
