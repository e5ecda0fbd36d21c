"""Every typed error of k3ray, one tree under `K3RayError`.

An error says what failed and where (`message`), what to do about it (`remedy`), and carries the
facts as `fields`, so that callers never parse text. All of them survive pickling (Ray moves them
between processes) with their fields; `code` is the stable, machine-readable name.
"""

from __future__ import annotations

from typing import Any, ClassVar


class K3RayError(Exception):
    """Root of all k3ray errors.

    Args:
        message: What failed and where, one sentence.
        remedy: What the reader can do about it.
        fields: Facts (ids, sizes, deadlines) by name; must be picklable.
    """

    code: ClassVar[str] = "k3ray_error"

    def __init__(self, message: str, *, remedy: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.fields: dict[str, Any] = fields

    def __str__(self) -> str:
        return f"{self.message} -> {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.remedy, self.fields)


def _rebuild(
    cls: type[K3RayError], message: str, remedy: str, fields: dict[str, Any]
) -> K3RayError:
    return cls(message, remedy=remedy, **fields)


class ConfigError(K3RayError, ValueError):
    """A configuration is wrong; `fields["violations"]` lists every violation."""

    code = "config_error"


class BadRequestError(K3RayError, ValueError):
    """A client's request is malformed; `fields["param"]` names the field."""

    code = "bad_request"


class UnknownModelError(BadRequestError):
    """The request names a model that this endpoint does not serve."""

    code = "model_not_found"


class ContextLengthError(BadRequestError):
    """Prompt plus requested tokens exceed the context length."""

    code = "context_length_exceeded"


class CapacityError(K3RayError):
    """A bounded resource is full; retry later (`fields["retry_after_s"]`) or raise the bound."""

    code = "capacity"


class PlacementError(K3RayError):
    """The cluster cannot hold what the spec asks for; the message carries the arithmetic."""

    code = "placement"


class PlanError(K3RayError):
    """A placement plan is invalid (uncovered expert, unknown group, ...)."""

    code = "plan"


class StaleVersionError(K3RayError):
    """A weight version, plan version or step attempt is no longer (or not yet) live."""

    code = "stale_version"


class FencedError(K3RayError):
    """The caller's term is lower than the journal's: it has been replaced and must exit."""

    code = "fenced"


class LineBusyError(K3RayError):
    """Another trainer holds the line's lease; fields: line, holder, host, age_s."""

    code = "line_busy"


class LeaseLostError(K3RayError):
    """The caller's lease has lapsed or was taken over; its open step was aborted."""

    code = "lease_lost"


class TransportError(K3RayError):
    """A message could not be delivered or understood."""

    code = "transport"


class PeerLostError(TransportError):
    """The peer's process died or its connection broke; fields: peer, operation."""

    code = "peer_lost"


class DeadlineError(TransportError):
    """A wait reached its deadline; fields: peer, operation, deadline_s."""

    code = "deadline"


class HandshakeError(TransportError):
    """Peer speaks another protocol version or code digest."""

    code = "handshake"


class StepAbortedError(K3RayError):
    """A training step attempt was aborted; retry it with attempt + 1."""

    code = "step_aborted"


class DataError(K3RayError):
    """Training or curation data is missing, truncated or inconsistent."""

    code = "data"


class StoreError(K3RayError):
    """A weight store entry is missing, incomplete or its digest does not match."""

    code = "store"


class CheckpointError(K3RayError):
    """A checkpoint in the release's layout is refused whole; `fields["kind"]` says why."""

    code = "checkpoint"


class JournalError(K3RayError):
    """The controller's journal cannot be read or written."""

    code = "journal"


class NumericError(K3RayError):
    """NaN or infinity where a finite value is required; the request or step is dropped."""

    code = "numeric"


class SupernodeError(K3RayError):
    """The supernode is not up, already up, or did not come up by its deadline."""

    code = "supernode"


class ScalingError(SupernodeError):
    """Another change of the size is under way."""

    code = "scaling"


class ScaleFailedError(SupernodeError):
    """A change of the size was taken back; the old size serves."""

    code = "scale_failed"


class PortInUseError(SupernodeError):
    """A TCP port that we must listen on is taken; fields: port."""

    code = "port_in_use"


class UnknownRequestError(K3RayError):
    """The stack does not know this request id (never submitted, expired, or another life of the
    stack); resubmit the request with the tokens already emitted and a higher term."""

    code = "unknown_request"
