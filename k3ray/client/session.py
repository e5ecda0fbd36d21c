"""`StreamSession`: one streamed request across any number of connections. Pure, no IO.

The request keeps its `x-request-id`; after a break it continues with `Last-Event-ID`. An event
whose id was seen before is dropped, so that every event is handed out exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from k3ray.clock import Deadline
from k3ray.errors import (
    BadRequestError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    K3RayError,
    StaleVersionError,
    SupernodeError,
    TransportError,
    UnknownModelError,
)

_BY_CODE: Mapping[str, type[K3RayError]] = {
    kind.code: kind
    for kind in (
        CapacityError, ContextLengthError, DeadlineError, StaleVersionError, SupernodeError,
        UnknownModelError,
    )
}  # fmt: skip
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One SSE event of a choice.

    Args:
        token_ids: The tokens behind it (asked for by the client).
        logprobs: Their log-probabilities, when asked for.
    """

    event_id: str
    choice: int
    text: str
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: str | None = None


class StreamSession:
    """See the module.

    Args:
        body: The request, `stream` set here.
        request_id: The idempotency key.
        max_breaks: Breaks in a row without a new event before giving up.
    """

    def __init__(self, body: Mapping[str, Any], *, request_id: str, max_breaks: int = 10) -> None:
        self.body = {**body, "stream": True, "return_token_ids": True}
        self.done = False
        self.breaks = 0
        self._request_id = request_id
        self._max_breaks = max_breaks
        self._without_progress = 0
        self._last_id: str | None = None
        self._seen: set[str] = set()
        self._fields: dict[str, str] = {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the next connection."""
        headers = {"x-request-id": self._request_id, "accept": "text/event-stream"}
        return headers if self._last_id is None else {**headers, "last-event-id": self._last_id}

    def feed(self, line: str) -> Iterator[StreamEvent]:
        """The events that a line of the body completes.

        Raises:
            K3RayError: the endpoint ended the stream with an error.
        """
        if line.startswith(":"):
            return
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return
        fields, self._fields = self._fields, {}
        data, event_id = fields.get("data"), fields.get("id", "")
        if data == "[DONE]":
            self.done = True
        elif data is not None:
            yield from self._event(json.loads(data), event_id)

    def broken(self, error: Exception | None) -> float:
        """The connection ended early; seconds to wait before the next one.

        Args:
            error: What ended it; None is a clean end without `[DONE]`.

        Raises:
            K3RayError: it is not worth another try.
        """
        if isinstance(error, K3RayError) and not _passes(error):
            raise error
        self.breaks += 1
        self._without_progress += 1
        self._fields = {}
        if self._without_progress > self._max_breaks:
            raise TransportError(
                f"the stream broke {self._without_progress} times without a new event",
                remedy="see the endpoint's /health",
                request_id=self._request_id,
            ) from error
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._without_progress - 1))
        if isinstance(error, CapacityError):
            pause_s = max(pause_s, float(error.fields.get("retry_after_s", 0.0)))
        return pause_s

    def _event(self, document: Mapping[str, Any], event_id: str) -> Iterator[StreamEvent]:
        if "error" in document:
            raise error_of(500, document, {})
        if event_id in self._seen:
            return
        self._seen.add(event_id)
        self._last_id = event_id
        self._without_progress = 0
        for choice in document.get("choices", ()):
            delta = choice.get("delta", {})
            yield StreamEvent(
                event_id=event_id,
                choice=choice["index"],
                text=choice.get("text") or delta.get("content") or "",
                reasoning=delta.get("reasoning_content") or "",
                token_ids=tuple(choice.get("token_ids") or ()),
                logprobs=_logprobs(choice.get("logprobs")),
                finish=choice.get("finish_reason"),
            )


@contextmanager
def typed_failures(path: str, limit_s: float) -> Iterator[None]:
    """Failures of the connection as `DeadlineError` and `TransportError`."""
    try:
        yield
    except httpx.TimeoutException as error:
        deadline = Deadline.after(limit_s, operation=path, peer="the endpoint")
        raise deadline.error(remedy="ask for fewer tokens, or stream") from error
    except httpx.TransportError as error:
        raise TransportError(
            f"{path} failed: {type(error).__name__}: {error}", remedy="see the endpoint's /health"
        ) from error


def check_answer(answer: httpx.Response) -> None:
    """Raise the typed error of an answer that is not a success; its body must have been read."""
    if answer.is_success:
        return
    try:
        document = answer.json()
    except ValueError:
        document = {}
    raise error_of(answer.status_code, document, answer.headers)


def error_of(status: int, document: Any, headers: Mapping[str, str]) -> K3RayError:
    """The endpoint's JSON error as one of ours."""
    found = document.get("error") if isinstance(document, dict) else None
    error: Mapping[str, Any] = found if isinstance(found, dict) else {}
    message = str(error.get("message") or f"the endpoint answered {status}")
    fields: dict[str, Any] = {"status": status, "param": error.get("param")}
    retry_after = headers.get("retry-after", "")
    if retry_after.isdigit():
        fields["retry_after_s"] = math.ceil(int(retry_after))
    default: type[K3RayError] = BadRequestError if 400 <= status < 500 else TransportError
    return _BY_CODE.get(str(error.get("code")), default)(message, **fields)


def _passes(error: K3RayError) -> bool:
    """Whether another try may succeed."""
    return not isinstance(error, BadRequestError | StaleVersionError)


def _logprobs(found: Mapping[str, Any] | None) -> tuple[float, ...]:
    if not found:
        return ()
    if found.get("content") is not None:
        return tuple(entry["logprob"] for entry in found["content"])
    return tuple(found.get("token_logprobs") or ())
