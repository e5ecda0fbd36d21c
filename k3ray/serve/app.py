"""Deploying the endpoint: from a supernode's spec to a URL that answers, and away again.

Driver side. `deploy` is idempotent: an endpoint that runs is left alone, one that somebody began to
deploy and did not see ready (an interrupted `k3ray serve`) is waited for. Only Serve's own proxy
listens, on the spec's host; the port is checked before anything starts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import httpx
from ray import serve
from ray.serve.config import HTTPOptions

from k3ray.actors.supernode import Supernode, locked, note_endpoint
from k3ray.clock import Deadline
from k3ray.config.resolve import resolve_model, resolve_tokenizer
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import PortInUseError, SupernodeError
from k3ray.ids import Role
from k3ray.serve.deployment import APP_NAME, Ingress, IngressBoot, load_tokenizer
from k3ray.serve.generation import GenerationLimits
from k3ray.serve.prompts import PromptBounds
from k3ray.serve.service import ServeSettings

PAGE_TOKENS = 64
# The ingress itself bounds what is open; Serve must not queue in front of it.
_MAX_ONGOING = 4096
_REPLICA_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def deploy(supernode: Supernode, *, port: int | None = None) -> str:
    """Serve the supernode over HTTP; returns the base URL once `/health` is ready.

    Args:
        port: HTTP port; None takes that of the running endpoint, else the spec's.

    Raises:
        PortInUseError: somebody else listens there.
        SupernodeError: the endpoint already runs on another port.
        DeadlineError: it did not become ready in time, or another deployment takes too long.
    """
    home = supernode.home
    with locked(home, home.serve_lock_file, what="k3ray serve"):
        return _deploy(supernode, port)


def _deploy(supernode: Supernode, port: int | None) -> str:
    spec: SupernodeSpec = supernode.call("spec")
    wanted = spec.endpoint.port if port is None else port
    running = _running_url(supernode, limit_s=spec.deadlines.start_s)
    if running is None and serve.status().proxies:
        undeploy()  # what an interrupted deployment left: its proxy listens, no ingress came
    url = running if running and port is None else f"http://{spec.endpoint.host}:{wanted}"
    if running is None:
        check_port_free(spec.endpoint.host, wanted)
    elif running == url:
        # Deploying again would replace the replica and cut its streams.
        wait_ready(url, limit_s=spec.deadlines.start_s + spec.deadlines.rebuild_s)
        return url
    else:
        raise SupernodeError(
            f"the endpoint already runs at {running}",
            remedy=f"use it, or end it first (`k3ray down`) to serve at {url}",
        )
    load_tokenizer(resolve_tokenizer(spec), settings_of(spec).bounds.vocab_size)  # say it here
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=spec.endpoint.host, port=wanted),
    )
    serve.run(build_app(spec, url=url), name=APP_NAME, route_prefix="/")
    wait_ready(url, limit_s=spec.deadlines.start_s + spec.deadlines.rebuild_s)
    note_endpoint(supernode.home, wanted)
    return url


def undeploy() -> None:
    """End the endpoint and Serve itself; fine when nothing runs."""
    shutdown: Callable[[], None] = serve.shutdown
    shutdown()


def build_app(spec: SupernodeSpec, *, url: str) -> serve.Application:
    """The Serve application of a spec."""
    boot = IngressBoot(
        settings=settings_of(spec),
        tokenizer_file=resolve_tokenizer(spec),
        endpoint=url,
        web_dir=str(files("dashboards") / "web"),
        controller_s=spec.deadlines.start_s,
        stopped_s=spec.deadlines.hop_s,
    )
    deployment: Any = serve.deployment(
        name="ingress",
        num_replicas=spec.endpoint.replicas,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=10.0,
        ray_actor_options={
            "num_cpus": 0,
            "runtime_env": {"env_vars": _REPLICA_ENV},
        },
    )(serve.ingress()(Ingress))
    application: serve.Application = deployment.bind(boot)
    return application


def settings_of(spec: SupernodeSpec) -> ServeSettings:
    """The ingress's bounds from the supernode's."""
    text, engine = resolve_model(spec).text_config, spec.engine
    return ServeSettings(
        model=spec.name,
        bounds=PromptBounds(
            vocab_size=text.vocab_size,
            context=min(text.max_position_embeddings, engine.num_pages * PAGE_TOKENS),
        ),
        max_open_choices=spec.stacks * (engine.max_running + engine.max_waiting),
        request_timeout_s=spec.endpoint.request_timeout_s,
        send_stall_timeout_s=spec.endpoint.send_stall_timeout_s,
        generation=GenerationLimits(stack_s=spec.deadlines.rebuild_s),
    )


def check_port_free(host: str, port: int) -> None:
    """Raise `PortInUseError` when somebody listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} on {host} cannot be listened on: {error.strerror}",
                remedy="end what listens there or choose another port (--port)",
                port=port,
            ) from error


def wait_ready(url: str, *, limit_s: float) -> None:
    """Wait until `/health` answers 200.

    Raises:
        DeadlineError: it did not in `limit_s`; the last reason is in the remedy.
    """
    deadline = Deadline.after(limit_s, operation="become ready", peer=f"the endpoint {url}")
    reason = "no answer yet"
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            try:
                answer = client.get(f"{url}/health")
                if answer.status_code == 200:
                    return
                reason = answer.text[:200]
            except httpx.HTTPError as error:
                reason = type(error).__name__
            deadline.check(remedy=f"last answer: {reason}; see `k3ray status`")
            time.sleep(0.1)


def _running_url(supernode: Supernode, *, limit_s: float) -> str | None:
    """Where our endpoint runs now, by the ingress that registered last.

    An application without an ingress is being deployed (or its ingress replaced): Serve goes on by
    itself, so the ingress is waited for, `limit_s` at most.
    """
    deadline_s = time.monotonic() + limit_s
    while APP_NAME in serve.status().applications:
        known = ingress_urls(supernode.call("status", limit_s=30.0))
        if known:
            return known[-1]
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(0.5)
    return None


def ingress_urls(status: dict[str, Any]) -> list[str]:
    """Base URLs of the ingresses in a status document, the newest last."""
    return [str(a["endpoint"]) for a in status["actors"] if a["role"] == str(Role.INGRESS)]
