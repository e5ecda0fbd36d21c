from __future__ import annotations

import pytest

from k3ray.engine.event_log import EventLog
from k3ray.engine.request import FinishReason, Request, TokenEvent
from k3ray.errors import FencedError, UnknownRequestError


def make_log(budget: int = 4, max_finished: int = 10) -> EventLog:
    return EventLog(
        event_budget=budget,
        finished_retention_s=10.0,
        orphan_timeout_s=5.0,
        max_finished=max_finished,
    )


def make_request(name: str = "r", emitted: tuple[int, ...] = (), term: int = 1) -> Request:
    return Request(request_id=name, prompt=(1,), emitted=emitted, seed=0, version="v1", term=term)


def token(position: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(position=position, token=position, finish=finish)


def positions(log: EventLog, after: int, now_s: float = 0.0) -> list[int]:
    return [e.position for e in log.read("r", after=after, term=1, now_s=now_s)]


def test_reading_consumes_nothing() -> None:
    log = make_log()
    log.open(make_request(), now_s=0.0)
    for position in range(3):
        assert log.append("r", token(position), now_s=0.0)
    assert positions(log, -1) == [0, 1, 2]
    assert positions(log, -1) == [0, 1, 2]
    assert positions(log, 1) == [2]
    assert positions(log, 2) == []


def test_read_events_make_room_and_unread_ones_do_not() -> None:
    log = make_log(budget=4)
    log.open(make_request(), now_s=0.0)
    for position in range(4):
        assert log.append("r", token(position), now_s=0.0)
    assert positions(log, 1) == [2, 3]
    assert log.append("r", token(4), now_s=0.0)
    assert log.append("r", token(5), now_s=0.0)
    assert not log.append("r", token(6), now_s=0.0)
    with pytest.raises(UnknownRequestError, match="events 0 to 1"):
        positions(log, -1)
    assert positions(log, 1) == [2, 3, 4, 5, 6]


def test_emitted_tokens_have_no_events_here() -> None:
    log = make_log()
    log.open(make_request(emitted=(4, 5)), now_s=0.0)
    log.append("r", token(2), now_s=0.0)
    assert positions(log, 1) == [2]
    with pytest.raises(UnknownRequestError):
        positions(log, 0)


def test_lower_terms_are_fenced() -> None:
    log = make_log()
    log.open(make_request(term=2), now_s=0.0)
    with pytest.raises(FencedError):
        log.read("r", after=-1, term=1, now_s=0.0)
    assert log.read("r", after=-1, term=3, now_s=0.0) == []
    with pytest.raises(FencedError):
        log.read("r", after=-1, term=2, now_s=0.0)


def test_orphans_are_named_and_polling_keeps_alive() -> None:
    log = make_log()
    log.open(make_request("r"), now_s=0.0)
    log.open(make_request("quiet"), now_s=0.0)
    positions(log, -1, now_s=4.0)
    assert log.expire(now_s=5.0) == ["quiet"]
    log.append("quiet", token(0, FinishReason.ABORTED), now_s=5.0)
    assert log.expire(now_s=9.0) == ["r"]


def test_finished_requests_stay_for_the_retention_only() -> None:
    log = make_log()
    log.open(make_request(), now_s=0.0)
    log.append("r", token(0, FinishReason.STOP), now_s=1.0)
    assert log.expire(now_s=10.9) == []
    assert positions(log, -1, now_s=10.9) == [0]
    log.expire(now_s=11.0)
    with pytest.raises(UnknownRequestError, match="not known"):
        positions(log, -1)
    assert len(log) == 0


def test_number_of_finished_requests_is_bounded() -> None:
    log = make_log(max_finished=2)
    for index in range(5):
        log.open(make_request(f"r{index}"), now_s=0.0)
        log.append(f"r{index}", token(0, FinishReason.STOP), now_s=0.0)
    log.expire(now_s=0.0)
    assert [f"r{i}" for i in range(5) if log.find(f"r{i}")] == ["r3", "r4"]


def test_a_restarted_record_outlives_its_predecessor() -> None:
    log = make_log()
    log.open(make_request(), now_s=0.0)
    log.append("r", token(0, FinishReason.ABORTED), now_s=0.0)
    log.open(make_request(term=2), now_s=9.0)
    log.expire(now_s=10.0)
    assert log.read("r", after=-1, term=2, now_s=10.0) == []
