"""A model whose every value names the prefix it was computed from.

Prefixes are interned: a node is (parent node, symbol), so that two nodes are the same number
exactly if they stand for the same tokens. Extending a prefix costs one dictionary lookup, which
keeps sequences of 100,000 tokens cheap and comparisons exact (no digest that could collide).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from milepost.core.plan import SamplingParams

_SYMBOL_BITS = 40
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Spread the bits of `value` over 64 bits (the finaliser of splitmix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PrefixTree:
    """Interned prefixes. Node numbers depend on the order of insertion, `fingerprint` does not."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}
        self._parents: list[int] = []
        self._symbols: list[int] = []
        self._depths: list[int] = []
        self._fingerprints: list[int] = []
        self._roots: dict[Hashable, int] = {}
        self._media_symbols: dict[tuple[bytes, int, int, int], int] = {}
        self._media_values: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def root(self, domain: Hashable, weights: bytes = b"") -> int:
        """The empty prefix of one cache domain.

        Args:
            domain: domains never share a node, even for equal tokens.
            weights: what the model's answers depend on besides the tokens (the adapter).
        """
        node = self._roots.get(domain)
        if node is None:
            node = self._append(-1, -1, 0, _mix(zlib.crc32(weights) + 1))
            self._roots[domain] = node
        return node

    def media_symbol(self, digest: bytes, length: int, offset: int, token: int) -> int:
        """The symbol of token `offset` of a media span of `length` tokens: it stands for the media."""
        key = (digest, length, offset, token)
        symbol = self._media_symbols.get(key)
        if symbol is None:
            symbol = (1 << 32) + len(self._media_values)
            self._media_symbols[key] = symbol
            value = (zlib.crc32(digest) << 20) + length * 65537 + offset * 257 + token
            self._media_values.append(_mix(value))
        return symbol

    def extend(self, path: list[int], symbols: Iterable[int]) -> None:
        """Append to `path` (nodes; `path[-1]` is the prefix so far) the node after each symbol."""
        node = path[-1]
        children = self._children
        for symbol in symbols:
            key = node << _SYMBOL_BITS | symbol
            child = children.get(key)
            if child is None:
                value = symbol if symbol < 1 << 32 else self._media_values[symbol - (1 << 32)]
                mixed = _mix(self._fingerprints[node] * _MULTIPLIER + value + 1)
                child = self._append(node, symbol, self._depths[node] + 1, mixed)
                children[key] = child
            path.append(child)
            node = child

    def depth(self, node: int) -> int:
        """Number of tokens the prefix holds."""
        return self._depths[node]

    def fingerprint(self, node: int) -> int:
        """64 bits that depend on the content only; feeds sampling, never an equality check."""
        return self._fingerprints[node]

    def describe(self, node: int, limit: int = 12) -> str:
        """The prefix in words, for messages: its length and its last `limit` symbols."""
        symbols: list[int] = []
        depth = self._depths[node]
        walk = node
        while self._parents[walk] >= 0 and len(symbols) < limit:
            symbols.append(self._symbols[walk])
            walk = self._parents[walk]
        shown = " ".join(str(s) for s in reversed(symbols))
        return f"{depth} tokens [{'... ' if depth > len(symbols) else ''}{shown}] (node {node})"

    def _append(self, parent: int, symbol: int, depth: int, fingerprint: int) -> int:
        self._parents.append(parent)
        self._symbols.append(symbol)
        self._depths.append(depth)
        self._fingerprints.append(fingerprint)
        return len(self._parents) - 1


@dataclass(frozen=True, slots=True)
class MediaSymbols:
    """A media span as the model sees it: tokens [start, end) stand for `digest`."""

    start: int
    end: int
    digest: bytes


class TrueSequence:
    """The tokens of one request as a run without any cache would produce them.

    The prompt is given; every later token is sampled from the prefix, so the sequence can be
    asked for any position and is the oracle for both inputs and outputs.
    """

    def __init__(
        self,
        model: FingerprintModel,
        prompt: Sequence[int],
        sampling: SamplingParams,
        root: int,
        media: Sequence[MediaSymbols] = (),
    ) -> None:
        self._model = model
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt)
        self.tokens = array("I", prompt)
        self.path = [root]
        symbols: list[int] = list(prompt)
        for span in media:
            for position in range(span.start, min(span.end, len(symbols))):
                offset = position - span.start
                token = symbols[position]
                symbols[position] = model.tree.media_symbol(span.digest, span.end - span.start, offset, token)
        model.tree.extend(self.path, symbols)

    def ensure(self, num_tokens: int) -> None:
        """Make the first `num_tokens` tokens and the nodes at positions [0, num_tokens] known."""
        while len(self.tokens) < num_tokens:
            position = len(self.tokens)
            token = self._model.sample(self.path[position], self.sampling, position - self.num_prompt_tokens)
            self.tokens.append(token)
            self._model.tree.extend(self.path, (token,))

    def outputs(self, max_tokens: int) -> list[int]:
        """What the request must answer: up to `max_tokens` tokens, the stop token included."""
        stops = set(self.sampling.stop_token_ids)
        produced: list[int] = []
        while len(produced) < max_tokens:
            position = self.num_prompt_tokens + len(produced)
            self.ensure(position + 1)
            produced.append(self.tokens[position])
            if produced[-1] in stops:
                break
        return produced


class FingerprintModel:
    """Samples tokens as a pure function of (prefix, seed, choice, output position).

    Args:
        vocab_size: sampled ids are in [0, vocab_size). Small, so that stop ids and equal
            continuations happen often.
    """

    def __init__(self, vocab_size: int = 16) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, not {vocab_size}")
        self.vocab_size = vocab_size
        self.tree = PrefixTree()

    def sample(self, node: int, sampling: SamplingParams, output_position: int) -> int:
        """The token that follows prefix `node`.

        At temperature 0 it depends on the prefix alone. A stop id is not sampled while fewer
        than `min_tokens` tokens were generated.
        """
        key = self.tree.fingerprint(node)
        if sampling.temperature > 0.0:
            key = _mix(key + sampling.seed * 0x1000003 + sampling.choice_index * 0x10001 + output_position)
        banned = set(sampling.stop_token_ids) if output_position < sampling.min_tokens else set()
        token = key % self.vocab_size
        for _ in range(self.vocab_size):
            if token not in banned:
                return token
            token = (token + 1) % self.vocab_size
        raise ValueError("every token of the vocabulary is a stop id and min_tokens forbids them all")
