"""The declarations of all metrics: name, kind, unit, help, labels.

Naming: `k3ray_<part>_<what>[_<unit>][_total]`; units in base form (seconds, bytes). Label values
must come from small sets: roles, lanes, lines, group ids; never request ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One declaration. `unit` is "" for plain numbers; `buckets` belong to histograms."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_HOP_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


def _counter(name: str, help_text: str, *labels: str, unit: str = "") -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.COUNTER, help=help_text, unit=unit, labels=labels)


def _gauge(name: str, help_text: str, *labels: str, unit: str = "") -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.GAUGE, help=help_text, unit=unit, labels=labels)


def _seconds(
    name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = _STEP_BUCKETS
) -> MetricSpec:
    return MetricSpec(
        name=name, kind=Kind.HISTOGRAM, help=help_text, unit="seconds", labels=labels,
        buckets=buckets,
    )  # fmt: skip


METRICS: tuple[MetricSpec, ...] = (
    # Ingress
    _counter("k3ray_ingress_requests_total", "Requests accepted."),
    _counter("k3ray_ingress_refused_total", "Requests answered 429."),
    _counter("k3ray_ingress_failed_total", "Requests that failed in the ingress."),
    _counter("k3ray_ingress_choices_total", "Choices begun or continued."),
    _counter("k3ray_ingress_tokens_total", "Tokens accepted from stacks."),
    _counter("k3ray_ingress_handovers_total", "Times a choice changed stacks."),
    _gauge("k3ray_ingress_running", "Choices being generated."),
    _gauge("k3ray_ingress_streams", "HTTP answers being read."),
    _gauge("k3ray_ingress_tokens_per_second", "Tokens per second over the last 5 s."),
    _seconds("k3ray_ingress_first_token_seconds", "Request accepted to first token.",
             buckets=_WAIT_BUCKETS),
    # Engine (one per attention stack)
    _gauge("k3ray_engine_requests_running", "Sequences in the running batch.", "stack"),
    _gauge("k3ray_engine_requests_waiting", "Sequences admitted and waiting.", "stack"),
    _gauge("k3ray_engine_pages_free", "Free pages of 64 latents.", "stack"),
    _gauge("k3ray_engine_slots_free", "Free KDA state slots.", "stack"),
    _counter("k3ray_engine_tokens_generated_total", "Tokens sampled.", "stack"),
    _counter("k3ray_engine_tokens_prefilled_total", "Prompt tokens computed.", "stack"),
    _counter("k3ray_engine_requests_finished_total", "Requests ended.", "stack", "reason"),
    _seconds("k3ray_engine_step_seconds", "One engine step.", "stack"),
    _seconds("k3ray_engine_phase_seconds",
             "A phase of a step: attention, dispatch, experts, combine, sample.",
             "stack", "phase", buckets=_HOP_BUCKETS),
    # Transport and groups
    _seconds("k3ray_transport_hop_seconds", "Dispatch to combine of one layer at one group.",
             "lane", buckets=_HOP_BUCKETS),
    _counter("k3ray_transport_sent_bytes_total", "Bytes sent to groups.", "lane", unit="bytes"),
    _counter("k3ray_transport_peers_lost_total", "Peers found dead or past a deadline.", "role"),
    _gauge("k3ray_group_queue_length", "Operations waiting.", "group", "lane"),
    _counter("k3ray_group_lane_busy_seconds_total", "Seconds of work per lane.", "group", "lane",
             unit="seconds"),
    _counter("k3ray_group_rows_total", "(token, expert) rows computed.", "group", "lane"),
    _gauge("k3ray_group_resident_bytes", "Bytes of expert tensors held.", "group", unit="bytes"),
    # Control
    _gauge("k3ray_plan_version", "Current placement plan."),
    _gauge("k3ray_weight_version_info", "1 for each live weight version.", "version", "latest"),
    _gauge("k3ray_weight_version_pins", "Requests that pin a version.", "version"),
    _gauge("k3ray_actors", "Actors by role and state.", "role", "state"),
    _counter("k3ray_actors_lost_total", "Deaths of actors, by role.", "role"),
    _counter("k3ray_rebuilds_total", "Lost actors brought back, by role.", "role"),
    _seconds("k3ray_rebuild_seconds", "Death seen to plan with the rebuilt actor.", "role",
             buckets=_WAIT_BUCKETS),
    _counter("k3ray_decisions_total", "Commands decided, by command.", "command"),
    # Training
    _gauge("k3ray_train_loss", "Mean token loss (nats) of the last committed step.", "line"),
    _gauge("k3ray_train_step", "Last committed step.", "line"),
    _gauge("k3ray_train_grad_norm", "Global gradient norm before clipping.", "line"),
    _gauge("k3ray_train_learning_rate", "Learning rate of the last committed step.", "line"),
    _gauge("k3ray_train_tokens_per_second", "Training tokens per second.", "line"),
    _counter("k3ray_train_steps_total", "Steps committed.", "line"),
    _counter("k3ray_train_attempts_aborted_total", "Step attempts aborted.", "line", "reason"),
    _seconds("k3ray_train_step_seconds", "One committed step, aborted attempts included.", "line"),
    # Curation
    _counter("k3ray_curate_documents_total", "Documents by verdict.", "verdict"),
)  # fmt: skip
"""All metrics, grouped by part."""


def markdown_table() -> str:
    """docs/metrics.md: generated, a test compares."""
    lines = [
        "# Metrics",
        "",
        "Generated from `k3ray/obs/metric_table.py` by `make docs`; do not edit.",
        "",
        "| name | kind | unit | labels | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{spec.name}` | {spec.kind} | {spec.unit or '-'} | "
        f"{', '.join(spec.labels) or '-'} | {spec.help} |"
        for spec in METRICS
    ]
    return "\n".join(lines) + "\n"
