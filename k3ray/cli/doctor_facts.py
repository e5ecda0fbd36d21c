"""What `k3ray doctor` looks at on this machine: gathered once into `Facts`, nothing is judged."""

from __future__ import annotations

import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from k3ray.actors.processes import MARKER_VARIABLE, find_marked
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.supernode import SupernodeSpec

_UNLIMITED_FILES = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The state of the machine. `installed` maps a distribution to its version or None."""

    spec: SupernodeSpec
    cluster: LocalClusterConfig
    python: tuple[int, int, int]
    required: tuple[str, ...]
    installed: Mapping[str, str | None]
    pins: Mapping[str, str]
    auth_mode: str | None
    auth_token_file: str | None
    busy_ports: frozenset[int]
    cluster_running: bool
    home: str
    disk_path: str
    disk_free_bytes: int
    memory_available_bytes: int
    shm_free_bytes: int
    open_files: int
    chromium: str | None
    dead_dirs: tuple[str, ...]
    stray_processes: tuple[tuple[int, str], ...]


def gather(
    spec: SupernodeSpec,
    cluster: LocalClusterConfig,
    *,
    home: Home,
    env: Mapping[str, str],
    constraints_file: Path | None,
) -> Facts:
    """Look at the machine; changes nothing."""
    required = required_distributions()
    disk = _nearest_existing(home.root)
    token = Path(env.get("HOME", "~")).expanduser() / ".ray" / "auth_token"
    return Facts(
        spec=spec,
        cluster=cluster,
        python=sys.version_info[:3],
        required=required,
        installed={name: _version(name) for name in (*required, "kernels")},
        pins=read_pins(constraints_file),
        auth_mode=env.get("RAY_AUTH_MODE"),
        auth_token_file=str(token) if token.exists() else None,
        busy_ports=frozenset(
            port for port in (spec.endpoint.port, cluster.dashboard_port) if port_is_busy(port)
        ),
        cluster_running=bool(find_marked(home.marker)),
        home=str(home.root),
        disk_path=str(disk),
        disk_free_bytes=shutil.disk_usage(disk).free,
        memory_available_bytes=memory_available_bytes(Path("/sys/fs/cgroup")),
        shm_free_bytes=_shm_free_bytes(),
        open_files=_open_files(),
        chromium=shutil.which("chromium") or shutil.which("chromium-browser"),
        dead_dirs=tuple(_dead_dirs(Path(tempfile.gettempdir()))),
        stray_processes=tuple(_stray_processes()),
    )


def required_distributions() -> tuple[str, ...]:
    """Normalised names of k3ray's own requirements, without the optional ones."""
    lines = metadata.requires("k3ray") or []
    names = [
        re.split(r"[\s\[;<>=!~]", line, maxsplit=1)[0] for line in lines if "extra" not in line
    ]
    return tuple(sorted(_normalised(name) for name in names))


def read_pins(constraints_file: Path | None) -> dict[str, str]:
    """`name==version` lines of a constraints file; {} when there is none."""
    if constraints_file is None or not constraints_file.is_file():
        return {}
    lines = constraints_file.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("#", 1)[0].strip().split("==") for line in lines]
    return {_normalised(pair[0]): pair[1] for pair in pairs if len(pair) == 2}


def port_is_busy(port: int) -> bool:
    """Whether the loopback port cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def memory_available_bytes(cgroup: Path) -> int:
    """Available memory, or what is left of the container's limit where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return available
    return min(available, max(0, limit - used))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _shm_free_bytes() -> int:
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() else 0


def _open_files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    return min(limits, default=_UNLIMITED_FILES)


def _dead_dirs(temporary: Path) -> Iterator[str]:
    """Session folders (`Home.temp_dir`) without a living process of their cluster."""
    for path in sorted(temporary.glob("k3ray-*-*")):
        _, owner, marker = path.name.split("-", 2)
        is_ours = owner.isdigit() and re.fullmatch(r"[0-9a-f]{10}", marker) and path.is_dir()
        if is_ours and not find_marked(marker):
            yield str(path)


def _stray_processes() -> Iterator[tuple[int, str]]:
    """(pid, home) of marked processes whose home has no record of a running cluster."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        root = environment.get("K3RAY_HOME")
        if MARKER_VARIABLE not in environment or root is None:
            continue
        if not Home(root=Path(root)).cluster_file.exists():
            yield process.pid, root
