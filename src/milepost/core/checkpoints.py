"""Where a prefill may keep a recurrent state: two rules, defined here once.

Names and rules follow vLLM pull request #53614 ("internal prefix checkpoints"), so that either side
can be read next to the other. `core/chunking.py` asks them and carries the answer in the plan; nobody
downstream works a position out again.
"""

from __future__ import annotations

from milepost.core.units import ceil_div, floor_div, floor_to, is_multiple


def get_mamba_prefill_checkpoint_position(
    num_tokens: int,
    hash_block_size: int,
    drop_eagle_block: bool,
    num_hash_lookahead_tokens: int = 0,
    proof_margin: bool = False,
) -> int:
    """The one position whose state lets a repeat or an extension of a prefill resume furthest.

    With H = `hash_block_size` and L = `num_hash_lookahead_tokens`, all in tokens:

    * no drop: floor((num_tokens - max(1, L)) / H) * H. A repeat must recompute its last token to get
      logits, and the hash of a unit exists only once the L tokens behind the unit do.
    * drop, as merged in #53614 (`proof_margin=False`): one H less than that.
    * drop, vLLM 0.33 (`proof_margin=True`): floor(num_tokens / H) * H - H. There the attention lookup
      may match the unit that is dropped up to `num_tokens` itself, so the unit thrown away already
      leaves tokens to recompute and no further one is held back.

    The two drop rules differ exactly where `num_tokens` sits on a boundary that the first one excludes.

    Args:
        num_tokens: length of the prefill (or end of the query), tokens.
        hash_block_size: tokens per hash block, the finest unit at which a hit may land.
        drop_eagle_block: whether a lookup throws away the last unit it matched, for a drafter whose
            KV depends on tokens behind that unit.
        num_hash_lookahead_tokens: tokens behind a unit that its hash also covers.
        proof_margin: use the drop rule of vLLM 0.33.

    Returns:
        A multiple of `hash_block_size`, at least 0; 0 means that there is no checkpoint.

    Raises:
        ValueError: if a count is negative or `hash_block_size` is not positive.
    """
    _require_count("num_tokens", num_tokens)
    _require_unit("hash_block_size", hash_block_size)
    _require_count("num_hash_lookahead_tokens", num_hash_lookahead_tokens)
    limit = num_tokens - max(1, num_hash_lookahead_tokens)
    if drop_eagle_block:
        if proof_margin:
            limit = num_tokens
        limit -= hash_block_size
    return max(0, floor_to(limit, hash_block_size))


def is_mamba_prefill_checkpoint_valid(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int | None,
    checkpoint_alignment: int | None,
) -> bool:
    """Whether a backend can export the state at `checkpoint_position` from one query.

    Column-addressed backends (`mamba_block_size` given) keep states in a table indexed by position;
    all six clauses of vLLM's rule bind. Slot-addressed backends (`mamba_block_size=None`) name each
    state by a slot, so only three do: an alignment exists, the position lies strictly inside the
    query, and its offset from the query start lies on the kernel's grid.

    Args:
        query_start: tokens already in the state the query starts from.
        query_end: tokens in the state after the query.
        checkpoint_position: position wanted, tokens.
        hash_block_size: tokens per hash block.
        mamba_block_size: tokens per state block (table column), or None for slot addressing.
        checkpoint_alignment: grid in tokens, relative to `query_start`, at which the kernel exports;
            None or 0 if it cannot export.

    Raises:
        ValueError: if a count is negative or a unit is not positive.
    """
    _require_count("query_start", query_start)
    _require_count("query_end", query_end)
    _require_count("checkpoint_position", checkpoint_position)
    _require_unit("hash_block_size", hash_block_size)
    if mamba_block_size is not None:
        _require_unit("mamba_block_size", mamba_block_size)
    if not checkpoint_alignment:
        return False
    _require_unit("checkpoint_alignment", checkpoint_alignment)
    if not query_start < checkpoint_position < query_end:
        return False
    if not is_multiple(checkpoint_position - query_start, checkpoint_alignment):
        return False
    if mamba_block_size is None:
        return True
    # The export lands in the column below the one of the running state; that must not be the column
    # from which the query still reads its initial state (-1 if it starts from nothing).
    checkpoint_column = ceil_div(query_end, mamba_block_size) - 2
    initial_state_column = floor_div(query_start - 1, mamba_block_size)
    return (
        is_multiple(query_start, hash_block_size)
        and query_start + hash_block_size <= checkpoint_position
        and checkpoint_column > initial_state_column
    )


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")


def _require_unit(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 token, not {value}")
