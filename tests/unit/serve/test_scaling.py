"""The size over HTTP: vLLM's and SGLang's body keys, progress, refusals."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.endpoint import Endpoint, start_endpoint
from tests.support.scripted_router import ScriptedRouter


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def endpoint(router: ScriptedRouter) -> Iterator[Endpoint]:
    running = start_endpoint(router)
    yield running
    running.stop()


def ask(endpoint: Endpoint, body: object) -> httpx.Response:
    return httpx.post(f"{endpoint.url}/scale_elastic_ep", json=body, timeout=20.0)


def progress(endpoint: Endpoint, method: str = "GET") -> dict[str, object]:
    answer = httpx.request(method, f"{endpoint.url}/is_scaling_elastic_ep", timeout=5.0)
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


def finish(router: ScriptedRouter, *, failure: str = "", after_s: float = 0.5) -> threading.Thread:
    """The change ends a little later."""

    def end() -> None:
        time.sleep(after_s)
        groups = router.scaling["groups"] if failure else router.scaling["target"]["groups"]
        router.scaling = {
            **router.scaling, "groups": groups, "under_way": False, "failure": failure
        }  # fmt: skip

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def test_the_waiting_key_answers_when_the_change_is_complete(
    endpoint: Endpoint, router: ScriptedRouter
) -> None:
    ending = finish(router)
    answer = ask(endpoint, {"new_data_parallel_size": 3, "drain_timeout": 10})
    ending.join()
    assert (answer.status_code, answer.json()["groups"]) == (200, 3)
    assert progress(endpoint) == {
        "is_scaling_elastic_ep": False, "ep_size": 3, "target_ep_size": None, "last_error": None,
    }  # fmt: skip


def test_the_other_key_answers_at_once_and_a_second_change_is_refused(
    endpoint: Endpoint, router: ScriptedRouter
) -> None:
    assert ask(endpoint, {"new_ep_size": 3}).json()["success"] is True
    assert progress(endpoint, "POST")["is_scaling_elastic_ep"] is True
    assert progress(endpoint)["target_ep_size"] == 3
    refused = ask(endpoint, {"new_ep_size": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "scaling")
    finish(router).join()
    assert progress(endpoint)["ep_size"] == 3


def test_a_change_that_is_taken_back_says_why(endpoint: Endpoint, router: ScriptedRouter) -> None:
    ending = finish(router, failure="group-2 failed 2 times")
    answer = ask(endpoint, {"new_data_parallel_size": 3})
    ending.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "scale_failed")
    assert "group-2 failed" in answer.json()["error"]["message"]
    assert progress(endpoint)["last_error"] == "group-2 failed 2 times"
    assert progress(endpoint)["ep_size"] == 2


def test_a_change_that_takes_longer_goes_on(endpoint: Endpoint) -> None:
    answer = ask(endpoint, {"new_data_parallel_size": 3, "drain_timeout": 0.3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "scale_timeout")
    assert progress(endpoint)["is_scaling_elastic_ep"] is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2, "new_ep_size": 2}, "new_data_parallel_size"),
        ({"new_ep_size": 0}, "new_ep_size"),
        ({"new_ep_size": -1}, "new_ep_size"),
        ({"new_ep_size": True}, "new_ep_size"),
        ({"new_ep_size": "3"}, "new_ep_size"),
        ({"new_ep_size": 2.5}, "new_ep_size"),
        ({"new_data_parallel_size": 2, "drain_timeout": 0}, "drain_timeout"),
        ({"new_data_parallel_size": 2, "drain_timeout": "x"}, "drain_timeout"),
        ({"new_ep_size": 3, "size": 1}, "size"),
        ({"new_ep_size": 9}, "new_ep_size"),
        ([3], None),
    ],
)
def test_bad_bodies_change_nothing(endpoint: Endpoint, body: object, param: str | None) -> None:
    answer = ask(endpoint, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert progress(endpoint)["is_scaling_elastic_ep"] is False
