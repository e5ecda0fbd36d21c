"""Experiment tracking: the only door to MLflow, beside a JSONL file that is always written.

`Tracker.log` appends to `metrics.jsonl` at once and hands the same values to a background thread
that imports MLflow late (seconds) and writes to a store on this machine (sqlite unless told
otherwise). MLflow failing never ends a run: it is said once, and kept in `problem`. The queue is
bounded (dropped values are counted and said), and `close` waits no longer than its deadline.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from k3ray.errors import StoreError
from k3ray.obs.log import get_log

MAX_PENDING = 4096
BATCH = 200
RUN_ID_FILE = "mlflow_run_id"

_log = get_log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Metrics of one step, at a wall-clock time in milliseconds."""

    step: int
    time_ms: int
    metrics: Mapping[str, float]


class Sink(Protocol):
    """Where entries go besides the JSONL file; used from the tracker's thread only."""

    def write(self, entries: list[Entry]) -> None:
        """Store entries; may raise anything, which ends the sink's use but not the run."""

    def end(self, status: str) -> None:
        """Mark the run FINISHED, FAILED or KILLED."""


class Tracker:
    """Metrics of one run. Not shared between threads; use as a context manager."""

    def __init__(
        self,
        run_dir: Path,
        open_sink: Callable[[], Sink],
        *,
        say: Callable[[str], None],
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._say = say
        self._clock_s = clock_s
        self._open_sink = open_sink
        self._entries: queue.Queue[Entry | None] = queue.Queue(maxsize=MAX_PENDING)
        self._status = "FINISHED"
        self.dropped = 0
        self.problem: str | None = None
        self.path = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._thread = threading.Thread(target=self._drain, name="k3ray-tracking", daemon=True)
        self._thread.start()

    @staticmethod
    def open(
        run_dir: Path,
        *,
        run_name: str,
        params: Mapping[str, object],
        uri: str | None = None,
        say: Callable[[str], None] = print,
    ) -> Tracker:
        """Start or continue the run of `run_dir`.

        Args:
            run_dir: Gets `metrics.jsonl` and, without `uri`, MLflow's store `mlflow.db`.
            run_name: Shown by MLflow.
            params: The resolved config, flat or nested; stored once.
            uri: An MLflow tracking URI.
            say: Told, in one line, when MLflow fails.

        Raises:
            StoreError: `metrics.jsonl` cannot be written.
        """
        return Tracker(
            run_dir,
            lambda: MlflowSink(run_dir, run_name=run_name, params=flatten(params), uri=uri),
            say=say,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Raises:
            StoreError: `metrics.jsonl` cannot be written (disk full).
        """
        entry = Entry(step=step, time_ms=int(self._clock_s() * 1000), metrics=dict(metrics))
        finite = {name: v if math.isfinite(v) else None for name, v in entry.metrics.items()}
        line = json.dumps({"step": step, "time_ms": entry.time_ms, **finite})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        if self.problem is not None:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._say("tracking: MLflow is slower than training; metrics.jsonl has everything")

    def close(self, status: str = "FINISHED", *, limit_s: float = 60.0) -> None:
        """Write what is pending, at most `limit_s` seconds, and end the run; idempotent."""
        if self._file.closed:
            return
        self._file.close()
        self._status = status
        deadline_s = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            try:
                self._entries.put(None, timeout=0.2)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"did not finish within {limit_s:g} s")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("FINISHED" if kind is None else "FAILED")

    def _drain(self) -> None:
        try:
            sink = self._open_sink()
            ended = False
            while not ended:
                entries = [self._entries.get()]
                while len(entries) < BATCH and not self._entries.empty():
                    entries.append(self._entries.get())
                ended = entries[-1] is None or None in entries
                sink.write([entry for entry in entries if entry is not None])
            sink.end(self._status)
        except Exception as error:  # MLflow and its store raise anything; a run outlives them
            self._fail(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )

    def _fail(self, problem: str) -> None:
        self.problem = problem
        _log.warning("tracking.failed", problem=problem)
        self._say(f"tracking: MLflow failed ({problem}); metrics.jsonl has everything")


class MlflowSink:
    """A run in an MLflow store; continues the run named in `<run_dir>/mlflow_run_id`."""

    def __init__(
        self, run_dir: Path, *, run_name: str, params: Mapping[str, str], uri: str | None
    ) -> None:
        # Read by MLflow at import; a training job reports to nobody.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        _quiet_libraries()
        store = (run_dir / "mlflow.db").absolute()
        self._metric: Any = Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{store}")
        id_file = run_dir / RUN_ID_FILE
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment = self._experiment((run_dir / "artifacts").absolute())
        self._run_id = self._client.create_run(experiment, run_name=run_name).info.run_id
        self._client.log_batch(
            self._run_id, params=[Param(name, value) for name, value in params.items()]
        )
        temporary = id_file.with_suffix(".tmp")
        temporary.write_text(self._run_id, encoding="utf-8")
        temporary.replace(id_file)

    def write(self, entries: list[Entry]) -> None:
        """Store the values of several steps in one call."""
        metrics = [
            self._metric(name, value, entry.time_ms, entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        for start in range(0, len(metrics), 1000):  # MLflow's bound per call
            self._client.log_batch(self._run_id, metrics=metrics[start : start + 1000])

    def end(self, status: str) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id, status=status)

    def _experiment(self, artifacts: Path) -> str:
        found = self._client.get_experiment_by_name("k3ray")
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment("k3ray", artifact_location=artifacts.as_uri()))


def flatten(params: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested params as dotted names; values as text of at most 500 characters."""
    out: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = str(value)[:500]
    return out


def _quiet_libraries() -> None:
    import logging

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write {path}: {error.strerror}",
        remedy="free some space or choose another run_dir; training resumes from its checkpoint",
        path=str(path),
    )
