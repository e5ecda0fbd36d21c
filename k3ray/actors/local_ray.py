"""A local Ray cluster of our own: started by `ray start`, ended by its marker, never `ray stop`.

`cluster/local.yaml` says how many logical CPUs and custom resources the node offers. Ports are
chosen free, so that several clusters live side by side; authentication is set explicitly on every
process, because otherwise it depends on a token file that an earlier run may have left.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from k3ray.actors.processes import MARKER_VARIABLE, end_marked, find_marked
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.errors import SupernodeError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """What `cluster.json` holds: how to reach the running cluster."""

    name: str
    ray_address: str
    dashboard_url: str
    marker: str
    auth_mode: str
    spec_digest: str

    def write(self, path: Path) -> None:
        """Write atomically."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @staticmethod
    def read(path: Path) -> ClusterInfo | None:
        """None when no cluster is recorded.

        Raises:
            SupernodeError: the file is there but cannot be understood.
        """
        try:
            return ClusterInfo(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise SupernodeError(
                f"{path} is damaged: {error}", remedy="run `k3ray down` to clean up"
            ) from error


def free_port(preferred: int | None = None) -> int:
    """`preferred` if nobody listens there, else any free TCP port of the loopback."""
    for port in (preferred, 0) if preferred else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port or 0))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SupernodeError("no free TCP port on the loopback", remedy="close some programs")


def cluster_environment(home: Home, *, auth_mode: str, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the cluster's processes and of clients that talk to it."""
    return {
        **base,
        MARKER_VARIABLE: home.marker,
        "K3RAY_HOME": str(home.root),
        "RAY_AUTH_MODE": auth_mode,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # One idle worker per logical CPU would be 16 interpreters nobody asked for.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_maximum_startup_concurrency": "2",
        # Job drivers say `python`: it must be this installation's.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }


def start_local_ray(home: Home, config: LocalClusterConfig, *, limit_s: float) -> tuple[str, str]:
    """Start a head node and return (GCS address, dashboard URL).

    Raises:
        SupernodeError: it did not start within `limit_s`; the log's tail is in the message.
    """
    home.log_dir.mkdir(parents=True, exist_ok=True)
    home.ray_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    gcs_port, dashboard_port = free_port(), free_port(config.dashboard_port)
    log = home.log_dir / "ray-start.log"
    command = [
        *ray_command(), "start", "--head", "--disable-usage-stats",
        f"--port={gcs_port}", f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-port={dashboard_port}", "--dashboard-host=127.0.0.1",
        f"--include-dashboard={'true' if config.dashboard else 'false'}",
        f"--num-cpus={config.num_cpus}", f"--resources={json.dumps(dict(config.resources))}",
        f"--object-store-memory={config.object_store_bytes}", f"--temp-dir={home.ray_dir}",
    ]  # fmt: skip
    environment = cluster_environment(home, auth_mode=config.auth_mode, base=os.environ)
    try:
        with log.open("wb") as sink:
            subprocess.run(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=limit_s, check=True, start_new_session=True,
            )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        stop_local_ray(home)
        tail = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise SupernodeError(
            f"Ray did not start ({type(error).__name__}); end of {log}:\n{tail}",
            remedy="run `k3ray doctor`",
        ) from error
    return f"{_node_address(home)}:{gcs_port}", f"http://127.0.0.1:{dashboard_port}"


def ray_command() -> list[str]:
    """The `ray` command of this very Python installation."""
    beside = Path(sys.executable).with_name("ray")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "ray.scripts.scripts"]


def _node_address(home: Home) -> str:
    """The address under which Ray registered the node (it resolves the loopback itself)."""
    log = (home.log_dir / "ray-start.log").read_text(encoding="utf-8", errors="replace")
    for line in log.splitlines():
        if "ray start --address=" in line:
            return line.split("--address='", 1)[1].split("'", 1)[0].rsplit(":", 1)[0]
    return "127.0.0.1"


def keep_ray_logs(home: Home) -> None:
    """Copy Ray's logs to `home.failed_log_dir`, before the session's folder goes."""
    logs = home.ray_dir / "session_latest" / "logs"
    shutil.rmtree(home.failed_log_dir, ignore_errors=True)
    if logs.is_dir():
        shutil.copytree(logs, home.failed_log_dir, ignore_dangling_symlinks=True)


def stop_local_ray(home: Home, *, grace_s: float = 5.0) -> list[int]:
    """End every process of the cluster and remove its sockets and session files.

    Returns the pids that would not die (empty when all is well).
    """
    left = end_marked(home.marker, grace_s=grace_s)
    shutil.rmtree(home.temp_dir, ignore_errors=True)
    return left


def is_running(home: Home) -> bool:
    """Whether any process of this home's cluster lives."""
    return bool(find_marked(home.marker))
