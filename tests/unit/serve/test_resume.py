"""Streams that go on: a kill under them, a repeat of the request, the id of the last event."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.endpoint import Endpoint, running_endpoint, sse, text_of
from tests.support.scripted_router import ScriptedRouter

BODY = {"model": "kimi-k3", "prompt": "Once", "max_tokens": 12, "seed": 3}


@pytest.mark.parametrize("kill_at", [0, 5, 11])
def test_a_kill_under_a_stream_shows_nowhere(
    endpoint: Endpoint, router: ScriptedRouter, kill_at: int
) -> None:
    calm = sse(endpoint.url, BODY)
    router.kill_at = {kill_at}
    assert text_of(sse(endpoint.url, BODY)) == text_of(calm)
    assert endpoint.service.counters.handovers_total == 1


def test_a_repeat_attaches_instead_of_generating(
    endpoint: Endpoint, router: ScriptedRouter
) -> None:
    headers = {"x-request-id": "abc", "authorization": "Bearer one"}
    first = sse(endpoint.url, BODY, headers)
    count = len(router.submitted)
    assert sse(endpoint.url, BODY, headers) == first
    whole = httpx.post(f"{endpoint.url}/v1/completions", json=BODY, headers=headers).json()
    assert whole["choices"][0]["text"] == text_of(first)
    assert len(router.submitted) == count
    other = {**headers, "authorization": "Bearer two"}
    assert text_of(sse(endpoint.url, BODY, other)) == text_of(first)
    assert len(router.submitted) == count + 1, "another tenant has its own keys"
    clash = httpx.post(f"{endpoint.url}/v1/completions", json={**BODY, "seed": 4}, headers=headers)
    assert (clash.status_code, clash.json()["error"]["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize("known", [True, False], ids=["same-ingress", "another-ingress"])
def test_last_event_id_continues_after_any_event(endpoint: Endpoint, known: bool) -> None:
    body = {**BODY, "n": 2, "stream_options": {"include_usage": True}}
    del body["seed"]
    headers = {"x-request-id": "resume"}
    events = sse(endpoint.url, body, headers)
    assert len({event_id for event_id, data in events if data != "[DONE]"}) == len(events) - 1

    def per_choice(found: list[Any]) -> dict[int, str]:
        texts = {0: "", 1: ""}
        for _, data in found:
            for choice in data["choices"] if data != "[DONE]" else ():
                texts[choice["index"]] += choice["text"]
        return texts

    for cut in range(0, len(events), 5):
        with running_endpoint(ScriptedRouter()) as other:
            url = endpoint.url if known else other.url
            rest = sse(url, body, {**headers, "last-event-id": events[cut][0]})
        assert per_choice([*events[: cut + 1], *rest]) == per_choice(events)
        assert rest[-1] == events[-1]


def test_a_foreign_event_id_is_refused(endpoint: Endpoint) -> None:
    (first, _), *_ = sse(endpoint.url, BODY, {"x-request-id": "a"})
    for headers, body in (
        ({"last-event-id": "nonsense"}, BODY),
        ({"last-event-id": first}, {**BODY, "seed": 99}),
        ({"last-event-id": first}, {**BODY, "n": 2}),
        ({"last-event-id": first}, {**BODY, "prompt": "something else"}),
    ):
        answer = httpx.post(f"{endpoint.url}/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize("request_id", ["a", "unknown"])
def test_an_event_id_past_the_end_is_an_error_and_no_answer(
    endpoint: Endpoint, request_id: str
) -> None:
    (first, _), *_ = sse(endpoint.url, BODY, {"x-request-id": "a"})
    body, seed, version, _, usage = first.split("~")
    beyond = "~".join((body, seed, version, "9999", usage))
    events = sse(endpoint.url, BODY, {"x-request-id": request_id, "last-event-id": beyond})
    assert [data["error"]["param"] for _, data in events] == ["last-event-id"]
