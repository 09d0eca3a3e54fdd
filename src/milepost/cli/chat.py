"""`milepost chat`: a conversation in the terminal that shows what each turn cost."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from milepost.cli.loading import load, started
from milepost.cli.values import check_answer_options
from milepost.errors import MilepostError

if TYPE_CHECKING:
    from milepost.engine.serving import ServingModel, ServingOptions

_COMMAND = re.compile(r"/[a-z]+")
"""A line that is one word behind a slash was meant for the program; a path has more of them."""
HELP = "/reset starts over, /exit (or end of input) leaves, Ctrl-C stops an answer"


def chat_with_model(
    directory: Path | None,
    options: ServingOptions,
    *,
    system: str | None,
    temperature: float,
    max_tokens: int,
) -> None:
    """Read turns from standard input until it ends."""
    check_answer_options(max_tokens, temperature)
    console = Console(stderr=True)
    model = load(directory, options, console)
    conversation = _Terminal(model, console, system, temperature, max_tokens)
    with started(model):
        console.print(HELP, style="dim")
        conversation.run()


class _Terminal:
    def __init__(
        self, model: ServingModel, console: Console, system: str | None, temperature: float, max_tokens: int
    ) -> None:
        self._model = model
        self._console = console
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def run(self) -> None:
        while True:
            self._console.print("> ", end="", style="bold")
            line = sys.stdin.readline()
            text = line.strip()
            if not line or text == "/exit":
                return
            if text == "/reset":
                self._messages = list(self._opening)
            elif text == "/help":
                self._console.print(HELP, style="dim")
            elif _COMMAND.fullmatch(text):
                self._console.print(f"{text} is no command: {HELP}", style="dim", markup=False)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            reply = self._reply()
        except MilepostError as error:
            self._messages.pop()
            self._console.print(str(error), style="red", highlight=False, soft_wrap=True, markup=False)
            return
        self._messages.append({"role": "assistant", "content": reply})

    def _reply(self) -> str:
        """Print the answer as it comes and, below it, what was reused."""
        from milepost.engine.blocking import answer
        from milepost.engine.messages import GenerationRequest
        from milepost.engine.params import OutputLimit, SamplingOptions, checked_max_tokens, sampling_params

        model = self._model
        begun = time.perf_counter()
        prompt = model.chat.render(self._messages)
        sampling = sampling_params(
            SamplingOptions(temperature=self._temperature),
            seed=model.seeds.next(),
            eos_token_ids=model.tokenizer.eos_token_ids,
            vocab_size=model.vocab_size,
        )
        num_prompt = len(prompt.token_ids)
        room = max(1, min(self._max_tokens, model.max_model_len - num_prompt))
        limit = checked_max_tokens(
            OutputLimit(room, prompt_param="messages"), num_prompt, model.max_model_len, 0
        )
        request = GenerationRequest(
            prompt.token_ids, sampling, limit, wanted=prompt.wanted, conversation="chat"
        )
        text, first, reuse, num_tokens, drafting = "", None, None, 0, None
        deltas = answer(model.engine, request)
        try:
            for delta in deltas:
                first = time.perf_counter() - begun if first is None else first
                reuse = delta.reuse or reuse
                drafting = delta.drafting
                num_tokens += len(delta.tokens)
                text += delta.text
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        guesses = ""
        if drafting is not None:
            guesses = f"; {drafting.num_accepted_tokens:,} of {drafting.num_draft_tokens:,} guesses right"
        if reuse is not None and first is not None:
            self._console.print(
                f"reused {reuse.num_cached_tokens:,} of {reuse.num_prompt_tokens:,} prompt tokens, "
                f"computed {reuse.num_computed_tokens:,} ({reuse.reason}); "
                f"first token after {1000 * first:.0f} ms, "
                f"{num_tokens} tokens in {time.perf_counter() - begun:.1f} s{guesses}",
                style="dim",
                highlight=False,
                soft_wrap=True,
            )
        return text
