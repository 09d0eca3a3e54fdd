"""Plans and results as bytes: msgpack of an envelope with a version and a kind, and a typed body.

The reader refuses another version, an unknown kind, a missing field or a wrong type. Bytes of
tokens travel as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from milepost.core.plan import StepDrafts, StepPlan, StepResult
from milepost.errors import WorkerError

WIRE_VERSION = 7

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """First message of a worker: it is loaded."""

    vocab_size: int
    num_records: list[int]


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Instead of a result: nothing of the plan counts.

    Attributes:
        kind: name of the exception type.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Make the drafts that a plan asks for; it is executed later."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class CloseWorker:
    """The last message to a worker."""


_KINDS: dict[str, type] = {
    "plan": StepPlan,
    "result": StepResult,
    "draft": DraftRequest,
    "drafts": StepDrafts,
    "ready": WorkerReady,
    "failure": WorkerFailure,
    "close": CloseWorker,
}
_NAMES = {message_type: name for name, message_type in _KINDS.items()}


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    kind: str
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(message_type) for name, message_type in _KINDS.items()
}


def encode(message: Any) -> bytes:
    """One of the messages above as bytes.

    Raises:
        TypeError: it is none of them.
    """
    name = _NAMES.get(type(message))
    if name is None:
        raise TypeError(f"{type(message).__name__} is no wire message")
    return _encoder.encode(_Envelope(WIRE_VERSION, name, msgspec.Raw(_encoder.encode(message))))


def decode(data: bytes) -> Any:
    """The message in `data`, typed.

    Raises:
        WorkerError: another version, an unknown kind, or a body that does not fit its type.
    """
    try:
        envelope = _envelope_decoder.decode(data)
        if envelope.version != WIRE_VERSION:
            raise WorkerError(
                f"wire version {envelope.version} is unknown, this side speaks {WIRE_VERSION}; "
                "run the same Milepost on both sides"
            )
        decoder = _decoders.get(envelope.kind)
        if decoder is None:
            raise WorkerError(f"wire message of the unknown kind {envelope.kind!r}")
        return decoder.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise WorkerError(f"wire message cannot be read: {error}") from None


def decode_as(data: bytes, message_type: type[_Message]) -> _Message:
    """`decode`, for a message that must be of this type.

    Raises:
        WorkerError: it is not.
    """
    message = decode(data)
    if not isinstance(message, message_type):
        raise WorkerError(f"expected a {_NAMES[message_type]} message, got {_NAMES[type(message)]}")
    return message
