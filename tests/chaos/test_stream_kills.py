"""Kills under streams: the client sees the tokens and log-prob bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from live import Live, wait_for
from openai import OpenAI

from k3ray.actors.initial_weights import write_initial_version
from k3ray.cli.kill_show import Stream, kill_during_stream, stream_completion, wait_rebuilt
from k3ray.config.presets import PRESETS
from k3ray.errors import K3RayError
from k3ray.weights.store import WeightStore

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_stream_survives_the_kill_of_a_group(live: Live) -> None:
    report = kill_during_stream(live.url, live.status, prompt="Survive: ", num_tokens=40, say=print)
    assert report.same_bits
    assert report.plan_after > report.plan_before
    assert report.hop_retries > 0


def stream(client: OpenAI, prompt: str, *, kill_at: int = 0, pids: Sequence[int] = ()) -> Stream:
    """A stream of 40 tokens, with a SIGKILL to `pids` after the token `kill_at` (0: none)."""

    def on_token(count: int) -> None:
        if count == kill_at:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    return stream_completion(client, prompt, max_tokens=40, seed=5, on_token=on_token)


def test_stream_survives_the_kill_of_every_stack(live: Live, client: OpenAI) -> None:
    golden = stream(client, "Stack: ")
    victims = live.actors("attention_stack")
    seen = stream(client, "Stack: ", kill_at=12, pids=[actor["pid"] for actor in victims])
    for actor in victims:
        wait_rebuilt(live.status, actor["id"], than_term=actor["term"])
    assert seen.steps == golden.steps


def test_streams_go_on_while_the_number_of_stacks_changes(live: Live, client: OpenAI) -> None:
    """2 -> 3 -> 1 -> 2 stacks under streams: the same bits, and no stack of the old number left."""
    golden = stream(client, "Scale: ")
    for stacks in (3, 1, 2):

        def change(count: int, stacks: int = stacks) -> None:
            if count == 8:
                live.supernode.call("scale", None, stacks)

        seen = stream_completion(client, "Scale: ", max_tokens=40, seed=5, on_token=change)
        assert seen.steps == golden.steps
        wait_for(lambda: not live.status()["scaling"]["under_way"], limit_s=120.0)
        assert live.status()["scaling"]["stacks"] == stacks
        assert [a["id"] for a in live.actors("attention_stack")] == [
            f"stack-{i}" for i in range(stacks)
        ]
        assert stream(client, "Scale: ").steps == golden.steps


def test_streams_go_on_while_the_number_of_groups_changes(live: Live, client: OpenAI) -> None:
    """2 -> 3 -> 1 -> 2 groups under streams, over HTTP: the same bits, and no group left over."""
    golden = stream(client, "Groups: ")
    for groups in (3, 1, 2):

        def change(count: int, groups: int = groups) -> None:
            if count == 8:
                httpx.post(
                    f"{live.url}/scale_elastic_ep", json={"new_ep_size": groups}, timeout=10.0
                ).raise_for_status()

        seen = stream_completion(client, "Groups: ", max_tokens=40, seed=5, on_token=change)
        assert seen.steps == golden.steps
        wait_for(lambda: not live.status()["scaling"]["under_way"], limit_s=120.0)
        document = live.status()
        assert (document["scaling"]["groups"], document["scaling"]["failure"]) == (groups, "")
        owners = [a["home_experts"] for a in document["actors"] if a["role"] == "expert_group"]
        experts = [e for owned in owners for e in owned[min(owned)]]
        assert (len(owners), len(experts)) == (groups, len(set(experts)))
        assert stream(client, "Groups: ").steps == golden.steps


def test_streams_keep_their_version_while_the_line_goes_there_and_back(
    live: Live, client: OpenAI
) -> None:
    """A stream that began by one version ends by it, whatever becomes the latest meanwhile."""
    text = PRESETS["k3-tiny"].text_config
    old = live.supernode.call("latest_version")
    golden = stream(client, "Versions: ")
    other = write_initial_version(WeightStore(live.home.store_dir), text, line="main", seed=1)

    def use(version: str) -> dict[str, Any]:
        answer = httpx.post(f"{live.url}/update_weights", json={"version": version}, timeout=60.0)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def there_and_back(count: int) -> None:
        if count == 6:
            assert use(str(other))["previous"] == old
        if count == 20:
            assert use(old)["previous"] == str(other)

    seen = stream_completion(client, "Versions: ", max_tokens=40, seed=5, on_token=there_and_back)
    assert seen.steps == golden.steps
    use(str(other))
    assert stream(client, "Versions: ").steps != golden.steps
    use(old)
    assert stream(client, "Versions: ").steps == golden.steps
    wait_for(lambda: [v["version"] for v in live.status()["versions"]] == [old])


@pytest.mark.parametrize(
    ("stacks", "said"), [(0, "nobody would serve"), (99, "k3_stack: 99 needed")]
)
def test_an_impossible_number_of_stacks_changes_nothing(live: Live, stacks: int, said: str) -> None:
    before = live.status()["scaling"]
    with pytest.raises(K3RayError, match=said):
        live.supernode.call("scale", None, stacks)
    assert live.status()["scaling"] == before


def host_lives(live: Live) -> list[tuple[str, int, int]]:
    hosts = (*live.actors("expert_group"), *live.actors("attention_stack"))
    return sorted((a["id"], a["term"], a["pid"]) for a in hosts)


def test_stream_survives_the_kill_of_the_controller(live: Live, client: OpenAI) -> None:
    golden = stream(client, "Controller: ")
    before, hosts = live.actors("controller")[0], host_lives(live)
    seen = stream(client, "Controller: ", kill_at=12, pids=[before["pid"]])
    assert seen.steps == golden.steps
    print(f"longest gap {seen.longest_gap_s:.2f} s")

    def ready_again() -> bool:
        try:
            document = live.status()
        except K3RayError:
            return False
        own = next(a for a in document["actors"] if a["role"] == "controller")
        return own["term"] > before["term"] and document["state"] == "ready"

    wait_for(ready_again, limit_s=120.0)
    assert host_lives(live) == hosts, "the new controller adopts who lives"
    assert stream(client, "Controller: ").steps == golden.steps
