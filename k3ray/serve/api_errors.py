"""Errors as OpenAI's JSON: `{"error": {"message", "type", "param", "code"}}` and a status.

Every typed error has one HTTP status here; an unknown exception becomes a 500 whose body says
nothing of it. Entry point: `error_reply`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3ray.errors import (
    BadRequestError,
    CapacityError,
    DeadlineError,
    K3RayError,
    ScaleFailedError,
    ScalingError,
    StaleVersionError,
    SupernodeError,
    TransportError,
    UnknownModelError,
)

_RETRY_LATER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """What the client gets: HTTP status, extra headers, JSON body."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def error_body(message: str, *, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The JSON of one error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: BaseException) -> ErrorReply:
    """Status, headers and body of any exception; only typed errors speak for themselves."""
    if not isinstance(error, K3RayError):
        body = error_body(
            "internal error; the server's log has the details", kind="server_error", param=None,
            code="internal_error",
        )  # fmt: skip
        return ErrorReply(status=500, body=body)
    if isinstance(error, BadRequestError):
        return _bad_request(error)
    status = _status(error)
    kind = "rate_limit_error" if status == 429 else error_type(status)
    body = error_body(str(error), kind=kind, param=None, code=error.code)
    headers = {"Retry-After": _retry_after(error)} if status in (429, 503) else {}
    return ErrorReply(status=status, body=body, headers=headers)


def error_type(status: int) -> str:
    """OpenAI's `type` of an error with this HTTP status."""
    return "invalid_request_error" if status < 500 else "server_error"


def _bad_request(error: BadRequestError) -> ErrorReply:
    default = 404 if isinstance(error, UnknownModelError) else 400
    status = int(error.fields.get("status", default))
    code = error.fields.get("code") or (None if type(error) is BadRequestError else error.code)
    body = error_body(
        str(error), kind="invalid_request_error", param=error.fields.get("param"), code=code
    )
    return ErrorReply(status=status, body=body)


def _status(error: K3RayError) -> int:
    match error:
        case CapacityError():
            return 429
        case StaleVersionError() | ScalingError():
            return 409
        case ScaleFailedError():
            return 500
        case DeadlineError():
            return 504
        case TransportError() | SupernodeError():
            return 503
        case _:
            return 500


def _retry_after(error: K3RayError) -> str:
    """Whole seconds, at least 1, as the header wants them."""
    return str(max(1, math.ceil(float(error.fields.get("retry_after_s", _RETRY_LATER_S)))))
