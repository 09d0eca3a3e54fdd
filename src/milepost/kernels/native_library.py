"""Finds the native library and sets it up from the environment, once per process.

MILEPOST_NATIVE=0 leaves it alone. MILEPOST_ISA=baseline|avx2|avx512 forces an instruction set.
MILEPOST_THREADS=n lets it use n threads (default 1); results do not depend on it.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from types import ModuleType

from milepost.errors import ConfigError

DISTRIBUTION = "milepost-kernels"
API_VERSION = 2
"""Signatures this side calls; the library states the ones it has."""
EXPANDED_REVISION = 2
"""Revision of the interface that brought expanded latents; one of an older library is less."""
EXPANDED_REASON = (
    f"the installed {DISTRIBUTION} is older than expanded latents (interface revision {EXPANDED_REVISION}); "
    "`make native` rebuilds it"
)
PARTS_REVISION = 3
"""Revision of the interface that brought packing of stored parts."""
TAPE_REVISION = 3
"""Revision of the interface that brought tapes of steps."""
SAMPLING_REVISION = 4
"""Revision of the interface that brought sampling."""
MIXTURES_REVISION = 5
"""Revision of the interface that brought experts of every kind, shared experts, output gates, mixes of
sources, and storing of keys and values alone."""
MIXTURES_REASON = (
    f"the installed {DISTRIBUTION} is older than experts of every kind "
    f"(interface revision {MIXTURES_REVISION}); `make native` rebuilds it"
)
CODED_REVISION = 1
"""Revision of the interface that brought weights of few bits; one of an older library is 0."""
CODED_REASON = (
    f"the installed {DISTRIBUTION} is older than weights of few bits (interface revision {CODED_REVISION}); "
    "`make native` rebuilds it"
)


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """Attributes:
    module: the extension, or None.
    reason: why it serves, or why it does not.
    """

    module: ModuleType | None
    reason: str

    @property
    def expands_latents(self) -> bool:
        """Whether attention can expand latents to keys and values."""
        return getattr(self.module, "API_REVISION", 0) >= EXPANDED_REVISION

    @property
    def has_coded_weights(self) -> bool:
        """Whether it multiplies by weights of few bits."""
        return getattr(self.module, "API_REVISION", 0) >= CODED_REVISION

    @property
    def packs_parts(self) -> bool:
        """Whether it joins, checks and packs stored parts in one pass."""
        return getattr(self.module, "API_REVISION", 0) >= PARTS_REVISION

    @property
    def has_tapes(self) -> bool:
        """Whether it can run a step that it has seen once more without Python in between."""
        return getattr(self.module, "API_REVISION", 0) >= TAPE_REVISION

    @property
    def samples(self) -> bool:
        """Whether it goes from logits to tokens."""
        return getattr(self.module, "API_REVISION", 0) >= SAMPLING_REVISION

    @property
    def has_mixtures(self) -> bool:
        """Whether what `MIXTURES_REVISION` brought is there."""
        return getattr(self.module, "API_REVISION", 0) >= MIXTURES_REVISION


def packing_threads() -> int:
    """CPUs this process may use: while weights are packed nothing else runs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def native_library() -> NativeLibrary:
    """
    Raises:
        ConfigError: MILEPOST_ISA or MILEPOST_THREADS cannot be obeyed.
    """
    if os.environ.get("MILEPOST_NATIVE", "") == "0":
        return NativeLibrary(None, "MILEPOST_NATIVE=0")
    try:
        module = importlib.import_module("milepost_kernels")
    except ImportError as error:
        return NativeLibrary(None, f"{DISTRIBUTION} cannot be loaded ({error}); `make native` builds it")
    version = getattr(module, "API_VERSION", None)
    if version != API_VERSION:
        return NativeLibrary(
            None, f"{DISTRIBUTION} has interface {version}, not {API_VERSION}; `make native` rebuilds it"
        )
    _configure(module)
    return NativeLibrary(
        module, f"{DISTRIBUTION} {module.__version__}, {module.isa()}, numerics {module.numerics_id()}"
    )


def _configure(module: ModuleType) -> None:
    isa = os.environ.get("MILEPOST_ISA", "")
    if isa:
        try:
            module.set_isa(isa)
        except ValueError as error:
            raise ConfigError("MILEPOST_ISA", str(error)) from None
    threads = os.environ.get("MILEPOST_THREADS", "")
    if threads:
        if not threads.isascii() or not threads.isdigit() or not 1 <= int(threads) <= 256:
            raise ConfigError("MILEPOST_THREADS", f"must be a whole number from 1 to 256, not {threads!r}")
        module.set_num_threads(int(threads))
