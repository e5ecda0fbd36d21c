"""The live endpoint on real actors: clients, errors, status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live import Live, live_supernode, wait_for
from openai import OpenAI

from k3ray.actors.supernode import attach_or_up
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.load import load_config
from k3ray.config.presets import PRESETS
from k3ray.config.release_writer import release_json
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import SupernodeError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_supernode() as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=120)


def test_status_lists_every_role(live: Live) -> None:
    document = live.status()
    roles = {actor["role"] for actor in document["actors"]}
    assert {"controller", "expert_group", "attention_stack", "ingress"} <= roles
    held: dict[str, list[int]] = {}
    for actor in document["actors"]:
        assert actor["pid"] in live.pids()
        assert actor["node"]
        assert actor["term"] >= 1
        for layer, experts in (actor.get("experts") or {}).items():
            held.setdefault(layer, []).extend(experts)
    assert held
    assert all(sorted(experts) == list(range(8)) for experts in held.values())


def test_a_job_attaches_to_the_same_model_by_whatever_name(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(release_json(PRESETS["k3-tiny"], packed_experts=False)))
    same = load_config(SupernodeSpec, None, [f"model_config_file={file}"])
    cluster = LocalClusterConfig()
    assert attach_or_up(same, live.home, cluster).call("plan") == live.supernode.call("plan")
    assert live.status()["model"] == "k3-tiny"
    with pytest.raises(SupernodeError, match=r"holds k3-tiny .* wants k3-nano"):
        attach_or_up(load_config(SupernodeSpec, None, []), live.home, cluster)


def test_models_and_health(live: Live, client: OpenAI) -> None:
    names = {model.id for model in client.models.list().data}
    assert "kimi-k3" in names
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert "k3ray_" in httpx.get(f"{live.url}/metrics").text


def test_chat_streamed_equals_whole(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello <|end_of_msg|> there"}]
    whole = client.chat.completions.create(
        model="kimi-k3", messages=messages, max_tokens=24, seed=3, temperature=0.3
    )
    streamed = ""
    for chunk in client.chat.completions.create(
        model="kimi-k3", messages=messages, max_tokens=24, seed=3, temperature=0.3, stream=True
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            streamed += chunk.choices[0].delta.content
    assert streamed == (whole.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ('{"model": "kimi-k3", "prompt": ', 400, None),
        ('{"model": "gpt-9", "prompt": "x"}', 404, "model"),
        ('{"model": "kimi-k3", "prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        ('{"model": "kimi-k3", "prompt": 5}', 400, "prompt"),
        ('{"model": "kimi-k3", "prompt": "' + "x" * 9000 + '"}', 400, None),
    ],
    ids=["bad-json", "unknown-model", "negative", "wrong-type", "too-long"],
)
def test_bad_requests_are_openai_errors(
    live: Live, body: str, status: int, param: str | None
) -> None:
    answer = httpx.post(
        f"{live.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    if param:
        assert error["param"] == param


def test_a_client_that_leaves_does_not_end_the_stream_of_another(live: Live) -> None:
    body = {"model": "kimi-k3", "prompt": "Two readers: ", "max_tokens": 120, "seed": 4,
            "stream": True, "ignore_eos": True}  # fmt: skip
    headers = {"x-request-id": "two-readers"}
    url = f"{live.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as first:
        lines = first.iter_lines()
        for _ in range(6):
            next(lines)
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as second:
            rest = second.iter_lines()
            next(rest)
            first.close()
            seen = [line for line in rest if line.startswith("data: ")]
    assert seen[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in seen)


def test_dropped_clients_free_everything(live: Live) -> None:
    for number in range(20):
        body = {"model": "kimi-k3", "prompt": f"drop {number}", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())

    def held() -> list[object]:
        """Pins, and stacks with a request, that are left."""
        pins = sum(version["pins"] for version in live.status()["versions"])
        busy = [s for s in live.actors("attention_stack") if s["running"] or s["waiting"]]
        return [*busy, *([f"{pins} pins"] if pins else [])]

    wait_for(lambda: not held(), held, limit_s=40.0)
    assert held() == []
