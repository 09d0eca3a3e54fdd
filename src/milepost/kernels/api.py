"""The operations models call, and which implementation serves each of them.

`select_kernels` makes the choice once, per operation, and records why; models hold the result and
call its attributes. Signatures, shapes and semantics are those of the functions in
`reference_layers`, whatever serves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from milepost.config import EXACT, check_exactness
from milepost.errors import ConfigError
from milepost.kernels import native_older, reference_layers
from milepost.kernels.arguments import KdaInputs, KdaParams, MoeParams
from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import CODED_REASON, EXPANDED_REASON, MIXTURES_REASON, native_library
from milepost.kernels.native_sampling import NativeSampling
from milepost.kernels.tapes import StepTapes

__all__ = [
    "NATIVE",
    "OPERATIONS",
    "REFERENCE",
    "KdaInputs",
    "KdaParams",
    "KernelChoice",
    "Kernels",
    "MoeParams",
    "select_kernels",
]

REFERENCE = "reference"
NATIVE = "native"


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
        numerics: names the roundings behind every result; a stored state is only valid under the same.
        exactness: what reuse may change (`config.EXACTNESS_MODES`). Unless it is EXACT, latent attention may
            expand latents.
        step_tapes: a new `StepTapes`, for who runs the same decoder over the same cache step after step; None
            where steps cannot be written down.
        sampling: goes from logits to tokens; None where the runner's own torch does.
    """

    pack_linear: Callable[..., Any]
    pack_swiglu: Callable[..., Any]
    pack_heads: Callable[..., Any]
    pack_experts: Callable[..., Any]
    embedding: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    linear_parts: Callable[..., tuple[torch.Tensor, ...]]
    linear_swiglu: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    store_latents: Callable[..., None]
    attend_latents: Callable[..., torch.Tensor]
    kda_mixer: Callable[..., torch.Tensor]
    gdn_mixer: Callable[..., torch.Tensor]
    gqa_mixer: Callable[..., torch.Tensor]
    store_keys_values: Callable[..., None]
    rotate_heads: Callable[..., torch.Tensor]
    gate_values: Callable[..., torch.Tensor]
    moe: Callable[..., torch.Tensor]
    add_shared: Callable[..., torch.Tensor]
    mix_sources: Callable[..., torch.Tensor]
    choices: tuple[KernelChoice, ...]
    numerics: str
    step_tapes: Callable[[], StepTapes | None]
    sampling: NativeSampling | None
    exactness: str = EXACT

    @property
    def implementation(self) -> str:
        """The one that serves all operations, or "mixed"."""
        names = {choice.implementation for choice in self.choices}
        return names.pop() if len(names) == 1 else "mixed"


OPERATIONS: tuple[str, ...] = tuple(
    field.name
    for field in fields(Kernels)
    if field.name not in ("choices", "numerics", "step_tapes", "sampling", "exactness")
)


def select_kernels(
    implementation: str = "auto", *, exactness: str = EXACT, coded_weights: bool = False
) -> Kernels:
    """Implementations for this process.

    Args:
        implementation: "auto" = native where the library is there, else reference; or the name of one.
        exactness: one of `config.EXACTNESS_MODES`.
        coded_weights: weights may be integers, which an older library cannot multiply by.

    Raises:
        ConfigError: an unknown name, "native" where the library is not usable, or a mode for which it is
            too old.
    """
    check_exactness(exactness)
    chosen = _select(implementation, coded_weights)
    if exactness == EXACT:
        return chosen
    if chosen.implementation != REFERENCE and not native_library().expands_latents:
        raise ConfigError("exactness", EXPANDED_REASON)
    return replace(chosen, exactness=exactness, numerics=f"{chosen.numerics}+{exactness}")


def _select(implementation: str, coded_weights: bool) -> Kernels:
    if implementation not in ("auto", REFERENCE, NATIVE):
        raise ConfigError("kernels", f"{implementation!r} is unknown; use auto, {NATIVE} or {REFERENCE}")
    if implementation == REFERENCE:
        return _kernels(reference_layers, REFERENCE, "asked for", _reference_numerics())
    library = native_library()
    if library.module is not None and coded_weights and not library.has_coded_weights:
        if implementation == NATIVE:
            raise ConfigError("kernels", CODED_REASON)
        return _kernels(reference_layers, REFERENCE, CODED_REASON, _reference_numerics())
    if library.module is not None:
        numerics = library.module.numerics_id()
        chosen = _kernels(NativeOperations(library.module), NATIVE, library.reason, numerics)
        return chosen if library.has_mixtures else _without_mixtures(chosen)
    if implementation == NATIVE:
        raise ConfigError("kernels", library.reason)
    return _kernels(reference_layers, REFERENCE, library.reason, _reference_numerics())


def _without_mixtures(chosen: Kernels) -> Kernels:
    """Native kernels of an older library: torch serves what it lacks, and completes what it has in part."""
    alone = native_older.REFERENCE_OPERATIONS
    choices = []
    for choice in chosen.choices:
        if choice.operation in alone:
            choice = KernelChoice(choice.operation, REFERENCE, MIXTURES_REASON)
        elif choice.operation in native_older.COMPOSED_OPERATIONS:
            choice = replace(choice, reason=f"{choice.reason}; in part composed: {MIXTURES_REASON}")
        choices.append(choice)
    operations: dict[str, Any] = dict(alone)
    return replace(chosen, choices=tuple(choices), **operations)


def _reference_numerics() -> str:
    # torch chooses its code by version and CPU; both decide roundings. The number rises with every change of
    # what the reference rounds.
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-2"


def _kernels(source: Any, implementation: str, reason: str, numerics: str) -> Kernels:
    choices = tuple(KernelChoice(name, implementation, reason) for name in OPERATIONS)
    operations = {name: getattr(source, name) for name in OPERATIONS}
    return Kernels(
        **operations,
        choices=choices,
        numerics=numerics,
        step_tapes=source.step_tapes,
        sampling=source.sampling(),
    )
