"""From a block's rows to guesses, left to right: the heads of DFlash and DSpark.

The backbone computes all rows at once, so a row does not know what the row before it guessed. DSpark adds
to its logits what follows from the token before,

    logits_j = head(h_j) + markov_w2(m_j)      m_j from e = markov_w1[token before], and h_j

    vanilla  m = e
    gated    m = sigmoid(gate_proj([h; e])) * e
    rnn      r, c, o = thirds of joint_proj([s; e; h]), m = tanh(o), s of the next row is
             sigmoid(r) * s + (1 - sigmoid(r)) * tanh(c), that of the first is 0

and may estimate the chance that a guess is accepted, sigmoid(confidence_head([h; e])), from which follows
how many guesses are worth to be verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from milepost.errors import ConfigError
from milepost.kernels.index import AttentionIndex
from milepost.kernels.rowwise import on_full_vectors
from milepost.models.block_config import BlockDrafterSpec, MarkovSpec, no_confidence
from milepost.models.dflash import BlockBackbone, BlockLane
from milepost.models.draft_target import DraftTarget
from milepost.models.inputs import CacheFields
from milepost.models.layers import Loader


class MarkovHead:
    """What the token before a row adds to its logits."""

    def __init__(self, loader: Loader, spec: BlockDrafterSpec, markov: MarkovSpec) -> None:
        rank, hidden = markov.rank, spec.hidden_size
        self._kernels, self._kind = loader.kernels, markov.kind
        self.rank = rank
        self._table = loader.tensor("markov_w1.weight", spec.vocab_size, rank)
        self._out = loader.pack_linear(loader.linear("markov_w2", rank, spec.draft_vocab_size))
        name, width_in, width = {
            "vanilla": ("", 0, 0),
            "gated": ("gate_proj", hidden + rank, rank),
            "rnn": ("joint_proj", 2 * rank + hidden, 3 * rank),
        }[markov.kind]
        if name:
            self._weight = loader.tensor_fp32(f"{name}.weight", width, width_in)
            self._bias = loader.tensor_fp32(f"{name}.bias", width)

    def first_state(self, num_lanes: int) -> torch.Tensor:
        """fp32 [num_lanes, rank]; only the recurrent kind reads it."""
        return torch.zeros(num_lanes, self.rank)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [L] -> [L, rank] in the model dtype."""
        return self._kernels.embedding(tokens, self._table)

    def bias(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to the logits of rows `hidden` [L, D], fp32 [L, draft vocabulary]; the next state."""
        mixed, wide = embedded, embedded.float()
        if self._kind == "gated":
            mixed = _sigmoid(self._joint(hidden, wide)) * wide
        elif self._kind == "rnn":
            raw, candidate, out = self._joint(state, wide, hidden).chunk(3, dim=-1)
            gate = _sigmoid(raw)
            state = gate * state + (1.0 - gate) * on_full_vectors(torch.tanh, candidate)
            mixed = on_full_vectors(torch.tanh, out)
        return self._kernels.linear(mixed.to(embedded.dtype), self._out, dtype=torch.float32), state

    def _joint(self, *parts: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.cat([part.float() for part in parts], dim=-1), self._weight, self._bias)


class ConfidenceHead:
    """The chance that a guess is accepted, if those before it are."""

    def __init__(self, loader: Loader, spec: BlockDrafterSpec) -> None:
        rank = 0 if spec.markov is None else spec.markov.rank
        name, hidden = "proj.weight", spec.hidden_size
        # Whether it reads the embedding of the token before shows in its width.
        width = loader.weights.shape(loader.prefix + name)[-1:]
        self._reads_token = bool(rank) and width == (hidden + rank,)
        self._weight = loader.tensor_fp32(name, 1, hidden + (rank if self._reads_token else 0))
        self._bias = loader.tensor_fp32("proj.bias", 1) if loader.has("proj.bias") else None

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """fp32 [L]."""
        read = hidden.float()
        if self._reads_token and embedded is not None:
            read = torch.cat([read, embedded.float()], dim=-1)
        return _sigmoid(F.linear(read, self._weight, self._bias)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class GuessRows:
    """What is known of some rows before their guesses are made.

    Attributes:
        logits: fp32 [M, vocabulary]; -inf for ids that the drafter cannot guess.
        confidence: fp32 [M], None if the drafter does not estimate it.
        state: fp32 [M, rank], what the rows behind these start from.
    """

    logits: torch.Tensor
    confidence: torch.Tensor | None
    state: torch.Tensor


class BlockDrafter:
    """A DFlash or DSpark drafter, loaded.

    Attributes:
        spec: its sizes.
        backbone: its layers.
        markov: None = rows are guessed independently.
        confidence: None = it does not estimate what is accepted.
    """

    def __init__(self, spec: BlockDrafterSpec, target: DraftTarget) -> None:
        """
        Raises:
            CheckpointFileError: a tensor is missing or has another shape.
            ConfigError: there is a threshold for its confidence, but it has none.
        """
        weights = target.open_files(spec.directory)
        self.spec = spec
        self._kernels = target.kernels
        self.backbone = BlockBackbone(spec, weights, target)
        loader = self.backbone.loader
        self._head: Any = target.decoder.head
        self._ids: torch.Tensor | None = None
        if spec.draft_vocab_size < spec.vocab_size:
            outside = loader if loader.has("lm_head.weight") else dataclasses.replace(loader, prefix="")
            head = outside.linear("lm_head", spec.hidden_size, spec.draft_vocab_size)
            self._head = loader.pack_linear(head, role="head")
            self._ids = _target_ids(outside, spec)
        self.markov: MarkovHead | None = None
        if spec.markov is not None:
            self.markov = MarkovHead(loader.under("markov_head"), spec, spec.markov)
        self.confidence: ConfidenceHead | None = None
        has_confidence = spec.has_confidence
        if has_confidence is None:
            has_confidence = loader.has("confidence_head.proj.weight")
        if has_confidence:
            self.confidence = ConfidenceHead(loader.under("confidence_head"), spec)
        if spec.confidence_threshold > 0.0 and self.confidence is None:
            raise no_confidence(spec.directory.name)
        weights.release()

    def store(self, taps: torch.Tensor, index: AttentionIndex, cache: CacheFields) -> None:
        """Stores the entries of processed rows.

        Args:
            taps: [N, taps * D], outputs of the layers `spec.tap_layers` side by side.
            index: positions and places of the rows.
        """
        self.backbone.store(taps, index, cache)

    def run(self, lanes: Sequence[BlockLane], cache: CacheFields) -> torch.Tensor:
        """One pass over a block behind each lane: the rows that guess, [lanes, guesses, D]."""
        return self.backbone.run(lanes, cache)[:, self.spec.block_rows - self.spec.num_guesses :]

    def base_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [..., draft vocabulary] of rows [..., D], without what the token before adds."""
        flat = self._kernels.linear(rows.reshape(-1, rows.shape[-1]), self._head, dtype=torch.float32)
        return flat.view(*rows.shape[:-1], -1)

    def first_state(self, num_lanes: int) -> torch.Tensor:
        """fp32 [num_lanes, rank], what the first rows of blocks start from."""
        return torch.zeros(num_lanes, 0 if self.markov is None else self.markov.rank)

    def read(
        self,
        rows: torch.Tensor,
        base_logits: torch.Tensor,
        previous: torch.Tensor,
        state: torch.Tensor,
        *,
        estimates: bool = True,
    ) -> GuessRows:
        """What rows guess from, behind the tokens before them.

        Args:
            rows: [M, D] of `run`, one place of several lanes; base_logits: theirs.
            previous: int64 [M], the token before each: the newest one, then what was guessed.
            state: fp32 [M, rank].
            estimates: whether the confidence is of interest.
        """
        logits, embedded = base_logits, None
        if self.markov is not None:
            embedded = self.markov.embed(previous)
            bias, state = self.markov.bias(embedded, rows, state)
            logits = logits + bias
        confidence = None
        if estimates and self.confidence is not None:
            confidence = self.confidence(rows, embedded)
        if self._ids is not None:
            wide = logits.new_full((logits.shape[0], self.spec.vocab_size), -torch.inf)
            wide[:, self._ids] = logits
            logits = wide
        return GuessRows(logits, confidence, state)


def _target_ids(loader: Loader, spec: BlockDrafterSpec) -> torch.Tensor:
    """int64 [draft vocabulary]: the decoder's id of every id that can be guessed."""
    ids = loader.weights.take_integers(loader.prefix + "d2t", (spec.draft_vocab_size,))
    ids = ids + torch.arange(spec.draft_vocab_size)
    if not ids.is_meta and not bool(((ids >= 0) & (ids < spec.vocab_size)).all()):
        raise ConfigError(
            "draft_model.draft_vocab_size",
            f"tensor d2t leads to ids outside of the vocabulary of {spec.vocab_size}; the file is damaged",
        )
    return ids


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return on_full_vectors(torch.sigmoid, x)
