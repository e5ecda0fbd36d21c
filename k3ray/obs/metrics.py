"""The metric registry: every metric of k3ray is declared here once, and nowhere else.

A declaration is name, kind, unit, help and labels; dashboards and the table in docs/metrics.md are
generated from it. Code measures through a `MetricSet` (its own registry, so tests and processes
never share state) or renders a snapshot with `render`. Names and labels that are not declared
raise; a label keeps at most `MAX_LABEL_VALUES` values, the others become "other".
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from k3ray.obs.metric_table import METRICS, Kind, MetricSpec

MAX_LABEL_VALUES = 256
OVERFLOW = "other"

_BY_NAME: Mapping[str, MetricSpec] = {spec.name: spec for spec in METRICS}


class _Reason(StrEnum):
    UNKNOWN = "is not declared in obs/metric_table.py"
    KIND = "is declared as a {kind}"
    LABELS = "is declared with labels {labels}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a gauge or counter, read elsewhere (an actor's stats) and rendered here."""

    name: str
    value: float
    labels: Mapping[str, str] | None = None


class MetricSet:
    """The metrics that this process measures itself; thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], set[str]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter.

        Raises:
            LookupError: not declared, not a counter, or other labels than declared.
        """
        found = self._find(name, Kind.COUNTER, labels)
        assert isinstance(found, Counter)
        found.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; raises as `add` does."""
        found = self._find(name, Kind.GAUGE, labels)
        assert isinstance(found, Gauge)
        found.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram; raises as `add` does."""
        found = self._find(name, Kind.HISTOGRAM, labels)
        assert isinstance(found, Histogram)
        found.observe(value)

    def render(self, samples: Iterable[Sample] = ()) -> tuple[bytes, str]:
        """The metrics of this set and of `samples` in Prometheus' text format, and its type."""
        body, media_type = render(samples)
        return generate_latest(self.registry) + body, media_type

    def _find(self, name: str, kind: Kind, labels: Mapping[str, str]) -> object:
        spec = declared(name, kind, labels)
        with self._lock:
            made = self._made.get(name)
            if made is None:
                made = self._made[name] = _make(spec, self.registry)
            bounded = {key: self._bounded(name, key, text) for key, text in labels.items()}
        return made.labels(**bounded) if bounded else made

    def _bounded(self, name: str, label: str, text: str) -> str:
        seen = self._seen.setdefault((name, label), set())
        if text in seen:
            return text
        if len(seen) >= MAX_LABEL_VALUES:
            return OVERFLOW
        seen.add(text)
        return text


def declared(name: str, kind: Kind, labels: Mapping[str, str]) -> MetricSpec:
    """The declaration of a metric that is used as `kind` with `labels`.

    Raises:
        LookupError: there is no such declaration.
    """
    spec = _BY_NAME.get(name)
    if spec is None:
        raise LookupError(f"metric {name!r} {_Reason.UNKNOWN}")
    if spec.kind is not kind:
        raise LookupError(f"metric {name!r} {_Reason.KIND.format(kind=spec.kind)}")
    if set(labels) != set(spec.labels):
        raise LookupError(f"metric {name!r} {_Reason.LABELS.format(labels=spec.labels)}")
    return spec


def render(samples: Iterable[Sample]) -> tuple[bytes, str]:
    """Samples of declared gauges and counters in Prometheus' text format, and its media type.

    Raises:
        LookupError: an undeclared metric or label, or a histogram.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in samples:
        labels = sample.labels or {}
        spec = _BY_NAME.get(sample.name)
        kind = spec.kind if spec is not None and spec.kind is Kind.COUNTER else Kind.GAUGE
        spec = declared(sample.name, kind, labels)
        family = families.get(sample.name)
        if family is None:
            make = CounterMetricFamily if kind is Kind.COUNTER else GaugeMetricFamily
            family = families[sample.name] = make(
                spec.name.removesuffix("_total"), spec.help, labels=list(spec.labels)
            )
        family.add_metric([labels[label] for label in spec.labels], sample.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Families:
    def __init__(self, families: list[CounterMetricFamily | GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return iter(self._families)


def _make(spec: MetricSpec, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if spec.kind is Kind.COUNTER:
        return Counter(spec.name, spec.help, spec.labels, registry=registry)
    if spec.kind is Kind.GAUGE:
        return Gauge(spec.name, spec.help, spec.labels, registry=registry)
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)
