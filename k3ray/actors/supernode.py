"""Bringing a supernode up, reaching it, and taking it down: the driver side.

`ensure_up` is idempotent: the first caller (the command or a job) starts Ray where needed and
creates the controller, everybody else connects. `down` ends all of it and reaps orphans. One lock
file per home makes the two exclude each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from k3ray.actors.last_up import LastUp
from k3ray.actors.local_ray import (
    ClusterInfo,
    cluster_environment,
    is_running,
    keep_ray_logs,
    start_local_ray,
    stop_local_ray,
)
from k3ray.actors.processes import find_marked
from k3ray.actors.ray_calls import call
from k3ray.actors.specs import CONTROLLER_NAME, NAMESPACE
from k3ray.clock import Deadline
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.load import config_digest
from k3ray.config.resolve import resolve_model
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.view import group_ids
from k3ray.errors import K3RayError, SupernodeError, TransportError
from k3ray.placement.layout import first_layout, partition_of

Say = Callable[[str], None]

_RESUME_ANSWER_S = 20.0
"""A controller that Ray is just restarting answers within this; one that does not is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supernode:
    """A connection to a running supernode: Ray is initialised and the controller answers."""

    home: Home
    info: ClusterInfo
    controller: Any

    def call(self, method: str, *args: Any, limit_s: float = 10.0) -> Any:
        """Call a controller method and wait for its answer.

        Raises:
            DeadlineError: no answer within `limit_s`.
            PeerLostError: the controller died; it is restarted.
            K3RayError: whatever the method raised.
        """
        return call(self.controller, method, *args, peer=CONTROLLER_NAME, limit_s=limit_s)

    def poll_status(self, deadline: Deadline) -> dict[str, Any]:
        """The status; a controller that dies meanwhile is waited for until `deadline`.

        Raises:
            DeadlineError: nobody answered in time.
        """
        while True:
            try:
                status: dict[str, Any] = self.call("status", limit_s=30.0)
                return status
            except TransportError as error:
                deadline.check(remedy=f"last answer: {error.message}; see `k3ray status`")
                time.sleep(0.5)


def is_up(home: Home) -> bool:
    """Whether a cluster is recorded in `home` and any process of it lives."""
    return ClusterInfo.read(home.cluster_file) is not None and is_running(home)


def connect(home: Home) -> Supernode:
    """Reach the supernode of `home`.

    Raises:
        SupernodeError: it is not up.
    """
    info = ClusterInfo.read(home.cluster_file)
    if info is None or not is_running(home):
        raise SupernodeError(
            f"no supernode is up in {home.root}",
            remedy="run `k3ray up` (another home: set K3RAY_HOME)",
        )
    for daemon in ("raylet", "gcs_server"):
        if not find_marked(home.marker, program=daemon):
            raise SupernodeError(
                f"Ray's {daemon} of {home.root} has died",
                remedy="run `k3ray down`, then `k3ray up`: journal and weights are kept",
            )
    _init_ray(home, info)
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    except ValueError as error:
        raise SupernodeError(
            f"Ray runs at {info.ray_address} but there is no controller",
            remedy="run `k3ray down`, then `k3ray up`",
        ) from error
    return Supernode(home=home, info=info, controller=controller)


def _init_ray(home: Home, info: ClusterInfo) -> None:
    os.environ.update(cluster_environment(home, auth_mode=info.auth_mode, base={}))
    if ray.is_initialized():
        return
    try:
        with _signals_kept():
            ray.init(
                address=info.ray_address, namespace=NAMESPACE, log_to_driver=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
    except (ConnectionError, RuntimeError) as error:
        raise SupernodeError(
            f"Ray at {info.ray_address} cannot be reached: {error}",
            remedy="run `k3ray down`, then `k3ray up`",
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray's driver takes SIGTERM for itself (it prints a C++ trace); give it back to the caller."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


def ensure_up(
    spec: SupernodeSpec, home: Home, cluster: LocalClusterConfig, *, say: Say = print
) -> Supernode:
    """Bring the supernode up, or connect to the one that is up.

    Raises:
        SupernodeError: one with another spec is up, or it did not come up in time.
        PlacementError: the cluster cannot hold it (the message has the arithmetic).
    """
    digest = config_digest(spec)
    with locked(home, home.lock_file, what="k3ray up or down", say=say):
        info = ClusterInfo.read(home.cluster_file)
        if info is not None and is_running(home):
            if info.spec_digest != digest:
                raise SupernodeError(
                    f"supernode {info.name!r} is up in {home.root} with another spec "
                    f"({info.spec_digest[:12]}, asked for {digest[:12]})",
                    remedy="use it with its own config, or `k3ray down` first",
                )
            return connect(home)
        return _bring_up(spec, home, cluster, say)


def resume(home: Home, *, say: Say = print) -> tuple[Supernode, LastUp]:
    """Bring up again what was up last, by the same spec; what is left of it is ended first. Fine
    when it is up and well. The journal tells the size, the versions and the latest of them.

    Raises:
        SupernodeError: nothing was ever up in this home, or as `ensure_up`.
    """
    last = LastUp.read(home.last_up_file)
    if last is None:
        raise SupernodeError(
            f"nothing was ever up in {home.root}",
            remedy="run `k3ray up` with its config (another home: set K3RAY_HOME)",
        )
    if is_running(home):
        try:
            supernode = connect(home)
            supernode.call("status", limit_s=_RESUME_ANSWER_S)
        except (K3RayError, ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            say(f"what is left of it does not work ({type(error).__name__}), ending it")
            ray.shutdown()
            with locked(home, home.lock_file, what="k3ray up or down", say=say):
                stop_local_ray(home, grace_s=1.0)
                home.cluster_file.unlink(missing_ok=True)
        else:
            return supernode, last
    return ensure_up(last.spec, home, last.cluster, say=say), last


def attach_or_up(
    spec: SupernodeSpec, home: Home, cluster: LocalClusterConfig, *, say: Say = print
) -> Supernode:
    """A job's door: the supernode that is up in `home` if its model fits, else a new one.

    Raises:
        SupernodeError: the one that is up holds another model or line; else as `ensure_up`.
    """
    if not is_up(home):
        return ensure_up(spec, home, cluster, say=say)
    supernode = connect(home)
    status = supernode.call("status", limit_s=30.0)
    held = (status["model_digest"], status["line"], status["numeric_mode"])
    wanted = (config_digest(resolve_model(spec).text_config), spec.line, str(spec.numeric_mode))
    if held != wanted:
        raise SupernodeError(
            f"the supernode in {home.root} holds {status['model']} on line {held[1]!r} in "
            f"{held[2]} mode, the job wants {spec.model_name} on {wanted[1]!r} in {wanted[2]} mode",
            remedy="set supernode.preset (or checkpoint), supernode.line and "
            "supernode.numeric_mode, or use another K3RAY_HOME",
        )
    return supernode


def _bring_up(spec: SupernodeSpec, home: Home, cluster: LocalClusterConfig, say: Say) -> Supernode:
    from k3ray.actors.controller import create_controller
    from k3ray.placement.fits import check_fits

    check_fits(spec, cluster)
    check_layout(spec)
    check_disk(home)
    stop_local_ray(home, grace_s=1.0)  # leftovers of a cluster that died
    started = time.monotonic()
    say("starting a local Ray cluster")
    address, dashboard = start_local_ray(home, cluster, limit_s=120.0)
    say(f"Ray is up at {address} ({time.monotonic() - started:.1f} s), dashboard {dashboard}")
    info = ClusterInfo(
        name=spec.name, ray_address=address, dashboard_url=dashboard, marker=home.marker,
        auth_mode=cluster.auth_mode, spec_digest=config_digest(spec),
    )  # fmt: skip
    try:
        _init_ray(home, info)
        info.write(home.cluster_file)
        controller = create_controller(spec, home)
        supernode = Supernode(home=home, info=info, controller=controller)
        wait_ready(supernode, spec, say=say)
    except BaseException:
        ray.shutdown()
        keep_ray_logs(home)
        stop_local_ray(home)
        home.cluster_file.unlink(missing_ok=True)
        raise
    LastUp(spec=spec, cluster=cluster).write(home.last_up_file)
    say(f"supernode {spec.name!r} is ready after {time.monotonic() - started:.1f} s")
    return supernode


def wait_ready(supernode: Supernode, spec: SupernodeSpec, *, say: Say) -> dict[str, Any]:
    """Wait until every actor is ready; a line at least every 5 s. Returns the status."""
    limit_s = spec.deadlines.start_s * 2 + spec.deadlines.rebuild_s
    deadline = Deadline.after(limit_s, operation="start", peer=f"supernode {spec.name!r}")
    said_s = 0.0
    while True:
        status = supernode.poll_status(deadline)
        waiting = [a["id"] for a in status["actors"] if a["state"] != "ready"]
        if status["state"] == "ready":
            return status
        if status["state"] == "failed":
            raise SupernodeError(
                f"supernode {spec.name!r} failed to start: {status.get('reason', 'unknown')}",
                remedy=f"Ray's logs are kept in {supernode.home.failed_log_dir}",
            )
        deadline.check(remedy="run `k3ray doctor`; is the machine overloaded?")
        if time.monotonic() - said_s >= 4.0:
            said_s = time.monotonic()
            say(f"waiting for {', '.join(waiting) or 'the first plan'}")
        time.sleep(0.2)


def down(home: Home, *, say: Say = print) -> list[int]:
    """End the supernode and its Ray cluster; reap orphans. Safe in any state, idempotent.

    The journal and the weight store stay. Returns pids that would not die (normally none).
    """
    with locked(home, home.lock_file, what="k3ray up or down", say=say):
        if is_running(home):
            _stop_politely(home, say)
        left = stop_local_ray(home)
        home.cluster_file.unlink(missing_ok=True)
        note_endpoint(home, None)
    return left


def note_endpoint(home: Home, port: int | None) -> None:
    """Remember on which port the endpoint runs, for `resume`; None: it was ended on purpose."""
    try:
        last = LastUp.read(home.last_up_file)
    except SupernodeError:
        return  # of another release: `resume` says so, an end or a deployment goes on
    if last is not None and last.port != port:
        last.model_copy(update={"port": port}).write(home.last_up_file)


def _stop_politely(home: Home, say: Say) -> None:
    """Let the controller journal the end; a wedged cluster is killed anyway."""
    try:
        supernode = connect(home)
        supernode.call("stop", limit_s=10.0)
    except (K3RayError, ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        say(f"the controller did not answer ({type(error).__name__}), killing the cluster")
    finally:
        ray.shutdown()


def check_layout(spec: SupernodeSpec) -> None:
    """Raise `PlanError` when the spec's partition and replication make no layout of its model."""
    experts = resolve_model(spec).text_config.num_experts
    groups = group_ids(spec.groups)
    first_layout(partition_of(spec, experts), groups, spec.replication, experts)


def check_disk(home: Home, *, needed_bytes: int = 1 << 30) -> None:
    """Raise `SupernodeError` when the home's disk has less than `needed_bytes` free."""
    make_home(home)
    free = shutil.disk_usage(home.root).free
    if free < needed_bytes:
        raise SupernodeError(
            f"{home.root} has {free / 2**30:.2f} GiB free, {needed_bytes / 2**30:.2f} GiB needed",
            remedy="free some disk space or point K3RAY_HOME elsewhere",
        )


def make_home(home: Home) -> None:
    """Make the home's folder.

    Raises:
        SupernodeError: it cannot be made or written to.
    """
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        home.lock_file.touch()
    except OSError as error:
        raise SupernodeError(
            f"the home {home.root} cannot be used: {error.strerror}",
            remedy="point K3RAY_HOME to a folder that you may write to",
        ) from error


@contextmanager
def locked(
    home: Home, lock_file: Path, *, what: str, say: Say = lambda _: None, limit_s: float = 300.0
) -> Iterator[None]:
    """Hold one of the home's lock files; waits at most `limit_s`, the death of a holder frees it.

    Raises:
        SupernodeError: the home cannot be used.
        DeadlineError: somebody else holds it for longer.
    """
    make_home(home)
    deadline = Deadline.after(limit_s, operation="lock", peer=str(lock_file))
    with lock_file.open("w") as file:
        waits = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    say(f"waiting for another {what} on this home")
                waits = True
                deadline.check(remedy=f"another {what} is running on this home")
                time.sleep(0.2)
        yield
