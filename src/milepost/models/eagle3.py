"""EAGLE-3 drafters (https://arxiv.org/abs/2503.01840): one decoder layer that reads several others.

    h_t = fc([output of layer a at t; of layer b; of layer c])           once per processed token
    x   = [norm(embedding of token t + 1); hidden_norm(h_t)]             twice as wide as the layer
    o   = h_t + attention(x)
    o   = o + mlp(norm(o))
    logits of the token behind t + 1 = head(norm(o))

A further guess is made from o, or from norm(o), in the place of h. So a drafter is a chain of one module,
whose entry for token t + 1 has position t. The head may know a part of the vocabulary only; row i of it is
then token i + d2t[i].
"""

from __future__ import annotations

import torch

from milepost.config import SPECULATIVE_FIELD
from milepost.errors import ConfigError
from milepost.models.draft_target import DraftRows, DraftTarget
from milepost.models.eagle3_config import LAYER_NAMES, PREFIXES, Eagle3Drafter
from milepost.models.gqa import GqaLayer
from milepost.models.inputs import CacheFields, StepInputs
from milepost.models.layers import DenseMlp, Loader, RmsNorm
from milepost.models.mla import MlaLayer
from milepost.models.specs import MlaSpec


class Eagle3Module:
    """A drafter, loaded; `draft_target.ChainedModules`.

    Attributes:
        width: of hidden states.
    """

    num_modules = 1

    def __init__(self, drafter: Eagle3Drafter, target: DraftTarget) -> None:
        """
        Raises:
            ConfigError: the files are those of another drafter.
            CheckpointFileError: a tensor is missing or has another shape.
        """
        weights = target.open_files(drafter.directory)
        self.width = hidden = drafter.hidden_size
        self.tap_layers = drafter.tap_layers
        self._drafter = drafter
        self._decoder = target.decoder
        self._kernels = target.kernels
        eps, tap_width, num_taps = drafter.norm_eps, drafter.target_hidden_size, len(drafter.tap_layers)
        loader = target.loader(weights, weights.prefix(PREFIXES, "fc.weight"))
        self._tap_norms = [
            RmsNorm(loader, f"fc_norm.{number}", tap_width, eps)
            for number in range(num_taps if drafter.norms_taps else 0)
        ]
        self._joined_norm: RmsNorm | None = None
        if drafter.norms_joined_taps:
            self._joined_norm = RmsNorm(loader, "input_norm", num_taps * tap_width, eps)
        self._fc = loader.pack_linear(loader.linear("fc", num_taps * tap_width, hidden))
        layer = loader.under(_layer_name(loader))
        self._embedding_norm = RmsNorm(layer, "input_layernorm", hidden, eps)
        self._hidden_norm = RmsNorm(layer, "hidden_norm", hidden, eps)
        self._mlp_norm = RmsNorm(layer, "post_attention_layernorm", hidden, eps)
        self._attention = _attention(layer.under("self_attn"), drafter)
        inner = drafter.intermediate_size
        self._mlp = DenseMlp(layer.under("mlp"), hidden, inner, "eagle3.mlp", situ=drafter.situ)
        self._norm = RmsNorm(loader, "norm", hidden, eps)
        self._table: torch.Tensor | None = None
        if drafter.has_embedding:
            self._table = loader.tensor("embed_tokens.weight", drafter.vocab_size, hidden)
        root = target.loader(weights)
        self._head = target.decoder.head
        if drafter.has_head:
            head = root.linear("lm_head", hidden, drafter.draft_vocab_size)
            self._head = root.pack_linear(head, role="head")
        self._token_ids = _token_ids(root, drafter)
        weights.release()

    def first_position(self, module: int) -> int:
        """Token position of the first entry."""
        return 1

    def layer(self, module: int) -> int:
        """Number under which the cache fields are kept: as if the layer came behind the decoder's."""
        return self._drafter.first_layer

    def taps(self, read: torch.Tensor) -> torch.Tensor:
        """[N, width] of the outputs of the tap layers side by side, [N, layers * D]."""
        if self._joined_norm is not None:
            read = self._joined_norm.new(read)
        if self._tap_norms:
            parts = read.chunk(len(self._tap_norms), dim=-1)
            joined = torch.empty_like(read)
            for norm, part, out in zip(self._tap_norms, parts, joined.chunk(len(parts), dim=-1), strict=True):
                norm(part, out=out)
            read = joined
        return self._kernels.linear(read, self._fc)

    def run(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> DraftRows:
        """One pass over rows; their entries are stored.

        Args:
            inputs: tokens of the rows, and the index of their entries.
            hidden: [N, width], for each row the hidden state at the position before.
        """
        assert inputs.attention is not None
        joined = self._joined(inputs, hidden)
        residual = joined[:, self.width :] if self._drafter.adds_to_normed else hidden
        x = self._attention(joined, residual, cache, inputs.attention, keeps_residual=True)
        x = self._mlp(self._mlp_norm(x), x)
        normed = self._norm.new(x)
        return DraftRows(normed if self._drafter.hands_on_normed else x, normed)

    def store(self, module: int, inputs: StepInputs, hidden: torch.Tensor, cache: CacheFields) -> None:
        """Stores the entries of rows and computes nothing else; see `run`."""
        assert inputs.attention is not None
        self._attention.store(self._joined(inputs, hidden), cache, inputs.attention)

    def logits(self, module: int, normed: torch.Tensor) -> torch.Tensor:
        """fp32 [M, vocabulary of the decoder] of rows `DraftRows.normed` [M, width]; -inf for tokens that the
        drafter does not know."""
        logits = self._kernels.linear(normed, self._head, dtype=torch.float32)
        if self._token_ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self._drafter.vocab_size), -torch.inf)
        wide[:, self._token_ids] = logits
        return wide

    def _joined(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """What attention reads, [N, 2 * width]: normed embeddings and normed hidden states."""
        if self._table is None:
            embedded = self._decoder.embed(inputs.token_ids)
        else:
            embedded = self._kernels.embedding(inputs.token_ids, self._table)
        joined = embedded.new_empty(embedded.shape[0], 2 * self.width)
        self._embedding_norm(embedded, out=joined[:, : self.width])
        self._hidden_norm(hidden, out=joined[:, self.width :])
        return joined


def _layer_name(loader: Loader) -> str:
    """Under which of its published names the layer is."""
    found = [name for name in LAYER_NAMES if loader.under(name).has("input_layernorm.weight")]
    return found[0] if found else LAYER_NAMES[0]


def _attention(loader: Loader, drafter: Eagle3Drafter) -> GqaLayer | MlaLayer:
    spec, layer, hidden = drafter.attention, drafter.first_layer, drafter.hidden_size
    if isinstance(spec, MlaSpec):
        return MlaLayer(loader, layer, hidden, spec, input_size=2 * hidden, name="eagle3.mla")
    return GqaLayer(loader, layer, hidden, spec, 0.0, input_size=2 * hidden, name="eagle3.gqa")


def _token_ids(loader: Loader, drafter: Eagle3Drafter) -> torch.Tensor | None:
    """int64 [draft vocabulary]: the token of every row of the head; None = they are the same.

    Raises:
        ConfigError: a row leads to no token of the decoder, or two lead to one.
    """
    size, vocab_size = drafter.draft_vocab_size, drafter.vocab_size
    if size == vocab_size and not loader.has("d2t"):
        return None
    ids = torch.arange(size) + loader.weights.take_integers("d2t", (size,))
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        row = int(outside[0])
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"tensor d2t of {drafter.directory} makes token {int(ids[row])} of row {row}, but the model's "
            f"tokens are below {vocab_size}; use the drafter that was made for this model",
        )
    if ids.unique().numel() < size:
        raise ConfigError(
            SPECULATIVE_FIELD,
            f"tensor d2t of {drafter.directory} makes the same token of several rows; it holds what is added "
            "to a row's number",
        )
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids
