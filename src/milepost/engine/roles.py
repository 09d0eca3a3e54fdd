"""What a replica is for, where prompts and answers are computed by different ones."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.errors import ConfigError, RequestError
from milepost.stores.address import SHARED_KINDS, StoreAddress

BOTH, PREFILL, DECODE = ROLES = ("both", "prefill", "decode")
AUTO, ALWAYS = LOAD_POLICIES = ("auto", "always")
FIELD = "role"


def check_role(role: str, addresses: Sequence[StoreAddress], *, serves_peers: bool) -> None:
    """
    Raises:
        ConfigError: there is no such role, or nobody could get what it computes, or it could get nothing.
    """
    if role not in ROLES:
        raise ConfigError(FIELD, f"{role!r} is unknown; use one of {', '.join(ROLES)}")
    shared = [address for address in addresses if address.kind in SHARED_KINDS]
    if role == PREFILL and not serves_peers and all(address.kind == "peer" for address in shared):
        raise ConfigError(
            FIELD,
            "prefill computes prompts for others: give it --serve-kv, or a shared --kv-store",
        )
    if role == DECODE and not shared:
        raise ConfigError(
            FIELD, "decode loads what others computed: name them with --kv-store peer://HOST:PORT, or a "
            "shared store",
        )  # fmt: skip


def load_policy_of(role: str, asked_for: str | None) -> str:
    """`--kv-load-policy`, which is `always` for a replica that is not meant to compute prompts.

    Raises:
        ConfigError: there is no such policy.
    """
    if asked_for is None:
        return ALWAYS if role == DECODE else AUTO
    if asked_for not in LOAD_POLICIES:
        raise ConfigError(
            "kv_load_policy", f"{asked_for!r} is unknown; use one of {', '.join(LOAD_POLICIES)}"
        )
    return asked_for


def check_answer_length(role: str, max_tokens: int, param: str) -> None:
    """
    Raises:
        RequestError: a replica that computes prompts only was asked for an answer.
    """
    if role == PREFILL and max_tokens > 1:
        raise RequestError(
            param,
            f"must be 1 and not {max_tokens}: this replica computes prompts only (--role prefill). Ask it "
            "for one token, and a replica with --role decode or both for the answer",
            code="prefill_only",
        )
