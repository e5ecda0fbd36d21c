"""`/metrics`: the ingress's own numbers, and the supernode's as its status document has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from k3ray.ids import Role
from k3ray.obs.metrics import Sample
from k3ray.serve.counters import Counters

_ENGINE = {
    "k3ray_engine_requests_running": "running",
    "k3ray_engine_requests_waiting": "waiting",
    "k3ray_engine_pages_free": "free_pages",
    "k3ray_engine_slots_free": "free_slots",
    "k3ray_engine_tokens_generated_total": "tokens_total",
}
_TRAIN = {"k3ray_train_loss": "loss", "k3ray_train_step": "committed_step"}


def metrics_page(counters: Counters, status: Mapping[str, Any] | None) -> tuple[bytes, str]:
    """Body and media type; `status` is None while the controller does not answer."""
    samples = [*_own(counters), *(status_samples(status) if status is not None else ())]
    return counters.metrics.render(samples)


def status_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """The status document as samples."""
    yield Sample(name="k3ray_plan_version", value=float(status.get("plan_version") or 0))
    for version in status.get("versions", ()):
        labels = {"version": version["version"]}
        yield Sample(name="k3ray_weight_version_pins", value=version["pins"], labels=labels)
        latest = {**labels, "latest": str(bool(version["latest"])).lower()}
        yield Sample(name="k3ray_weight_version_info", value=1.0, labels=latest)
    actors = status.get("actors", ())
    states = Counter((actor["role"], actor["state"]) for actor in actors)
    for (role, state), count in states.items():
        yield Sample(name="k3ray_actors", value=count, labels={"role": role, "state": state})
    for actor in actors:
        if actor["role"] == Role.ATTENTION_STACK:
            yield from _some(_ENGINE, actor, {"stack": actor["id"]})
    for line, training in status.get("training", {}).items():
        yield from _some(_TRAIN, training, {"line": line})


def _some(
    names: Mapping[str, str], source: Mapping[str, Any], labels: Mapping[str, str]
) -> Iterator[Sample]:
    for name, key in names.items():
        if isinstance(source.get(key), int | float):
            yield Sample(name=name, value=float(source[key]), labels=labels)


def _own(counters: Counters) -> Iterator[Sample]:
    for key, value in counters.snapshot().items():
        name = "tokens_per_second" if key == "tokens_per_s" else key
        yield Sample(name=f"k3ray_ingress_{name}", value=float(value))
