"""SIGSTOP: a stopped peer is treated as a dead one, and what wakes up later changes nothing."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest
from live import Live, wait_for
from openai import OpenAI

from k3ray.cli.kill_show import Stream, stream_completion
from k3ray.errors import K3RayError

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def stream(client: OpenAI, *, stop_at: int = 0, pid: int = 0) -> Stream:
    """A stream of 60 tokens; SIGSTOP to `pid` after the token `stop_at` (0: none)."""

    def on_token(count: int) -> None:
        if count == stop_at:
            os.kill(pid, signal.SIGSTOP)

    return stream_completion(client, "Stop: ", max_tokens=60, seed=5, on_token=on_token)


def wake(pid: int) -> None:
    """Let a stopped process go on, if it still lives."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def is_whole(live: Live, actor: str, than_term: int) -> bool:
    try:
        document = live.status()
    except K3RayError:
        return False
    terms = [a["term"] for a in document["actors"] if a["id"] == actor]
    return document["state"] == "ready" and terms != [] and terms[-1] > than_term


@pytest.mark.parametrize("role", ["expert_group", "attention_stack", "controller"])
def test_streams_go_on_beside_a_stopped_actor(live: Live, client: OpenAI, role: str) -> None:
    golden = stream(client)
    victims = live.actors(role)
    for victim in victims[:1] if role != "attention_stack" else victims:
        seen = stream(client, stop_at=12, pid=victim["pid"])
        print(f"{victim['id']}: longest gap {seen.longest_gap_s:.2f} s")
        assert seen.steps == golden.steps
        wait_for(lambda v=victim: is_whole(live, v["id"], v["term"]), limit_s=90.0)
        wake(victim["pid"])
        time.sleep(0.5)
        assert stream(client).steps == golden.steps


def test_a_stopped_ingress_is_replaced(live: Live, client: OpenAI) -> None:
    golden = stream(client)
    wait_for(lambda: live.actors("ingress") != [])  # a new controller hears of it at a heartbeat
    victim = live.actors("ingress")[0]
    began_s = time.monotonic()
    os.kill(victim["pid"], signal.SIGSTOP)
    wait_for(lambda: is_whole(live, victim["id"], victim["term"]), limit_s=90.0)

    def answers() -> bool:
        try:
            return httpx.get(f"{live.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(answers, limit_s=90.0)
    print(f"ingress answers again after {time.monotonic() - began_s:.1f} s")
    wake(victim["pid"])
    assert stream(client).steps == golden.steps
