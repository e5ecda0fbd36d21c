"""A live supernode for tests and benches: own home, own port, taken down at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k3ray.actors.local_ray import free_port
from k3ray.actors.processes import find_marked
from k3ray.actors.supernode import Supernode, down, ensure_up
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.load import load_config
from k3ray.config.supernode import SupernodeSpec
from k3ray.serve.app import deploy, undeploy


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running supernode with its endpoint."""

    supernode: Supernode
    url: str
    home: Home

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.supernode.call("status", limit_s=30.0)
        return document

    def actors(self, role: str) -> list[dict[str, Any]]:
        return [a for a in self.status()["actors"] if a["role"] == role]

    def pids(self) -> list[int]:
        return find_marked(self.home.marker)


def wait_for(
    what: Callable[[], bool], tell: Callable[[], Any] = dict, limit_s: float = 240.0
) -> None:
    """Wait until `what()` holds; at the limit the test fails with what `tell()` says."""
    deadline_s = time.monotonic() + limit_s
    while not what():
        if time.monotonic() >= deadline_s:
            pytest.fail(f"it did not happen within {limit_s:g} s: {tell()}")
        time.sleep(0.2)


@contextmanager
def live_supernode(*overrides: str, preset: str = "k3-tiny", say: Any = print) -> Iterator[Live]:
    """Bring up, deploy, yield, take down; fails when something is left."""
    home = Home(root=Path(tempfile.mkdtemp(prefix="k3ray-live-")))
    spec = load_config(SupernodeSpec, None, [f"preset={preset}", *overrides])
    cluster = LocalClusterConfig(dashboard_port=free_port())
    saved = dict(os.environ)
    try:
        supernode = ensure_up(spec, home, cluster, say=say)
        yield Live(supernode=supernode, url=deploy(supernode, port=free_port()), home=home)
        undeploy()  # Serve keeps the last cluster in this process otherwise
    finally:
        left = down(home, say=say)
        os.environ.clear()
        os.environ.update(saved)
        shutil.rmtree(home.root, ignore_errors=True)
    assert not left, f"still alive after down: {left}"
