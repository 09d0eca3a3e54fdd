"""How a matrix is coded by integers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BITS = 16
"""A scale is a bf16."""
GROUP_MULTIPLE = 8
"""Kernels decode this many neighbours along the inputs at once."""


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """value = code * scale; a code has `bits` bits, `group` neighbours along the inputs share a scale."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group < 1 or self.group % GROUP_MULTIPLE:
            raise ValueError(
                f"integers of {self.bits} bits in groups of {self.group}: 4 or 8 bits and a multiple of "
                f"{GROUP_MULTIPLE} are implemented"
            )

    @property
    def name(self) -> str:
        return f"int{self.bits}/{self.group}"

    def num_bytes(self, num_values: int) -> int:
        """Of a matrix whose inputs are whole groups, scales included."""
        return num_values * self.bits // 8 + num_values // self.group * SCALE_BITS // 8
