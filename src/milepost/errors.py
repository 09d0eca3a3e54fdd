"""The one exception family of Milepost. A message names the field that is wrong and the fix."""

from __future__ import annotations

import re


class MilepostError(Exception):
    """Base of every error Milepost raises on purpose."""


class ConfigError(MilepostError):
    """An option or a model configuration cannot work.

    `field` is the option or config key, so that a caller can point at it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestError(MilepostError):
    """A request that cannot be served; becomes an OpenAI-style 400 that names `param`."""

    def __init__(
        self, param: str | None, message: str, *, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class CheckpointFileError(MilepostError):
    """A model directory (config, safetensors, tokenizer) that cannot be loaded; names file and tensor."""


class WorkerError(MilepostError):
    """The worker failed to execute a plan; the requests in the plan did not advance."""


class StoreError(MilepostError):
    """A store that cannot be used (a wrong address or option), or a call to it that failed."""


class InvariantError(MilepostError):
    """The core found its own state inconsistent. Always a bug in Milepost, never a user's fault."""


_QUOTED = re.compile(r"(?<!\w)'[^']*'" r'|"[^"]*"')


def naming(param: str | None, message: str) -> str:
    """`message`, with the field it is about in front where it does not name it: clients print the message
    alone. What stands in quotes was sent by the caller and names nothing."""
    if param is None or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", _QUOTED.sub("", message)):
        return message
    return f"{param}: {message}"
