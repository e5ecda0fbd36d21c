"""Pretraining as a Ray Train job: lease, one train worker, progress on the driver's console.

The driver holds the line's lease and renews it in the background; the worker does the training.
A worker whose process dies is restarted by Ray Train and goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3ray.actors.supernode import Supernode
from k3ray.config.jobs import PretrainConfig
from k3ray.errors import K3RayError, LeaseLostError, SupernodeError
from k3ray.jobs.train_worker import PROGRESS_FILE, RESULT_FILE, read_outcome, run_worker

Say = Callable[[str], None]

MAX_WORKER_DEATHS = 3
_QUIET_S = 4.0
_FOLLOW_S = 0.25


def run_pretrain(config: PretrainConfig, supernode: Supernode, *, say: Say) -> dict[str, Any]:
    """Train the line of `config.supernode` on the live supernode.

    Returns:
        `TrainResult` as a dict.

    Raises:
        LineBusyError: another trainer holds the line.
        LeaseLostError: the lease lapsed on the way; the open step was aborted.
        K3RayError: whatever ended the training.
    """
    spec = config.supernode
    home = supernode.home
    run_dir = Path(config.run_dir or home.root / "runs" / f"pretrain-{spec.line}").absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / RESULT_FILE).unlink(missing_ok=True)
    (run_dir / "resolved.json").write_text(config.model_dump_json(indent=2), encoding="utf-8")
    job = {
        "config": config.model_dump_json(),
        "store_dir": str(spec.store_dir or home.store_dir),
        "run_dir": str(run_dir),
        "tracking_uri": config.tracking_uri or f"sqlite:///{home.root / 'mlflow.db'}",
    }
    with held_lease(supernode, spec.line) as lease, _followed(run_dir / PROGRESS_FILE, say):
        _fit({**job, "lease_id": lease.lease_id}, run_dir)
        lease.check()
    try:
        return read_outcome(run_dir)
    except FileNotFoundError as error:
        raise SupernodeError(
            "the train worker ended without a result",
            remedy=f"see {run_dir / PROGRESS_FILE} and Ray's logs in {home.ray_dir}",
        ) from error


class HeldLease:
    """The line's lease, renewed by a thread until `close`."""

    def __init__(self, supernode: Supernode, line: str) -> None:
        self._supernode = supernode
        granted = supernode.call(
            "acquire_lease", line, _job_name(), socket.gethostname(), os.getpid()
        )
        self.lease_id: str = granted.id
        self._period_s = granted.ttl_s / 4
        self._ended = threading.Event()
        self._lost: LeaseLostError | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LeaseLostError` if a renewal was refused."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Stop renewing and give the line back."""
        self._ended.set()
        self._thread.join(self._period_s)
        if self._lost is None:
            self._supernode.call("release_lease", self.lease_id)

    def _renew(self) -> None:
        while not self._ended.wait(self._period_s):
            try:
                self._supernode.call("renew_lease", self.lease_id, limit_s=self._period_s)
            except LeaseLostError as error:
                self._lost = error
                return
            except K3RayError:
                continue  # the controller is slow; the next renewal is well before the end


@contextmanager
def held_lease(supernode: Supernode, line: str) -> Iterator[HeldLease]:
    """Hold the training lease of `line` for a block."""
    lease = HeldLease(supernode, line)
    try:
        yield lease
    finally:
        lease.close()


def _fit(job: dict[str, str], run_dir: Path) -> None:
    import ray.train
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        run_worker,
        train_loop_config=job,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=f"ray-train-{int(time.time())}",
            storage_path=str(run_dir),
            failure_config=FailureConfig(max_failures=MAX_WORKER_DEATHS),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise SupernodeError(
            f"the train worker failed: {str(error).splitlines()[0]}",
            remedy=f"see {run_dir / PROGRESS_FILE} and Ray's logs",
        ) from error


@contextmanager
def _followed(path: Path, say: Say) -> Iterator[None]:
    """Repeat the lines that are appended to `path`; never silent for more than five seconds."""
    over = threading.Event()
    start = path.stat().st_size if path.exists() else 0
    thread = threading.Thread(
        target=_follow, args=(path, start, say, over), name="follow-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


def _follow(path: Path, start: int, say: Say, over: threading.Event) -> None:
    heard_s = said_s = time.monotonic()
    position, rest = start, ""
    ended = False
    while not ended:
        ended = over.wait(_FOLLOW_S)
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in lines:
            say(line)
        now_s = time.monotonic()
        if lines:
            heard_s = said_s = now_s
        elif now_s - said_s >= _QUIET_S:
            said_s = now_s
            waiting = "no line from" if position > start else "waiting for"
            say(f"{waiting} the train worker ({now_s - heard_s:.0f} s)")


def _job_name() -> str:
    return os.environ.get("RAY_JOB_SUBMISSION_ID") or f"pretrain-{os.getpid()}"


def baselines(data_dir: str) -> dict[str, float | None]:
    """Held-out bits per byte of the unigram models, from the data set's report."""
    report = json.loads((Path(data_dir) / "report.json").read_text(encoding="utf-8"))
    found: dict[str, float | None] = report["heldout_bits_per_byte"]
    return found
