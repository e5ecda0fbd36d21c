"""The tier's own cluster: fake resources of a supernode, explicit authentication, own home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def test_the_cluster_offers_whole_fake_units(ray_local: Path) -> None:
    import ray

    offered = ray.cluster_resources()
    assert (offered["CPU"], offered["k3_group"], offered["k3_stack"]) == (16, 16, 8)
    assert ray.get_runtime_context().namespace == "k3ray"


def test_an_actor_of_a_group_takes_no_cpu_and_sees_the_explicit_environment(
    ray_local: Path,
) -> None:
    import ray

    @ray.remote(num_cpus=0, resources={"k3_group": 1}, max_restarts=0)
    class Probe:
        def environment(self) -> tuple[str | None, str | None, str | None]:
            names = ("HOME", "RAY_AUTH_MODE", "OMP_NUM_THREADS")
            home, auth, threads = (os.environ.get(name) for name in names)
            return home, auth, threads

    probe = Probe.remote()
    try:
        seen = ray.get(probe.environment.remote(), timeout=120)
    finally:
        ray.kill(probe)
    assert seen == (str(ray_local), "disabled", "1")
