"""A worker without tensors: a page holds its tokens, a state holds every token it has read.

Executing a chunk checks that the state and the pages agree, so a wrong reuse fails loudly. What it
"predicts" is either a script taken from the prompt or pseudo-random numbers over the whole context:

* `{{text}}` in the prompt: the answer is `text`, then the end-of-answer token;
* `{{bytes:text}}`: the same, one byte per token, so that code points and stop strings span tokens;
* anything else: scores drawn from a hash of all tokens so far.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.plan import (
    ZERO_STATE,
    ChunkDrafts,
    ChunkPlan,
    ChunkResult,
    SampledToken,
    SamplingParams,
    ScoredToken,
    StepDrafts,
    StepPlan,
    StepResult,
)
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import WorkerError

SCRIPT = re.compile(r"\{\{(bytes:)?(.*?)\}\}", re.DOTALL)
SCRIPT_SCORE = 30.0


def small_geometry(match_unit: int = 16) -> CacheGeometry:
    """One attention group, one recurrent group; a page and a state are 4 KiB records each."""
    return CacheGeometry(match_unit, (AttentionGroupSpec("mla", 64),), (RecurrentGroupSpec("kda", 4096),))


@dataclass
class _Live:
    sampling: SamplingParams
    num_prompt_tokens: int
    table: list[int]
    is_tainted: bool = False


class ByteWorker:
    """Implements `core.ports.Worker`.

    Attributes:
        fail_next: this many of the next steps with chunks raise.
        num_computed: prompt and output rows over all steps.
        poisoned: slots with a state that is silently wrong; what is computed from one is wrong too.
        taint: what is added to one score of a wrong state; None = all of them are others.
        drafter: makes the drafts that a plan asks for, from all tokens so far and their number.
        draft_log: drafts that were verified, and how many of them were accepted.
        num_drafted_first: plans whose drafts were made before they were executed.
        chunk_log: request ids of every step with chunks.
        scripts: text in a prompt -> the answer to it, control tokens as tokens; the last one given counts.
        gate: cleared = steps wait, so that a test can act in the middle of a request.
    """

    def __init__(
        self, geometry: CacheGeometry, tokenizer: Tokenizer, *, seconds_per_step: float = 0.0
    ) -> None:
        self.match_unit = geometry.match_unit
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.seconds_per_step = 0.0
        self.fail_next = 0
        self.num_computed = 0
        self.num_steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False
        self.poisoned: set[int] = set()
        self.scripts: dict[str, str] = {}
        self.taint: float | None = None
        self.chunk_log: list[list[int]] = []
        self.drafter: Callable[[Sequence[int], int], Sequence[int]] | None = None
        self.draft_log: list[tuple[list[int], int]] = []
        self.num_drafted_first = 0
        self.live: dict[int, _Live] = {}
        self._pages: dict[int, dict[int, int]] = {}
        self._slots: dict[int, array[int]] = {}
        self._byte_ids = {}
        for token_id in range(self.vocab_size):
            data = tokenizer.token_bytes(token_id)
            if len(data) == 1 and not tokenizer.is_special(token_id):
                self._byte_ids[data[0]] = token_id

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.chunks:
            self.gate.wait(30)
            if self.seconds_per_step:
                time.sleep(self.seconds_per_step)
            if self.fail_next:
                self.fail_next -= 1
                raise WorkerError("planted failure")
        self.num_steps += 1
        if plan.chunks:
            self.chunk_log.append([chunk.request_id for chunk in plan.chunks])
        for request_id in plan.finished:
            self.live.pop(request_id, None)
        for started in plan.started:
            (table,) = started.page_tables
            self.live[started.request_id] = _Live(started.sampling, started.num_prompt_tokens, list(table))
        for copy in plan.copies:
            self._slots[copy.destination_slot] = self._slots[copy.source_slot]
        initial = [self._initial(chunk) for chunk in plan.chunks]
        for chunk in plan.chunks:
            self.live[chunk.request_id].is_tainted = chunk.initial_slots[0] in self.poisoned
        results = [self._run(chunk, state) for chunk, state in zip(plan.chunks, initial, strict=True)]
        return StepResult(plan.step_id, results)

    def draft(self, plan: StepPlan) -> StepDrafts:
        self.num_drafted_first += 1
        made = [
            ChunkDrafts(chunk.request_id, self._drafted(chunk, self._initial(chunk)).tobytes())
            for chunk in plan.chunks
            if chunk.num_own_drafts
        ]
        return StepDrafts(plan.step_id, made, 0.0)

    def _drafted(self, chunk: ChunkPlan, before: array[int]) -> array[int]:
        assert self.drafter is not None
        drafts = array("I", self.drafter(before + array("I", chunk.tokens), chunk.num_own_drafts))
        stops = self.live[chunk.request_id].sampling.stop_token_ids
        return drafts[: next((at for at, token in enumerate(drafts) if token in stops), len(drafts))]

    def close(self) -> None:
        self.closed = True

    def _initial(self, chunk: ChunkPlan) -> array[int]:
        (slot,) = chunk.initial_slots
        state = array("I") if slot == ZERO_STATE else self._slots[slot]
        assert len(state) == chunk.start, f"state of {len(state)} tokens read at {chunk.start}"
        return state

    def _run(self, chunk: ChunkPlan, before: array[int]) -> ChunkResult:
        live = self.live[chunk.request_id]
        own = chunk.num_own_drafts > 0
        if own:
            chunk = dataclasses.replace(chunk)
            chunk.set_drafts(self._drafted(chunk, before).tobytes())
        for group, unit, page in chunk.replaced_pages:
            assert group == 0
            live.table[unit] = page
        live.table.extend(chunk.new_pages[0])
        after = before + array("I", chunk.tokens)
        assert len(after) == chunk.end
        sampled = self._sampled(chunk, live, after)
        after = after + array("I", chunk.draft_tokens)[: max(0, len(sampled) - 1)]
        end = len(after)
        for position in range(chunk.start, end):
            page = self._pages.setdefault(live.table[position // self.match_unit], {})
            page[position % self.match_unit] = after[position]
        seen = [
            self._pages[live.table[position // self.match_unit]][position % self.match_unit]
            for position in range(end)
        ]
        assert seen == after.tolist(), "pages and state disagree"
        exported = [export.position for export in chunk.exports if export.position <= end]
        for export in chunk.exports:
            if export.position <= end:
                self._write(export.slots[0], after[: export.position], live)
        self._write(chunk.running_slots[0], after, live)
        self.num_computed += end - chunk.start
        logits = b""
        if chunk.captures_logits:
            logits = array("f", self._scores(after, live)).tobytes()
        scores = [
            self._scored(after[: chunk.start + chunk.scored_offset + row + 1], token_id, chunk, live)
            for row, token_id in enumerate(array("I", chunk.scored_tokens))
        ]
        drafts = chunk.draft_tokens if own else b""
        return ChunkResult(chunk.request_id, end, exported, sampled, logits, scores, drafts)

    def _sampled(self, chunk: ChunkPlan, live: _Live, tokens: array[int]) -> list[SampledToken]:
        """Behind the last token, and behind each draft that was accepted."""
        if not chunk.num_samples:
            return []
        drafts = array("I", chunk.draft_tokens)
        width = len(chunk.allowed_tokens) // (1 + len(drafts))
        assert width * (1 + len(drafts)) == len(chunk.allowed_tokens)
        sampled: list[SampledToken] = []
        for place in range(1 + len(drafts)):
            row = chunk.allowed_tokens[place * width : (place + 1) * width]
            before = tokens + drafts[:place]
            sampled.append(self._sample(live, before, chunk.output_position + place, row))
            if place == len(drafts) or drafts[place] != sampled[-1].token_id:
                break
        if drafts:
            self.draft_log.append((drafts.tolist(), len(sampled) - 1))
        return sampled

    def _scored(self, before: array[int], token_id: int, chunk: ChunkPlan, live: _Live) -> ScoredToken:
        raw = self._scores(before, live)
        total = math.log(sum(math.exp(score) for score in raw))
        best = sorted(range(self.vocab_size), key=lambda i: -raw[i])[: chunk.num_score_logprobs]
        rank = 1 + sum(score > raw[token_id] for score in raw)
        return ScoredToken(token_id, raw[token_id] - total, rank, [(i, raw[i] - total) for i in best])

    def _write(self, slot: int, tokens: array[int], live: _Live) -> None:
        self._slots[slot] = tokens
        self.poisoned.discard(slot)
        if live.is_tainted:
            self.poisoned.add(slot)

    # ---------------------------------------------------------------- the "model"

    def _scores(self, tokens: array[int], live: _Live) -> list[float]:
        is_other = live.is_tainted and self.taint is None
        seed = hashlib.sha256(tokens.tobytes() + (b"wrong" if is_other else b"")).digest()
        draw = random.Random(seed).random
        scores = [4.0 * draw() for _ in range(self.vocab_size)]
        for token in self.tokenizer.control_tokens:
            scores[token.token_id] = -10.0
        if live.is_tainted and self.taint is not None:
            scores[self._byte_ids[0]] += self.taint
        script = self._script(tokens[: live.num_prompt_tokens])
        done = len(tokens) - live.num_prompt_tokens
        if script is not None and done < len(script):
            scores[script[done]] = SCRIPT_SCORE
        return scores

    def _script(self, prompt: Sequence[int]) -> list[int] | None:
        text = self.tokenizer.decode(prompt)
        for key, answer in reversed(self.scripts.items()):
            if key in text:
                return [*self.tokenizer.encode_with_control(answer), self.tokenizer.eos_token_ids[0]]
        found = SCRIPT.findall(text)
        if not found:
            return None
        one_byte_each, text = found[-1]
        ids = (
            [self._byte_ids[byte] for byte in text.encode()] if one_byte_each else self.tokenizer.encode(text)
        )
        return [*ids, self.tokenizer.eos_token_ids[0]]

    def _sample(
        self, live: _Live, tokens: array[int], output_position: int, allowed_tokens: bytes
    ) -> SampledToken:
        params = live.sampling
        raw = self._scores(tokens, live)
        scores = list(raw)
        counts = Counter(tokens[live.num_prompt_tokens :])
        for token_id, count in counts.items():
            scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
        for token_id, bias in params.logit_bias.items():
            scores[token_id] += bias
        if output_position < params.min_tokens:
            for token_id in params.stop_token_ids:
                scores[token_id] = -math.inf
        if allowed_tokens:
            bits = int.from_bytes(allowed_tokens, "little")
            excluded = [i for i in range(self.vocab_size) if not bits >> i & 1]
            assert len(excluded) < self.vocab_size, "no token is allowed"
            for token_id in excluded:
                scores[token_id] = -math.inf
        if params.temperature > 0:
            key = f"{params.seed}/{params.choice_index}/{output_position}"
            noise = random.Random(hashlib.sha256(key.encode()).digest())
            order = sorted(range(self.vocab_size), key=lambda i: -scores[i])
            allowed = set(order[: params.top_k] if params.top_k else order)
            scores = [
                score / params.temperature - math.log(-math.log(noise.random()))
                if i in allowed
                else -math.inf
                for i, score in enumerate(scores)
            ]
        token_id = max(range(self.vocab_size), key=lambda i: (scores[i], -i))
        if params.num_logprobs is None:
            return SampledToken(token_id)
        total = math.log(sum(math.exp(score) for score in raw))
        best = sorted(range(self.vocab_size), key=lambda i: -raw[i])[: params.num_logprobs]
        return SampledToken(token_id, raw[token_id] - total, [(i, raw[i] - total) for i in best])
