"""A local Ray cluster for a module of tests, with the fake resources of a supernode.

Per module, because other modules of this tier bring up and take down clusters of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RESOURCES = {"k3_group": 16.0, "k3_stack": 8.0}


@pytest.fixture(scope="module")
def ray_local() -> Iterator[Path]:
    """Ray in this process's namespace `k3ray`; yields the temporary HOME it runs with.

    HOME is its own because `ray.init` may write a token file there; it is short because socket
    paths end at 107 bytes.
    """
    import ray

    home = Path(tempfile.mkdtemp(prefix="k3rt-"))
    saved = dict(os.environ)
    os.environ |= {
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }
    try:
        ray.init(
            num_cpus=16, resources=RESOURCES, include_dashboard=False, namespace="k3ray",
            object_store_memory=256 * 1024 * 1024, log_to_driver=False, _temp_dir=str(home / "r"),
        )  # fmt: skip
        yield home
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(saved)
        shutil.rmtree(home, ignore_errors=True)
