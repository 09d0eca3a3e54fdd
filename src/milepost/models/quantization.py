"""Which weights are quantised when a model is loaded, and how. No torch.

This is the only place that says so: loaders ask it for every weight they pack, and the memory plan counts
the same roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milepost.errors import ConfigError
from milepost.kernels.schemes import IntegerScheme

Role = Literal["projection", "expert", "head", "absorbed", "router", "gate", "table", "vector"]
"""What a weight is for.

projection: linears of mixers and dense MLPs. expert: linears of routed experts. head: the product that
makes logits. absorbed: the per-head expansions of MLA. router: chooses experts. gate: scales a shared MLP.
table: embeddings. vector: norms, convolution taps, biases and the like.
"""

_INT8 = IntegerScheme(bits=8, group=64)
_INT4 = IntegerScheme(bits=4, group=32)
REVISION = 1
"""Raised when the same name codes weights in another way."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Attributes:
    name: as users write it.
    schemes: of the roles that are quantised; every other weight keeps the model's dtype.
    """

    name: str
    schemes: Mapping[Role, IntegerScheme]

    def scheme(self, role: Role) -> IntegerScheme | None:
        """How weights of this role are coded; None = not at all."""
        return self.schemes.get(role)

    @property
    def numerics(self) -> str:
        """Names the values weights are rounded to; a part of what stored states depend on."""
        parts = ",".join(f"{role}={scheme.name}" for role, scheme in sorted(self.schemes.items()))
        return f"{self.name}-{REVISION}({parts})"


# The head is a quarter of a small model's weights and errors in it go straight into the answer: never
# fewer than 8 bits. Routers decide by small differences, absorbed expansions multiply scores, and both are
# small beside the rest.
_QUANTIZATIONS = {
    "int8": Quantization("int8", {"projection": _INT8, "expert": _INT8, "head": _INT8}),
    "int4": Quantization("int4", {"projection": _INT4, "expert": _INT4, "head": _INT8}),
}
QUANTIZATIONS = tuple(_QUANTIZATIONS)
"""Names for `--quantization`."""
NONE = "none"


def quantization_of(name: str | None) -> Quantization | None:
    """By its name; None and "none" = weights stay as they are.

    Raises:
        ConfigError: unknown.
    """
    if name is None or name == NONE:
        return None
    found = _QUANTIZATIONS.get(name)
    if found is None:
        known = ", ".join((NONE, *QUANTIZATIONS))
        raise ConfigError("quantization", f"{name!r} is not supported; use one of {known}")
    return found
