"""Kills in the middle of streams: the client sees the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from live import Live, live_supernode
from openai import OpenAI

from k3ray.cli.kill_show import Stream, kill_during_stream, stream_completion, wait_rebuilt

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_supernode("stacks=2") as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=120)


def test_stream_survives_the_kill_of_a_group(live: Live) -> None:
    report = kill_during_stream(live.url, live.status, prompt="Survive: ", num_tokens=40, say=print)
    assert report.same_tokens
    assert report.plan_after > report.plan_before
    assert report.hop_retries > 0


def test_stream_survives_the_kill_of_every_stack(live: Live, client: OpenAI) -> None:
    def run(kill_at: int) -> Stream:
        def on_token(count: int) -> None:
            if count == kill_at:
                for actor in victims:
                    os.kill(actor["pid"], signal.SIGKILL)

        return stream_completion(client, "Stack: ", max_tokens=40, seed=5, on_token=on_token)

    victims: list[dict[str, object]] = []
    golden = run(-1)
    victims = live.actors("attention_stack")
    seen = run(12)
    for actor in victims:
        wait_rebuilt(live.status, str(actor["id"]), than_term=int(str(actor["term"])))
    assert seen.tokens == golden.tokens
