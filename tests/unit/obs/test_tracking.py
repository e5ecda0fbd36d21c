"""Tracking: JSONL always, MLflow beside it, and MLflow's failures said but harmless."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from k3ray.errors import StoreError
from k3ray.obs.tracking import MAX_PENDING, Entry, Tracker, flatten


class MemorySink:
    """Keeps entries; `gate` blocks the first write, `fault` is raised by it."""

    def __init__(self, gate: threading.Event | None = None, fault: Exception | None = None) -> None:
        self.entries: list[Entry] = []
        self.status: str | None = None
        self._gate, self._fault = gate, fault

    def write(self, entries: list[Entry]) -> None:
        if self._gate is not None:
            assert self._gate.wait(30)
        if self._fault is not None:
            raise self._fault
        self.entries += entries

    def end(self, status: str) -> None:
        self.status = status


def _tracker(tmp_path: Path, sink: MemorySink) -> tuple[Tracker, list[str]]:
    said: list[str] = []
    return Tracker(tmp_path, lambda: sink, say=said.append, clock_s=lambda: 2.5), said


def _jsonl(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_there_at_once_and_the_sink_gets_everything(tmp_path: Path) -> None:
    sink = MemorySink()
    tracker, said = _tracker(tmp_path, sink)
    tracker.log(1, {"loss": 5.5})
    assert _jsonl(tmp_path) == [{"step": 1, "time_ms": 2500, "loss": 5.5}]
    tracker.log(2, {"loss": math.nan})
    tracker.close()
    tracker.close()
    assert _jsonl(tmp_path)[1]["loss"] is None
    assert [entry.step for entry in sink.entries] == [1, 2]
    assert (sink.status, tracker.problem, said) == ("FINISHED", None, [])


def test_a_failing_sink_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    tracker, said = _tracker(tmp_path, MemorySink(fault=RuntimeError("database is locked\nat x")))
    for step in range(50):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert tracker.problem == "RuntimeError: database is locked"
    assert len(said) == 1
    assert "database is locked" in said[0]
    assert len(_jsonl(tmp_path)) == 50


def test_a_slow_sink_is_bounded_and_close_has_a_deadline(tmp_path: Path) -> None:
    gate = threading.Event()
    tracker, said = _tracker(tmp_path, MemorySink(gate=gate))
    for step in range(MAX_PENDING + 300):
        tracker.log(step, {"loss": 1.0})
    assert 0 < tracker.dropped <= 300
    tracker.close(limit_s=0.5)
    assert tracker.problem == "did not finish within 0.5 s"
    assert len(said) == 2
    gate.set()
    assert len(_jsonl(tmp_path)) == MAX_PENDING + 300


def test_an_exception_ends_the_run_as_failed(tmp_path: Path) -> None:
    sink = MemorySink()
    tracker, _ = _tracker(tmp_path, sink)
    with pytest.raises(ValueError, match="boom"), tracker:
        raise ValueError("boom")
    assert sink.status == "FAILED"


def test_unwritable_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        _tracker(tmp_path / "file", MemorySink())


def test_params_are_flat_and_bounded() -> None:
    assert flatten({"a": {"b": 1}, "c": "x" * 900}) == {"a.b": "1", "c": "x" * 500}


def test_a_real_mlflow_store_and_a_continued_run(tmp_path: Path) -> None:
    for first in (0, 3):
        with Tracker.open(
            tmp_path, run_name="nano", params={"seed": 0, "optimizer": {"peak_lr": 2e-3}}
        ) as tracker:
            for step in range(first, first + 3):
                tracker.log(step, {"loss": 6.0 - step, "lr": 1e-3})
        assert tracker.problem is None

    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run((tmp_path / "mlflow_run_id").read_text())
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "optimizer.peak_lr": "0.002"}
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in losses] == [(step, 6.0 - step) for step in range(6)]
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert not Path("mlruns").exists() or os.environ.get("MLFLOW_TRACKING_URI")
