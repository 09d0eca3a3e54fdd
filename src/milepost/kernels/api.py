"""The operations models call, and which implementation serves each of them.

`select_kernels` makes the choice once, per operation, and records why; models hold the result and
call its attributes. Signatures, shapes and semantics are those of the functions in `reference`
and `reference_kda`, whatever serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from milepost.errors import ConfigError
from milepost.kernels import reference, reference_kda
from milepost.kernels.reference_kda import KdaRows

__all__ = ["OPERATIONS", "REFERENCE", "KdaRows", "KernelChoice", "Kernels", "select_kernels"]

REFERENCE = "reference"
_REFERENCE_OPS: Mapping[str, Callable[..., Any]] = {
    "linear": reference.linear,
    "per_head_linear": reference.per_head_linear,
    "rms_norm": reference.rms_norm,
    "gated_rms_norm": reference.gated_rms_norm,
    "l2_norm": reference.l2_norm,
    "swiglu": reference.swiglu,
    "short_conv": reference.short_conv,
    "kda_gate": reference.kda_gate,
    "kda": reference_kda.kda,
    "store_rows": reference.store_rows,
    "latent_attention": reference.latent_attention,
    "route": reference.route,
    "routed_experts": reference.routed_experts,
}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which implementation serves an operation, and why."""

    operation: str
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable per operation, and the choices behind them.

    Attributes:
        choices: one per operation, in the order of the attributes.
    """

    linear: Callable[..., torch.Tensor]
    per_head_linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    l2_norm: Callable[..., torch.Tensor]
    swiglu: Callable[..., torch.Tensor]
    short_conv: Callable[..., torch.Tensor]
    kda_gate: Callable[..., torch.Tensor]
    kda: Callable[..., torch.Tensor]
    store_rows: Callable[..., None]
    latent_attention: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    routed_experts: Callable[..., torch.Tensor]
    choices: tuple[KernelChoice, ...]


OPERATIONS: tuple[str, ...] = tuple(field.name for field in fields(Kernels) if field.name != "choices")


def select_kernels(implementation: str = "auto") -> Kernels:
    """Implementations for this process.

    Args:
        implementation: "auto" = the best available for each operation, or the name of one.

    Raises:
        ConfigError: an unknown name.
    """
    if implementation not in ("auto", REFERENCE):
        raise ConfigError("kernels", f"{implementation!r} is unknown; use auto or {REFERENCE}")
    reason = "asked for" if implementation == REFERENCE else "no other implementation is built in"
    choices = tuple(KernelChoice(name, REFERENCE, reason) for name in OPERATIONS)
    return Kernels(**_REFERENCE_OPS, choices=choices)
