"""Finding and ending the processes of one cluster, by a marker in their environment.

Every process that `k3ray up` starts, and every child of theirs, carries `K3RAY_CLUSTER=<marker>`
in its environment. That finds all of them (Ray's daemons change their command lines, sessions and
parents) and never one that belongs to somebody else, even when a pid was reused.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARKER_VARIABLE = "K3RAY_CLUSTER"


def find_marked(marker: str, *, program: str = "") -> list[int]:
    """Pids, ascending, of living processes of the cluster `marker` (this process left out);
    with `program` only those whose executable has that name."""
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _has_variable(entry, wanted) and _runs(entry, program)
    ]
    return sorted(pid for pid in found if pid != os.getpid())


def _has_variable(process: Path, wanted: bytes) -> bool:
    try:
        return wanted in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or belongs to another user
        return False


def _runs(process: Path, program: str) -> bool:
    try:
        executable = (process / "cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return False
    return not program or Path(os.fsdecode(executable)).name == program


def end_marked(marker: str, *, grace_s: float, kill_s: float = 10.0) -> list[int]:
    """SIGTERM all processes of the cluster, SIGKILL what is left after `grace_s`.

    A process stopped by SIGSTOP ends at the SIGKILL. Returns the pids still alive at the end
    (empty when all is well).
    """
    _signal_all(marker, signal.SIGTERM)
    if _wait_gone(marker, grace_s):
        return []
    deadline = time.monotonic() + kill_s
    while time.monotonic() < deadline:
        _signal_all(marker, signal.SIGKILL)
        if _wait_gone(marker, 0.5):
            return []
    return find_marked(marker)


def _signal_all(marker: str, number: signal.Signals) -> None:
    for pid in find_marked(marker):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait_gone(marker: str, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while find_marked(marker):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
