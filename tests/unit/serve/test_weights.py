"""Weight versions over HTTP: what is there, changing the latest, asking for one of several."""

import httpx
import pytest

from tests.support.endpoint import Endpoint
from tests.support.scripted_router import VERSION, ScriptedRouter

OTHER = "main@3-aaaaaaaaaaaa"


def update(endpoint: Endpoint, body: object) -> httpx.Response:
    return httpx.post(f"{endpoint.url}/update_weights", json=body, timeout=20.0)


def ask(endpoint: Endpoint, **headers: str) -> httpx.Response:
    body = {"model": "kimi-k3", "prompt": "hello", "max_tokens": 8, "seed": 1}
    return httpx.post(f"{endpoint.url}/v1/completions", json=body, headers=headers, timeout=20.0)


def test_the_latest_changes_and_goes_back(endpoint: Endpoint, router: ScriptedRouter) -> None:
    router.stored.add(OTHER)
    changed = update(endpoint, {"version": OTHER}).json()
    assert (changed["success"], changed["version"], changed["previous"]) == (True, OTHER, VERSION)
    assert httpx.get(f"{endpoint.url}/weight_info", timeout=5.0).json()["version"] == OTHER
    assert ask(endpoint).headers["x-k3ray-version"] == OTHER
    assert update(endpoint, {"version": VERSION}).json()["previous"] == OTHER
    assert update(endpoint, {"version": VERSION}).json()["message"] == "unchanged"
    assert ask(endpoint).headers["x-k3ray-version"] == VERSION


def test_a_request_names_its_version(endpoint: Endpoint, router: ScriptedRouter) -> None:
    router.live.add(OTHER)
    by_other = ask(endpoint, **{"x-k3ray-version": OTHER})
    by_latest = ask(endpoint)
    assert by_other.headers["x-k3ray-version"] == OTHER
    assert by_latest.headers["x-k3ray-version"] == VERSION
    assert by_other.json()["choices"][0]["text"] != by_latest.json()["choices"][0]["text"]
    gone = ask(endpoint, **{"x-k3ray-version": "main@9-bbbbbbbbbbbb"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "stale_version")


def test_a_repeat_cannot_change_its_version(endpoint: Endpoint, router: ScriptedRouter) -> None:
    router.live.add(OTHER)
    assert ask(endpoint, **{"x-request-id": "r1"}).status_code == 200
    other = ask(endpoint, **{"x-request-id": "r1", "x-k3ray-version": OTHER})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "x-k3ray-version")
    same = ask(endpoint, **{"x-request-id": "r1", "x-k3ray-version": VERSION})
    assert same.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "version"),
        ({"version": ""}, 400, "version"),
        ({"version": 3}, 400, "version"),
        ({"version": None}, 400, "version"),
        ({"version": VERSION, "force": True}, 400, "force"),
        ({"version": "main@9-bbbbbbbbbbbb"}, 404, "version"),
        ([VERSION], 400, None),
    ],
)
def test_bad_bodies_change_nothing(
    endpoint: Endpoint, router: ScriptedRouter, body: object, status: int, param: str | None
) -> None:
    answer = update(endpoint, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert router.version == VERSION
