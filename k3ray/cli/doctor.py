"""The checks of `k3ray doctor`: judgements over facts that `doctor_facts` gathered.

Every check is a pure function `facts -> Finding`, so that each verdict is tested without the
machine being in that state. A finding that is not ok says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from k3ray.cli.doctor_facts import Facts
from k3ray.config.count import count_parameters
from k3ray.config.resolve import resolve_model
from k3ray.errors import PlacementError
from k3ray.placement.fits import BYTES_FP32, check_fits

PYTHON = (3, 11)
SPARE_DISK_BYTES = 2 * 2**30
"""Ray's session files and logs, tracking store and curated data beside the weights."""

CHECKPOINT_COPIES = 3
"""A checkpoint holds the master and two moments."""

MIN_OPEN_FILES = 4096


class Level(StrEnum):
    """Verdict of a check; only `fail` makes the exit status non-zero."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    level: Level
    name: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.name:10}  {self.detail}"
        return f"{line} -> {self.remedy}" if self.remedy else line


def examine(facts: Facts) -> tuple[Finding, ...]:
    """All findings in the order of the report."""
    return (
        check_python(facts),
        *check_packages(facts),
        Finding(level=Level.OK, name="home", detail=f"{facts.home} (K3RAY_HOME)"),
        check_auth(facts),
        *check_ports(facts),
        check_disk(facts),
        check_memory(facts),
        check_shared_memory(facts),
        check_open_files(facts),
        check_chromium(facts),
        check_leftovers(facts),
    )


def check_python(facts: Facts) -> Finding:
    """Python 3.11: the torch build on the supported machines exists for no other."""
    version = ".".join(map(str, facts.python))
    if facts.python[:2] == PYTHON:
        return Finding(level=Level.OK, name="python", detail=version)
    return Finding(
        level=Level.FAIL, name="python", detail=f"{version}, 3.11 is needed",
        remedy="make the virtual environment with python3.11 (make install)",
    )  # fmt: skip


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Every required distribution is there, at the pinned version; HF `kernels` is not."""
    missing = sorted(name for name in facts.required if facts.installed.get(name) is None)
    if missing:
        yield Finding(
            level=Level.FAIL, name="packages", detail=f"not installed: {', '.join(missing)}",
            remedy="make install",
        )  # fmt: skip
    off = _off_pins(facts.installed, facts.pins)
    if off:
        yield Finding(
            level=Level.WARN, name="packages", detail=f"not the pinned versions: {', '.join(off)}",
            remedy="make install (constraints.txt is what is tested)",
        )  # fmt: skip
    if facts.installed.get("kernels") is not None:
        yield Finding(
            level=Level.FAIL, name="packages",
            detail="the PyPI distribution 'kernels' takes the import name of our kernels/ folder",
            remedy="pip uninstall kernels",
        )  # fmt: skip
    if not missing and not off and facts.installed.get("kernels") is None:
        main = ("ray", "torch", "pyarrow", "pydantic", "mlflow", "pyzmq")
        shown = ", ".join(f"{name} {facts.installed[name]}" for name in main if name in facts.pins)
        yield Finding(level=Level.OK, name="packages", detail=shown or "all installed")


def _off_pins(installed: Mapping[str, str | None], pins: Mapping[str, str]) -> list[str]:
    pairs = [(name, version, pins.get(name)) for name, version in sorted(installed.items())]
    return [
        f"{name} {version} (pinned {pin})"
        for name, version, pin in pairs
        if version is not None and pin is not None and version.partition("+")[0] != pin
    ]


def check_auth(facts: Facts) -> Finding:
    """A token file left by any `ray.init` turns authentication on for a plain `ray job submit`."""
    if facts.auth_mode is not None:
        return Finding(level=Level.OK, name="ray auth", detail=f"RAY_AUTH_MODE={facts.auth_mode}")
    if facts.auth_token_file is None:
        detail = "RAY_AUTH_MODE unset, no token file: off"
        return Finding(level=Level.OK, name="ray auth", detail=detail)
    return Finding(
        level=Level.WARN, name="ray auth",
        detail=f"RAY_AUTH_MODE unset and {facts.auth_token_file} exists: your own `ray` commands "
        "would use a token that our cluster does not ask for",
        remedy="export RAY_AUTH_MODE=disabled",
    )  # fmt: skip


def check_ports(facts: Facts) -> Iterator[Finding]:
    """The endpoint's port must be free (or ours); Ray's dashboard takes another one by itself."""
    port = facts.spec.endpoint.port
    if port not in facts.busy_ports:
        yield Finding(level=Level.OK, name="ports", detail=f"{port} (endpoint) is free")
    elif facts.cluster_running:
        detail = f"{port} (endpoint) is taken, and a cluster of this home is running"
        yield Finding(level=Level.OK, name="ports", detail=detail)
    else:
        yield Finding(
            level=Level.FAIL, name="ports", detail=f"{port} (endpoint) is taken",
            remedy=f"end what listens on {port}, or `k3ray serve --port N`",
        )  # fmt: skip
    dashboard = facts.cluster.dashboard_port
    if dashboard in facts.busy_ports and not facts.cluster_running:
        detail = f"{dashboard} (Ray dashboard) is taken: `k3ray up` takes another and prints it"
        yield Finding(level=Level.INFO, name="ports", detail=detail)


def check_disk(facts: Facts) -> Finding:
    """Room for the live versions, two checkpoints (one being written), and Ray's own files."""
    total = count_parameters(resolve_model(facts.spec).text_config).total
    copies = facts.spec.max_live_versions + 1 + 2 * CHECKPOINT_COPIES
    need = BYTES_FP32 * total * copies + SPARE_DISK_BYTES
    detail = (
        f"{_gib(facts.disk_free_bytes)} free at {facts.disk_path}, {_gib(need)} for "
        f"{facts.spec.preset} ({copies} copies of {total:,} fp32 parameters + 2 GiB)"
    )
    if facts.disk_free_bytes >= need:
        return Finding(level=Level.OK, name="disk", detail=detail)
    return Finding(
        level=Level.FAIL, name="disk", detail=detail,
        remedy="free some space, or set K3RAY_HOME to a larger disk",
    )  # fmt: skip


def check_memory(facts: Facts) -> Finding:
    """The arithmetic of `k3ray up`, with the memory that is available now."""
    try:
        lines = check_fits(facts.spec, facts.cluster, memory_bytes=facts.memory_available_bytes)
    except PlacementError as error:
        return Finding(level=Level.FAIL, name="memory", detail=error.message, remedy=error.remedy)
    return Finding(level=Level.OK, name="memory", detail="; ".join(lines))


def check_shared_memory(facts: Facts) -> Finding:
    """Ray's object store lies in /dev/shm; where that is too small Ray falls back to disk."""
    need = facts.cluster.object_store_bytes
    detail = f"/dev/shm {_gib(facts.shm_free_bytes)} free, object store {_gib(need)}"
    if facts.shm_free_bytes >= need:
        return Finding(level=Level.OK, name="shm", detail=detail)
    return Finding(
        level=Level.WARN, name="shm", detail=f"{detail}: Ray will use the disk, slowly",
        remedy="enlarge /dev/shm (docker: --shm-size) or lower object_store_bytes",
    )  # fmt: skip


def check_open_files(facts: Facts) -> Finding:
    """Ray and the data plane keep many sockets open."""
    if facts.open_files >= MIN_OPEN_FILES:
        return Finding(level=Level.OK, name="files", detail=f"{facts.open_files} open files")
    return Finding(
        level=Level.WARN, name="files", detail=f"limit of {facts.open_files} open files",
        remedy=f"ulimit -n {MIN_OPEN_FILES}",
    )  # fmt: skip


def check_chromium(facts: Facts) -> Finding:
    """Only the browser tests need it."""
    if facts.chromium is not None:
        return Finding(level=Level.OK, name="chromium", detail=facts.chromium)
    return Finding(
        level=Level.WARN, name="chromium", detail="not found: the browser tests would fail",
        remedy="apt-get install chromium chromium-driver (only for `make test`)",
    )  # fmt: skip


def check_leftovers(facts: Facts) -> Finding:
    """Files and processes of clusters whose home no longer knows them."""
    parts = [f"{path} (no process)" for path in facts.dead_dirs]
    parts += [f"pid {pid} of {home}" for pid, home in facts.stray_processes]
    if not parts:
        return Finding(level=Level.OK, name="leftovers", detail="none")
    shown = ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    remedy = "`K3RAY_HOME=<its home> k3ray down` ends processes; then remove the named folders"
    return Finding(level=Level.WARN, name="leftovers", detail=shown, remedy=remedy)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
