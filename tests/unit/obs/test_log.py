"""Logs: one JSON object a line, ids bound, payload never."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from k3ray.obs.log import PAYLOAD_FIELDS, configure, get_log


@pytest.fixture
def sink() -> Iterator[io.StringIO]:
    logger = logging.getLogger("k3ray")
    saved = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure(stream=stream, role="stack", incarnation="stack-0#2")
    yield stream
    logger.handlers[:], logger.propagate = saved[0], saved[2]
    logger.setLevel(saved[1])


def _lines(sink: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_event_with_bound_ids_and_fields(sink: io.StringIO) -> None:
    get_log("k3ray.engine").bind(request="req-1").info("plan.switched", plan=7, dur_s=0.25, ok=True)
    (line,) = _lines(sink)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info", "logger": "k3ray.engine", "event": "plan.switched", "role": "stack",
        "incarnation": "stack-0#2", "request": "req-1", "plan": 7, "dur_s": 0.25, "ok": True,
    }  # fmt: skip


def test_plain_logging_comes_out_in_the_same_form(sink: io.StringIO) -> None:
    logging.getLogger("k3ray.actors").warning("event=actor.lost incarnation=%s", "group-0#1")
    logging.getLogger("k3ray.actors").info("no event here")
    first, second = _lines(sink)
    assert (first["event"], first["detail"]) == ("actor.lost", "incarnation=group-0#1")
    assert (second["event"], second["detail"]) == ("log", "no event here")


@pytest.mark.parametrize("name", sorted(PAYLOAD_FIELDS))
def test_payload_is_never_written(sink: io.StringIO, name: str) -> None:
    get_log("k3ray").bind(**{name: "secret words"}).info("request.admitted", num_tokens=3)
    assert "secret" not in sink.getvalue()
    assert _lines(sink)[0]["num_tokens"] == 3


def test_odd_values_make_a_valid_line(sink: io.StringIO) -> None:
    get_log("k3ray").info("odd", nan=float("nan"), big="x" * 9999, obj={"a": 1}, nothing=None)
    (line,) = _lines(sink)
    assert (line["nan"], line["obj"], line["nothing"]) == ("nan", "{'a': 1}", None)
    assert len(line["big"]) < 400
    assert len(sink.getvalue().splitlines()) == 1


def test_errors_carry_type_and_traceback_in_one_line(sink: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        get_log("k3ray").error("request.failed", error=error)
    (line,) = _lines(sink)
    assert line["error_type"] == "ValueError"
    assert "two" in line["traceback"]


def test_below_the_level_nothing_is_written(sink: io.StringIO) -> None:
    get_log("k3ray").debug("noise")
    assert sink.getvalue() == ""


def test_configure_replaces_itself(sink: io.StringIO) -> None:
    configure(stream=sink)
    get_log("k3ray").info("once")
    assert len(_lines(sink)) == 1
