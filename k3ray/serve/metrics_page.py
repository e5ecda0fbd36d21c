"""`/metrics`: the ingress's counters in Prometheus' text format, read at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from k3ray.serve.counters import Counters


def metrics_page(counters: Counters) -> tuple[bytes, str]:
    """Body and media type."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(counters))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Snapshot:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        now = self._counters
        gauges = {
            "running": ("choices being generated", now.running),
            "streams": ("HTTP answers being read", now.streams),
            "tokens_per_second": ("tokens per second over the last 5 s", now.tokens_per_s()),
        }
        totals = {
            "requests": ("requests accepted", now.requests_total),
            "choices": ("choices begun or continued", now.choices_total),
            "tokens": ("tokens accepted from stacks", now.tokens_total),
            "handovers": ("times a choice changed stacks", now.handovers_total),
            "refused": ("requests answered 429", now.refused_total),
            "failed": ("requests that failed here", now.failed_total),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"k3ray_ingress_{name}", text, value=value)
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"k3ray_ingress_{name}", text, value=value)
