"""Which extras a command needs, found out before a model is loaded: nobody waits to read an error."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from milepost.config import install_command
from milepost.errors import MilepostError

if TYPE_CHECKING:
    from milepost.engine.stores import StoreOptions
    from milepost.server.options import ServerOptions

EXTRAS = {
    "torch": "cpu", "safetensors": "cpu", "numpy": "cpu", "tokenizers": "cpu",
    "fastapi": "server", "uvicorn": "server", "jinja2": "server", "prometheus_client": "server",
    "yaml": "server", "opentelemetry": "otel", "zmq": "events", "redis": "redis", "mooncake": "mooncake",
}  # fmt: skip
"""Package -> the extra that brings it."""

MODEL_PACKAGES = ("torch", "safetensors", "numpy", "tokenizers", "jinja2")
SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
OTLP_MODULE = "opentelemetry.exporter.otlp.proto.http"


def missing_text(module: str) -> str | None:
    """What to say about a module that is not there; None if no extra brings it."""
    package = module.partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return f"this command needs {package}; install it with: {install_command(extra)}"


def check_serving_extras(stores: StoreOptions, server: ServerOptions) -> None:
    """
    Raises:
        MilepostError: names a package that these options need, and the command that installs it.
    """
    wanted = [*MODEL_PACKAGES, *SERVER_PACKAGES]
    if server.otlp_traces_endpoint is not None:
        wanted.append(OTLP_MODULE)
    kinds = {address.kind for address in stores.addresses()}
    wanted += [kind for kind in ("redis", "mooncake") if kind in kinds]
    if stores.events() is not None:
        wanted.append("zmq")
    check_modules(wanted)


def check_modules(modules: list[str] | tuple[str, ...]) -> None:
    """
    Raises:
        MilepostError: names the first module that is missing, and the command that installs it.
    """
    for module in modules:
        if not _is_there(module):
            raise MilepostError(
                missing_text(module) or f"this command needs {module}, which is not installed"
            )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing, or was put aside
        return False
