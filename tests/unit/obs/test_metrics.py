"""The metric registry: declared once, refused otherwise, bounded labels, generated table."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3ray.obs.metric_table import METRICS, Kind, markdown_table
from k3ray.obs.metrics import MAX_LABEL_VALUES, MetricSet, Sample, render

ROOT = Path(__file__).parents[3]


def test_declarations_are_unique_and_well_named() -> None:
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert re.fullmatch(r"k3ray_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM)
        assert spec.unit in ("", "seconds", "bytes")
        assert not spec.unit or spec.name.removesuffix("_total").endswith(f"_{spec.unit}")
        assert spec.help.endswith(".")


def test_every_declared_metric_can_be_measured_and_rendered() -> None:
    measured = MetricSet()
    verbs = {Kind.COUNTER: measured.add, Kind.GAUGE: measured.set, Kind.HISTOGRAM: measured.observe}
    for spec in METRICS:
        verbs[spec.kind](spec.name, 1.0, **dict.fromkeys(spec.labels, "x"))
    body, media_type = measured.render()
    assert media_type.startswith("text/plain")
    text = body.decode()
    assert all(f"# TYPE {spec.name} {spec.kind}" in text for spec in METRICS)


def test_samples_are_rendered_beside_own_measurements() -> None:
    measured = MetricSet()
    measured.add("k3ray_rebuilds_total", role="expert_group")
    samples = [
        Sample(name="k3ray_plan_version", value=7),
        Sample(name="k3ray_engine_tokens_generated_total", value=3, labels={"stack": "stack-0"}),
        Sample(name="k3ray_engine_tokens_generated_total", value=4, labels={"stack": "stack-1"}),
    ]
    text = measured.render(samples)[0].decode()
    assert 'k3ray_rebuilds_total{role="expert_group"} 1.0' in text
    assert "k3ray_plan_version 7.0" in text
    assert 'k3ray_engine_tokens_generated_total{stack="stack-1"} 4.0' in text


def test_undeclared_names_kinds_and_labels_are_refused() -> None:
    measured = MetricSet()
    with pytest.raises(LookupError, match="not declared"):
        measured.add("k3ray_surprise_total")
    with pytest.raises(LookupError, match="declared as a gauge"):
        measured.add("k3ray_plan_version")
    with pytest.raises(LookupError, match="labels"):
        measured.set("k3ray_train_loss", 1.0)
    with pytest.raises(LookupError, match="labels"):
        render([Sample(name="k3ray_plan_version", value=1, labels={"x": "y"})])
    with pytest.raises(LookupError, match="histogram"):
        render([Sample(name="k3ray_engine_step_seconds", value=1, labels={"stack": "s"})])


def test_label_values_are_bounded() -> None:
    measured = MetricSet()
    for index in range(MAX_LABEL_VALUES + 50):
        measured.set("k3ray_train_loss", 1.0, line=f"line-{index}")
    text = measured.render()[0].decode()
    assert text.count("k3ray_train_loss{") == MAX_LABEL_VALUES + 1
    assert 'line="other"' in text


def test_threads_share_one_metric() -> None:
    measured = MetricSet()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(64):
            pool.submit(measured.add, "k3ray_ingress_requests_total")
    assert "k3ray_ingress_requests_total 64.0" in measured.render()[0].decode()


def test_the_table_in_docs_is_generated() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == markdown_table(), "run `make docs`"
