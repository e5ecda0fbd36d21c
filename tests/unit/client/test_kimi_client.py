"""The clients against a real socket: typed errors, and streams that survive broken connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from k3ray.client.kimi import AsyncKimiClient, KimiClient
from k3ray.client.loadgen import Ask, Damage, History, compare, percentile, run_load
from k3ray.errors import (
    BadRequestError,
    CapacityError,
    DeadlineError,
    TransportError,
    UnknownModelError,
)
from tests.support.endpoint import Endpoint, running_endpoint
from tests.support.scripted_router import ScriptedRouter

PARAMS = {"max_tokens": 24, "seed": 3}


class CuttingProxy:
    """A TCP relay that cuts the first `cuts` connections after `num_bytes` of the answer."""

    def __init__(self, url: str, *, cuts: int, num_bytes: int) -> None:
        self._target = urlsplit(url)
        self._cuts, self._num_bytes = cuts, num_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            limit = self._num_bytes if self._cuts > 0 else None
            self._cuts -= 1
            far = socket.create_connection((self._target.hostname, self._target.port))
            threading.Thread(target=self._relay, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._relay, args=(far, near, limit), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        left = limit
        try:
            while (left is None or left > 0) and (chunk := source.recv(min(left or 4096, 4096))):
                sink.sendall(chunk)
                left = None if left is None else left - len(chunk)
        except OSError:
            pass  # the other side is gone, which is what the test is about
        finally:
            for end in (source, sink):
                with suppress(OSError):  # closed already
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def endpoint(router: ScriptedRouter) -> Iterator[Endpoint]:
    with running_endpoint(router) as running:
        yield running


def test_whole_answers_and_models(endpoint: Endpoint) -> None:
    with KimiClient(f"{endpoint.url}/v1") as client:
        assert set(client.models()) == {"k3", "kimi-k3"}
        whole = client.complete("Once", **PARAMS)
        text = "".join(event.text for event in client.stream_completion("Once", **PARAMS))
        assert text == whole["choices"][0]["text"]
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat(messages, **PARAMS)["choices"][0]["message"]["content"]
        assert "".join(e.text for e in client.stream_chat(messages, **PARAMS)) == answer


def test_errors_are_typed(endpoint: Endpoint, router: ScriptedRouter) -> None:
    with KimiClient(endpoint.url, max_breaks=1) as client:
        with pytest.raises(UnknownModelError):
            client.complete("x", model="gpt")
        with pytest.raises(BadRequestError) as wrong:
            list(client.stream_completion("x", max_tokens=0))
        assert wrong.value.fields["param"] == "max_tokens"
        router.capacity = 0
        with pytest.raises(CapacityError) as full:
            client.complete("x")
        assert full.value.fields["retry_after_s"] == 2


@pytest.mark.parametrize("num_bytes", [1, 700, 1500, 4000])
def test_a_cut_stream_goes_on_at_the_next_event(endpoint: Endpoint, num_bytes: int) -> None:
    proxy = CuttingProxy(endpoint.url, cuts=3, num_bytes=num_bytes)
    try:
        with KimiClient(endpoint.url) as client:
            calm = list(client.stream_completion("Once", **PARAMS, n=2))
        with KimiClient(proxy.url) as client:
            cut = list(client.stream_completion("Once", **PARAMS, n=2))
    finally:
        proxy.close()
    for choice in (0, 1):
        expected = [e.token_ids for e in calm if e.choice == choice]
        assert [e.token_ids for e in cut if e.choice == choice] == expected
        assert "".join(e.text for e in cut if e.choice == choice) == "".join(
            e.text for e in calm if e.choice == choice
        )


def test_an_absent_endpoint_ends_with_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        KimiClient(f"http://127.0.0.1:{port}", max_breaks=1) as client,
        pytest.raises(TransportError, match="broke 2 times"),
    ):
        list(client.stream_completion("x"))


def test_a_silent_endpoint_ends_with_a_deadline(endpoint: Endpoint, router: ScriptedRouter) -> None:
    router.gate = asyncio.Event()
    with KimiClient(endpoint.url, whole_s=0.2) as client, pytest.raises(DeadlineError):
        client.complete("x")


def test_load_is_bounded_and_undamaged_by_kills(endpoint: Endpoint, router: ScriptedRouter) -> None:
    asks = [Ask(name=str(i), prompt=f"p{i}", params={**PARAMS, "seed": i}) for i in range(12)]

    async def load() -> list[History]:
        async with AsyncKimiClient(endpoint.url) as client:
            return await run_load(client, asks, num_streams=4)

    calm = asyncio.run(load())
    router.kill_at = {3, 9, 20}
    seen = asyncio.run(load())
    assert compare(calm, seen) == Damage()
    assert all(len(history.tokens) == 24 for history in seen)
    assert all(len(history.gaps_s) == 23 for history in seen)
    assert all(history.finish == "length" for history in seen)


def test_damage_is_counted() -> None:
    def history(*tokens: int) -> History:
        return History(
            name="a", started_s=0.0, tokens=tokens, logprobs=(), times_s=(), text="", finish=None
        )

    calm = [history(1, 2, 3, 4, 5)]
    assert compare(calm, [history(1, 2, 4, 5)]) == Damage(lost=1)
    assert compare(calm, [history(1, 2, 3, 3, 4, 5)]) == Damage(doubled=1)
    assert compare(calm, [history(1, 2, 9, 4, 5)]) == Damage(changed=1)
    assert not compare(calm, [history(1, 2, 9, 4, 5)]).none


def test_percentiles() -> None:
    assert percentile(range(100), 0.5) == 50
    assert percentile(range(100), 0.99) == 99
