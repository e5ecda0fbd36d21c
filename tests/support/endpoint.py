"""The real FastAPI app on a real socket, over any `StackRouter`, in a thread of the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from k3ray.serve.generation import GenerationLimits
from k3ray.serve.health import Health
from k3ray.serve.prompts import PromptBounds
from k3ray.serve.router import StackRouter
from k3ray.serve.routes import build_routes
from k3ray.serve.service import ServeSettings, Service
from k3ray.text.tokenizer import K3Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A running endpoint."""

    url: str
    service: Service
    tokenizer: K3Tokenizer
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        """End it now; open streams are cut."""
        self.server.should_exit = True
        self.thread.join(10.0)


def serve_settings(**fields: Any) -> ServeSettings:
    """Small bounds for tests."""
    defaults: dict[str, Any] = {
        "model": "k3",
        "bounds": PromptBounds(vocab_size=512, context=512, default_max_tokens=32),
        "generation": GenerationLimits(poll_wait_s=0.5, answer_s=1.0, stack_s=5.0),
        "keep_alive_s": 0.2,
        "resume_grace_s": 0.5,
    }
    return ServeSettings(**{**defaults, **fields})


def start_endpoint(router: StackRouter, **fields: Any) -> Endpoint:
    """Start an endpoint on a free port; `fields` are `ServeSettings`."""
    tokenizer = K3Tokenizer.byte_level(512)
    service = Service(serve_settings(**fields), router, tokenizer)
    web_dir = Path(str(files("dashboards") / "web"))
    app = build_routes(service, Health(router, max_age_s=0.0), web_dir)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="critical", lifespan="on",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit_s = time.monotonic() + 20.0
    while not server.started:
        assert thread.is_alive(), "the endpoint did not start"
        assert time.monotonic() < limit_s, "the endpoint did not start in time"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    return Endpoint(url=url, service=service, tokenizer=tokenizer, server=server, thread=thread)


@contextmanager
def running_endpoint(router: StackRouter, **fields: Any) -> Iterator[Endpoint]:
    """`start_endpoint`, stopped at the end."""
    endpoint = start_endpoint(router, **fields)
    try:
        yield endpoint
    finally:
        endpoint.stop()


def sse(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
    """(id, parsed data) of every event."""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=headers, timeout=20
    ) as response:
        response.read()
        assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line[:1] not in ("", ":"))
        if not lines:
            continue
        data = lines["data"]
        events.append((lines["id"], data if data == "[DONE]" else json.loads(data)))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(d["choices"][0]["text"] for _, d in events if d != "[DONE]" and d["choices"])
