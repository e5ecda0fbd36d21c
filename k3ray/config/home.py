"""Where a supernode keeps its files: `Home`, one folder per supernode on this machine.

`K3RAY_HOME` (default `~/.k3ray`) holds what must survive the processes: the journal, the weight
store and `cluster.json`. Sockets and Ray's session files go to a short path under the system's
temporary folder, because Unix socket paths end at 107 bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Paths of one supernode; nothing is created here."""

    root: Path

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Home:
        """The home that `K3RAY_HOME` names, else `~/.k3ray`."""
        return Home(root=Path(env.get("K3RAY_HOME") or Path.home() / ".k3ray").absolute())

    @property
    def cluster_file(self) -> Path:
        """Address, ports and marker of the running cluster; absent when it is down."""
        return self.root / "cluster.json"

    @property
    def last_up_file(self) -> Path:
        """What was brought up last; stays after `k3ray down`."""
        return self.root / "last-up.json"

    @property
    def lock_file(self) -> Path:
        """Held while a cluster is brought up or down."""
        return self.root / "lock"

    @property
    def serve_lock_file(self) -> Path:
        """Held while the endpoint is deployed."""
        return self.root / "serve.lock"

    @property
    def journal_file(self) -> Path:
        """The controller's append-only journal."""
        return self.root / "journal" / "journal.jsonl"

    @property
    def store_dir(self) -> Path:
        """Root of the weight store."""
        return self.root / "store"

    @property
    def log_dir(self) -> Path:
        """Logs of processes that we start ourselves."""
        return self.root / "logs"

    @property
    def failed_log_dir(self) -> Path:
        """Ray's logs of the last start that failed."""
        return self.log_dir / "failed-start"

    @property
    def marker(self) -> str:
        """Value of `K3RAY_CLUSTER` in the environment of every process of this cluster."""
        return hashlib.blake2b(os.fsencode(self.root), digest_size=5).hexdigest()

    @property
    def temp_dir(self) -> Path:
        """Sockets and Ray's session; removed by `k3ray down`."""
        return Path(tempfile.gettempdir()) / f"k3ray-{os.getuid()}-{self.marker}"

    @property
    def socket_dir(self) -> Path:
        """Data-plane sockets of the groups."""
        return self.temp_dir / "s"

    @property
    def ray_dir(self) -> Path:
        """Ray's session folder."""
        return self.temp_dir / "r"
