"""Structured logging: one JSON object per line, on the standard library's logging.

`configure` is called once per process by whoever owns it (an actor's start, a job's main); its
bound ids (role, incarnation, line...) are on every line. `get_log(__name__).info("plan.switched",
plan=7)` is the way to log; lines of code that logs `"event=x ..."` text come out in the same form.
Payload (prompts, completions, bodies) never enters a log: such fields are replaced, and strings
are cut.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

Scalar = str | int | float | bool | None

ROOT = "k3ray"
MAX_TEXT = 300
PAYLOAD_FIELDS = frozenset(
    {
        "body", "completion", "content", "delta", "document", "input", "message_text", "messages",
        "output", "prompt", "text", "token_ids", "tokens",
    }
)  # fmt: skip
"""Names under which payload would travel; count things under `num_tokens` and the like."""

_RECORD_FIELDS = "k3_fields"


class Log:
    """A named logger with bound fields; cheap to create, immutable."""

    __slots__ = ("_bound", "_logger")

    def __init__(self, logger: logging.Logger, bound: Mapping[str, object]) -> None:
        self._logger = logger
        self._bound = dict(bound)

    def bind(self, **fields: object) -> Log:
        """A log whose lines carry `fields` too, such as `request="req-1"`."""
        return Log(self._logger, {**self._bound, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """An event for somebody who is looking for a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A thing that happened, as it should."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """A thing that should not happen often; the system copes."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> None:
        """A thing that went wrong; `error` adds its type, message and traceback."""
        self._write(logging.ERROR, event, fields, error)

    def _write(
        self,
        level: int,
        event: str,
        fields: Mapping[str, object],
        error: BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {_RECORD_FIELDS: {**self._bound, **fields}}
            self._logger.log(level, "event=%s", event, extra=extra, exc_info=error)


def get_log(name: str, **bound: object) -> Log:
    """The log of a module (`get_log(__name__)`) with bound fields."""
    return Log(logging.getLogger(name), bound)


def configure(
    *, level: int = logging.INFO, stream: TextIO | None = None, **bound: object
) -> logging.Handler:
    """Write everything under the logger "k3ray" as JSON lines; replaces an earlier `configure`.

    Args:
        level: Lowest level written.
        stream: Where to; None is standard error, taken at every write.
        bound: Fields on every line, such as `role="stack"`, `incarnation="stack-0#2"`.
    """
    logger = logging.getLogger(ROOT)
    handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(bound))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return handler


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: ts, level, logger, event, bound ids, fields."""

    def __init__(self, bound: Mapping[str, object]) -> None:
        super().__init__()
        self._bound = {name: safe_value(name, value) for name, value in bound.items()}

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline; never raises for odd field values."""
        event, rest = _split_event(record.getMessage())
        line: dict[str, Scalar] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        if rest:
            line["detail"] = rest[:MAX_TEXT]
        line |= self._bound
        fields: Mapping[str, object] = getattr(record, _RECORD_FIELDS, {})
        line |= {name: safe_value(name, value) for name, value in fields.items()}
        if record.exc_info and record.exc_info[0] is not None:
            line["error_type"] = record.exc_info[0].__name__
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def safe_value(name: str, value: object) -> Scalar:
    """What may be logged of a field: scalars as they are, long text cut, payload never."""
    if name in PAYLOAD_FIELDS:
        return "<payload not logged>"
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN or infinity
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}...({len(text)} chars)"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks standard error up at every write: Ray and pytest replace it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _split_event(message: str) -> tuple[str, str]:
    """("plan.switched", "plan=7") from "event=plan.switched plan=7"; plain text is a "log"."""
    if not message.startswith("event="):
        return "log", message
    event, _, rest = message.removeprefix("event=").partition(" ")
    return event, rest
