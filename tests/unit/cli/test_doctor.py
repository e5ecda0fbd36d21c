"""Every verdict of the doctor, over facts; and the facts of this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.cli.doctor import Level, examine
from k3ray.cli.doctor_facts import Facts, gather, memory_available_bytes, port_is_busy, read_pins
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.load import load_config
from k3ray.config.supernode import SupernodeSpec

GIB = 2**30
HEALTHY = Facts(
    spec=SupernodeSpec(preset="k3-tiny"), cluster=LocalClusterConfig(), python=(3, 11, 7),
    required=("ray", "torch"), installed={"ray": "2.60.0", "torch": "2.13.0+cpu", "kernels": None},
    pins={"ray": "2.60.0", "torch": "2.13.0"}, auth_mode=None, auth_token_file=None,
    busy_ports=frozenset(), cluster_running=False, home="/data/home",
    disk_path="/data", disk_free_bytes=50 * GIB,
    memory_available_bytes=20 * GIB, shm_free_bytes=8 * GIB, open_files=65536,
    chromium="/usr/bin/chromium", dead_dirs=(), stray_processes=(),
)  # fmt: skip


def test_a_healthy_machine_is_all_ok() -> None:
    findings = examine(HEALTHY)
    assert {finding.level for finding in findings} == {Level.OK}
    names = {finding.name for finding in findings}
    assert names == {
        "python", "packages", "home", "ray auth", "ports", "disk", "memory", "shm", "files",
        "chromium", "leftovers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "level", "name", "text"),
    [
        ({"python": (3, 12, 1)}, Level.FAIL, "python", "3.12.1"),
        ({"installed": {"ray": None, "torch": "2.13.0"}}, Level.FAIL, "packages", "ray"),
        ({"installed": {"ray": "2.59.0", "torch": "2.13.0"}}, Level.WARN, "packages",
         "ray 2.59.0 (pinned 2.60.0)"),
        ({"installed": {"ray": "2.60.0", "torch": "2.13.0", "kernels": "0.17"}}, Level.FAIL,
         "packages", "pip uninstall kernels"),
        ({"auth_token_file": "/h/.ray/auth_token"}, Level.WARN, "ray auth", "export RAY_AUTH_MODE"),
        ({"busy_ports": frozenset({8000})}, Level.FAIL, "ports", "8000 (endpoint) is taken"),
        ({"busy_ports": frozenset({8265})}, Level.INFO, "ports", "8265"),
        ({"disk_free_bytes": GIB}, Level.FAIL, "disk", "K3RAY_HOME"),
        ({"memory_available_bytes": GIB // 2}, Level.FAIL, "memory", "offer more memory"),
        ({"shm_free_bytes": 2**26}, Level.WARN, "shm", "--shm-size"),
        ({"open_files": 1024}, Level.WARN, "files", "ulimit -n"),
        ({"chromium": None}, Level.WARN, "chromium", "apt-get install chromium"),
        ({"dead_dirs": ("/tmp/k3ray-0-0123456789",)}, Level.WARN, "leftovers", "0123456789"),
        ({"stray_processes": ((77, "/home/x"),)}, Level.WARN, "leftovers", "pid 77 of /home/x"),
    ],
)  # fmt: skip
def test_verdicts(changes: dict[str, object], level: Level, name: str, text: str) -> None:
    findings = examine(replace(HEALTHY, **changes))  # type: ignore[arg-type]
    bad = [finding for finding in findings if finding.level is not Level.OK]
    assert [(finding.level, finding.name) for finding in bad] == [(level, name)]
    assert text in str(bad[0])
    assert bool(bad[0].remedy) is (level is not Level.INFO)


def test_a_running_cluster_may_hold_the_endpoint_port() -> None:
    facts = replace(HEALTHY, busy_ports=frozenset({8000, 8265}), cluster_running=True)
    assert {finding.level for finding in examine(facts)} == {Level.OK}


def test_the_real_model_does_not_fit_a_small_machine() -> None:
    spec = load_config(SupernodeSpec, None, ["preset=kimi-k3"])
    failed = {f.name for f in examine(replace(HEALTHY, spec=spec)) if f.level is Level.FAIL}
    assert failed == {"disk", "memory"}


def test_facts_of_this_machine(tmp_path: Path) -> None:
    facts = gather(
        SupernodeSpec(), LocalClusterConfig(), home=Home(root=tmp_path / "a" / "b"),
        env={"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}, constraints_file=None,
    )  # fmt: skip
    assert facts.python[:2] == (3, 11)
    assert "ray" in facts.required
    assert "pytest" not in facts.required
    assert facts.disk_path == str(tmp_path)
    assert facts.disk_free_bytes > 0 < facts.memory_available_bytes
    assert (facts.auth_mode, facts.auth_token_file) == ("disabled", None)
    assert not facts.cluster_running
    assert all(pid != os.getpid() for pid, _ in facts.stray_processes)


def test_port_is_busy_while_somebody_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port_is_busy(port)
    assert not port_is_busy(port)


def test_memory_limit_of_a_container(tmp_path: Path) -> None:
    without_limit = memory_available_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    assert memory_available_bytes(tmp_path) == 600_000 < without_limit
    (tmp_path / "memory.max").write_text("max")
    assert memory_available_bytes(tmp_path) > 600_000


def test_pins_are_read_by_normalised_name(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# set\nRuamel.Yaml==0.19.1\nray==2.60.0  # x\n")
    assert read_pins(path) == {"ruamel-yaml": "0.19.1", "ray": "2.60.0"}
    assert read_pins(tmp_path / "absent") == {}
